"""Waiters: woken by other processes through one subscription, and by looking when that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest
from tests.servers.redis import Group, Server, eventually

from oncekey.errors import StoreClosedError
from oncekey.models import Key, Record, Scope, State, Terms, Verdict
from oncekey.stores.redis import RedisBackend, RedisStore

TERMS = Terms(lease_ms=600_000, ttl_ms=86_400_000)
LONG = 600.0  # seconds that a waiter would sleep if nobody woke it
HANG = 30.0  # seconds after which a waiter counts as not woken
KEY = Key(Scope("once", "redis"), "key")
OWNER = b"o" * 16


def _pending(record: Record | None) -> bool:
    return record is not None and record.state is State.PENDING


class Waiter:
    """Somebody who waits for a key, in a thread or in an event loop of its own."""

    def __init__(self, store: RedisStore | RedisBackend, key: Key = KEY) -> None:
        self.store = store
        self.key = key
        self.woken = threading.Event()
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        if isinstance(self.store, RedisStore):
            with contextlib.suppress(StoreClosedError):
                while _pending(self.store.read(self.key)):
                    self.store.wait(self.key, LONG)
        else:
            asyncio.run(self._wait_async(self.store))
        self.woken.set()

    async def _wait_async(self, store: RedisBackend) -> None:
        while _pending(await store.read(self.key)):
            await store.wait(self.key, LONG)

    def must_wake(self) -> None:
        assert self.woken.wait(HANG), "the waiter was not woken"
        self.thread.join()


@pytest.fixture(params=["redis_server", "redis_cluster"])
def servers(request: pytest.FixtureRequest) -> Server | Group:
    found: Server | Group = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def owner(servers: Server | Group) -> Iterator[RedisStore]:
    """A store of another process, which holds the key."""
    with RedisStore(servers.url, prefix=os.urandom(4).hex()) as store:
        yield store


@pytest.fixture(params=["sync", "async"])
def store(
    request: pytest.FixtureRequest, servers: Server | Group, owner: RedisStore
) -> Iterator[RedisStore | RedisBackend]:
    """A store whose waiters are to be woken."""
    prefix = owner._options.prefix[:-1].decode()
    if request.param == "sync":
        with RedisStore(servers.url, prefix=prefix) as opened:
            yield opened
        return
    backend = RedisBackend(servers.url, prefix=prefix)
    yield backend
    asyncio.run(backend.aclose())


def inboxes(owner: RedisStore, key: Key = KEY) -> int:
    """How many have left word with the record."""
    name = owner._options.prefix + key.digest
    address = owner._lanes.batches.topology.route(name)
    import redis

    with redis.Redis(host=address[0], port=address[1]) as client:
        raw: bytes = client.get(name) or b""
    return (len(raw) - 43 - 16 - 1) // 8 if raw[:1] == b"P" else 0


def claimed(owner: RedisStore, key: Key = KEY) -> int:
    return owner.claim(key, OWNER, b"f", TERMS).fence


def test_a_completion_elsewhere_wakes_a_waiter(
    store: RedisStore | RedisBackend, owner: RedisStore
) -> None:
    """A waiter is woken by another store's completion, without looking again."""
    fence = claimed(owner)
    waiter = Waiter(store)
    eventually(lambda: inboxes(owner) == 1, "the waiter's word")
    assert not waiter.woken.is_set()
    assert owner.complete(KEY, OWNER, fence, b"j", TERMS)
    waiter.must_wake()


def test_a_release_and_a_write_elsewhere_wake_a_waiter(
    store: RedisStore | RedisBackend, owner: RedisStore
) -> None:
    """So do a release and a write over the claim."""
    fence = claimed(owner)
    waiter = Waiter(store)
    eventually(lambda: inboxes(owner) == 1, "the waiter's word")
    assert owner.release(KEY, OWNER, fence)
    waiter.must_wake()
    claimed(owner)
    waiter = Waiter(store)
    eventually(lambda: inboxes(owner) == 1, "the waiter's word")
    owner.write(KEY, b"f", b"j", 10**13)
    waiter.must_wake()


def test_a_renewal_keeps_the_waiters(store: RedisStore | RedisBackend, owner: RedisStore) -> None:
    """Word that was left survives renewals and the owner's repeated claim."""
    fence = claimed(owner)
    waiter = Waiter(store)
    eventually(lambda: inboxes(owner) == 1, "the waiter's word")
    assert owner.renew(KEY, OWNER, fence, TERMS)
    assert owner.claim(KEY, OWNER, b"f", TERMS).verdict is Verdict.WON
    assert inboxes(owner) == 1
    assert not waiter.woken.is_set()
    owner.complete(KEY, OWNER, fence, b"", TERMS)
    waiter.must_wake()
    record = owner.read(KEY)
    assert record is not None
    assert (record.state, record.answer) == (State.COMPLETED, b"")


