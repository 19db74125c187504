"""What goes over the wire to PostgreSQL: round trips, writes, and replies that get lost."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.servers.fixtures_pg import TERMS, eventually, key, sql
from tests.servers.wire import Wire

from oncekey import AsyncOnce, IdempotencyStore, Once, SyncWebhookDedupStore, WebhookDedupStore
from oncekey._core.flows import new_owner
from oncekey.errors import IdempotencyConflictError, StoreClosedError, StoreUnavailableError
from oncekey.models import State, Verdict
from oncekey.stores._batching import ALONE
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore

DRIVERS = ["asyncpg", "psycopg"]
HANG = 60


@pytest.fixture
def wire(pg_url: str) -> Iterator[Wire]:
    """A proxy before a fresh database."""
    with Wire(pg_url) as proxy:
        yield proxy


def next_transaction(url: str) -> int:
    """The number that the next transaction that writes will get."""
    return int(sql(url, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")[0][0])


# Which loop runs it


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_calls_need_no_task_on_any_loop(wire: Wire, loop: str) -> None:
    """Alone, together, cancelled and refused: on uvloop as on asyncio."""
    factory = asyncio.new_event_loop
    if loop == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop

    async def calls() -> None:
        store = AsyncPostgresStore(wire.url, driver="asyncpg")
        await store.create_schema()
        for number in range(2 * ALONE):  # after a while a lone call is sent before it is awaited
            assert await store.first_seen(key(f"lone {number}"), TERMS)
            assert not await store.first_seen(key(f"lone {number}"), TERMS)
        names = [key(f"many {number}") for number in range(40)]
        claims = await asyncio.gather(*(store.claim(one, b"o", b"f", TERMS) for one in names))
        assert {claim.verdict for claim in claims} == {Verdict.WON}
        tasks = [
            asyncio.ensure_future(store.complete(one, b"o", claim.fence, b"j1", TERMS))
            for one, claim in zip(names, claims, strict=True)
        ]
        await asyncio.sleep(0)
        tasks[3].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [one is True for one in done] == [number != 3 for number in range(40)]
        await store.aclose()
        with pytest.raises(StoreClosedError):
            await store.first_seen(key("late"), TERMS)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(calls(), HANG))


# One round trip a decision


def every_kind(name: str) -> list[tuple[str, str, Callable[..., Any]]]:
    """Each call that is one round trip: what it is, its method, and its arguments from a fence."""
    own, other = new_owner(), new_owner()
    one, two, three = key(f"{name}-1"), key(f"{name}-2"), key(f"{name}-3")
    return [
        ("claim", "claim", lambda fence: (one, own, b"f", TERMS)),
        ("in flight", "claim", lambda fence: (one, other, b"f", TERMS)),
        ("renew", "renew", lambda fence: (one, own, fence, TERMS)),
        ("complete", "complete", lambda fence: (one, own, fence, b"j1", TERMS)),
        ("replay", "claim", lambda fence: (one, other, b"f", TERMS)),
        ("conflict", "claim", lambda fence: (one, other, b"g", TERMS)),
        ("claim", "claim", lambda fence: (two, own, b"f", TERMS)),
        ("release", "release", lambda fence: (two, own, fence)),
        ("take again", "claim", lambda fence: (two, other, b"f", TERMS)),
        ("first seen", "first_seen", lambda fence: (three, TERMS)),
        ("duplicate", "first_seen", lambda fence: (three, TERMS)),
    ]


ONE_EACH = [(what, 1) for what, _, _ in every_kind("")]


def test_each_call_is_one_round_trip(wire: Wire) -> None:
    """Once connections are warm, every decision of the sync store is one round trip."""
    with PostgresStore(wire.url) as store:
        trips = []
        for name in ("cold", "warm", "hot"):
            trips, fence = [], 0
            for what, method, arguments in every_kind(name):
                with wire.counted() as count:
                    result = getattr(store, method)(*arguments(fence))
                trips.append((what, count[0]))
                fence = getattr(result, "fence", fence)
    assert trips == ONE_EACH


@pytest.mark.parametrize("driver", DRIVERS)
async def test_each_async_call_is_one_round_trip(wire: Wire, driver: str) -> None:
    """Once connections are warm, every decision of the async store is one round trip."""
    async with AsyncPostgresStore(wire.url, driver=driver) as store:
        trips = []
        for name in ("cold", "warm", "hot"):
            trips, fence = [], 0
            for what, method, arguments in every_kind(name):
                with wire.counted() as count:
                    result = await getattr(store, method)(*arguments(fence))
                trips.append((what, count[0]))
                fence = getattr(result, "fence", fence)
    assert trips == ONE_EACH


def test_a_guarded_call_is_two_round_trips(wire: Wire) -> None:
    """A decorated function costs a claim and a completion, its replay one claim."""
    with PostgresStore(wire.url) as store:
        once = Once(store, scope="trips")

        @once(key="name")
        def work(name: str) -> str:
            return name

        work("warm"), work("warm")
        with wire.counted() as first:
            work("k")
        with wire.counted() as again:
            work("k")
    assert (first, again) == ([2], [1])


@pytest.mark.parametrize("driver", DRIVERS)
async def test_calls_of_one_tick_share_a_round_trip(wire: Wire, driver: str) -> None:
    """Fifty claims of different keys at once are at most three round trips; so are completions."""
    async with AsyncPostgresStore(wire.url, driver=driver) as store:
        owners = [new_owner() for _ in range(50)]
        for name in ("warm", "hot"):
            with wire.counted() as claims:
                won = await asyncio.gather(
                    *(store.claim(key(f"{name}{n}"), owners[n], b"f", TERMS) for n in range(50))
                )
            with wire.counted() as completions:
                held = await asyncio.gather(
                    *(
                        store.complete(
                            key(f"{name}{n}"), owners[n], won[n].fence, b"j%d" % n, TERMS
                        )
                        for n in range(50)
                    )
                )
            assert {reply.verdict for reply in won} == {Verdict.WON}
            assert all(held)
        assert claims[0] <= 3
        assert completions[0] <= 3
        records = await asyncio.gather(*(store.read(key(f"hot{n}")) for n in range(50)))
        assert [record.answer for record in records if record] == [b"j%d" % n for n in range(50)]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_claims_of_one_key_share_a_statement(wire: Wire, driver: str) -> None:
    """Fifty claims of one key at once are one statement: one wins, the others are in flight."""
    async with AsyncPostgresStore(wire.url, driver=driver) as store:
        await store.claim(key("warm"), new_owner(), b"f", TERMS)
        with wire.counted() as count:
            replies = await asyncio.gather(
                *(store.claim(key("one"), new_owner(), b"f", TERMS) for _ in range(50))
            )
        assert count == [1]
        verdicts = Counter(reply.verdict for reply in replies)
        assert verdicts == {Verdict.WON: 1, Verdict.IN_FLIGHT: 49}
        assert len({reply.fence for reply in replies}) == 1


def test_threads_share_a_round_trip(wire: Wire) -> None:
    """Threads that claim while a statement is under way go together in the next one."""
    with PostgresStore(wire.url) as store, ThreadPoolExecutor(50) as threads:
        store.claim(key("warm"), new_owner(), b"f", TERMS)
        list(threads.map(lambda n: store.claim(key(f"w{n}"), new_owner(), b"", TERMS), range(50)))
        store.claim(key("alone"), new_owner(), b"f", TERMS)  # prepared, after so many new ones
        wire.hold()
        with wire.counted() as count:
            claims = [
                threads.submit(store.claim, key(n), new_owner(), b"f", TERMS) for n in range(50)
            ]
            eventually(lambda: len(store._claims._gathering.waiting) == 49, "gathering")
            wire.let_go()
            assert {claim.result(HANG).verdict for claim in claims} == {Verdict.WON}
    assert count == [2]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_mixed_kinds_of_one_tick_all_get_their_own_answers(wire: Wire, driver: str) -> None:
    """Claims with other payloads and terms, marks and reads of one tick don't mix up."""
    async with AsyncPostgresStore(wire.url, driver=driver) as store:
        short = TERMS._replace(lease_ms=5000)
        await store.write(key("done"), b"f", b"jdone", 4_000_000_000_000)
        got = await asyncio.gather(
            store.claim(key("a"), new_owner(), b"f", TERMS),
            store.claim(key("a"), new_owner(), b"g", TERMS),
            store.claim(key("a"), new_owner(), b"f", short),
            store.claim(key("b"), new_owner(), b"f", short),
            store.claim(key("done"), new_owner(), b"f", TERMS),
            store.claim(key("done"), new_owner(), b"g", TERMS),
            store.first_seen(key("m"), TERMS),
            store.first_seen(key("m"), TERMS),
            store.first_seen(key("done"), TERMS),
            store.read(key("done")),
            store.read(key("none")),
        )
        assert [reply.verdict for reply in got[:6]] == [
            Verdict.WON,
            Verdict.CONFLICT,
            Verdict.IN_FLIGHT,
            Verdict.WON,
            Verdict.REPLAY,
            Verdict.CONFLICT,
        ]
        assert (got[3].lease_ms, got[4].answer, got[5].answer) == (5000, b"jdone", None)
        assert got[6:9] == [True, False, False]
        assert (got[9].answer, got[10]) == (b"jdone", None)


