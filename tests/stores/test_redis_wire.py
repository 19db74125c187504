"""One connection of an event loop: on its transport, or through what redis-py promises."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio.connection
from tests.servers.redis import Proxy, Server

from oncekey.conformance import CHECKS, Check, arun_check
from oncekey.errors import StoreTimeoutError
from oncekey.models import Key, Scope, Terms, Verdict
from oncekey.stores.redis import AsyncRedisStore, wire
from oncekey.stores.redis.operations import command
from oncekey.stores.redis.topology import Send
from oncekey.stores.redis.wire import DriverWire, TransportWire, Wire

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
FAR = 10.0**9


def key(name: object = "") -> Key:
    return Key(Scope("once", "redis"), str(name) or os.urandom(8).hex())


def without_hiredis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our side not find it; redis-py has made up its mind when it was imported."""

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(wire, "import_module", missing)


@pytest.fixture(params=[TransportWire, DriverWire])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Wire]:
    """Both kinds of wire: the second is what is left without hiredis."""
    found: type[Wire] = request.param
    if found is DriverWire:
        without_hiredis(monkeypatch)
    else:
        pytest.importorskip("hiredis")
    return found


async def opened(server: Server | Proxy, kind: type[Wire], lost: Callable[[Wire], Any]) -> Wire:
    connection = redis.asyncio.connection.Connection(port=server.port, protocol=2)
    found = await wire.open_wire(connection, lost)
    assert type(found) is kind
    return found


async def test_replies_go_to_who_asked_in_order(redis_server: Server, kind: type[Wire]) -> None:
    """Requests that are written before the first reply each get theirs; errors are replies."""
    line = await opened(redis_server, kind, lambda _: None)
    came: list[asyncio.Future[Any]] = []
    for size in (0, 1, 100, 70_000):
        came.append(asyncio.get_running_loop().create_future())
        asks = command(b"ECHO", b"x" * size) + command(b"NOSUCH") + command(b"TIME")
        line.send(Send("", asks, 3), came[-1].set_result, FAR)
        assert line.deadline == FAR
    for size, future in zip((0, 1, 100, 70_000), came, strict=True):
        echo, error, clock = await asyncio.wait_for(future, 30)
        assert echo == b"x" * size
        assert isinstance(error, Exception)
        assert len(clock) == 2
    assert line.deadline is None
    line.close()
    await asyncio.wait_for(line.closed, 30)


async def test_a_connection_that_breaks_fails_all_that_wait(
    redis_server: Server, make_proxy: Callable[[int], Proxy], kind: type[Wire]
) -> None:
    """Whoever waits is told, and the wire is forgotten."""
    proxy = make_proxy(redis_server.port)
    lost: list[Wire] = []
    line = await opened(proxy, kind, lost.append)
    proxy.lose_replies(1)
    came = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for future in came:
        line.send(Send("", command(b"TIME")), future.set_result, FAR)
    for future in came:
        assert isinstance(await asyncio.wait_for(future, 30), Exception)
    assert line in lost


async def test_what_is_not_the_protocol_is_an_error(kind: type[Wire]) -> None:
    """Bytes that no Redis sends are refused, not guessed at."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(65_536):
                writer.write(b"+OK\r\n" * data.count(b"SETINFO"))  # what the driver says at first
                if b"TIME" in data:
                    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        connection = redis.asyncio.connection.Connection(
            port=server.sockets[0].getsockname()[1], protocol=2
        )
        line = await wire.open_wire(connection, lambda _: None)
        came = asyncio.get_running_loop().create_future()
        line.send(Send("", command(b"TIME")), came.set_result, FAR)
        assert isinstance(await asyncio.wait_for(came, 30), Exception)
        line.close()


async def test_a_driver_that_changed_is_used_as_it_promises(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where redis-py has no stream by the name that we know, its own methods serve."""
    monkeypatch.setattr(wire, "_stream_of", lambda connection: None)
    line = await opened(redis_server, DriverWire, lambda _: None)
    line.close()
    await line.closed


@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if "racing" in check.__name__ or "replays" in check.__name__],
    ids=lambda check: check.__name__,
)
async def test_the_store_works_without_hiredis(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    """Checks of the contract through what redis-py promises."""
    without_hiredis(monkeypatch)
    await arun_check(check, lambda: AsyncRedisStore(redis_server.url, prefix=os.urandom(4).hex()))


async def test_deadlines_and_cancelled_claims_without_hiredis(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung server ends the call in time, and a cancelled claim is given back."""
    without_hiredis(monkeypatch)
    store = AsyncRedisStore(redis_server.url, prefix=os.urandom(4).hex(), timeout=0.5)
    try:
        assert (await store.claim(key("warm"), b"o", b"f", TERMS)).verdict is Verdict.WON
        redis_server.pause()
        try:
            with pytest.raises(StoreTimeoutError):
                await store.claim(key("late"), b"o", b"f", TERMS)
        finally:
            redis_server.resume()
        await store.now()
        claim = asyncio.create_task(store.claim(key("gone"), b"o", b"f", TERMS))
        await asyncio.sleep(0)
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)
    finally:
        await store.aclose()
    async with AsyncRedisStore(redis_server.url, prefix=store._options.prefix[:-1].decode()) as new:
        assert (await new.claim(key("gone"), b"p", b"f", TERMS)).verdict is Verdict.WON
