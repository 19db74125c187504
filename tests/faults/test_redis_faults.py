"""What goes wrong on the way: lost scripts, lost replies, moved clocks, forks, many at once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.servers.redis import Group, Proxy, Server

from oncekey import AsyncOnce, Once
from oncekey.errors import StoreUnavailableError
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.stores.redis import RedisBackend, RedisStore

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
SHORT = Terms(lease_ms=1_000, ttl_ms=2_000)
A, B = b"a" * 16, b"b" * 16
PRINT = b"f" * 64


def key(name: object = "") -> Key:
    return Key(Scope("once", "redis"), str(name) or os.urandom(8).hex())


# Scripts


def test_flushed_scripts_are_loaded_again(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """SCRIPT FLUSH before every operation: each does its work once, and nobody notices."""
    store = open_redis(redis_server.url)
    flush = lambda: redis_server.run("SCRIPT FLUSH")  # noqa: E731
    flush()
    won = store.claim(key("k"), A, PRINT, TERMS)
    assert (won.verdict, won.attempts) == (Verdict.WON, 1)
    flush()
    assert store.renew(key("k"), A, won.fence, TERMS) is True
    flush()
    assert store.complete(key("k"), A, won.fence, b"j", TERMS) is True
    flush()
    assert store.read(key("k")).answer == b"j"
    flush()
    other = store.claim(key("r"), A, PRINT, TERMS)
    flush()
    assert store.release(key("r"), A, other.fence) is True
    flush()
    assert store.first_seen(key("r"), TERMS) is True  # over the released record: by script
    flush()
    store.write(key("w"), PRINT, b"j", 10**13)
    flush()
    assert store.together([("first_seen", key("m"), TERMS)] * 20).count(True) == 1


def test_scripts_flushed_while_batches_run(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """Scripts that vanish again and again under load: every key is won and completed once."""
    store = open_redis(redis_server.url)
    stop = threading.Event()

    def flush() -> None:
        with redis_server.client() as client:
            while not stop.is_set():
                client.script_flush()

    flusher = threading.Thread(target=flush)
    flusher.start()
    try:
        for _ in range(10):
            names = [key() for _ in range(20)]
            owners = [os.urandom(16) for _ in names]
            won = store.together(
                [("claim", n, o, PRINT, TERMS) for n, o in zip(names, owners, strict=True)]
            )
            assert {(reply.verdict, reply.attempts) for reply in won} == {(Verdict.WON, 1)}
            held = store.together(
                [
                    ("complete", n, o, reply.fence, b"j" + o, TERMS)
                    for n, o, reply in zip(names, owners, won, strict=True)
                ]
            )
            assert held == [True] * 20
            assert [store.read(n).answer for n in names] == [b"j" + o for o in owners]
    finally:
        stop.set()
        flusher.join()


# Replies that get lost


@pytest.fixture
def wire(redis_server: Server, make_proxy: Callable[[int], Proxy]) -> Proxy:
    return make_proxy(redis_server.port)


def test_a_lost_reply_changes_nothing(wire: Proxy, open_redis: Callable[..., Any]) -> None:
    """Every operation whose reply is lost is done once and told as it was."""
    store = open_redis(wire.url)
    assert store.first_seen(key("before"), TERMS) is True

    def lost(call: Callable[[], Any]) -> Any:
        wire.lose_replies(1)
        result = call()
        assert wire._lose == 0
        return result

    won = lost(lambda: store.claim(key("k"), A, PRINT, TERMS))
    assert (won.verdict, won.attempts, won.takeover) == (Verdict.WON, 1, False)
    assert lost(lambda: store.renew(key("k"), A, won.fence, TERMS)) is True
    assert lost(lambda: store.complete(key("k"), A, won.fence, b"j", TERMS)) is True
    assert lost(lambda: store.claim(key("k"), B, PRINT, TERMS)).answer == b"j"
    other = lost(lambda: store.claim(key("r"), A, PRINT, TERMS))
    assert lost(lambda: store.release(key("r"), A, other.fence)) is True
    assert store.release(key("r"), A, other.fence) is False
    again = store.claim(key("r"), B, PRINT, TERMS)
    assert (again.attempts, again.fence > other.fence) == (2, True)
    assert lost(lambda: store.release(key("r"), B, None)) is True


def test_a_first_call_whose_reply_is_lost_is_still_the_first(
    wire: Proxy, open_redis: Callable[..., Any]
) -> None:
    """A mark is known again by its maker, alone and in company; everybody else is a duplicate."""
    store = open_redis(wire.url)
    assert store.first_seen(key("before"), TERMS) is True
    wire.lose_replies(1)
    assert store.first_seen(key("alone"), TERMS) is True
    assert wire._lose == 0
    assert store.first_seen(key("alone"), TERMS) is False
    won = store.claim(key("over"), A, PRINT, TERMS)
    store.release(key("over"), A, won.fence)
    wire.lose_replies(2)  # the look, then the script that marks over the released record
    with pytest.raises(StoreUnavailableError):
        store.first_seen(key("over"), TERMS)
    wire.lose_replies(1, after=b"EVALSHA")
    names = [key(n % 10) for n in range(30)]
    results = store.together([("first_seen", name, TERMS) for name in names])
    assert wire._lose == 0
    first = Counter(n.name for n, result in zip(names, results, strict=True) if result is True)
    assert first == Counter(str(n) for n in range(10))


def test_replies_lost_again_and_again_are_an_error(
    wire: Proxy, open_redis: Callable[..., Any]
) -> None:
    """A connection that breaks twice in one call is an error; its owner can call again."""
    store = open_redis(wire.url)
    assert store.first_seen(key("before"), TERMS) is True
    wire.lose_replies(2)
    with pytest.raises(StoreUnavailableError) as caught:
        store.claim(key("k"), A, PRINT, TERMS)
    assert caught.value.retryable
    reply = store.claim(key("k"), A, PRINT, TERMS)
    assert (reply.verdict, reply.attempts) == (Verdict.WON, 1)


def test_connections_cut_between_calls_are_made_anew(
    wire: Proxy, open_redis: Callable[..., Any]
) -> None:
    """A connection that was closed while nobody used it costs the next call nothing."""
    store = open_redis(wire.url)
    for number in range(5):
        assert store.first_seen(key(number), TERMS) is True
        wire.cut()


# Many at once


def test_many_more_callers_than_a_pool_has_connections(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """Five hundred operations at once over one connection: none is refused."""
    store = open_redis(redis_server.url)
    names = [key(n) for n in range(500)]
    owners = [os.urandom(16) for _ in names]
    won = store.together(
        [("claim", n, o, PRINT, TERMS) for n, o in zip(names, owners, strict=True)]
    )
    assert {reply.verdict for reply in won} == {Verdict.WON}
    with redis_server.client() as client:
        assert len(client.client_list()) == 2
    seen = store.together([("first_seen", key(f"m{n % 100}"), TERMS) for n in range(500)])
    assert seen.count(True) == 100
    assert seen.count(False) == 400


def test_a_batch_of_everything_at_once(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """Calls of every kind, with several terms, share batches and each gets its own answer."""
    store = open_redis(redis_server.url)
    held = {n: store.claim(key(f"h{n}"), A, PRINT, TERMS).fence for n in range(20)}
    calls: list[tuple[Any, ...]] = []
    for n in range(5):
        terms = Terms(lease_ms=30_000 + n, ttl_ms=86_400_000)
        calls += [
            ("claim", key(f"c{n}"), B, PRINT, terms),
            ("complete", key(f"h{n}"), A, held[n], b"%d" % n, terms),
            ("renew", key(f"h{n + 5}"), A, held[n + 5], terms),
            ("release", key(f"h{n + 10}"), A, held[n + 10]),
            ("first_seen", key(f"m{n}"), terms),
            ("read", key(f"h{n + 15}")),
            ("now",),
            ("write", key(f"w{n}"), PRINT, b"w", 10**13),
        ]
    results = store.together(calls)
    for n in range(5):
        claim, complete, renew, release, mark, record, now, put = results[8 * n : 8 * n + 8]
        assert (claim.verdict, claim.lease_ms) == (Verdict.WON, 30_000 + n)
        assert (complete, renew, release, mark, put) == (True, True, True, True, None)
        assert record.fence == held[n + 15]
        assert now > 1_600_000_000_000
        assert store.read(key(f"h{n}")).answer == b"%d" % n


# Clocks


@pytest.mark.parametrize("moved", [60.0, -3600.0])
def test_the_servers_clock_may_jump(
    redis_server: Server, open_redis: Callable[..., Any], moved: float
) -> None:
    """A jump of a minute ahead or an hour back: claims hold, answers replay, fences rise."""
    clock = redis_server.needs_clock()
    store = open_redis(redis_server.url)
    terms = Terms(lease_ms=120_000, ttl_ms=86_400_000)
    held, done, free = key("held"), key("done"), key("free")
    fence = store.claim(held, A, PRINT, terms).fence
    store.complete(done, A, store.claim(done, A, PRINT, terms).fence, b"j", terms)
    last = store.claim(free, A, PRINT, terms).fence
    store.release(free, A, last)
    assert store.first_seen(key("seen"), terms) is True
    clock.move(moved)
    assert store.claim(held, B, PRINT, terms).verdict is Verdict.IN_FLIGHT
    assert store.claim(done, B, PRINT, terms).answer == b"j"
    assert store.first_seen(key("seen"), terms) is False
    assert store.claim(free, B, PRINT, terms).fence > last
    assert store.renew(held, A, fence, terms) is True
    assert store.complete(held, A, fence, b"jj", terms) is True


def test_a_lease_that_the_servers_clock_ended_is_fenced(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """A clock that jumps over a lease lets another win; the first owner records nothing."""
    clock = redis_server.needs_clock()
    store = open_redis(redis_server.url)
    first = store.claim(key("k"), A, PRINT, TERMS)
    clock.move(60)
    second = store.claim(key("k"), B, PRINT, TERMS)
    assert (second.verdict, second.takeover, second.fence > first.fence) == (
        Verdict.WON,
        True,
        True,
    )
    assert store.complete(key("k"), A, first.fence, b"late", TERMS) is False
    clock.move(-3600)
    assert store.complete(key("k"), B, second.fence, b"right", TERMS) is True


def test_the_clients_clock_does_not_count(
    redis_server: Server, open_redis: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose clock is an hour off gives and gets what everybody does."""
    import time

    real = time.time
    store = open_redis(redis_server.url)
    first = store.claim(key("k"), A, PRINT, TERMS)
    for moved in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda moved=moved: real() + moved)
        assert store.claim(key("k"), B, PRINT, TERMS).verdict is Verdict.IN_FLIGHT
        assert abs(store.now() - real() * 1000) < 60_000
        assert store.first_seen(key(moved), SHORT) is True
        record = store.read(key(moved))
        assert abs(record.expires_at - real() * 1000 - SHORT.ttl_ms) < 60_000
    assert store.complete(key("k"), A, first.fence, b"j", TERMS) is True