# What writes nothing


def test_answers_that_are_there_write_nothing(pg_url: str) -> None:
    """A replay, a claim in flight, a conflict, an expired key and a duplicate are reads."""
    remembered = TERMS._replace(ttl_ms=0, remember_ms=86_400_000)
    with PostgresStore(pg_url) as store:
        own = new_owner()
        for name, terms in (("done", TERMS), ("old", remembered)):
            won = store.claim(key(name), own, b"f", terms)
            assert store.complete(key(name), own, won.fence, b"j1", terms)
        store.claim(key("running"), own, b"f", TERMS)
        assert store.first_seen(key("seen"), TERMS)
        before = next_transaction(pg_url)
        for _ in range(300):  # more than lie between two steps of sweeping
            assert store.claim(key("done"), new_owner(), b"f", TERMS).verdict is Verdict.REPLAY
        for _ in range(10):
            reply = store.claim(key("running"), new_owner(), b"f", TERMS)
            assert reply.verdict is Verdict.IN_FLIGHT
            assert store.claim(key("done"), own, b"g", TERMS).verdict is Verdict.CONFLICT
            assert store.claim(key("running"), own, b"g", TERMS).verdict is Verdict.CONFLICT
            assert store.claim(key("old"), own, b"f", remembered).verdict is Verdict.EXPIRED
            assert not store.first_seen(key("seen"), TERMS)
            assert not store.first_seen(key("done"), TERMS)
            assert not store.first_seen(key("running"), TERMS)
            assert store.read(key("none")) is None
        assert next_transaction(pg_url) == before
        store.first_seen(key("new"), TERMS)
        assert next_transaction(pg_url) == before + 1


