"""``oncekey listen``: none is left out, none comes twice, and who is gone or back is said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.process import TOKEN, App, Served, app, config, event, until

from oncekey.cli import listen
from oncekey.cli._parser import parse
from oncekey.errors import PolicyError, StoreUnavailableError

NOW = 1_800_000_000_000
MINUTE = 60_000


def id_of(ms: int, number: int = 0) -> str:
    """An id as an inbox makes it."""
    return f"msg_{(ms << 20) + number:016x}"


class Gateway:
    """A gateway's API: events by their ids, some of which are not committed yet."""

    def __init__(self) -> None:
        self.now_ms = NOW
        self.ids: list[str] = []
        self.others: list[str] = []  # that the search does not find
        self.gone = False
        self.asked: list[str] = []

    def get(self, *path: str, **query: Any) -> Any:
        if self.gone:
            raise StoreUnavailableError("no gateway answers")
        if path == ("stats",):
            assert query["minutes"] == 1
            return {"since": "2027-01-15T08:01:00.000Z"}  # its inbox is two minutes ahead
        if len(path) == 2:
            return {"id": path[1], "at": "", "source": "shop", "type": "t", "key": "k",
                    "headers": [], "body": "{}", "body_encoding": "utf-8"}  # fmt: skip
        search = query.get("q", "")
        found = sorted(self.ids if search else self.ids + self.others, reverse=True)
        if search:
            self.asked.append(search)
            age = re.search(r"age:<(\d+)s", search)
            least = NOW + 2 * MINUTE - int(age[1]) * 1000 if age else 0
            found = [one for one in found if int(one[4:], 16) >> 20 >= least]
        left = [one for one in found if one < (query.get("after") or "n")]
        page = left[: query["limit"]]
        more = page[-1] if len(left) > len(page) else None
        return {"items": [{"id": one} for one in page], "next": more}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    made = Gateway()
    monkeypatch.setattr(listen, "GatewayClient", lambda arguments: made)
    return made


def listener(*words: str) -> listen._Listener:
    return listen._Listener(parse(["listen", *words]))


