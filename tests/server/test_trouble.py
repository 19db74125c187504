"""Full disks, people who must leave, logs under attack, and stops that hang."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.kit import CONFIG, ENVIRON, HASH, bearer, csrf_of, deliver, sign_in
from tests.server.process import Served, config, event

from oncekey.errors import StoreUnavailableError
from oncekey.inbox.abc import AsyncInbox
from oncekey.server import listening, live
from oncekey.server.app import make_app
from oncekey.server.config import settings_from
from oncekey.server.gateway import Gateway
from oncekey.server.logs import EACH, WINDOW, Sparing
from oncekey.testing import Proxy, SignedDelivery, sample

Signed = Callable[..., SignedDelivery]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with hardly any room; only root can mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid():
        pytest.skip("needs root, to mount a small disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=1500k", "oncekey-test", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_a_full_disk_is_told_and_nothing_is_lost(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 for events and for /readyz, until there is room; then all that got a 200 is there."""
    monkeypatch.setattr("oncekey.server.gateway._LOOK_AGAIN", 0.0)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(600_000))
    text = CONFIG.format(store=f"sqlite:///{small_disk}/inbox.db")
    gateway = await Gateway.open(settings_from(text, "gateway.toml", ENVIRON))
    transport = httpx.ASGITransport(app=make_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway.test") as http:
        assert (await http.get("/readyz")).status_code == 200
        provider = gateway.settings.sources["shop"].provider
        kept = []
        for number in range(100):
            one = sample(provider, id=f"evt_{number}", url="http://gateway.test/hooks/shop")
            padded = json.dumps({**json.loads(one.body), "pad": "x" * 20_000}).encode()
            signed = provider.sign("POST", one.url, {}, padded)
            answer = await http.post(one.url, content=padded, headers=dict(signed.headers))
            if answer.status_code != 200:
                break
            kept.append(f"evt_{number}")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert kept
        ready = await http.get("/readyz")
        assert (ready.status_code, ready.text) == (503, "not ready: STORE_FULL\n")
        assert (await http.get("/healthz")).status_code == 200
        ballast.unlink()
        assert (await http.get("/readyz")).status_code == 200
        found = await http.get("/_oncekey/api/v1/events?limit=500", headers=bearer("read"))
        assert {row["key"] for row in found.json()["items"]} == set(kept)
    await gateway.stop(5)


async def test_ready_is_looked_at_once_for_all(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """Whoever asks for /readyz, and however often: the inbox is written to once a second."""
    before = gateway.inbox.check
    calls = 0

    async def counted(*, quick: bool = False) -> None:
        nonlocal calls
        calls += 1
        await before(quick=quick)

    gateway.inbox.check = counted  # type: ignore[method-assign]
    answers = await asyncio.gather(*(http.get("/readyz") for _ in range(20)))
    assert {one.status_code for one in answers} == {200}
    assert calls == 1


# Streams


async def _stream(gateway: Gateway, http: httpx.AsyncClient) -> AsyncIterator[bytes]:
    """The stream of the page that this client has open, without a server that buffers it."""
    sent: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    cookie = "; ".join(f"{one.name}={one.value}" for one in http.cookies.jar)
    path = "/_oncekey/live"
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
             "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
             "headers": [(b"cookie", cookie.encode()), (b"host", b"gateway.test")],
             "asgi": {"spec_version": "2.4"}}  # fmt: skip
    work = asyncio.ensure_future(make_app(gateway)(scope, receive, sent.put))
    try:
        assert (await sent.get())["status"] == 200
        while (message := await sent.get()).get("more_body"):
            yield message["body"]  # type: ignore[misc]
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize("how", ["logout", "expiry", "role", "gone"])
async def test_a_stream_ends_with_what_it_was_opened_by(
    gateway: Gateway, http: httpx.AsyncClient, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who signed out, whose session ended, or who has another role is told nothing more."""
    monkeypatch.setattr(live, "EVERY", 0.02)
    await sign_in(http, "anna")
    text = CONFIG.format(store=gateway.settings.store)
    ended = False
    async with asyncio.timeout(60):
        async for part in _stream(gateway, http):
            if b"tick" not in part or ended:
                continue
            ended = True
            if how == "logout":
                await http.post("/_oncekey/logout", data={"csrf": await csrf_of(http)})
            elif how == "expiry":
                token = http.cookies["oncekey_session"]
                session = await gateway.doorman.session(token)
                assert session is not None
                await gateway.doorman.sign_out(session)
            elif how == "role":
                old = f'[users.anna]\npassword_hash = "{HASH}"\nrole = "admin"'
                changed = text.replace(old, old.replace("admin", "read"))
                assert changed != text
                await gateway.use(settings_from(changed, "gateway.toml", ENVIRON))
            else:
                changed = text.replace("[users.anna]", "[users.bert]")
                await gateway.use(settings_from(changed, "gateway.toml", ENVIRON))
    assert ended


async def test_streams_live_through_any_error(
    gateway: Gateway,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault of ours is told to who looks on, logged once, and the next look is made."""
    monkeypatch.setattr(live, "EVERY", 0.0)
    await sign_in(http, "anna")
    counts, failures, parts = gateway.inbox.counts, 0, list[bytes]()

    async def broken(since: int, until: int | None = None) -> Any:
        nonlocal failures
        if failures < 3 or not any(b"a fault of the gateway" in part for part in parts):
            failures += 1
            raise ValueError("nobody thought of this")
        return await counts(since, until)

    monkeypatch.setattr(gateway.inbox, "counts", broken)
    async with asyncio.timeout(60):
        async for part in _stream(gateway, http):
            parts.append(part)
            if b"totals" in part:
                break
    assert not any(b"nobody thought" in part for part in parts)
    told = [one for one in caplog.records if "can't be told what happens" in one.message]
    assert len(told) == 1
    assert told[0].exc_info is not None


async def test_one_person_does_not_take_all_places(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has many streams open gets no more; others do, and a stream that ends gives its place."""
    monkeypatch.setattr(live, "EVERY", 0.02)
    monkeypatch.setattr(live, "MOST_EACH", 1)
    await sign_in(http, "anna")
    async with asyncio.timeout(60):
        opened = _stream(gateway, http)
        assert await anext(opened)
        assert (await http.get("/_oncekey/live")).status_code == 503
        assert not gateway.live.is_full("bert")
        await opened.aclose()  # type: ignore[attr-defined]
        while gateway.live.is_full("anna"):
            await asyncio.sleep(0)


# Logs


def test_lines_of_one_kind_are_bounded() -> None:
    """The first few are written; what was left out is told with the next after a while."""
    now = 0.0
    sparing = Sparing(lambda: now)

    def line(text: str, *args: object) -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "f", 1, text, args, None)
        return record.getMessage() if sparing.filter(record) else None

    told = [line("can't read %s", number) for number in range(EACH + 50)]
    assert [one is not None for one in told] == [True] * EACH + [False] * 50
    assert line("another kind") == "another kind"
    now = WINDOW
    assert line("can't read %s", "it") == "can't read it (50 more like it were not logged)"
    assert line("can't read %s", 1) == "can't read 1"


# Browsers behind a proxy


@pytest.mark.parametrize(
    "origin, status",
    [
        ("https://hooks.example.com", 303),
        ("http://gateway.test", 303),
        ("http://hooks.example.com", 403),
        ("https://evil.example", 403),
        ("null", 403),
    ],
)
async def test_origin_is_that_of_the_public_url(
    gateway: Gateway, http: httpx.AsyncClient, origin: str, status: int
) -> None:
    """Behind a proxy that writes its own Host, forms of the public address are taken, no others."""
    text = 'public_url = "https://Hooks.example.com/"\n' + CONFIG
    settings = settings_from(text.format(store=gateway.settings.store), "x", ENVIRON)
    await gateway.use(settings)
    form = {"name": "anna", "password": "correct horse battery"}
    answer = await http.post("/_oncekey/login", data=form, headers={"Origin": origin})
    assert answer.status_code == status


# Stops


async def test_a_stop_is_bounded_by_its_time(gateway: Gateway) -> None:
    """An inbox that never lets go does not keep the gateway: its time is over first."""
    released = asyncio.Event()
    inbox: AsyncInbox = gateway.inbox
    close = inbox.aclose

    async def hangs() -> None:
        await released.wait()

    inbox.aclose = hangs  # type: ignore[method-assign]
    began = time.monotonic()
    await gateway.stop(0.2)
    assert time.monotonic() - began < 30
    inbox.aclose = close  # type: ignore[method-assign]
    await inbox.aclose()


def test_what_hangs_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when the time of its stop is over, whatever is in the way."""
    ended = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(listening.os, "_exit", leave)
    listening._cut_off(0.01)
    assert ended.wait(60)
    assert codes == [1]


@pytest.mark.skipif(not os.environ.get("ONCEKEY_TEST_LONG"), reason="a process that hangs: long")
def test_a_stop_ends_in_time_with_a_database_that_hangs(tmp_path: Path, pg_url: str) -> None:
    """SIGTERM while PostgreSQL says nothing any more: it ends within stop_seconds, not well."""
    command = [sys.executable, "-m", "oncekey", "migrate", "--inbox", pg_url]
    subprocess.run(command, check=True, capture_output=True)
    with Proxy(pg_url) as network:
        file = config(tmp_path, "http://127.0.0.1:9/events", network.url)
        file.write_text("stop_seconds = 3\n" + file.read_text())
        with Served("--config", str(file), "--port", "0") as gateway:
            assert gateway.deliver(event("evt_1", gateway.address)) == 200
            with network.blackhole():
                began = time.monotonic()
                _, errors = gateway.stop()
                took = time.monotonic() - began
    assert took < 10, errors
    assert "in time" in errors or "cut off" in errors


async def test_an_inbox_that_says_nothing_is_not_ready(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/readyz does not wait for a database that hangs, and says no for one that is away."""
    monkeypatch.setattr("oncekey.server.gateway._LOOK_AGAIN", 0.0)
    monkeypatch.setattr("oncekey.server.gateway._LOOK_SECONDS", 0.05)

    async def hangs(*, quick: bool = False) -> None:
        await asyncio.Event().wait()

    async def away(*, quick: bool = False) -> None:
        raise StoreUnavailableError("nobody is there")

    gateway.inbox.check = hangs  # type: ignore[method-assign]
    assert (await http.get("/readyz")).text == "not ready: INBOX_SLOW\n"
    gateway.inbox.check = away  # type: ignore[method-assign]
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "not ready: STORE_UNAVAILABLE\n")


async def test_what_can_be_kept_is_kept(http: httpx.AsyncClient, signed: Signed) -> None:
    """An inbox with room takes events and is ready."""
    assert (await deliver(http, signed("shop"))).status_code == 200
    assert (await http.get("/readyz")).status_code == 200