# Lost replies


class Runs:
    """Counts how often a handler ran."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def test_a_claim_whose_reply_is_lost_still_runs_once(wire: Wire) -> None:
    """The claim is tried again by the same owner, wins again, and the handler runs once."""
    with PostgresStore(wire.url) as store:
        once, runs = Once(store, scope="lost"), Runs()

        @once(key="name")
        def work(name: str) -> int:
            return runs()

        work("warm")
        wire.lose_next_reply()
        assert work("k") == 2
        assert work("k") == 2
        assert (wire.lost, runs.count) == (1, 2)
    rows = sql(wire._url, "SELECT state, attempts FROM oncekey_records")
    assert rows == [(State.COMPLETED, 1)] * 2


def test_a_completion_whose_reply_is_lost_is_recorded_once(wire: Wire) -> None:
    """The completion is tried again, finds itself on record, and holds."""
    with PostgresStore(wire.url) as store:
        once, runs = Once(store, scope="lost"), Runs()

        @once(key="name")
        def work(name: str) -> int:
            if name == "k":
                wire.lose_next_reply()
            return runs()

        work("warm")
        assert work("k") == 2
        assert work("k") == 2
        assert (wire.lost, runs.count) == (1, 2)
    rows = sql(wire._url, "SELECT state, attempts FROM oncekey_records")
    assert rows == [(State.COMPLETED, 1)] * 2


def test_a_release_whose_reply_is_lost_frees_the_key(wire: Wire) -> None:
    """A handler fails and the reply to the release gets lost: the next call runs at once."""
    with PostgresStore(wire.url) as store:
        once, runs = Once(store, scope="lost"), Runs()

        @once(key="name")
        def work(name: str) -> int:
            if runs() == 2:
                wire.lose_next_reply()
                raise ZeroDivisionError
            return runs.count

        work("warm")
        with pytest.raises(ZeroDivisionError):
            work("k")
        assert work("k") == 3
        assert wire.lost == 1


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("lost", ["claim", "complete"])
async def test_async_calls_survive_a_lost_reply(wire: Wire, driver: str, lost: str) -> None:
    """Async: a claim or a completion whose reply is lost is tried again; one run, one record."""
    async with AsyncPostgresStore(wire.url, driver=driver) as store:
        once, runs = AsyncOnce(store, scope="lost"), Runs()

        @once(key="name")
        async def work(name: str) -> int:
            if name == "k" and lost == "complete":
                wire.lose_next_reply()
            return runs()

        await work("warm")
        if lost == "claim":
            wire.lose_next_reply()
        assert await work("k") == 2
        assert await work("k") == 2
        assert (wire.lost, runs.count) == (1, 2)
    rows = sql(wire._url, "SELECT state, attempts FROM oncekey_records")
    assert rows == [(State.COMPLETED, 1)] * 2


@pytest.mark.parametrize("driver", DRIVERS)
async def test_requests_survive_a_lost_reply(wire: Wire, driver: str) -> None:
    """IdempotencyStore.wrap: replies of the claim and of the completion are lost; it runs once."""
    async with AsyncPostgresStore(wire.url, driver=driver) as backend:
        requests, runs = IdempotencyStore(backend), Runs()

        class Context:
            caller_identity = "alice"

        async def create(request: Any, context: Any = None) -> dict[str, Any]:
            if request["amount"] == 2:
                wire.lose_next_reply()
            return {"run": runs(), "amount": request["amount"]}

        handler = requests.wrap(create)
        warm = {"idempotency_key": "key-of-the-warm-up", "amount": 1}
        await handler(warm, Context())
        request = {"idempotency_key": "key-of-the-lost-one", "amount": 2}
        wire.lose_next_reply()
        first = await handler(request, Context())
        again = await handler(request, Context())
        assert first["run"] == again["run"] == 2
        assert (wire.lost, runs.count) == (2, 2)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_mark_whose_reply_is_lost_is_processed(
    wire: Wire, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    """check_and_record can't know whether it was first: it says so with a warning and processes."""
    async with AsyncPostgresStore(wire.url, driver=driver) as backend:
        dedup = WebhookDedupStore(backend)
        await dedup.check_and_record("alice", "warm")
        wire.lose_next_reply()
        with caplog.at_level(logging.WARNING, logger="oncekey"):
            assert await dedup.check_and_record("alice", "evt") is True
        assert "may be too" in caplog.text
        assert await dedup.check_and_record("alice", "evt") is False
        wire.lose_next_reply()
        with pytest.raises(StoreUnavailableError, match="may or may not"):
            await backend.first_seen(key("k"), TERMS)
        assert await backend.first_seen(key("k"), TERMS) is False


