"""The PostgreSQL store beside the bare driver and the peers. Run by ``run.py``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import harness
import targets
from harness import Case, Options, in_tasks, in_threads, new_keys

import servers
from oncekey import (
    AsyncPostgresStore,
    AsyncWebhookDedup,
    IdempotencyStore,
    PostgresStore,
    WebhookDedup,
)
from oncekey.models import Key, Scope, Terms
from oncekey.stores._batching import Job
from oncekey.stores.postgres.calls import _statement
from oncekey.stores.postgres.connections import LANE

BATCH = "limit: one statement for all"
SINGLE = "limit: asyncpg, one by one"
ASYNCPG = "**oncekey** asyncpg"
PSYCOPG = "**oncekey** psycopg"
THREADS = "**oncekey** sync, threads"
WRAP = "**oncekey** wrap"
ADCP = "adcp"
ADCP_WRAP = "adcp wrap"
IDEMKIT = "idemkit"
FLOOR = "floor: our statements, by hand"
HAND = "limit: by hand, asyncpg"

CALLERS = (1, 16, 64)
DAY_MS = 86_400_000
SCOPE = Scope("once", "bench")
TERMS = Terms(30_000, DAY_MS)
RESULT = {"id": "pay_1", "status": "ok", "amount": 129.95, "currency": "EUR", "note": "x" * 120}
ANSWER = json.dumps(RESULT).encode()
WHO = {"caller_identity": "acme"}

BARE = """
CREATE TABLE IF NOT EXISTS seen (
    key text COLLATE "C" PRIMARY KEY, expires_at timestamptz NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    key text COLLATE "C" PRIMARY KEY, owner text NOT NULL, fingerprint text NOT NULL,
    answer bytea, expires_at timestamptz NOT NULL);
CREATE TABLE IF NOT EXISTS effects (key text NOT NULL, amount numeric NOT NULL);
TRUNCATE seen, records, effects"""
INSERT = """INSERT INTO seen VALUES ($1, now() + interval '1 day')
ON CONFLICT DO NOTHING RETURNING key"""
INSERT_ALL = """INSERT INTO seen SELECT key, now() + interval '1 day' FROM unnest($1::text[]) key
ON CONFLICT DO NOTHING RETURNING key"""
CLAIM = """WITH new AS (
    INSERT INTO records VALUES ($1, $2, $3, NULL, now() + interval '30 seconds')
    ON CONFLICT DO NOTHING RETURNING owner, fingerprint, answer)
