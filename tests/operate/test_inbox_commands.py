"""The operator's commands on a gateway's inbox: a SQLite file, and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from oncekey.cli import main
from oncekey.inbox import (
    Arrival,
    AsyncInbox,
    Filter,
    Outcome,
    Result,
    Route,
    TargetStatus,
    open_inbox,
)

CONFIG = """
store = "{store}"
[sources.shop]
provider = "stripe"
secret_env = "SHOP_SECRET"
targets = ["app"]
[targets.app]
url = "http://127.0.0.1:9/events"
allow_private = true
"""
Use = Callable[[AsyncInbox], Coroutine[Any, Any, Any]]


class Shop(NamedTuple):
    """An inbox and its config."""

    file: str
    url: str
    capsys: pytest.CaptureFixture[str]

    def use(self, work: Use) -> Any:
        async def run() -> Any:
            async with await open_inbox(self.url) as inbox:
                return await work(inbox)

        return asyncio.run(run())

    def run(self, *words: str) -> tuple[int, Any]:
        """What a command answers as JSON."""
        code = main([*words, "--config", self.file, "--json"])
        return code, json.loads(self.capsys.readouterr().out)

    def text(self, *words: str) -> str:
        """What it prints for people."""
        main([*words, "--config", self.file])
        return self.capsys.readouterr().out


@pytest.fixture(params=["sqlite", "postgresql"])
def shop(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Shop:
    """An inbox with two events: one was given up, one is in a worker's hands."""
    monkeypatch.setenv("SHOP_SECRET", "whsec_x")
    monkeypatch.setenv("ONCEKEY_TOKEN", "a-token-of-the-admin")
    url = f"sqlite:///{tmp_path}/inbox.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("pg_url")
        assert main(["migrate", "--inbox", url]) == 0
    file = tmp_path / "gateway.toml"
    file.write_text(CONFIG.format(store=url))
    made = Shop(str(file), url, capsys)

    async def fill(inbox: AsyncInbox) -> None:
        for name in ("evt_1", "evt_2", "evt_2"):
            await inbox.ingest(Arrival("shop", name, "paid", b"{}", (), (Route("app"),)))
        first, _ = await inbox.fetch({"app": 2}, 60_000)
        await inbox.finish([Result(first, Outcome.DEAD, status=500, error="HTTP 500")])

    made.use(fill)
    capsys.readouterr()
    return made


def test_stats_and_stuck(shop: Shop) -> None:
    """What waits, what was given up, what is in hand and for how long."""
    code, told = shop.run("stats")
    inbox = told["inbox"]
    assert code == 0
    assert (inbox["waiting"], inbox["dead"]) == (1, 1)
    assert inbox["oldest_ms"] >= 0
    assert inbox["totals"]["received"] == 3
    assert inbox["totals"]["duplicate"] == 1
    assert told["scopes"] == {"webhook:inbox:shop": 2}
    code, told = shop.run("stuck")
    assert (code, len(told["inbox"]["in_hand"]), told["inbox"]["lapsed"]) == (0, 1, [])
    text = shop.text("stats") + shop.text("stuck")
    assert "inbox: 1 waiting, 1 dead" in text
    assert "1 delivery in hand, 0 past their lease" in text


def test_a_delivery_is_counted_once(shop: Shop) -> None:
    """Its lateness is counted beside it, and is no event of the last hour."""

    async def delivered(inbox: AsyncInbox) -> None:
        await inbox.ingest(Arrival("shop", "evt_new", "paid", b"{}", routes=(Route("quick"),)))
        (one,) = await inbox.fetch({"quick": 1}, 60_000)
        await inbox.finish([Result(one, Outcome.DELIVERED)])

    shop.use(delivered)
    _, told = shop.run("stats")
    assert told["inbox"]["totals"]["delivered"] == 1
    assert "late" not in told["inbox"]["totals"]


def test_a_lease_that_nobody_takes_again_is_stuck(shop: Shop) -> None:
    """A worker that died long ago, and no other: its deliveries are listed, and the code is 1."""

    async def lapse(inbox: AsyncInbox) -> None:
        held = await inbox.in_hand()
        event = await inbox.event(held[0].id)
        assert event is not None
        await inbox.replay(held[0].id, ["other"], actor="anna")
        await inbox.fetch({"other": 1}, -60_000)

    shop.use(lapse)
    code, told = shop.run("stuck")
    assert code == 1
    assert [one["target"] for one in told["inbox"]["lapsed"]] == ["other"]
    assert "is a gateway running" in shop.text("stuck")


