"""The commands that look at a running gateway, and those that prepare one."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.process import PATIENCE, SECRET, TOKEN, App, Served, app, config, event, until

from oncekey.cli import _replaying, issues
from oncekey.cli._replaying import replay_event
from oncekey.cli.event import moments
from oncekey.server.config import read_config


def oncekey(*words: str, given: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """A command of ours, as a process."""
    return subprocess.run(
        [sys.executable, "-m", "oncekey", *words],
        capture_output=True,
        text=True,
        input=given,
        check=False,
        env={**os.environ, "ONCEKEY_TOKEN": TOKEN, "SHOP_SECRET": SECRET, **environ},
    )


@pytest.fixture(scope="module")
def target() -> Iterator[App]:
    with app() as one:
        yield one


@pytest.fixture(scope="module")
def gateway(target: App, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    with Served("--config", str(config(folder, target.url)), "--port", "0") as one:
        for number in range(3):
            assert one.deliver(event(f"evt_{number}", one.address)) == 200
        assert one.deliver(event("evt_0", one.address)) == 200
        until(lambda: len(target.events()) == 3, "three deliveries")
        yield one


def test_events_and_one_of_them(gateway: Served) -> None:
    """The list is found by a search; one event has its copy and its attempt; the body is raw."""
    listed = oncekey("events", "source:shop", "--json", "--gateway", gateway.address)
    rows = json.loads(listed.stdout)["items"]
    assert [row["key"] for row in rows] == ["evt_2", "evt_1", "evt_0"]
    assert "evt_1" in oncekey("events", "evt_1", "--gateway", gateway.address).stdout
    one = oncekey("event", rows[2]["id"], "--gateway", gateway.address).stdout
    assert "copy stopped" in one
    assert "app: delivered" in one
    body = oncekey("event", rows[2]["id"], "--body", "--gateway", gateway.address).stdout
    assert json.loads(body)["id"] == "evt_0"
    assert oncekey("issues", "--gateway", gateway.address).stdout == "nothing fails\n"


def test_an_event_is_replayed(gateway: Served, target: App) -> None:
    """As a new attempt with who asked for it; a target or an event that is not there is told."""
    rows = json.loads(oncekey("events", "--json", "--gateway", gateway.address).stdout)["items"]
    words, before = ("event", rows[0]["id"], "--gateway", gateway.address), len(target.requests)
    assert (
        oncekey(*words, "--replay").stdout == f"{rows[0]['id']} is delivered again, to 1 target\n"
    )
    until(lambda: len(target.requests) == before + 1, "the replay")
    until(lambda: oncekey(*words).stdout.count("app: delivered") == 2, "both attempts")
    assert "replay" in oncekey(*words).stdout
    again = oncekey(*words, "--replay", "--target", "app", "--json")
    assert json.loads(again.stdout) == {"queued": 1, "left_out": {}}
    for more, told in (
        (("--replay", "--target", "ap"), "no such target"),
        (("--target", "app"), "--target goes with --replay"),
    ):
        wrong = oncekey(*words, *more)
        assert wrong.returncode == 2
        assert told in wrong.stderr
        assert "explain" not in wrong.stderr  # that is all that there is to say


def test_replay_takes_the_id_of_an_event(gateway: Served, target: App) -> None:
    """As the event's page has it, for all targets or one; parts of two forms are told."""
    rows = json.loads(oncekey("events", "--json", "--gateway", gateway.address).stdout)["items"]
    words, before = ("replay", rows[0]["id"], "--gateway", gateway.address), len(target.requests)
    assert oncekey(*words).stdout == f"{rows[0]['id']} is delivered again, to 1 target\n"
    until(lambda: len(target.requests) == before + 1, "the replay")
    assert json.loads(oncekey(*words, "--target", "app", "--json").stdout) == {
        "queued": 1,
        "left_out": {},
    }
    for more, told in (
        (("--target", "ap"), "no such target"),
        (("--rate", "5"), "--rate goes with --search"),
        (("--seed", "1"), "--seed goes with a recording"),
        (("--dry-run",), "--dry-run goes with --search"),
        (("--search", "x"), "what is to be replayed?"),
        (("recording.jsonl",), "what is to be replayed?"),
    ):
        wrong = oncekey(*words, *more)
        assert (wrong.returncode, told in wrong.stderr) == (2, True), wrong.stderr
    for form in ((), ("http://127.0.0.1:9",), ("--search", "", "--cancel", "1")):
        assert "what is to be replayed?" in oncekey("replay", *form).stderr