def test_nothing_to_wait_for_returns_at_once(
    store: RedisStore | RedisBackend, owner: RedisStore
) -> None:
    """A key that is absent, completed or released is not waited for."""

    def wait() -> None:
        if isinstance(store, RedisStore):
            store.wait(KEY, LONG)
        else:
            asyncio.run(asyncio.wait_for(store.wait(KEY, LONG), HANG))

    wait()
    fence = claimed(owner)
    owner.release(KEY, OWNER, fence)
    wait()
    fence = claimed(owner)
    owner.complete(KEY, OWNER, fence, b"j", TERMS)
    wait()


def test_waiters_share_one_subscription(owner: RedisStore, servers: Server | Group) -> None:
    """Twenty waiters of a store for five keys: one connection more, and each is told of its key."""
    prefix = owner._options.prefix[:-1].decode()
    keys = [Key(Scope("once", "redis"), str(n)) for n in range(5)]
    fences = [claimed(owner, key) for key in keys]
    members = servers.servers if isinstance(servers, Group) else [servers]
    with RedisStore(servers.url, prefix=prefix) as store:
        waiters = [Waiter(store, key) for key in keys for _ in range(4)]
        for key in keys:
            eventually(lambda key=key: inboxes(owner, key) == 1, "the waiters' word")
        subscribed = sum(each["sub"] != "0" for member in members for each in _clients(member))
        assert subscribed == 1
        owner.complete(keys[0], OWNER, fences[0], b"j", TERMS)
        for waiter in waiters[:4]:
            waiter.must_wake()
        assert not any(waiter.woken.is_set() for waiter in waiters[4:])
        for key, fence in zip(keys[1:], fences[1:], strict=True):
            owner.complete(key, OWNER, fence, b"j", TERMS)
        for waiter in waiters[4:]:
            waiter.must_wake()


def _clients(server: Server) -> list[dict[str, str]]:
    with server.client() as client:
        found: list[dict[str, str]] = client.client_list()
    return found


def test_nothing_is_published_if_nobody_waits(
    redis_server: Server,
) -> None:
    """Completions of keys that nobody waits for send no message, and need no thread."""
    with RedisStore(redis_server.url) as store, redis_server.client() as client:
        before = threading.active_count()
        client.config_resetstat()
        for n in range(10):
            key = Key(Scope("once", "redis"), str(n))
            fence = claimed(store, key)
            assert store.complete(key, OWNER, fence, b"j", TERMS)
        assert "cmdstat_publish" not in client.info("commandstats")
        assert threading.active_count() == before


def test_a_waiter_survives_the_loss_of_its_subscription(
    store: RedisStore | RedisBackend, owner: RedisStore, servers: Server | Group
) -> None:
    """A subscription that is killed is made anew, and its waiters are woken through that."""
    fence = claimed(owner)
    waiter = Waiter(store)
    eventually(lambda: inboxes(owner) == 1, "the waiter's word")
    members = servers.servers if isinstance(servers, Group) else [servers]

    def subscribed() -> set[str]:
        return {each["id"] for member in members for each in _clients(member) if each["sub"] != "0"}

    (before,) = subscribed()
    for member in members:
        member.run("CLIENT KILL", "TYPE", "pubsub")
    eventually(lambda: subscribed() and before not in subscribed(), "the new subscription")
    assert not waiter.woken.is_set()
    owner.complete(KEY, OWNER, fence, b"j", TERMS)
    waiter.must_wake()


def test_without_a_subscription_a_waiter_polls(redis_server: Server) -> None:
    """Where subscribing is forbidden, a wait ends with its time, and looking finds the answer."""
    redis_server.run(
        *("ACL SETUSER", "deaf", "on", ">pw", "~*", "resetchannels", "+@all", "-subscribe")
    )
    url = f"redis://deaf:pw@{redis_server.address}"
    with RedisStore(url) as store, RedisStore(redis_server.url) as owner:
        fence = claimed(owner)
        store.wait(KEY, 0.01)
        assert inboxes(owner) == 0
        assert owner.complete(KEY, OWNER, fence, b"j", TERMS)
        assert store.claim(KEY, b"p" * 16, b"f", TERMS).verdict is Verdict.REPLAY