def test_a_key_is_inspected_and_evicted(shop: Shop) -> None:
    """With its event and deliveries; after that a copy is new, and the audit has who did it."""
    code, told = shop.run("inspect", "evt_1", "--source", "shop")
    assert (code, told["situation"]) == (0, "done")
    assert told["event"]["deliveries"] == {"app": "dead"}
    assert "app dead" in shop.text("inspect", "evt_1", "--source", "shop")
    assert shop.run("inspect", "evt_9", "--source", "shop")[0] == 1
    code, told = shop.run("evict", "evt_1", "--source", "shop", "--yes", "--reason", "a mistake")
    assert (code, told["evicted"]) == (0, True)

    async def again(inbox: AsyncInbox) -> tuple[bool, Any]:
        kept = await inbox.ingest(Arrival("shop", "evt_1", "paid", b"{}", (), (Route("app"),)))
        return kept.new, (await inbox.audit()).items[0]

    new, entry = shop.use(again)
    assert new
    assert (entry.action, entry.subject, entry.detail) == ("evict", "shop:evt_1", "a mistake")


def test_dead_letters_are_a_queue_to_settle(shop: Shop) -> None:
    """They are listed until they are settled, one by one; what waits stays."""
    code, told = shop.run("reconcile")
    assert code == 1
    (letter,) = told["dead_letters"]
    assert (letter["target"], letter["error"]) == ("app", "HTTP 500")
    assert "1 to look at" in shop.text("reconcile")
    code, told = shop.run("reconcile", "--settle", letter["id"], "--note", "paid by hand")
    assert (code, told["settled"], told["dead_letters"]) == (0, 1, [])

    async def left(inbox: AsyncInbox) -> Any:
        waiting = sum(one.waiting for one in await inbox.depths())
        return waiting, [one.action for one in (await inbox.audit()).items]

    assert shop.use(left) == (1, ["discard", "settle"])
    code = main(["reconcile", shop.url, "--inbox", "--json"])
    assert code == 0


def test_the_audit_is_verified(shop: Shop) -> None:
    """Whole, then with an action changed behind the gateway's back."""

    async def act(inbox: AsyncInbox) -> None:
        for number in range(3):
            await inbox.record("look", f"thing {number}", actor="anna")

    shop.use(act)
    code, told = shop.run("audit", "verify")
    assert (code, told["problems"], told["head"].split(":")[0]) == (0, [], "3")
    shop.use(_forge)
    code, told = shop.run("audit", "verify")
    assert (code, told["problems"]) == (1, ["entry 2 was changed, or made with another secret"])


async def _forge(inbox: AsyncInbox) -> None:
    def forged() -> Any:
        yield "UPDATE oncekey_inbox_audit SET actor = 'bert' WHERE number = 2", []

    await inbox._write(forged())  # type: ignore[attr-defined]


def test_doctor_looks_at_a_gateway(shop: Shop) -> None:
    """What waits for nobody, was given up, is stopped or forged; and a good one is told so."""
    code, told = shop.run("doctor", "--read-only")
    report = told[0]
    assert {one["check"] for one in report["findings"]} == {"dead letters"}
    assert {"config", "inbox", "audit", "orphans", "login"} <= set(report["passed"])

    async def worse(inbox: AsyncInbox) -> None:
        event = (await inbox.search(Filter(), limit=1)).items[0].id
        await inbox.replay(event, ["gone"], actor="anna")
        await inbox.set_target("app", TargetStatus.PAUSED, actor="anna")
        await _forge(inbox)

    shop.use(worse)
    Path(shop.file).write_text('host = "0.0.0.0"\nremember = 3600\n' + Path(shop.file).read_text())
    code, told = shop.run("doctor", "--read-only")
    assert code == 1
    assert {one["check"] for one in told[0]["findings"]} == {
        *("dead letters", "orphans", "stopped targets", "audit"),
        *("public address", "memory of keys"),
    }


def test_doctor_names_the_faults_of_a_config(shop: Shop) -> None:
    """Each fault is a finding with its line and fix; the rest could not be looked at."""
    file = Path(shop.file)
    file.write_text(file.read_text().replace("stripe", "strpe"))
    code, told = shop.run("doctor")
    assert code == 1
    (fault,) = told[0]["findings"]
    assert fault["evidence"] == "line 4, sources.shop.provider: no provider 'strpe'"
    assert fault["fix"] == "Did you mean 'stripe'?"
    assert "inbox" in told[0]["skipped"]


@pytest.mark.parametrize(
    "words, told",
    [
        (["stats", "sqlite:///x.db", "--config", "FILE"], "leave out its URL"),
        (["stats", "--config", "nowhere.toml"], "can't be read"),
        (["inspect", "k", "sqlite:///x.db", "--source", "shop"], "--config FILE too"),
        (["inspect", "k", "--source", "a", "--scope", "b", "--config", "FILE"], "leave out"),
        (["stats", "--config", "FILE"], "there is no inbox yet"),
        (["reconcile"], "DIRECTORY of journals, or --config FILE"),
    ],
)
def test_wrong_calls_say_what_to_give(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a sentence; no file is made."""
    file = tmp_path / "gateway.toml"
    file.write_text(CONFIG.format(store=f"sqlite:///{tmp_path}/inbox.db"))
    assert main([str(file) if one == "FILE" else one for one in words]) == 2
    assert told in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["gateway.toml"]