def test_deliveries_are_replayed_by_a_search(tmp_path: Path) -> None:
    """Dead or made: counted first, then all at a rate; Ctrl-C or another call stops it."""
    with app() as target:
        target.answer = lambda headers: 410
        with Served("--config", str(config(tmp_path, target.url)), "--port", "0") as one:
            where = ("--gateway", one.address)
            for number in range(3):
                assert one.deliver(event(f"evt_{number}", one.address)) == 200

            def dead() -> int:
                return len(one.api("GET", "/dead-letters")["items"])

            until(lambda: dead() == 3, "three dead letters")
            dry = oncekey("replay", "--search", "target:app", "--dry-run", "--rate", "1.5", *where)
            assert dry.stdout == (
                "3 deliveries would be delivered again, in 2.0 s; nothing was done\n"
            )
            assert one.api("GET", "/bulk-replays")["items"] == []
            none = oncekey("replay", "--search", "target:nobody", *where)
            assert none.returncode == 0, none.stderr
            assert none.stdout == (
                "bulk replay 1 is done: 0 of 0 deliveries\n"
                "dead letters only; add state:delivered for what was delivered\n"
            )
            wrong = oncekey("replay", "--search", "", "--rate", "0", *where)
            assert (wrong.returncode, "rate does not fit" in wrong.stderr) == (2, True)

            # One that takes for ever, and whoever began it goes away.
            command = [sys.executable, "-m", "oncekey", "replay", "--search", "", "--rate", "0.001"]
            process = subprocess.Popen(
                [*command, *where],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "ONCEKEY_TOKEN": TOKEN},
            )
            assert process.stderr is not None
            assert process.stderr.readline() == (
                "bulk replay 2: 3 deliveries, at most 0.001 a second; Ctrl-C stops it\n"
            )
            process.send_signal(signal.SIGINT)
            told, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 130
            assert told == "bulk replay 2 is cancelled: 0 of 3 deliveries\n"
            assert one.api("GET", "/bulk-replays")["items"][0]["state"] == "cancelled"
            begun = one.api("POST", "/bulk-replays", {"rate": 0.001, "dry_run": False})
            stopped = oncekey("replay", "--cancel", str(begun["id"]), "--json", *where)
            assert json.loads(stopped.stdout)["state"] == "cancelled"

            target.answer = lambda headers: 200
            done = oncekey("replay", "--search", "state:dead", "--rate", "100", *where)
            assert done.returncode == 0, done.stderr
            assert done.stdout == "bulk replay 4 is done: 3 of 3 deliveries\n"
            until(lambda: len(target.events()) == 3, "the deliveries")
            words = ("--search", "state:delivered age:<1h", "--rate", "100", *where)
            until(
                lambda: oncekey("replay", *words, "--dry-run").stdout.startswith("3 deliveries"),
                "what was delivered",
            )
            before = len(target.requests)
            again = oncekey("replay", *words)
            assert again.stdout == "bulk replay 5 is done: 3 of 3 deliveries\n", again.stderr
            until(lambda: len(target.requests) == before + 3, "the deliveries again")


def test_targets_are_paused_and_resumed(gateway: Served) -> None:
    """The list says how each stands; a change is made on every node, and is in the audit."""
    where = ("--gateway", gateway.address)
    shown = oncekey("targets", *where).stdout.splitlines()
    assert shown[0].split()[:3] == ["target", "status", "breaker"]
    assert shown[1].split()[:3] == ["app", "active", "closed"]
    paused = oncekey("targets", "app", "--set", "paused", "--reason", "a deploy", "--json", *where)
    assert json.loads(paused.stdout)["items"][0]["status"] == "paused"
    assert gateway.api("GET", "/audit")["items"][0]["detail"] == "a deploy"
    assert "active" in oncekey("targets", "app", "--set", "active", *where).stdout
    for words, told in (
        (("nobody",), "no such target"),
        (("nobody", "--set", "paused"), "no such target"),
        (("--set", "paused"), "--set goes with the NAME"),
        (("app", "--reason", "x"), "--reason with --set"),
    ):
        wrong = oncekey("targets", *words, *where)
        assert (wrong.returncode, told in wrong.stderr) == (2, True), wrong.stderr


def test_a_listener_resumes(gateway: Served, tmp_path: Path) -> None:
    """All events since then reach the app in order; the next start brings only what is new."""
    cursor = str(tmp_path / "cursor")
    with app() as mine:
        words = ("listen", "--since", "1h", "--forward", mine.url, "--cursor", cursor, "--once",
                 "--gateway", gateway.address)  # fmt: skip
        first = oncekey(*words)
        assert first.returncode == 0, first.stderr
        keys = [json.loads(body)["id"] for _, body in mine.requests]
        assert keys == ["evt_0", "evt_1", "evt_2"]
        assert mine.requests[0][0]["oncekey-type"] == "invoice.paid"
        gateway.deliver(event("evt_3", gateway.address))
        assert oncekey(*words).returncode == 0
        assert [json.loads(body)["id"] for _, body in mine.requests[3:]] == ["evt_3"]


def test_nobody_there_is_said(gateway: Served) -> None:
    """No gateway, no token, a wrong token: exit code 2 and what to do, never the token."""
    gone = oncekey("events", "--gateway", "http://127.0.0.1:9")
    assert gone.returncode == 2
    assert "oncekey serve" in gone.stderr
    bare = oncekey("events", "--gateway", gateway.address, ONCEKEY_TOKEN="")
    assert bare.returncode == 2
    assert "ONCEKEY_TOKEN" in bare.stderr
    wrong = oncekey("events", "--gateway", gateway.address, ONCEKEY_TOKEN="a-wrong-token-of-mine")
    assert wrong.returncode == 2
    assert "a-wrong-token" not in wrong.stderr
    assert "does not know the token in ONCEKEY_TOKEN" in wrong.stderr


