"""Sessions of the store's own: what they are set to, and when they are left."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime as dt
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers.fixtures_pg import TERMS, eventually, key, sessions, sql
from tests.servers.postgres import running
from tests.servers.sources_pg import ASYNC, SYNC, label
from tests.servers.wire import Wire

from oncekey import Policy
from oncekey._core.call import Job as CallJob
from oncekey._core.call import aopen_claim
from oncekey._core.codec import Codec
from oncekey._core.flows import Plan, new_owner
from oncekey.errors import (
    StoreConfigError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from oncekey.models import State, Verdict
from oncekey.stores._batching import Job
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore
from oncekey.stores.postgres.calls import run_jobs
from oncekey.stores.postgres.errors import named
from oncekey.stores.postgres.flows import GRACE_MS, SWEEP_PAGES
from oncekey.stores.postgres.statements import statements_in

Make = Callable[..., Any]
HANG = 20.0
KINDS = ["sync", "asyncpg", "psycopg"]


# What they are set to


@pytest.mark.parametrize("kind", KINDS)
async def test_lanes_compile_nothing(pg_url: str, kind: str) -> None:
    """Own sessions prefer indexes, which makes scans look dear: so JIT is off on them."""
    if kind == "sync":
        with PostgresStore(pg_url) as store:
            for lane in ("claim", "settle", "other"):
                assert store._source.fetch(lane, "SHOW jit", []) == [("off",)]
        return
    async with AsyncPostgresStore(pg_url, driver=kind) as backend:
        for lane in ("claim", "settle", "other"):
            rows = await backend._source.fetch(lane, "SHOW jit", [])
            assert [tuple(row) for row in rows] == [("off",)]


def every_statement(schema: str) -> Iterator[tuple[str, str]]:
    """The statements of calls and of sweeping, with a name for each."""
    home = statements_in(schema)
    for form, found in (("one", home.one), ("many", home.many)):
        for name, text in found.items():
            yield f"{name} for {form}", text
    for name in ("write", "await_change", "sweep", "clear"):
        yield name, home.sql[name]
    yield "claim in a transaction", home.claim_in
    yield "claim of a new key in a transaction", home.claim_in_new
    yield "complete in a transaction", home.complete_in


def test_no_statement_looks_dear_to_the_server(pg_url: str) -> None:
    """On connections of others, whose settings we leave alone, no plan is worth compiling."""
    fill = (
        "INSERT INTO oncekey_records (tenant, key, scope, state, owner, fence, fingerprint, "
        "lease_until, expires_at, purge_at, attempts) SELECT '', sha256(n::text::bytea), 'x', 1, "
        "'', n, '', 0, 1, 1, 1 FROM generate_series(1, 20000) n"
    )
    sql(pg_url, fill, "ANALYZE oncekey_records")
    dear = {}
    for name, text in every_statement("public"):
        plan = sql(pg_url, f"EXPLAIN (GENERIC_PLAN, FORMAT JSON) {text}")[0][0]
        cost = plan[0]["Plan"]["Total Cost"]
        if cost >= 100_000:  # jit_above_cost
            dear[name] = cost
    assert dear == {}


def _distributions() -> list[Path]:
    return sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))


@pytest.mark.skipif(not _distributions(), reason="needs the distribution's PostgreSQL, with JIT")
def test_a_server_that_compiles_stays_fast() -> None:
    """A stock server with JIT: no statement of any lane is compiled, the sweep least of all."""
    for server in running(folder=_distributions()[-1].parent, fsync="off", jit_above_cost="100000"):
        url = server.database()
        if sql(url, "SELECT pg_jit_available()") != [(True,)]:
            pytest.skip("this server has no JIT")
        with PostgresStore(url) as store:
            store.create_schema()
            home = store._ready()
            jobs = [Job("claim", (key(n), new_owner(), b"f", TERMS)) for n in range(3)]
            asked = [
                ("other", home.sql["sweep"], [SWEEP_PAGES, None, GRACE_MS]),
                ("claim", *next(run_jobs(home, "", jobs))),
                ("claim", *next(run_jobs(home, "", jobs[:1]))),
            ]
            for lane, text, args in asked:
                rows = store._source.fetch(lane, f"EXPLAIN (ANALYZE, VERBOSE) {text}", args)
                shown = "\n".join(str(row[0]) for row in rows)
                assert "JIT:" not in shown
                assert "Execution Time" in shown


BOUNDED = {
    "idle_in_transaction_session_timeout": "5min",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60000",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_machine_that_vanishes_is_noticed(pg_url: str, kind: str) -> None:
    """In a transaction of the store's own the server looks after a client that is silent."""
    shown = "SELECT current_setting($1)"
    if kind == "sync":
        with PostgresStore(pg_url) as store, store.transaction("k") as tx:
            cursor: Any = psycopg.RawCursor(tx.connection)
            found = {name: cursor.execute(shown, [name]).fetchone()[0] for name in BOUNDED}
    else:
        async with (
            AsyncPostgresStore(pg_url, driver=kind) as backend,
            backend.transaction("k") as tx,
        ):
            found = {}
            for name in BOUNDED:
                if kind == "asyncpg":
                    found[name] = await tx.connection.fetchval(shown, name)
                else:
                    rows = await tx.connection.execute(shown.replace("$1", "%s"), [name])
                    found[name] = (await rows.fetchone())[0]
    assert found == BOUNDED


