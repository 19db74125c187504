"""``oncekey simulate``: a provider's retries, to a real receiver that verifies what it gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from oncekey.cli import main
from oncekey.cli import simulate as command
from oncekey.cli._schedule import schedule_of
from oncekey.signatures import Verdict, provider, providers

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OPTIONS = {"mailgun": {"accept_unsigned": "body"}, "twilio": {"allowed_hosts": "127.0.0.1"}}


class Receiver:
    """Verifies each delivery, and answers what ``answer`` says of how many came before."""

    def __init__(self, name: str) -> None:
        self.verdicts: list[Verdict] = []
        self.answer: Callable[[int], tuple[int, dict[str, str]]] = lambda before: (200, {})
        maker = provider(name, secret=SECRET, **OPTIONS.get(name, {}))
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                verdict = maker.verify("POST", outer.url, dict(self.headers), body)
                with lock:
                    outer.verdicts.append(verdict)
                    before = len(outer.verdicts) - 1
                status, headers = outer.answer(before)
                self.send_response(status)
                for key, value in {"Content-Length": "0", **headers}.items():
                    self.send_header(key, value)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Callable[[str], Receiver]]:
    made: list[Receiver] = []

    def make(name: str) -> Receiver:
        made.append(Receiver(name))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits it made, without waiting for them; and the secret in the environment."""
    made: list[float] = []
    monkeypatch.setattr(command.time, "sleep", made.append)
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    return made


def simulate(name: str, url: str, *more: str) -> int:
    return main(["simulate", name, url, "--secret-env", "HOOK_SECRET", *more])


def test_retries_until_it_is_taken(
    receiver: Callable[[str], Receiver], waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Three failures and a 200: four verified deliveries of one event, by Svix's own waits."""
    there = receiver("svix")
    there.answer = lambda before: (500 if before < 3 else 204, {})
    assert simulate("svix", there.url, "--speed", "10") == 0
    assert [one.ok for one in there.verdicts] == [True] * 4
    assert len({one.event_id for one in there.verdicts}) == 1
    assert waits == [0.5, 30, 180]
    told = capsys.readouterr().out
    assert "7 retries over 27.6 h, docs (docs.svix.com/retries)" in told
    assert "next in 5.0 s (0.5 s here)" in told
    assert told.count("attempt ") == 4
    assert told.endswith("taken\n")
    assert SECRET not in told


def test_the_schedule_ends(
    receiver: Callable[[str], Receiver], waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A receiver that never takes it gets the whole schedule, and the exit code is 1."""
    there = receiver("slack")
    there.answer = lambda before: (500, {})
    assert simulate("slack", there.url, "--json") == 1
    assert waits == [0, 60, 300]
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [one["answers"][0]["status"] for one in found["attempts"]] == [500] * 4
    assert [one["next_wait"] for one in found["attempts"]] == [0, 60, 300, None]
    assert [one["at_seconds"] for one in found["attempts"]] == [0, 0, 60, 360]
    assert found["attempts"][-1]["ends"] == "the schedule ends"


@pytest.mark.parametrize(
    "name, status, headers, attempts, told",
    [
        ("github", 500, {}, 1, "GitHub does not retry"),
        ("mailgun", 406, {}, 1, "gives up on this answer"),
        ("standard-webhooks", 410, {}, 1, "gives up on this answer"),
        ("zendesk", 500, {}, 1, "does not retry on this answer"),
        ("zendesk", 503, {}, 1, "only after a Retry-After up to 59"),
        ("zendesk", 503, {"Retry-After": "7"}, 4, "the schedule ends"),
        ("twilio", 500, {}, 1, "does not retry on this answer"),
    ],
)
def test_answers_that_a_provider_does_not_retry(
    name: str,
    status: int,
    headers: dict[str, str],
    attempts: int,
    told: str,
    receiver: Callable[[str], Receiver],
    waits: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What ends a provider's retries ends them here, and it says so."""
    there = receiver(name)
    there.answer = lambda before: (status, headers)
    assert simulate(name, there.url) == 1
    assert len(there.verdicts) == attempts
    assert waits == [7.0] * (attempts - 1)
    assert told in capsys.readouterr().out


def test_copies_go_at_the_same_time(
    receiver: Callable[[str], Receiver], waits: list[float]
) -> None:
    """Three copies are in the receiver together; only the one that failed comes again."""
    there = receiver("stripe")
    together = threading.Barrier(3)

    def answer(before: int) -> tuple[int, dict[str, str]]:
        if before < 3:
            together.wait(60)
        return (409 if before == 1 else 200), {}

    there.answer = answer
    assert simulate("stripe", there.url, "--copies", "3") == 0
    assert [one.ok for one in there.verdicts] == [True] * 4
    assert len({one.event_id for one in there.verdicts}) == 1
    assert len(waits) == 1


def test_a_limit_of_attempts_and_nobody_there(
    waits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens: each attempt says so, and the limit ends it; the secret is in a file."""
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    words = ["simulate", "stripe", "http://127.0.0.1:9/", "--secret-file", str(file)]
    assert main([*words, "--max-attempts", "2"]) == 1
    told = capsys.readouterr().out
    assert "unpublished: an approximation" in told
    assert told.count(" none ") == 2
    assert told.endswith("--max-attempts\n")
    assert len(waits) == 1
    assert main([*words, "--secret-env", "HOOK_SECRET"]) == 2
    file.write_text(" \n")
    assert main(words) == 2
    assert main([*words[:-1], str(tmp_path)]) == 2


@pytest.mark.parametrize("more", [("--speed", "0"), ("--copies", "0"), ("--max-attempts", "0")])
def test_wrong_numbers_are_refused(more: tuple[str, str], waits: list[float]) -> None:
    """Before anything is sent."""
    assert simulate("stripe", "http://127.0.0.1:9/", *more) == 2
    assert waits == []


@pytest.mark.parametrize("name", providers())
def test_every_provider_has_a_schedule(name: str) -> None:
    """As many retries as are published, over no more than the time that is; else it says so."""
    facts = providers()[name]
    plan = schedule_of(facts)
    assert sum(plan.waits) <= facts.retry_seconds * 1.0001
    assert list(plan.waits) == sorted(plan.waits)
    known = facts.retry_schedule
    assert set(known) <= {"steps", "source", "times", "only", "ends"}
    if plan.published:
        assert known["source"]
        assert list(plan.waits[: len(known["steps"])]) == known["steps"]
    else:
        assert "unpublished: an approximation" in plan.about
        assert len(plan.waits) == known.get("times", len(plan.waits))
    if plan.waits and known.get("times") != 1:
        assert sum(plan.waits) > facts.retry_seconds * 0.5
