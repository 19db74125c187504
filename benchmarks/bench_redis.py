"""The Redis store beside bare sockets and the peers. Run by ``run.py``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import harness
import targets
from bench_postgres import (
    ANSWER,
    IDEMKIT,
    SCOPE,
    TERMS,
    WRAP,
    Ops,
    async_case,
    idemkit_ops,
    named,
    our_handler,
    store_ops,
    thread_case,
    wrapped,
)
from harness import Case, Options, new_keys

import servers
from oncekey import AsyncRedisStore, RedisStore
from oncekey.models import Key
from oncekey.stores._batching import Job
from oncekey.stores.redis.operations import CLAIM, COMPLETE, LONE_MARK, MARK, Op

SOCKET = "limit: blocking socket, pipelined"
BARE = "limit: auto-pipelined, unfenced"
OURS = "**oncekey** async"
THREADS = "**oncekey** sync, threads"
FLOOR = "floor: our scripts, by hand"
REDIS_PY = "redis-py, one by one"

CALLERS = (1, 16, 128)
DAY = 86_400


def command(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


def mark(key: str) -> bytes:
    return command(b"SET", key.encode(), b"1", b"NX", b"EX", b"%d" % DAY)


def claim(key: str, owner: bytes) -> bytes:
    return command(b"SET", key.encode(), b"C" + owner, b"NX", b"PX", b"30000")


def complete(key: str) -> bytes:
    return command(b"SET", key.encode(), b"R" + ANSWER, b"EX", b"%d" % DAY)


def flushed(url: str) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        client.flushdb()


# ---------------------------------------------------------------------------------- what is timed


def connected(url: str) -> socket.socket:
    """A plain socket to the server; of a URL, its host, port and database count."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        client = socket.socket(socket.AF_UNIX)
        client.connect(parts.path)
        return client
    client = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if parts.password:
        client.sendall(
            command(b"AUTH", (parts.username or "default").encode(), parts.password.encode())
        )
        client.recv(64)
    client.sendall(command(b"SELECT", parts.path.strip("/").encode() or b"0"))
    client.recv(64)
    return client