SELECT owner, fingerprint, answer FROM new UNION ALL
SELECT owner, fingerprint, answer FROM records WHERE key = $1 AND NOT EXISTS (SELECT FROM new)"""
COMPLETE = """UPDATE records SET answer = $3, expires_at = now() + interval '1 day'
WHERE key = $1 AND owner = $2 AND answer IS NULL RETURNING key"""
EFFECT = "INSERT INTO effects VALUES ($1, 129.95)"

Ops = dict[str, Callable[[str], Awaitable[bool]]]
Opened = Callable[[str, int], contextlib.AbstractAsyncContextManager[Ops]]


# ---------------------------------------------------------------------------------- what is timed


@contextlib.asynccontextmanager
async def bare(url: str, callers: int) -> AsyncIterator[Ops]:
    """Prepared statements on connections of their own, one for each caller up to 16."""
    import asyncpg

    connections = [await asyncpg.connect(url) for _ in range(min(callers, 16))]
    free: asyncio.Queue[Any] = asyncio.Queue()
    try:
        await connections[0].execute(BARE)
        for connection in connections:
            prepared = [await connection.prepare(sql) for sql in (INSERT, CLAIM, COMPLETE)]
            free.put_nowait((connection, prepared))

        @contextlib.asynccontextmanager
        async def taken() -> AsyncIterator[Any]:
            one = await free.get()
            try:
                yield one
            finally:
                free.put_nowait(one)

        async def run(number: int, *args: Any) -> Any:
            one = await free.get()
            try:
                return await one[1][number].fetchrow(*args)
            finally:
                free.put_nowait(one)

        async def first(key: str) -> bool:
            return await run(0, key) is not None

        async def once(key: str) -> bool:
            row = await run(1, key, key[:16], "f")
            return row[0] == key[:16] and await run(2, key, key[:16], ANSWER) is not None

        async def replay(key: str) -> bool:
            row = await run(1, key, "another", "f")
            return bool(row[2] == ANSWER)

        async def by_hand(key: str) -> bool:
            async with taken() as (connection, (_, claim, complete)), connection.transaction():
                row = await claim.fetchrow(key, key[:16], "f")
                await connection.execute(EFFECT, key)
                done = await complete.fetchrow(key, key[:16], ANSWER)
            return row[0] == key[:16] and done is not None

        yield {"first": first, "once": once, "replay": replay, "transaction": by_hand}
    finally:
        for connection in connections:
            await connection.close()


class ByHand:
    """Statements on one connection of asyncpg, for as many keys at once as there are callers.

    Timed is from sending to the rows, and nothing else.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._prepared: dict[str, Any] = {}
        self.taken = 0.0

    async def fetch(self, sql: str, args: Any) -> list[Any]:
        statement = self._prepared.get(sql)
        if statement is None:
            statement = self._prepared[sql] = await self._connection.prepare(sql)
        start = time.perf_counter()
        rows: list[Any] = await statement.fetch(*args)
        self.taken += time.perf_counter() - start
        return rows

    async def timed(
        self,
        run: Callable[[list[str]], Awaitable[bool]],
        keys: list[str],
        callers: int,
        seconds: float,
    ) -> harness.Timed:
        """Run for all keys, or until the time is up."""
        for warm in new_keys(8, ("warm", callers)):
            await run(new_keys(callers, warm))
        self.taken, at = 0.0, 0
        while at < len(keys) and self.taken < seconds:
            if not await run(keys[at : at + callers]):
                raise SystemExit("a statement by hand did not do what it should")
            at += callers
        return harness.Timed(self.taken / min(at, len(keys)), keys[:at])


@contextlib.asynccontextmanager
async def by_hand(url: str, script: str) -> AsyncIterator[ByHand]:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        await connection.execute(script)
        yield ByHand(connection)
    finally:
        await connection.close()


async def in_batches(url: str, keys: list[str], callers: int, seconds: float) -> float:
    """The limit: the bare row, one statement for all callers."""
    async with by_hand(url, BARE) as hand:

        async def run(part: list[str]) -> bool:
            return len(await hand.fetch(INSERT_ALL, [part])) == len(part)

        return (await hand.timed(run, keys, callers, seconds)).each


async def our_statements(
    url: str, labels: dict[str, str], keys: list[str], callers: int, seconds: float
) -> dict[str, float]:
    """The floor: what the store sends and nothing of the store, one statement for all callers."""
    async with AsyncPostgresStore(url) as backend:
        await emptied(backend)
        home = await backend._ready()

    def job(kind: str, name: str, *args: Any) -> Job:
        return Job(kind, (Key(SCOPE, name), *args))

    async with by_hand(url, LANE) as hand:

        async def send(kind: str, name: str, jobs: list[Job]) -> list[Any]:
            sql, args = _statement(home, "", kind, name, jobs)
            return await hand.fetch(sql, args)

        async def first(part: list[str]) -> bool:
            jobs = [job("mark", name, TERMS) for name in part]
            return len(await send("mark", "mark_new", jobs)) == len(part)

        async def once(part: list[str]) -> bool:
            claims = [job("claim", name, name[:16].encode(), b"f", TERMS) for name in part]
            statement = "claim_new" if len(part) > 1 else "claim"
            fences = {row[0]: row[3] for row in await send("claim", statement, claims)}
            jobs = [
                Job("complete", (*one.args[:2], fences[one.args[0].digest], ANSWER, TERMS))
                for one in claims
            ]
            return len(await send("complete", "complete", jobs)) == len(part)

        async def replay(part: list[str]) -> bool:
            jobs = [job("claim", name, b"another", b"f", TERMS) for name in part]
            return len(await send("claim", "claim", jobs)) == len(part)

        taken, left = {}, keys
        operations = {"first": first, "once": once, "replay": replay}
        for operation, label in labels.items():
            run = operations[operation]
            taken[label], left = await hand.timed(run, left, callers, seconds)
        return taken


