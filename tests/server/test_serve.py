"""``oncekey serve`` as a process: from provider to app, through kills, stops and reloads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.process import App, Served, app, config, event, until

from oncekey.signatures import provider


@pytest.fixture
def target() -> Iterator[App]:
    with app() as one:
        yield one


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the inbox is: a file, or a fresh database whose tables ``oncekey migrate`` made."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/inbox.db"
    url: str = request.getfixturevalue("pg_url")
    command = [sys.executable, "-m", "oncekey", "migrate", "--inbox", url]
    subprocess.run(command, check=True, capture_output=True)
    return url


def test_from_the_provider_to_the_app(target: App, tmp_path: Path, store: str) -> None:
    """The least config delivers each event once it is kept, signed anew, byte for byte."""
    with Served("--config", str(config(tmp_path, target.url, store)), "--port", "0") as gateway:
        one = event("evt_1", gateway.address)
        assert [gateway.deliver(one) for _ in range(3)] == [200, 200, 200]
        until(lambda: target.requests, "the delivery")
        (headers, body) = target.requests[0]
        assert body == one.body
        found = gateway.api("GET", "/events?q=source:shop")["items"]
        assert [row["id"] for row in found] == [headers["webhook-id"]]
        assert headers["idempotency-key"] == headers["webhook-id"]
        assert (headers["oncekey-source"], headers["oncekey-type"]) == ("shop", "invoice.paid")
        secret = gateway.api("POST", "/targets/app/secret")["secret"]
        signed = provider("standard-webhooks", secret)
        assert signed.verify("POST", target.url, headers, body).ok
        kept = headers["webhook-id"]
        until(lambda: gateway.api("GET", f"/events/{kept}")["attempts"], "the record of it")
        detail = gateway.api("GET", f"/events/{kept}")
        assert len(detail["duplicates"]) == 2
        assert [attempt["status"] for attempt in detail["attempts"]] == [200]
        assert gateway.api("POST", f"/events/{kept}/replay") == {"queued": 1, "left_out": {}}
        until(lambda: len(target.requests) == 2, "the replay")
        code, errors = gateway.stop()
    assert (code, errors) == (0, "")
    assert len(target.requests) == 2


def test_a_failing_app_gets_it_later(target: App, tmp_path: Path) -> None:
    """An app that answers 500 three times gets the event on the fourth try, under the same id."""
    seen: list[str] = []

    def answer(headers: dict[str, str]) -> int:
        seen.append(headers["webhook-id"])
        return 500 if len(seen) < 4 else 200

    target.answer = answer
    with Served("--config", str(config(tmp_path, target.url)), "--port", "0") as gateway:
        assert gateway.deliver(event("evt_1", gateway.address)) == 200
        until(lambda: target.requests, "the delivery")
        assert len(seen) == 4
        assert len(set(seen)) == 1


def test_private_addresses_are_refused(target: App, tmp_path: Path) -> None:
    """Without allow_private nothing is sent to loopback, and the event says why.

    Written so that the config can't see it: an address at sight is refused there.
    """
    file = config(tmp_path, target.url.replace("127.0.0.1", "0x7f.1"))
    file.write_text(file.read_text().replace("allow_private = true\n", ""))
    with Served("--config", str(file), "--port", "0") as gateway:
        assert gateway.call("GET", "/healthz")[0] == 200
        one = event("evt_1", gateway.address)
        assert gateway.deliver(one) == 200
        found = gateway.api("GET", "/events")["items"][0]["id"]
        until(lambda: gateway.api("GET", f"/events/{found}")["attempts"], "an attempt")
        errors = {one["error"] for one in gateway.api("GET", f"/events/{found}")["attempts"]}
        assert any("address" in error for error in errors), errors
    assert target.requests == []


def test_a_reload_is_all_or_nothing(target: App, tmp_path: Path) -> None:
    """SIGHUP takes a new source; a config with a fault changes nothing and is told."""
    file = config(tmp_path, target.url)
    good = file.read_text()
    with Served("--config", str(file), "--port", "0") as gateway:
        assert gateway.call("GET", "/hooks/second")[0] == 404
        second = '[sources.second]\nprovider = "stripe"\nsecret_env = "SHOP_SECRET"\n'
        file.write_text(good + second + 'targets = ["app"]\n')
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: gateway.call("GET", "/hooks/second")[0] == 200, "the reload")
        file.write_text(good + second.replace("stripe", "strpe") + 'targets = ["app"]\n')
        gateway.process.send_signal(signal.SIGHUP)
        assert gateway.process.stderr is not None
        told = ""
        while "Did you mean 'stripe'?" not in told:
            told += gateway.process.stderr.readline()
        assert "the old one stays" in told
        assert gateway.call("GET", "/hooks/second")[0] == 200
        assert gateway.deliver(event("evt_1", gateway.address)) == 200
        code, errors = gateway.stop()
    assert (code, errors) == (0, "")


def test_what_a_reload_cannot_change_is_said(target: App, tmp_path: Path) -> None:
    """Settings that only a start reads are refused by name, and the rest of that config too."""
    file = config(tmp_path, target.url)
    good = file.read_text()
    with Served("--config", str(file), "--port", "0") as gateway:
        file.write_text(f"retention = 86400\nremember = 9999999\nstop_seconds = 5\n{good}")
        gateway.process.send_signal(signal.SIGHUP)
        assert gateway.process.stderr is not None
        told = gateway.process.stderr.readline()
        assert "retention, stop_seconds, remember: needs a restart; nothing was changed" in told


def test_a_wrong_config_is_told_and_nothing_starts(tmp_path: Path) -> None:
    """All faults with their lines, exit code 2, no traceback."""
    file = tmp_path / "gateway.toml"
    file.write_text('stor = "sqlite:///x.db"\n[sources.shop]\nprovider = "strpe"\n')
    command = [sys.executable, "-m", "oncekey", "serve", "--config", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"{file}:1: stor: is no setting. Did you mean 'store'?" in ended.stderr
    assert f"{file}:3: sources.shop.provider: no provider 'strpe'." in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.glob("*.db")) == []


def test_a_damaged_inbox_is_refused(target: App, tmp_path: Path) -> None:
    """A file that is no inbox gives exit code 2 and a sentence, not a traceback."""
    (tmp_path / "inbox.db").write_bytes(b"this is no database" * 100)
    file = config(tmp_path, target.url)
    command = [sys.executable, "-m", "oncekey", "serve", "--config", str(file), "--port", "0"]
    environ = {"SHOP_SECRET": "whsec_x", "PATH": "/usr/bin"}
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_stop_hands_back_what_hangs(tmp_path: Path) -> None:
    """An attempt that hangs does not hold up the stop, and another start makes it again."""
    release = threading.Event()
    with app() as target:
        asked = threading.Event()

        def answer(headers: dict[str, str]) -> int:
            asked.set()
            release.wait(60)
            return 200

        target.answer = answer
        file = config(tmp_path, target.url)
        file.write_text("stop_seconds = 2\n" + file.read_text())
        try:
            with Served("--config", str(file), "--port", "0") as gateway:
                assert gateway.deliver(event("evt_1", gateway.address)) == 200
                assert asked.wait(60)
                code, errors = gateway.stop()
            assert code == 0
            assert "handed back" in errors
        finally:
            release.set()
        with Served("--config", str(file), "--port", "0") as gateway:
            until(lambda: len(target.requests) >= 2, "the second attempt")


def test_the_demo_needs_nothing(tmp_path: Path) -> None:
    """``--demo`` starts with no config, prints a token, and leaves nothing behind."""
    with Served("--demo", "--port", "0") as gateway:
        assert gateway.process.stdout is not None
        token = gateway.process.stdout.readline().split("token: ")[1].strip()
        status, _, _ = gateway.call(
            "GET", "/_oncekey/api/v1/sources", authorization=f"Bearer {token}"
        )
        assert status == 200
        code, errors = gateway.stop(signal.SIGINT)
    assert (code, errors) == (0, "")


def test_nodes_share_one_inbox(target: App, tmp_path: Path, pg_url: str) -> None:
    """Two gateways on one PostgreSQL: copies that come to both are one event and one delivery."""
    command = [sys.executable, "-m", "oncekey", "migrate", "--inbox", pg_url]
    subprocess.run(command, check=True, capture_output=True)
    file = str(config(tmp_path, target.url, pg_url))
    with (
        Served("--config", file, "--port", "0") as first,
        Served("--config", file, "--port", "0") as second,
    ):
        threads = [
            threading.Thread(target=node.deliver, args=(event(f"evt_{number}", node.address),))
            for number in range(20)
            for node in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: len(target.events()) == 20, "twenty deliveries")
        rows = second.api("GET", "/events?limit=100")["items"]
        assert len(rows) == 20
        assert sum(row["duplicates"] for row in rows) == 20
        for node in (first, second):
            code, errors = node.stop()
            assert (code, errors) == (0, "")
    assert len(target.requests) == 20