class Socket:
    """A blocking socket: writes, and reads the replies. Timed is that, and nothing else."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._reader = harness.peer("hiredis").Reader()
        self.taken = 0.0

    def call(self, data: bytes, expect: int) -> list[Any]:
        replies: list[Any] = []
        start = time.perf_counter()
        self._client.sendall(data)
        while len(replies) < expect:
            self._reader.feed(self._client.recv(65_536))
            while (reply := self._reader.gets()) is not False:
                replies.append(reply)
        self.taken += time.perf_counter() - start
        return replies

    def timed(
        self, run: Callable[[list[str]], bool], keys: list[str], callers: int, seconds: float
    ) -> harness.Timed:
        """Run for all keys, as many at once as there are callers, or until the time is up."""
        self.taken, at = 0.0, 0
        while at < len(keys) and self.taken < seconds:
            if not run(keys[at : at + callers]):
                raise SystemExit("a command by hand did not do what it should")
            at += callers
        return harness.Timed(self.taken / min(at, len(keys)), keys[:at])


def pipelined(url: str, keys: list[str], callers: int, seconds: float) -> float:
    """The limit: the bare key, as many commands in one write as there are callers."""
    flushed(url)
    with connected(url) as client:
        wire = Socket(client)

        def run(part: list[str]) -> bool:
            return None not in wire.call(b"".join(map(mark, part)), len(part))

        return wire.timed(run, keys, callers, seconds).each


def our_commands(
    url: str, labels: dict[str, str], keys: list[str], callers: int, seconds: float
) -> dict[str, float]:
    """The floor: what the store sends and nothing of the store, one script for all callers."""
    flushed(url)
    head = b"$40\r\noncekey:"

    def digest(name: str) -> bytes:
        return Key(SCOPE, name).digest

    with connected(url) as client:
        wire, known = Socket(client), set()

        def send(op: Op, jobs: list[Job]) -> Any:
            source = op not in known  # a server learns a script by running it
            known.add(op)
            return wire.call(op.pack(head, jobs, False, source), op.replies)[0]

        def first(part: list[str]) -> bool:
            jobs = [Job(MARK, (digest(name), TERMS, name[:16].encode())) for name in part]
            if len(jobs) == 1:
                return bool(send(LONE_MARK, jobs) == b"OK")
            return bool(send(MARK, jobs) == 1)

        def once(part: list[str]) -> bool:
            claims = [Job(CLAIM, (digest(name), TERMS, name[:16].encode(), b"f")) for name in part]
            fences = send(CLAIM, claims)
            jobs = [
                Job(COMPLETE, (*job.args[:3], fence, ANSWER))
                for job, fence in zip(claims, fences, strict=True)
            ]
            return bool(send(COMPLETE, jobs) == 1)

        def replay(part: list[str]) -> bool:
            jobs = [Job(CLAIM, (digest(name), TERMS, b"another", b"f")) for name in part]
            return all(reply[4] == ANSWER for reply in send(CLAIM, jobs))

        taken, left = {}, keys
        operations = {"first": first, "once": once, "replay": replay}
        for operation, label in labels.items():
            taken[label], left = wire.timed(operations[operation], left, callers, seconds)
        return taken


class Pipe(asyncio.Protocol):
    """Commands of one tick in one write, on one connection; replies in their order."""

    def __init__(self) -> None:
        self.reader = harness.peer("hiredis").Reader()
        self.waiting: deque[asyncio.Future[Any]] = deque()
        self.unsent: list[bytes] = []
        self.loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data)
        while (reply := self.reader.gets()) is not False:
            self.waiting.popleft().set_result(reply)

    def send(self, data: bytes) -> asyncio.Future[Any]:
        future = self.loop.create_future()
        if not self.waiting:
            self.transport.write(data)
        else:
            if not self.unsent:
                self.loop.call_soon(self.flush)
            self.unsent.append(data)
        self.waiting.append(future)
        return future

    def flush(self) -> None:
        unsent, self.unsent = self.unsent, []
        self.transport.write(b"".join(unsent))


@contextlib.asynccontextmanager
async def bare(url: str, callers: int) -> AsyncIterator[Ops]:
    flushed(url)
    client = connected(url)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    if client.family == socket.AF_UNIX:
        transport, pipe = await loop.create_unix_connection(Pipe, sock=client)
    else:
        transport, pipe = await loop.create_connection(Pipe, sock=client)

    async def first(key: str) -> bool:
        return await pipe.send(mark(key)) is not None

    async def once(key: str) -> bool:
        won = await pipe.send(claim(key, key[:16].encode()))
        return won is not None and await pipe.send(complete(key)) is not None

    async def replay(key: str) -> bool:
        won = pipe.send(claim(key, b"another"))
        found = await pipe.send(command(b"GET", key.encode()))
        return await won is None and bool(found[1:] == ANSWER)

    try:
        yield {"first": first, "once": once, "replay": replay}
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def redis_py(url: str, callers: int) -> AsyncIterator[Ops]:
    import redis.asyncio

    flushed(url)
    async with redis.asyncio.Redis.from_url(url, max_connections=256) as client:

        async def first(key: str) -> bool:
            return bool(await client.set(key, "1", nx=True, ex=DAY))

        async def once(key: str) -> bool:
            won = await client.set(key, "C" + key[:16], nx=True, px=30_000)
            return bool(won and await client.set(key, b"R" + ANSWER, ex=DAY))

        async def replay(key: str) -> bool:
            won = await client.set(key, "C", nx=True, px=30_000)
            found = await client.get(key)
            return not won and bool(found[1:] == ANSWER)

        yield {"first": first, "once": once, "replay": replay}


@contextlib.asynccontextmanager
async def ours(url: str, callers: int) -> AsyncIterator[Ops]:
    flushed(url)
    async with AsyncRedisStore(url, check="off") as backend:
        yield store_ops(backend)


@contextlib.asynccontextmanager
async def our_wrap(url: str, callers: int) -> AsyncIterator[Ops]:
    flushed(url)
    async with AsyncRedisStore(url, check="off") as backend:
        yield wrapped(our_handler(backend))


@contextlib.asynccontextmanager
async def idemkit(url: str, callers: int) -> AsyncIterator[Ops]:
    import redis.asyncio

    flushed(url)
    async with redis.asyncio.Redis.from_url(url, max_connections=256) as client:
        yield idemkit_ops(harness.peer("idemkit").RedisBackend(client))


def in_sync(url: str) -> Callable[[], contextlib.AbstractContextManager[RedisStore]]:
    @contextlib.contextmanager
    def opened() -> Iterator[RedisStore]:
        flushed(url)
        with RedisStore(url, check="off") as store:
            yield store

    return opened


# ------------------------------------------------------------------------------------------ cases


def first_seen_cases(url: str, callers: int, keys: list[str], seconds: float) -> dict[str, Case]:
    labels = {"first": named("first seen", callers)}
    cases: dict[str, Case] = {
        SOCKET: lambda: {labels["first"]: pipelined(url, keys, callers, seconds)},
        FLOOR: lambda: our_commands(url, labels, keys, callers, seconds),
        BARE: async_case(url, bare, callers, keys, labels, seconds),
        OURS: async_case(url, ours, callers, keys, labels, seconds),
        THREADS: thread_case(in_sync(url), callers, keys, labels, seconds),
        REDIS_PY: async_case(url, redis_py, callers, keys, labels, seconds),
    }
    if harness.peer("idemkit"):
        cases[IDEMKIT] = async_case(url, idemkit, callers, keys, labels, seconds)
    return cases


def claim_cases(url: str, callers: int, keys: list[str], seconds: float) -> dict[str, Case]:
    labels = {"once": named("claim, complete", callers), "replay": named("replay", callers)}
    cases: dict[str, Case] = {
        FLOOR: lambda: our_commands(url, labels, keys, callers, seconds),
        BARE: async_case(url, bare, callers, keys, labels, seconds),
        OURS: async_case(url, ours, callers, keys, labels, seconds),
        THREADS: thread_case(in_sync(url), callers, keys, labels, seconds),
        WRAP: async_case(url, our_wrap, callers, keys, labels, seconds),
        REDIS_PY: async_case(url, redis_py, callers, keys, labels, seconds),
    }
    if harness.peer("idemkit"):
        cases[IDEMKIT] = async_case(url, idemkit, callers, keys, labels, seconds)
    return cases


# ----------------------------------------------------------------------------------------- report


def speeds(url: str, options: Options) -> harness.Samples:
    """Measure every operation."""
    samples: harness.Samples = {}
    keys = new_keys(64_000, options.seed)  # more than any case gets through
    seconds = options.pick(0.1, 0.25, 0.8)  # of a case and operation
    groups = [
        *(first_seen_cases(url, callers, keys, seconds) for callers in CALLERS),
        *(claim_cases(url, callers, keys, seconds) for callers in CALLERS),
    ]
    for number, cases in enumerate(groups, start=1):
        samples |= harness.measure(
            f"redis {number} of {len(groups)}",
            cases,
            rounds=options.pick(3, 7, 11),
            seconds=options.pick(4, 20, 90),
            seed=options.seed,
        )
    return samples


def server_version(url: str) -> str:
    import redis

    with redis.Redis.from_url(url) as client:
        found: Any = client.info("server")
        return str(found["redis_version"])


def report(options: Options) -> str:
    """Measure, and give the section in Markdown."""
    if not (harness.peer("redis") and harness.peer("hiredis")):
        return "### Redis\n\nLeft out: install `redis` and `hiredis`.\n"
    try:
        with servers.redis(options.directory) as url:
            version = server_version(url)
            samples = speeds(url, options)
            flushed(url)
    except servers.Missing as missing:
        return f"### Redis\n\n{missing}\n"
    references = {
        "of the socket": SOCKET,
        "of the floor": FLOOR,
        "of auto-pipelined": BARE,
        "times redis-py": REDIS_PY,
        "times idemkit": IDEMKIT,
    }
    verdicts = targets.table("redis")
    return f"""### Redis

{harness.left_out("idemkit")}
Redis {version} on this machine, nothing written to disk, for all alike. The *socket* sends as \
many `SET NX` at once as there are callers and reads the replies; the floor sends the store's own \
scripts in that way. *Auto-pipelined* is a minimal \
client on asyncio whose callers share one connection; it completes without looking whether the \
claim is still its own, and to replay it sends `SET NX` and `GET` together.

{harness.speed_table(samples, references)}
{verdicts}"""