@pytest.mark.parametrize("alone", [True, False])
def test_a_mark_reads_as_the_table_says(
    redis_server: Server, open_redis: Callable[..., Any], alone: bool
) -> None:
    """A mark is a completed record without owner or answer; its fence lies at its end."""
    clock = redis_server.needs_clock()
    store = open_redis(redis_server.url)
    store.first_seen(key("warm"), SHORT)
    clock.stand(1_800_000_000.0005)
    others = [] if alone else [("first_seen", key(n), SHORT) for n in range(9)]
    assert store.together([*others, ("first_seen", key("k"), SHORT)])[-1] is True
    ends = 1_800_000_002_000
    record = store.read(key("k"))
    assert record == (State.COMPLETED, b"", ends * 1000 - 1, b"", 0, ends, ends, 1, None)
    clock.stand(1_800_000_001.9995)
    assert store.first_seen(key("k"), SHORT) is False
    assert store.claim(key("k"), A, PRINT, SHORT).verdict is Verdict.REPLAY
    clock.stand(1_800_000_002.0005)
    assert store.read(key("k")) == record
    assert store.first_seen(key("k"), SHORT) is True


# Forks and loops


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_parent_and_child_use_a_store_after_a_fork(redis_server: Server) -> None:
    """Both go on with connections of their own, and see each other's records."""
    with RedisStore(redis_server.url) as store:
        once = Once(store, scope="fork")

        @once(key="name")
        def work(name: str) -> int:
            return os.getpid()

        assert work("before") == os.getpid()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                seen = [work("before"), work("child"), *(work(f"{n}") for n in range(20))]
                os.write(writing, " ".join(map(str, seen)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        mine = [work(f"p{n}") for n in range(20)]
        with os.fdopen(reading, "rb") as stream:
            theirs = list(map(int, stream.read().split()))
        os.waitpid(child, 0)
        assert mine == [os.getpid()] * 20
        assert theirs == [os.getpid(), *[child] * 21]
        assert work("child") == child


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_an_async_store_works_after_a_fork(redis_server: Server) -> None:
    """A backend used before the fork works in new loops of the parent and of the child."""
    backend = RedisBackend(redis_server.url)

    async def marks(who: str) -> list[bool]:
        return list(
            await asyncio.gather(*(backend.first_seen(key(f"{who}{n}"), TERMS) for n in range(9)))
        )

    assert asyncio.run(marks("before")) == [True] * 9
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            seen = [*asyncio.run(marks("before")), *asyncio.run(marks("child"))]
            os.write(writing, b"".join(b"1" if each else b"0" for each in seen))
        finally:
            os._exit(0)
    os.close(writing)
    assert asyncio.run(marks("parent")) == [True] * 9
    with os.fdopen(reading, "rb") as stream:
        assert stream.read() == b"0" * 9 + b"1" * 9
    os.waitpid(child, 0)
    asyncio.run(backend.aclose())


def test_several_loops_share_a_backend(redis_server: Server) -> None:
    """Eight loops in eight threads mark the same keys at once: each key is new once."""
    backend = RedisBackend(redis_server.url)
    start = threading.Barrier(8)
    seen: Counter[int] = Counter()

    async def mark() -> list[bool]:
        start.wait()
        marks = [backend.first_seen(key(n), TERMS) for n in range(100)]
        return list(await asyncio.gather(*marks))

    def loop() -> None:
        seen.update(number for number, first in enumerate(asyncio.run(mark())) if first)

    threads = [threading.Thread(target=loop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == Counter(range(100))
    asyncio.run(backend.aclose())


async def test_cancelled_callers_leave_the_others_alone(redis_server: Server) -> None:
    """A task that is cancelled while its batch is under way does not harm its neighbours."""
    async with RedisBackend(redis_server.url) as store:
        await store.first_seen(key("warm"), TERMS)
        tasks = [
            asyncio.create_task(store.claim(key(n), os.urandom(16), PRINT, TERMS))
            for n in range(50)
        ]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results[::2]} <= {asyncio.CancelledError}
        assert {result.verdict for result in results[1::2]} == {Verdict.WON}  # type: ignore[union-attr]


async def test_a_guarded_function_runs_once_for_many_callers(redis_cluster: Group) -> None:
    """Fifty calls of one key from two stores on a Cluster: the handler runs once."""
    runs: list[str] = []
    prefix = os.urandom(4).hex()

    def guarded(store: RedisBackend) -> Any:
        @AsyncOnce(store, scope="many")(key="name")
        async def work(name: str) -> str:
            runs.append(name)
            await asyncio.sleep(0.05)
            return f"{name} done"

        return work

    async with (
        RedisBackend(redis_cluster.url, prefix=prefix) as one,
        RedisBackend(redis_cluster.url, prefix=prefix) as two,
    ):
        calls = [guarded(store)("k") for store in (one, two) for _ in range(25)]
        assert set(await asyncio.gather(*calls)) == {"k done"}
    assert runs == ["k"]