def test_init_writes_a_config_that_works(tmp_path: Path) -> None:
    """What ``init`` writes is read without a fault, and is not overwritten."""
    file = tmp_path / "mine.toml"
    assert oncekey("init", "stripe", "--output", str(file)).returncode == 0
    settings = read_config(str(file), {"STRIPE_SECRET": "whsec_x"})
    assert list(settings.sources) == ["stripe"]
    assert file.stat().st_mode & 0o111 == 0  # it is nothing to run
    again = oncekey("init", "github", "--output", str(file))
    assert again.returncode == 2
    assert "stripe" in file.read_text()


def test_a_password_becomes_a_hash() -> None:
    """``password`` reads a line and prints a hash that is not the password."""
    made = oncekey("password", given="correct horse battery\n")
    assert made.stdout.startswith('password_hash = "$argon2id$')
    assert "correct" not in made.stdout
    assert oncekey("password", given="short\n").returncode == 2


def test_what_an_app_refuses_for_good_waits_through_a_restart(tmp_path: Path) -> None:
    """A 410 is a dead letter: reconcile has it, it is not sent again, and it can be settled."""
    asked: list[str] = []

    def gone(headers: dict[str, str]) -> int:
        asked.append(headers["webhook-id"])
        return 410

    with app() as target:
        target.answer = gone
        file = str(config(tmp_path, target.url))
        with Served("--config", file, "--port", "0") as one:
            assert one.deliver(event("evt_gone", one.address)) == 200
            found = ("issues", "--gateway", one.address)
            until(lambda: "HTTP 410" in oncekey(*found).stdout, "a dead letter")
            told = oncekey("event", asked[0], "--gateway", one.address).stdout
            assert re.search(r"app: dead +[0-9.]+ ms, HTTP 410", told), told
        listed = oncekey("reconcile", "--config", file)
        assert listed.returncode == 1
        assert asked[0] in listed.stdout
        with Served("--config", file, "--port", "0") as one:
            assert (
                one.deliver(event("evt_gone", one.address)) == 200
            )  # a copy of it changes nothing
            assert "HTTP 410" in oncekey("issues", "--gateway", one.address).stdout
        settled = oncekey("reconcile", "--config", file, "--settle", asked[0], "--note", "by hand")
        assert settled.returncode == 0, settled.stdout + settled.stderr
    assert len(asked) == 1


def test_an_event_is_received_before_all_else() -> None:
    """What happened in one millisecond is told in the order in which it can have happened."""
    at = "2026-01-01T00:00:00.000Z"
    lost = {"target": "app", "outcome": "lost", "ms": 0, "status": 0, "error": "no end"}
    lost |= {"at": at, "note": ""}
    found = {
        "at": at,
        "source": "shop",
        "duplicates": [{"at": at, "same": True}],
        "attempts": [lost],
        "actions": [],
    }
    told = [(what, more) for _, what, more in moments(found)]
    assert told == [("received", "from shop"), ("copy stopped", ""), ("app: lost", "no end")]


@pytest.mark.parametrize(
    "answer, code, told",
    [
        (
            {"queued": 0, "left_out": {"app": "running"}},
            1,
            "nothing was queued for app: an attempt is under way\n",
        ),
        (
            {"queued": 1, "left_out": {"app": "parked"}},
            0,
            (
                "msg_1 is delivered again, to 1 target\n"
                "nothing was queued for app: an earlier event of the same entity comes first\n"
            ),
        ),
        (
            {"queued": 0},
            1,
            "nothing was queued: it goes to no target, or is in hand just now\n",
        ),
    ],
)
def test_a_replay_that_queued_nothing_fails(
    answer: dict[str, object],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 1, and why; what was left out of a replay is named."""

    class Client:
        def __init__(self, arguments: object) -> None:
            pass

        def post(self, *words: str, **asked: object) -> dict[str, object]:
            return answer

    monkeypatch.setattr(_replaying, "GatewayClient", Client)
    assert replay_event(argparse.Namespace(target=None, json=False), "msg_1") == code
    assert capsys.readouterr().out == told


def test_issues_show_what_the_app_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The beginning of its own answer, and for a 401 where the secret is."""
    row = {"target": "app", "status": 401, "error": "HTTP 401", "dead": 0, "failing": 2}
    row |= {"query": "target:app", "sample": "msg_1", "hint": "does your app have the secret?"}
    said = {"target": "app", "status": 401, "note": "no\x1b matching\nsignature"}

    class Client:
        def __init__(self, arguments: object) -> None:
            pass

        def get(self, *words: str, **asked: object) -> dict[str, object]:
            return {"items": [row]} if words == ("issues",) else {"attempts": [said]}

    monkeypatch.setattr(issues, "GatewayClient", Client)
    assert issues.run(argparse.Namespace(json=False)) == 1
    told = capsys.readouterr().out.splitlines()[2:]
    assert told == ['app answered 401: "no  matching signature"', "does your app have the secret?"]