def test_a_sync_mark_whose_reply_is_lost_is_processed(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """Sync: the same, with a warning."""
    with PostgresStore(wire.url) as store:
        dedup = SyncWebhookDedupStore(store)
        dedup.check_and_record("alice", "warm")
        wire.lose_next_reply()
        with caplog.at_level(logging.WARNING, logger="oncekey"):
            assert dedup.check_and_record("alice", "evt") is True
        assert "may be too" in caplog.text
        assert dedup.check_and_record("alice", "evt") is False


def test_a_batch_whose_reply_is_lost_is_claimed_again(wire: Wire) -> None:
    """Fifty threads share a statement whose reply is lost: each tries again and runs once."""
    with PostgresStore(wire.url) as store, ThreadPoolExecutor(50) as threads:
        once, runs = Once(store, scope="lost"), Counter[str]()
        lock = threading.Lock()

        @once(key="name")
        def work(name: str) -> str:
            with lock:
                runs[name] += 1
            return name

        work("warm")
        wire.hold()
        calls = [threads.submit(work, f"k{n}") for n in range(50)]
        eventually(lambda: len(store._claims._gathering.waiting) == 49, "gathering")
        wire.lose_next_reply()
        wire.let_go()
        assert [call.result(HANG) for call in calls] == [f"k{n}" for n in range(50)]
        assert set(runs.values()) == {1}
        assert wire.lost == 1


def test_a_waiter_outlives_a_lost_reply(wire: Wire) -> None:
    """Asking to be told of an outcome is a courtesy: where that fails, waiting goes on."""
    with PostgresStore(wire.url) as store:
        store.wait(key("warm"), 0.03)
        won = store.claim(key("k"), own := new_owner(), b"f", TERMS)
        wire.lose_next_reply()
        store.wait(key("k"), 0.03)
        assert wire.lost == 1
        assert store.complete(key("k"), own, won.fence, b"j1", TERMS)


def test_the_proxy_counts_and_loses(wire: Wire) -> None:
    """The proxy itself: a query is one round trip, and a lost reply was carried out."""
    import psycopg

    with psycopg.connect(wire.url, autocommit=True) as connection:
        with wire.counted() as count:
            connection.execute("CREATE TABLE t (n int)")
            connection.execute("INSERT INTO t VALUES (%s)", [1])
        assert count == [2]
        wire.lose_next_reply()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("INSERT INTO t VALUES (%s)", [2])
    assert sql(wire._url, "SELECT n FROM t") == [(1,), (2,)]


def test_conflicts_reach_the_caller(wire: Wire) -> None:
    """Another payload under one key is a conflict, also right after a lost reply."""
    with PostgresStore(wire.url) as store:
        once = Once(store, scope="lost")

        @once(key="name")
        def work(name: str, amount: int) -> int:
            return amount

        work("k", 1)
        wire.lose_next_reply()
        with pytest.raises(IdempotencyConflictError):
            work("k", 2)