def test_an_owner_is_not_harmed_by_waiters_it_may_not_tell(redis_server: Server) -> None:
    """A user without the right to publish completes a key that somebody waits for."""
    redis_server.run("ACL SETUSER", "mute", "on", ">pw", "~*", "resetchannels", "+@all", "-publish")
    with (
        RedisStore(redis_server.url) as store,
        RedisStore(f"redis://mute:pw@{redis_server.address}") as owner,
    ):
        fence = claimed(owner)
        waiter = Waiter(store)
        eventually(lambda: inboxes(store) == 1, "the waiter's word")
        assert owner.complete(KEY, OWNER, fence, b"j", TERMS) is True
        store._inbox.waiters.wake_all()
        waiter.must_wake()


def test_another_process_wakes_a_waiter(redis_server: Server) -> None:
    """A process of its own completes the key; the waiter here is woken."""
    other = """
        import sys
        from oncekey.models import Key, Scope, Terms
        from oncekey.stores.redis import RedisStore

        key, owner = Key(Scope("once", "redis"), "key"), b"o" * 16
        terms = Terms(lease_ms=600_000, ttl_ms=86_400_000)
        with RedisStore(sys.argv[1]) as store:
            fence = store.claim(key, owner, b"f", terms).fence
            print("claimed", flush=True)
            sys.stdin.readline()
            print(store.complete(key, owner, fence, b"j", terms), flush=True)
    """
    with (
        RedisStore(redis_server.url) as store,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(other), redis_server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        assert store.claim(KEY, b"p" * 16, b"f", TERMS).verdict is Verdict.IN_FLIGHT
        waiter = Waiter(store)
        eventually(lambda: inboxes(store) == 1, "the waiter's word")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
        waiter.must_wake()


def test_closing_wakes_waiters_and_ends_the_thread(redis_server: Server) -> None:
    """Nobody sleeps on in a closed store, and no thread of it is left."""
    with RedisStore(redis_server.url) as owner:
        claimed(owner)
        store = RedisStore(redis_server.url)
        waiter = Waiter(store)
        eventually(lambda: inboxes(owner) == 1, "the waiter's word")
        store.close()
        waiter.must_wake()
        names = [thread.name for thread in threading.enumerate()]
        assert "oncekey-redis-inbox" not in names


def test_a_forked_child_has_an_inbox_of_its_own(redis_server: Server) -> None:
    """A store that waited before a fork waits in the child too, under another name."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    with RedisStore(redis_server.url) as owner, RedisStore(redis_server.url) as store:
        fence = claimed(owner)
        mine = Waiter(store)
        eventually(lambda: inboxes(owner) == 1, "the parent's word")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                while _pending(store.read(KEY)):
                    store.wait(KEY, LONG)
                os.write(writing, b"woken")
            finally:
                os._exit(0)
        os.close(writing)
        eventually(lambda: inboxes(owner) == 2, "the child's word")
        owner.complete(KEY, OWNER, fence, b"j", TERMS)
        with os.fdopen(reading, "rb") as stream:
            assert stream.read() == b"woken"
        os.waitpid(child, 0)
        mine.must_wake()


async def test_many_async_waiters_hold_no_connection(redis_server: Server) -> None:
    """A hundred tasks wait with two connections: one for calls, one that listens."""
    async with RedisBackend(redis_server.url, prefix="many") as store:
        with RedisStore(redis_server.url, prefix="many") as owner:
            fence = claimed(owner)

            async def wait() -> None:
                while _pending(await store.read(KEY)):
                    await store.wait(KEY, LONG)

            tasks = [asyncio.create_task(wait()) for _ in range(100)]

            def standing() -> bool:
                return inboxes(owner) == 1

            await asyncio.to_thread(eventually, standing, "the waiters' word")
            with redis_server.client() as client:
                assert len(client.client_list()) <= 2 + 1 + 1  # the store's, the owner's, this one
            owner.complete(KEY, OWNER, fence, b"j", TERMS)
            done, late = await asyncio.wait(tasks, timeout=HANG)
            assert not late
            assert len(done) == 100


def test_more_callers_than_inboxes_poll(redis_server: Server) -> None:
    """A record keeps word of 64 stores; more than that look again by themselves."""
    from oncekey.stores.redis.operations import WATCH

    with RedisStore(redis_server.url) as store:
        fence = claimed(store)
        for number in range(70):
            assert store._do(WATCH, KEY.digest, None, b"%08d" % number) is False
        assert inboxes(store) == 64
        assert store.complete(KEY, OWNER, fence, b"j", TERMS)
        record = store.read(KEY)
        assert record is not None
        assert record.answer == b"j"