def brought(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Ids in the order in which they were shown."""
    return re.findall("msg_[0-9a-f]{16}", capsys.readouterr().out)


@pytest.mark.parametrize("search", [(), ("--search", "type:rare")])
def test_an_id_that_shows_up_late_is_brought(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], search: tuple[str, ...]
) -> None:
    """Made before a higher one and committed after it, by seconds: it comes, and each once."""
    gateway.ids = [id_of(NOW - MINUTE)]
    one = listener(*search)
    first, late, later = id_of(NOW), id_of(NOW - 8000), id_of(NOW - 8000, 1)
    gateway.ids.append(first)
    one.look()
    gateway.ids.append(late)
    one.look()
    gateway.ids += [later, id_of(NOW + 1000)]
    one.look()
    one.look()
    assert brought(capsys) == [first, late, later, id_of(NOW + 1000)]


def test_what_was_on_its_way_at_the_start_is_brought(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default start is the newest event: what is there is old, what comes is new."""
    gateway.ids = [id_of(NOW - 2, 5), id_of(NOW), id_of(NOW - 3 * MINUTE)]
    one = listener()
    gateway.ids.append(id_of(NOW - 1))  # committed after it, though it has a lower id
    one.look()
    gateway.ids.append(id_of(NOW + 5))
    one.look()
    assert brought(capsys) == [id_of(NOW - 1), id_of(NOW + 5)]


def test_an_inbox_without_events_is_listened_to(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first event of all is new."""
    one = listener("--search", "x")
    one.look()
    gateway.ids.append(id_of(NOW))
    one.look()
    one.look()
    assert brought(capsys) == [id_of(NOW)]


def test_a_restart_neither_loses_nor_doubles(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Killed after any event, it goes on with the next: the file has what is in the window."""
    file = tmp_path / "cursor"
    words = ("--cursor", str(file), "--since", "1h")
    gateway.ids = [id_of(NOW - 30 * MINUTE + 4000 * number) for number in range(500)]
    seen: list[str] = []
    for _ in range(4):
        one = listener(*words)
        bring, count = one._bring, 0

        def killed(event: dict[str, Any], bring: Any = bring) -> None:
            nonlocal count
            count += 1
            if count > 100:
                raise KeyboardInterrupt
            bring(event)

        one._bring = killed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            one.look()
        seen += brought(capsys)
        assert len(file.read_text().split()) < 10  # not all that was ever brought
    late = id_of(NOW - 30 * MINUTE + 4000 * 499 - 9000)
    gateway.ids.append(late)
    for _ in range(2):
        listener(*words).look()
    assert seen + brought(capsys) == sorted(gateway.ids)
    assert list(tmp_path.iterdir()) == [file]


def test_a_cursor_is_kept_from_the_start_on(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What comes between two runs is brought, though the first brought nothing."""
    for search in ((), ("--search", "x")):
        words = ("--cursor", str(tmp_path / f"cursor{len(search)}"), *search)
        gateway.ids = [] if search else [id_of(NOW)]
        gateway.others = [id_of(NOW)] if search else []
        listener(*words).look()
        fresh = [id_of(NOW - 10_000), id_of(NOW + 1)] if search else [id_of(NOW + 1)]
        gateway.ids += fresh
        for _ in range(2):
            listener(*words).look()
        assert brought(capsys) == fresh


def test_a_cursor_of_before_goes_on(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A file with one id, the last that was brought; one with anything else is refused."""
    file = tmp_path / "cursor"
    file.write_text(id_of(NOW) + "\n")
    gateway.ids = [id_of(NOW - 1000), id_of(NOW), id_of(NOW + 1)]
    listener("--cursor", str(file)).look()
    assert brought(capsys) == [id_of(NOW + 1)]
    for wrong in ("", "msg_1\n", f"{id_of(NOW)}\nnonsense\n"):
        file.write_text(wrong)
        with pytest.raises(PolicyError, match="holds no event's id"):
            listener("--cursor", str(file))


def test_a_cursor_is_replaced_as_a_whole(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A write that fails half way leaves the file as it was."""
    file = tmp_path / "cursor"
    gateway.ids = [id_of(NOW)]
    one = listener("--cursor", str(file))
    before = file.read_text()
    gateway.ids.append(id_of(NOW + 1))

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        one.look()
    assert file.read_text() == before


def test_a_rare_match_does_not_page_through_the_history(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """A look asks for what may be new, by the inbox's clock, however old the last match is."""
    day = 24 * 60 * MINUTE
    gateway.ids = [id_of(NOW - 30 * day)]
    gateway.others = [id_of(NOW - number * MINUTE) for number in range(30)]
    one = listener("--search", "type:rare")
    gateway.asked.clear()
    one.look()
    assert gateway.asked == ["type:rare age:<190s"]  # 10 s, the clocks' two minutes, and one more
    gateway.now_ms += 5 * MINUTE
    gateway.others.append(id_of(NOW + 5 * MINUTE))
    one.look()
    one.look()
    assert gateway.asked[1:] == ["type:rare age:<490s", "type:rare age:<190s"]
    own = listener("--search", "type:rare age:<1h")
    gateway.asked.clear()
    own.look()
    assert gateway.asked == ["type:rare age:<1h"]
    assert brought(capsys) == []


def test_since_does_not_go_back_further(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came before the time that is asked for is left, in the second look, too."""
    gateway.ids = [id_of(NOW - 70 * MINUTE), id_of(NOW - 57 * MINUTE)]
    one = listener("--since", "1h")
    one.look()
    gateway.ids = [id_of(NOW - 70 * MINUTE)]
    other = listener("--since", "1h", "--search", "x")
    for _ in range(3):
        one.look()
        other.look()
    assert brought(capsys) == [id_of(NOW - 57 * MINUTE)]


def test_who_is_gone_and_who_is_back_is_said_once(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """App and gateway each by itself; an app that fails gets the event until it takes it."""
    monkeypatch.setattr(listen.time, "sleep", lambda seconds: pauses.append(seconds))
    pauses: list[float] = []
    answers = iter([0, 0, 500, 503, 500, 500, 500, 500, 200, 204, 404, 200])
    posted: list[str] = []

    def post(url: str, headers: dict[str, str], body: bytes) -> int:
        posted.append(headers["webhook-id"])
        return next(answers)

    monkeypatch.setattr(listen, "_post", post)
    one = listener("--forward", "http://app.test/events")
    gateway.gone = True
    one.look()
    one.look()
    assert capsys.readouterr().err == "oncekey: no gateway answers\n"
    gateway.gone = False
    gateway.ids = [id_of(NOW)]
    one.look()
    told = capsys.readouterr()
    assert told.err == (
        "oncekey: http://app.test/events answers nothing, trying again\n"
        "oncekey: http://app.test/events is back\n"
        "oncekey: the gateway is back\n"
    )
    assert told.out.endswith("-> 200\n")
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    gateway.ids += [id_of(NOW + 1), id_of(NOW + 2)]
    one.look()
    assert capsys.readouterr().err == (
        "oncekey: http://app.test/events answers 404, trying again\n"
        "oncekey: http://app.test/events is back\n"
    )
    assert posted == [id_of(NOW)] * 9 + [id_of(NOW + 1)] + [id_of(NOW + 2)] * 2


@pytest.fixture
def target() -> Iterator[App]:
    with app() as one:
        yield one


def test_it_lives_through_a_restart_of_the_gateway(target: App, tmp_path: Path) -> None:
    """As a process: it says that the gateway is gone, and goes on where it was."""
    file = str(config(tmp_path, "http://127.0.0.1:9/events"))
    with Served("--config", file, "--port", "0") as one:
        port = str(one.port)
        assert one.deliver(event("evt_0", one.address)) == 200
        command = [sys.executable, "-m", "oncekey", "listen", "--since", "1h", "--every", "0.05",
                   "--forward", target.url, "--gateway", one.address]  # fmt: skip
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ONCEKEY_TOKEN": TOKEN},
        )
        try:
            until(lambda: len(target.requests) == 1, "the first")
            one.stop()
            assert process.stderr is not None
            assert "no gateway answers" in process.stderr.readline()
            with Served("--config", file, "--port", port) as again:
                assert process.stderr.readline() == "oncekey: the gateway is back\n"
                assert again.deliver(event("evt_1", again.address)) == 200
                until(lambda: len(target.requests) == 2, "the second")
        finally:
            process.kill()
            process.communicate()
    assert [b'"evt_0"' in target.requests[0][1], b'"evt_1"' in target.requests[1][1]] == [True] * 2