def store_ops(store: Any) -> Ops:
    """What any asynchronous store of ours does."""
    dedup = AsyncWebhookDedup(store)

    async def first(key: str) -> bool:
        return await dedup.check_and_record("sender-1", key)

    async def once(name: str) -> bool:
        key, owner = Key(SCOPE, name), name[:16].encode()
        reply = await store.claim(key, owner, b"f", TERMS)
        return bool(await store.complete(key, owner, reply.fence, ANSWER, TERMS))

    async def replay(name: str) -> bool:
        reply = await store.claim(Key(SCOPE, name), b"another", b"f", TERMS)
        return bool(reply.answer == ANSWER)

    return {"first": first, "once": once, "replay": replay}


def sync_ops(store: Any) -> dict[str, Callable[[str], bool]]:
    """The same for a synchronous one."""
    dedup = WebhookDedup(store)

    def once(name: str) -> bool:
        key, owner = Key(SCOPE, name), name[:16].encode()
        reply = store.claim(key, owner, b"f", TERMS)
        return bool(store.complete(key, owner, reply.fence, ANSWER, TERMS))

    def replay(name: str) -> bool:
        reply = store.claim(Key(SCOPE, name), b"another", b"f", TERMS)
        return bool(reply.answer == ANSWER)

    return {
        "first": lambda key: dedup.check_and_record("sender-1", key),
        "once": once,
        "replay": replay,
    }


def ours(driver: str) -> Opened:
    @contextlib.asynccontextmanager
    async def opened(url: str, callers: int) -> AsyncIterator[Ops]:
        async with AsyncPostgresStore(url, driver=driver) as backend:
            await emptied(backend)

            async def transaction(key: str) -> bool:
                async with backend.transaction(key, scope="bench") as tx:
                    if driver == "asyncpg":
                        await tx.connection.execute(EFFECT, key)
                    else:
                        await tx.connection.execute(EFFECT.replace("$1", "%s"), (key,))
                    tx.answer = RESULT
                return not tx.replayed

            yield {**store_ops(backend), "transaction": transaction}

    return opened


async def emptied(backend: AsyncPostgresStore) -> None:
    """Make the tables, without rows: neither live ones nor such as wait for VACUUM."""
    await backend.create_schema()
    await backend._source.fetch("other", "TRUNCATE oncekey_records", [])


def wrapped(handler: Callable[..., Awaitable[Any]]) -> Ops:
    """``wrap`` of ours or of adcp: a first call and a replay give the same."""

    async def once(key: str) -> bool:
        found = await handler({"idempotency_key": key, "amount": 129.95}, WHO)
        return bool(found["note"] == RESULT["note"])  # adcp marks replays in the answer

    return {"once": once, "replay": once}


@contextlib.asynccontextmanager
async def our_wrap(url: str, callers: int) -> AsyncIterator[Ops]:
    async with AsyncPostgresStore(url) as backend:
        await emptied(backend)
        yield wrapped(our_handler(backend))