def test_what_the_owner_has_set_stays(pg_url: str) -> None:
    """A limit of the database or the URL counts, not ours."""
    name = pg_url.rpartition("/")[2]
    sql(pg_url, f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '7s'")
    with PostgresStore(pg_url + "?options=-ctcp_keepalives_idle%3D99") as store:
        with store.transaction("k") as tx:
            idle = tx.connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
            alive = tx.connection.execute("SHOW tcp_keepalives_idle").fetchone()
    assert (idle, alive) == (("7s",), ("99",))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_idle_transaction_frees_its_key(pg_url: str, kind: str) -> None:
    """The server ends it, the block's own error can be retried, and another gets the key."""
    name = pg_url.rpartition("/")[2]
    sql(pg_url, f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '100ms'")

    async def idle() -> None:
        if kind == "sync":
            with PostgresStore(pg_url) as store, store.transaction("k") as tx:
                tx.answer = "first"
                _ended(pg_url)
        else:
            async with (
                AsyncPostgresStore(pg_url, driver=kind) as backend,
                backend.transaction("k") as tx,
            ):
                tx.answer = "first"
                await asyncio.to_thread(_ended, pg_url)

    with PostgresStore(pg_url) as other:
        with pytest.raises(StoreUnavailableError) as caught:
            await idle()
        assert caught.value.retryable
        with other.transaction("k", wait=0) as tx:
            assert not tx.replayed


def _ended(url: str) -> None:
    busy = "idle in transaction"
    eventually(
        lambda: not sql(url, "SELECT 1 FROM pg_stat_activity WHERE state = %s", args=[busy]),
        "the end of the transaction",
    )


class Refused(Exception):
    """An error of a server's, as drivers show it."""

    def __init__(self, state: str) -> None:
        self.sqlstate = state


@pytest.mark.parametrize(
    "state, kind, word",
    [
        ("25P03", StoreUnavailableError, "idle_in_transaction_session_timeout"),
        ("25P04", StoreUnavailableError, "transaction_timeout"),
        ("26000", StoreConfigError, "prepare=False"),
        ("42P05", StoreConfigError, "prepare=False"),
    ],
)
def test_states_have_names(state: str, kind: type[Exception], word: str) -> None:
    """Each SQLSTATE gives a type by which to decide, and a message that names the fix."""
    error = named(Refused(state))
    assert isinstance(error, kind)
    assert word in str(error)
    assert error.retryable is (kind is StoreUnavailableError)


def test_a_pooler_that_loses_statements_is_named(pg_url: str) -> None:
    """Prepared statements behind a transaction pooler: the error says prepare=False."""
    from tests.servers.pooler import TransactionPooler

    with TransactionPooler(pg_url) as pooler, PostgresStore(pooler.url) as store:

        def many() -> None:
            for number in range(50):
                store.first_seen(key(number), TERMS)

        with pytest.raises(StoreConfigError, match="prepare=False"):
            many()


# When they are left


def read_only(url: str, on: bool) -> None:
    """Make sessions that are opened from now on read-only, or not; those there are stay."""
    value = "on" if on else "off"
    name = url.rpartition("/")[2]
    change = f"ALTER DATABASE {name} SET default_transaction_read_only = {value}"
    sql(url, "SET default_transaction_read_only = off", change)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_primary_that_became_read_only_is_left(pg_url: str, kind: str) -> None:
    """A session to what is no primary any more is dropped within the call, which succeeds."""
    read_only(pg_url, True)
    if kind == "sync":
        with PostgresStore(pg_url) as store:
            assert store.read(key("k")) is None
            with pytest.raises(StoreReadOnlyError):
                store.claim(key("k"), new_owner(), b"f", TERMS)
            assert store.read(key("k")) is None  # on a session that is as read-only
            with pytest.raises(StoreReadOnlyError), store.transaction("t"):
                pytest.fail("ran")
            read_only(pg_url, False)
            assert store.claim(key("k"), new_owner(), b"f", TERMS).verdict is Verdict.WON
            with store.transaction("t") as tx:
                tx.answer = 1
        return
    async with AsyncPostgresStore(pg_url, driver=kind) as backend:
        assert await backend.read(key("k")) is None
        with pytest.raises(StoreReadOnlyError):
            await backend.claim(key("k"), new_owner(), b"f", TERMS)
        assert await backend.read(key("k")) is None
        with pytest.raises(StoreReadOnlyError):
            async with backend.transaction("t"):
                pytest.fail("ran")
        read_only(pg_url, False)
        won = await backend.claim(key("k"), new_owner(), b"f", TERMS)
        assert won.verdict is Verdict.WON
        async with backend.transaction("t") as tx:
            tx.answer = 1


@pytest.mark.parametrize("source", SYNC[1:], ids=label)
def test_a_pool_leaves_a_read_only_server(source: Make, pg_url: str) -> None:
    """Of what was passed in, such a connection is closed: the next one may be to the primary."""
    read_only(pg_url, True)
    with source(pg_url) as (given, options), PostgresStore(given, **options) as store:
        with pytest.raises(StoreReadOnlyError):
            store.claim(key("k"), new_owner(), b"f", TERMS)
        read_only(pg_url, False)
        eventually(lambda: store.first_seen(key("m"), TERMS), "leaving")


@pytest.mark.parametrize("source", ASYNC[2:], ids=label)
async def test_an_async_pool_leaves_a_read_only_server(source: Make, pg_url: str) -> None:
    """Async: the same."""
    read_only(pg_url, True)
    async with source(pg_url) as (given, options), AsyncPostgresStore(given, **options) as store:
        with pytest.raises(StoreReadOnlyError):
            await store.claim(key("k"), new_owner(), b"f", TERMS)
        read_only(pg_url, False)
        for _ in range(20):
            try:
                assert await store.first_seen(key("m"), TERMS)
                break
            except StoreReadOnlyError:
                pass
        else:
            pytest.fail("never left")


# TLS


class Impostor:
    """A server whose certificate nobody has signed; it takes no connection past the handshake."""

    def __init__(self, folder: Path) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        def made(name: str) -> Path:
            secret = ec.generate_private_key(ec.SECP256R1())
            subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
            now = dt.datetime.now(dt.UTC)
            builder = (
                x509.CertificateBuilder()
                .issuer_name(subject)
                .subject_name(subject)
                .public_key(secret.public_key())
                .serial_number(1)
                .not_valid_before(now - dt.timedelta(days=1))
                .not_valid_after(now + dt.timedelta(days=1))
            )
            certificate = builder.sign(secret, hashes.SHA256())
            file = folder / f"{name}.pem"
            pem = serialization.Encoding.PEM
            file.write_bytes(
                secret.private_bytes(
                    pem,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
                + certificate.public_bytes(pem)
            )
            return file

        self.trusted = made("trusted")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(made("impostor"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(HANG)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(8)
            writer.write(b"S")
            await writer.drain()
            await writer.start_tls(self._context)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(HANG)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG)
        self._loop.close()


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[Impostor]:
    made = Impostor(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["untrusted", "missing"])
async def test_a_certificate_that_is_refused_is_named(
    impostor: Impostor, kind: str, fault: str, tmp_path: Path
) -> None:
    """It is neither the address that can't be read, nor a server that can't be reached."""
    root = impostor.trusted if fault == "untrusted" else tmp_path / "nowhere.pem"
    url = (
        f"postgresql://app:hidden@127.0.0.1:{impostor.port}/db?sslmode=verify-full"
        f"&sslrootcert={root}"
    )

    async def ask() -> None:
        if kind == "sync":
            with PostgresStore(url) as store:
                store.now()
        else:
            async with AsyncPostgresStore(url, driver=kind) as backend:
                await backend.now()

    with pytest.raises(StoreConfigError, match="certificate") as caught:
        await ask()
    assert "address" not in str(caught.value)
    assert "hidden" not in str(caught.value)


# Cancelled claims


LOCKED = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


@contextlib.contextmanager
def locked(url: str, name: str) -> Iterator[Callable[[], None]]:
    """A record on which the server lets claims wait; gives what waits until one does."""
    with PostgresStore(url) as store:
        won = store.claim(key(name), own := new_owner(), b"", TERMS)
        assert store.release(key(name), own, won.fence)
    with psycopg.connect(url) as other:
        query = "SELECT 1 FROM oncekey_records WHERE key = %s FOR UPDATE"
        other.execute(query, [key(name).digest])
        yield lambda: eventually(lambda: sql(url, LOCKED), "a claim that waits")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_cancelled_claim_is_released_in_order(pg_url: str, driver: str) -> None:
    """The claim is still under way when its caller goes: its release comes after it."""
    job = CallJob(key("k"), b"", Plan.of(Policy(lease=3600)), Codec(), "work")
    async with AsyncPostgresStore(pg_url, driver=driver, timeout=HANG) as store:
        await store.first_seen(key("warm"), TERMS)
        with locked(pg_url, "k") as waits:
            claim = asyncio.ensure_future(aopen_claim(store, job))
            await asyncio.to_thread(waits)
            claim.cancel()
            await asyncio.gather(claim, return_exceptions=True)
            assert claim.cancelled()
            await asyncio.sleep(0.2)  # in which a release that does not wait would be done
        verdict = None
        async with asyncio.timeout(HANG):
            while verdict is not Verdict.WON:
                verdict = (await store.claim(key("k"), new_owner(), b"", TERMS)).verdict


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_release_follows_the_claim_in_a_batch(pg_url: str, driver: str) -> None:
    """Also where a release of another key, which stands before both, sets the kinds' order."""
    with Wire(pg_url) as wire:
        async with AsyncPostgresStore(wire.url, driver=driver, timeout=HANG) as store:
            await store.claim(key("warm"), new_owner(), b"", TERMS)
            wire.hold()
            trips = wire.trips
            busy = asyncio.ensure_future(store.claim(key("b"), new_owner(), b"", TERMS))
            while wire.trips == trips:
                await asyncio.sleep(0.01)
            own = new_owner()
            calls = [
                asyncio.ensure_future(call)
                for call in (
                    store.release(key("e"), new_owner(), None),
                    store.claim(key("k"), own, b"", TERMS),
                    store.release(key("k"), own, None),
                )
            ]
            await asyncio.sleep(0)
            wire.let_go()
            await asyncio.wait_for(asyncio.gather(busy, *calls), HANG)
            record = await store.read(key("k"))
            assert record is not None
            assert record.state is State.RELEASED


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_call_that_was_not_sent_yet_is_never_sent(pg_url: str, driver: str) -> None:
    """A claim that is cancelled while it waits for its batch takes no key."""
    with Wire(pg_url) as wire:
        async with AsyncPostgresStore(wire.url, driver=driver, timeout=HANG) as store:
            await store.claim(key("warm"), new_owner(), b"", TERMS)
            wire.hold()
            busy = asyncio.ensure_future(store.claim(key("b"), new_owner(), b"", TERMS))
            await asyncio.sleep(0.05)
            late = asyncio.ensure_future(store.claim(key("k"), new_owner(), b"", TERMS))
            await asyncio.sleep(0)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            wire.let_go()
            await asyncio.wait_for(busy, HANG)
            assert await store.read(key("k")) is None


def test_an_interrupted_thread_releases_in_order(pg_url: str) -> None:
    """A release without a fence goes the way of claims, so that it can't overtake one."""
    with PostgresStore(pg_url, timeout=HANG) as store, ThreadPoolExecutor(2) as threads:
        store.first_seen(key("warm"), TERMS)
        assert store.release(key("warm"), new_owner(), 1) is False
        own = new_owner()
        with locked(pg_url, "k") as waits:
            claim = threads.submit(store.claim, key("k"), own, b"", TERMS)
            waits()
            release = threads.submit(store.release, key("k"), own, None)
            concurrent.futures.wait([release], timeout=0.2)
        assert claim.result(HANG).verdict is Verdict.WON
        assert release.result(HANG) is True


def test_sessions_are_few(pg_url: str) -> None:
    """A store that calls, completes and sweeps has three of them."""
    with PostgresStore(pg_url) as store:
        won = store.claim(key("k"), own := new_owner(), b"f", TERMS)
        assert store.complete(key("k"), own, won.fence, b"j1", TERMS)
        store.sweep()
        assert len(sessions(pg_url)) == 3
