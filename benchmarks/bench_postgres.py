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
from bench_sqlite import in_tasks, in_threads
from harness import Case, Options, new_keys

import servers
from oncekey import (
    AsyncPostgresStore,
    AsyncWebhookDedup,
    IdempotencyStore,
    PostgresStore,
    WebhookDedup,
)
from oncekey.models import Key, Scope, Terms

BATCH = "limit: one statement for all"
SINGLE = "limit: asyncpg, one by one"
ASYNCPG = "**oncekey** asyncpg"
PSYCOPG = "**oncekey** psycopg"
THREADS = "**oncekey** sync, threads"
WRAP = "**oncekey** wrap"
ADCP = "adcp"
ADCP_WRAP = "adcp wrap"
IDEMKIT = "idemkit"
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


def in_batches(url: str, keys: list[str], callers: int) -> float:
    """Seconds per key: as many keys in one statement as there are callers, and nothing else."""

    async def go() -> float:
        import asyncpg

        connection = await asyncpg.connect(url)
        try:
            await connection.execute(BARE)
            statement = await connection.prepare(INSERT_ALL)
            for key in new_keys(8, "warm"):
                await statement.fetch([key])
            start = time.perf_counter()
            new = 0
            for at in range(0, len(keys), callers):
                new += len(await statement.fetch(keys[at : at + callers]))
            taken = (time.perf_counter() - start) / len(keys)
        finally:
            await connection.close()
        if new != len(keys):
            raise SystemExit("the limit did not write every row")
        return taken

    return asyncio.run(go())


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
    url: str, opened: Opened, callers: int, keys: list[str], labels: dict[str, str]
) -> Case:
    """Warm up, then time each operation of ``labels`` (operation: name in the table) in turn."""

    async def go() -> dict[str, float]:
        async with opened(url, callers) as ops:
            for operation in labels:  # so that statements are prepared and planned for good
                await in_tasks(ops[operation], new_keys(callers * 8, "warm"), callers)
            return {
                label: await in_tasks(ops[operation], keys, callers)
                for operation, label in labels.items()
            }

    return lambda: asyncio.run(go())


def thread_case(
    opened: Callable[[], contextlib.AbstractContextManager[Any]],
    callers: int,
    keys: list[str],
    labels: dict[str, str],
) -> Case:
    def go() -> dict[str, float]:
        with opened() as store:
            ops = sync_ops(store)
            for operation in labels:
                in_threads(ops[operation], new_keys(callers * 8, "warm"), callers)
            return {
                label: in_threads(ops[operation], keys, callers)
                for operation, label in labels.items()
            }

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


def first_seen_cases(url: str, count: int, callers: int, seed: int) -> dict[str, Case]:
    keys = new_keys(count, seed)
    few = keys[: max(callers * 8, count // 6)]
    labels = {"first": named("first seen", callers)}
    cases: dict[str, Case] = {
        BATCH: lambda: {labels["first"]: in_batches(url, keys, callers)},
        SINGLE: async_case(url, bare, callers, few, labels),
        ASYNCPG: async_case(url, ours("asyncpg"), callers, keys, labels),
        PSYCOPG: async_case(url, ours("psycopg"), callers, keys, labels),
        THREADS: thread_case(in_sync(url), callers, keys, labels),
    }
    for name, opened in peers().items():
        cases[name] = async_case(url, opened, callers, few, labels)
    return cases


def claim_cases(url: str, count: int, callers: int, seed: int) -> dict[str, Case]:
    keys = new_keys(count // 2, seed)
    few = keys[: max(callers * 8, count // 12)]
    labels = {"once": named("claim, complete", callers), "replay": named("replay", callers)}
    cases: dict[str, Case] = {
        SINGLE: async_case(url, bare, callers, few, labels),
        ASYNCPG: async_case(url, ours("asyncpg"), callers, keys, labels),
        PSYCOPG: async_case(url, ours("psycopg"), callers, keys, labels),
        THREADS: thread_case(in_sync(url), callers, keys, labels),
        WRAP: async_case(url, our_wrap, callers, keys, labels),
    }
    for name, opened in peers().items():
        title = ADCP_WRAP if name == ADCP else name
        cases[title] = async_case(url, opened, callers, few, labels)
    return cases


def transaction_cases(url: str, count: int, callers: int, seed: int) -> dict[str, Case]:
    keys = new_keys(count, seed)
    labels = {"transaction": named("transaction", callers)}
    return {
        HAND: async_case(url, bare, callers, keys, labels),
        ASYNCPG: async_case(url, ours("asyncpg"), callers, keys, labels),
        PSYCOPG: async_case(url, ours("psycopg"), callers, keys, labels),
    }


# ----------------------------------------------------------------------------------------- report


def speeds(url: str, options: Options) -> harness.Samples:
    """Measure every operation."""
    samples: harness.Samples = {}
    sizes = {
        1: options.pick(120, 400),
        16: options.pick(960, 4_000),
        64: options.pick(1_920, 8_000),
    }
    groups = [
        *(first_seen_cases(url, sizes[at], at, options.seed) for at in CALLERS),
        *(claim_cases(url, sizes[at], at, options.seed) for at in CALLERS),
        *(transaction_cases(url, sizes[at] // 4, at, options.seed) for at in (1, 16)),
    ]
    for number, cases in enumerate(groups, start=1):
        samples |= harness.measure(
            f"postgres {number} of {len(groups)}",
            cases,
            rounds=options.pick(3, 5, 11),
            seconds=options.pick(4, 20, 120),
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
tenants. Peers have pools of as many connections.

{harness.speed_table(samples, references)}
{verdicts}
A transaction is a claim, one row of the caller's, and the answer, in one commit."""