def our_handler(store: Any) -> Callable[..., Awaitable[Any]]:
    @IdempotencyStore(store).wrap
    async def pay(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        return RESULT

    return pay


@contextlib.asynccontextmanager
async def adcp(url: str, callers: int) -> AsyncIterator[Ops]:
    from psycopg_pool import AsyncConnectionPool

    module: Any = harness.adcp()
    most = min(callers, 16)
    async with (
        AsyncConnectionPool(url, min_size=most, max_size=most, open=False) as pool,
        AsyncConnectionPool(url, min_size=most, max_size=most, open=False) as locks,
    ):
        async with pool.connection() as connection:
            await connection.execute("DROP TABLE IF EXISTS adcp_idempotency")
        backend = module.PgBackend(pool=pool, lock_pool=locks)
        await backend.create_schema()

        async def pay(self: None, params: dict[str, Any], context: Any = None) -> dict[str, Any]:
            return RESULT

        guarded = module.IdempotencyStore(backend).wrap(pay)

        async def first(key: str) -> bool:
            entry = module.CachedResponse("x", {}, time.time() + 86_400)
            return bool(await backend.put_if_absent("sender-1", key, entry))

        yield {"first": first, **wrapped(lambda *args: guarded(None, *args))}


@contextlib.asynccontextmanager
async def idemkit(url: str, callers: int) -> AsyncIterator[Ops]:
    import asyncpg

    most = min(callers, 16)
    async with asyncpg.create_pool(url, min_size=most, max_size=most) as pool:
        from idemkit.backends.postgres import _schema_sql

        await pool.execute("DROP TABLE IF EXISTS idemkit_records")
        await pool.execute(_schema_sql("idemkit_records"))
        backend = harness.peer("idemkit").PostgresBackend(pool)
        yield idemkit_ops(backend)


def idemkit_ops(backend: Any) -> Ops:
    """What a backend of idemkit does, on PostgreSQL or on Redis."""
    from idemkit.core.events import EventEmitter
    from idemkit.core.runner import IdempotentCore, StoredResult

    core = IdempotentCore(backend, emitter=EventEmitter([]), backend_name="bench")

    async def pay() -> dict[str, Any]:
        return RESULT

    async def first(key: str) -> bool:
        return (await backend.claim(key, "f", 1, 86_400.0)).our_claim_token is not None

    async def once(key: str) -> bool:
        done = await core.run_once(
            key, "f", pay, encode=lambda value: StoredResult(json.dumps(value).encode())
        )
        return done is not None

    async def replay(key: str) -> bool:
        done = await core.run_once(key, "f", pay, encode=lambda value: StoredResult(b""))
        return bool(done.stored.blob == ANSWER)

    return {"first": first, "once": once, "replay": replay}


# ------------------------------------------------------------------------------------------ cases


def async_case(
    url: str, opened: Opened, callers: int, keys: list[str], labels: dict[str, str], seconds: float
) -> Case:
    """Warm up, then time each operation of ``labels`` (operation: name in the table) in turn."""

    async def go() -> dict[str, float]:
        taken, left, warm = {}, keys, new_keys(callers * 8, "warm")
        async with opened(url, callers) as ops:
            for operation in labels:  # so that statements are prepared and planned for good
                _, warm = await in_tasks(ops[operation], warm, callers, seconds)
            for operation, label in labels.items():
                taken[label], left = await in_tasks(ops[operation], left, callers, seconds)
        return taken

    return lambda: asyncio.run(go())


def thread_case(
    opened: Callable[[], contextlib.AbstractContextManager[Any]],
    callers: int,
    keys: list[str],
    labels: dict[str, str],
    seconds: float,
) -> Case:
    def go() -> dict[str, float]:
        taken, left, warm = {}, keys, new_keys(callers * 8, "warm")
        with opened() as store:
            ops = sync_ops(store)
            for operation in labels:
                _, warm = in_threads(ops[operation], warm, callers, seconds)
            for operation, label in labels.items():
                taken[label], left = in_threads(ops[operation], left, callers, seconds)
        return taken

    return go


def in_sync(url: str) -> Callable[[], contextlib.AbstractContextManager[PostgresStore]]:
    @contextlib.contextmanager
    def opened() -> Iterator[PostgresStore]:
        with PostgresStore(url) as store:
            store.create_schema()
            store._source.fetch("other", "TRUNCATE oncekey_records", [])
            yield store

    return opened


def named(what: str, callers: int) -> str:
    return f"{what}, {callers} at a time"


def peers() -> dict[str, Opened]:
    found: dict[str, Opened] = {}
    if harness.adcp():
        found[ADCP] = adcp
    if harness.peer("idemkit"):
        found[IDEMKIT] = idemkit
    return found


def first_seen_cases(url: str, callers: int, keys: list[str], seconds: float) -> dict[str, Case]:
    labels = {"first": named("first seen", callers)}
    cases: dict[str, Case] = {
        BATCH: lambda: {labels["first"]: asyncio.run(in_batches(url, keys, callers, seconds))},
        FLOOR: lambda: asyncio.run(our_statements(url, labels, keys, callers, seconds)),
        SINGLE: async_case(url, bare, callers, keys, labels, seconds),
        ASYNCPG: async_case(url, ours("asyncpg"), callers, keys, labels, seconds),
        PSYCOPG: async_case(url, ours("psycopg"), callers, keys, labels, seconds),
        THREADS: thread_case(in_sync(url), callers, keys, labels, seconds),
    }
    for name, opened in peers().items():
        cases[name] = async_case(url, opened, callers, keys, labels, seconds)
    return cases


def claim_cases(url: str, callers: int, keys: list[str], seconds: float) -> dict[str, Case]:
    labels = {"once": named("claim, complete", callers), "replay": named("replay", callers)}
    cases: dict[str, Case] = {
        FLOOR: lambda: asyncio.run(our_statements(url, labels, keys, callers, seconds)),
        SINGLE: async_case(url, bare, callers, keys, labels, seconds),
        ASYNCPG: async_case(url, ours("asyncpg"), callers, keys, labels, seconds),
        PSYCOPG: async_case(url, ours("psycopg"), callers, keys, labels, seconds),
        THREADS: thread_case(in_sync(url), callers, keys, labels, seconds),
        WRAP: async_case(url, our_wrap, callers, keys, labels, seconds),
    }
    for name, opened in peers().items():
        title = ADCP_WRAP if name == ADCP else name
        cases[title] = async_case(url, opened, callers, keys, labels, seconds)
    return cases


def transaction_cases(url: str, callers: int, keys: list[str], seconds: float) -> dict[str, Case]:
    labels = {"transaction": named("transaction", callers)}
    return {
        HAND: async_case(url, bare, callers, keys, labels, seconds),
        ASYNCPG: async_case(url, ours("asyncpg"), callers, keys, labels, seconds),
        PSYCOPG: async_case(url, ours("psycopg"), callers, keys, labels, seconds),
    }


# ----------------------------------------------------------------------------------------- report


def speeds(url: str, options: Options) -> harness.Samples:
    """Measure every operation."""
    samples: harness.Samples = {}
    keys = new_keys(24_000, options.seed)  # more than any case gets through
    seconds = options.pick(0.15, 0.35, 1.0)  # of a case and operation
    groups = [
        *(first_seen_cases(url, callers, keys, seconds) for callers in CALLERS),
        *(claim_cases(url, callers, keys, seconds) for callers in CALLERS),
        *(transaction_cases(url, callers, keys, seconds) for callers in (1, 16)),
    ]
    for number, cases in enumerate(groups, start=1):
        samples |= harness.measure(
            f"postgres {number} of {len(groups)}",
            cases,
            rounds=options.pick(3, 5, 11),
            seconds=options.pick(6, 24, 120),
            seed=options.seed,
        )
    return samples


def server_version(url: str) -> str:
    import psycopg

    with psycopg.connect(url) as connection:
        row: Any = connection.execute("SHOW server_version").fetchone()
        return str(row[0])


def report(options: Options) -> str:
    """Measure, and give the section in Markdown."""
    if not (harness.peer("asyncpg") and harness.peer("psycopg")):
        return "### PostgreSQL\n\nLeft out: install `asyncpg` and `psycopg`.\n"
    try:
        with servers.postgres(options.directory) as url:
            version = server_version(url)
            samples = speeds(url, options)
    except servers.Missing as missing:
        return f"### PostgreSQL\n\n{missing}\n"
    references = {
        "of one statement": BATCH,
        "of the floor": FLOOR,
        "of one by one": SINGLE,
        "of by hand": HAND,
        "times adcp": ADCP,
        "times adcp wrap": ADCP_WRAP,
        "times idemkit": IDEMKIT,
    }
    verdicts = targets.table("postgres")
    return f"""### PostgreSQL, durable

{harness.left_out("adcp", "idemkit")}
PostgreSQL {version}, `synchronous_commit` on for all alike. *One statement for all* inserts as \
many keys at once as there are callers, into a table of two columns; *one by one* is asyncpg with \
prepared statements, a connection for each caller up to 16, and no fences, no leases and no \
tenants. The floor sends the store's own statements, for all callers at once, and does nothing \
else. Peers have pools of as many connections.

{harness.speed_table(samples, references)}
{verdicts}
A transaction is a claim, one row of the caller's, and the answer, in one commit."""
