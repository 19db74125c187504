"""A server that does not answer: every call ends at its deadline, and says what is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import psycopg
import pytest
from tests.servers.fixtures_pg import TERMS, eventually, key, sql
from tests.servers.postgres import Postgres
from tests.servers.sources_pg import ASYNC, SYNC, label, with_driver
from tests.servers.wire import Wire

from oncekey import AsyncOnce, Once, aconnect, connect
from oncekey._core.flows import new_owner
from oncekey.drivers.psycopg import PsycopgConnection
from oncekey.errors import StoreConfigError, StoreTimeoutError
from oncekey.models import Verdict
from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore

SHORT = 0.4  # seconds: the deadline of a call in these tests
HANG = 20.0  # far more than a few deadlines: whoever takes so long hangs
Make = Callable[..., Any]


@pytest.fixture
def wire(pg_url: str) -> Iterator[Wire]:
    with Wire(pg_url) as relay:
        yield relay
        relay.let_go()


@contextlib.contextmanager
def hurried(store: Any) -> Iterator[None]:
    """Short deadlines for a while: only where nothing answers, however busy the machine is."""
    store.timeout = store._source._timeout = SHORT
    try:
        yield
    finally:
        store.timeout = store._source._timeout = HANG


@contextlib.contextmanager
def silent(wire: Wire, store: Any = None) -> Iterator[None]:
    """From now on nothing comes back, on open connections as on new ones."""
    wire.hold()
    try:
        with contextlib.nullcontext() if store is None else hurried(store):
            yield
    finally:
        wire.let_go()


@contextlib.contextmanager
def stopped(server: Any) -> Iterator[None]:
    """A server whose every process stands still, as on a machine that hangs."""
    clients = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
    rows = sql(server.url(), clients)
    pids = [server.process.pid, *(row[0] for row in rows)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def overdue(call: Callable[..., Any], *args: Any) -> StoreTimeoutError:
    """Make a call that gets no answer; gives its error, unless it hangs."""
    caught: list[BaseException] = []

    def make() -> None:
        try:
            call(*args)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive(), "the call hangs"
    assert caught, "the call got an answer"
    assert isinstance(caught[0], StoreTimeoutError), caught[0]
    return caught[0]


async def aoverdue(call: Any) -> StoreTimeoutError:
    """The same for a coroutine."""
    async with asyncio.timeout(HANG):
        with pytest.raises(StoreTimeoutError) as caught:
            await call
    return caught.value


def use(store: PostgresStore, name: str) -> None:
    won = store.claim(key(name), owner := new_owner(), b"f", TERMS)
    assert won.verdict is Verdict.WON
    assert store.complete(key(name), owner, won.fence, b"j1", TERMS)


async def ause(store: AsyncPostgresStore, name: str) -> None:
    won = await store.claim(key(name), owner := new_owner(), b"f", TERMS)
    assert won.verdict is Verdict.WON
    assert await store.complete(key(name), owner, won.fence, b"j1", TERMS)


# Single calls


@pytest.mark.parametrize("source", SYNC, ids=label)
def test_a_call_without_an_answer_ends(source: Make, wire: Wire) -> None:
    """Sync: it is unknown whether it was carried out; the same owner's next one finds out."""
    with (
        source(wire.url) as (given, options),
        PostgresStore(given, timeout=HANG, **options) as store,
    ):
        use(store, "warm")
        own = new_owner()
        with silent(wire, store):
            error = overdue(store.claim, key("k"), own, b"f", TERMS)
            assert not error.outcome_known
            assert "may or may not" in str(error)
        assert store.claim(key("k"), own, b"f", TERMS).verdict is Verdict.WON


@pytest.mark.parametrize("source", ASYNC, ids=label)
async def test_an_async_call_without_an_answer_ends(source: Make, wire: Wire) -> None:
    """Async: the same, whatever the store was given."""
    async with source(wire.url) as (given, options):
        async with AsyncPostgresStore(given, timeout=HANG, **options) as store:
            await ause(store, "warm")
            own = new_owner()
            with silent(wire, store):
                error = await aoverdue(store.claim(key("k"), own, b"f", TERMS))
                assert not error.outcome_known
            again = await store.claim(key("k"), own, b"f", TERMS)
            assert again.verdict is Verdict.WON


def calls(store: Any) -> dict[str, Callable[[], Any]]:
    """Everything that is asked of a server."""
    own = new_owner()
    return {
        "complete": lambda: store.complete(key("k"), own, 1, b"j1", TERMS),
        "renew": lambda: store.renew(key("k"), own, 1, TERMS),
        "release": lambda: store.release(key("k"), own, None),
        "first_seen": lambda: store.first_seen(key("k"), TERMS),
        "read": lambda: store.read(key("k")),
        "write": lambda: store.write(key("k"), b"", b"j1", 4_000_000_000_000),
        "now": lambda: store.now(),
        "sweep": lambda: store.sweep(),
        "clear": lambda: store.clear(),
        "peek": lambda: store.peek(key("k"), b"", TERMS),
    }


@pytest.mark.parametrize("kind", ["sync", "asyncpg", "psycopg"])
async def test_every_call_has_a_deadline(wire: Wire, kind: str) -> None:
    """No method of a store waits longer for a server that is silent."""
    if kind == "sync":
        with PostgresStore(wire.url, timeout=HANG) as store:
            use(store, "warm")
            with silent(wire, store):
                for call in calls(store).values():
                    await asyncio.to_thread(overdue, call)
            use(store, "after")
        return
    async with AsyncPostgresStore(wire.url, driver=kind, timeout=HANG) as backend:
        await ause(backend, "warm")
        with silent(wire, backend):
            for acall in calls(backend).values():
                await aoverdue(acall())
        await ause(backend, "after")


@pytest.mark.parametrize("kind", ["sync", "asyncpg", "psycopg"])
async def test_calls_for_a_pooler_have_deadlines_too(wire: Wire, kind: str) -> None:
    """With prepare=False, where asyncpg wraps each call in a transaction."""
    own = new_owner()
    if kind == "sync":
        with PostgresStore(wire.url, timeout=HANG, prepare=False) as store:
            use(store, "warm")
            with silent(wire, store):
                await asyncio.to_thread(overdue, store.claim, key("k"), own, b"f", TERMS)
            use(store, "after")
        return
    async with AsyncPostgresStore(wire.url, driver=kind, timeout=HANG, prepare=False) as backend:
        await ause(backend, "warm")
        with silent(wire, backend):
            await aoverdue(backend.claim(key("k"), own, b"f", TERMS))
        await ause(backend, "after")


@pytest.mark.parametrize("kind", ["sync", "asyncpg", "psycopg"])
async def test_a_connection_that_is_not_made_leaves_the_outcome_known(
    wire: Wire, kind: str
) -> None:
    """A call that could not be sent changed nothing, and its error says so."""
    with silent(wire):
        if kind == "sync":
            with PostgresStore(wire.url, timeout=SHORT) as store:
                error = await asyncio.to_thread(overdue, store.first_seen, key("k"), TERMS)
        else:
            async with AsyncPostgresStore(wire.url, driver=kind, timeout=SHORT) as backend:
                error = await aoverdue(backend.first_seen(key("k"), TERMS))
    assert error.outcome_known
    assert "nothing was changed" in str(error)


@pytest.mark.parametrize("kind", ["sync", "asyncpg", "psycopg"])
async def test_a_server_that_stands_still(own_postgres: Postgres, own_url: str, kind: str) -> None:
    """The server's processes are stopped and go on later: calls end, then work again."""
    if kind == "sync":
        with PostgresStore(own_url, timeout=HANG) as store:
            use(store, "warm")
            with stopped(own_postgres), hurried(store):
                await asyncio.to_thread(overdue, store.claim, key("k"), new_owner(), b"f", TERMS)
                await asyncio.to_thread(overdue, store.now)  # nor is a new connection made
            use(store, "after")
        return
    async with AsyncPostgresStore(own_url, driver=kind, timeout=HANG) as backend:
        await ause(backend, "warm")
        with stopped(own_postgres), hurried(backend):
            await aoverdue(backend.claim(key("k"), new_owner(), b"f", TERMS))
            await aoverdue(backend.now())
        await ause(backend, "after")


@pytest.mark.parametrize("kind", ["sync", "psycopg"])
async def test_of_two_hosts_the_first_is_silent(own_postgres: Postgres, kind: str) -> None:
    """A connection that came too late for its call is there for a later one."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        hosts = f"127.0.0.1:{dead.getsockname()[1]},127.0.0.1:{own_postgres.port}"
        url = f"postgresql://postgres@{hosts}/postgres?connect_timeout=2"
        asked = 0
        if kind == "sync":
            with PostgresStore(url, timeout=SHORT) as store:
                while not (found := _or_none(store.now)):
                    asked += 1
        else:
            async with AsyncPostgresStore(url, driver=kind, timeout=SHORT) as backend:
                while not (found := await _aor_none(backend.now())):
                    asked += 1
        assert found > 0
        assert 0 < asked < 20


def _or_none(call: Callable[[], Any]) -> Any:
    with contextlib.suppress(StoreTimeoutError):
        return call()
    return None


async def _aor_none(call: Any) -> Any:
    with contextlib.suppress(StoreTimeoutError):
        return await call
    return None


# Batches


def test_calls_that_wait_for_a_silent_batch_end_too(wire: Wire) -> None:
    """Thirty threads call while a statement hangs: each gets its error, then all goes on."""
    with PostgresStore(wire.url, timeout=HANG) as store, ThreadPoolExecutor(30) as threads:
        use(store, "warm")
        with silent(wire, store):
            claims = [
                threads.submit(store.claim, key(n), new_owner(), b"f", TERMS) for n in range(30)
            ]
            for claim in claims:
                assert isinstance(claim.exception(HANG), StoreTimeoutError)
        use(store, "after")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_tasks_that_wait_for_a_silent_batch_end_too(wire: Wire, driver: str) -> None:
    """Calls that come before, while and after a statement hangs: each gets its error."""
    async with AsyncPostgresStore(wire.url, driver=driver, timeout=HANG) as store:
        await ause(store, "warm")
        with silent(wire, store):
            tasks = []
            for number in range(30):
                claim = store.claim(key(number), new_owner(), b"f", TERMS)
                tasks.append(asyncio.ensure_future(claim))
                await asyncio.sleep(SHORT / 25)
            done, late = await asyncio.wait(tasks, timeout=HANG)
            assert not late
            assert {type(task.exception()) for task in done} == {StoreTimeoutError}
        await ause(store, "after")


# Guarded calls, and what is shielded from cancellation


def test_a_guarded_call_that_waits_ends(wire: Wire) -> None:
    """A call with wait=1 on a connection that has died ends with a typed error."""
    with PostgresStore(wire.url, timeout=HANG) as store:
        once = Once(store, scope="deadline", wait=1)

        @once(key="name")
        def work(name: str) -> str:
            return name

        work("warm")
        with silent(wire, store):
            overdue(work, "k")
        assert work("another") == "another"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_timeout_ends_a_completion(wire: Wire, driver: str) -> None:
    """asyncio.timeout around a call whose completion gets no answer ends within two deadlines."""
    async with AsyncPostgresStore(wire.url, driver=driver, timeout=HANG) as store:
        once = AsyncOnce(store, scope="deadline")

        @once(key="name")
        async def work(name: str) -> str:
            if name != "warm":
                wire.hold()
            return name

        await work("warm")
        begun = time.monotonic()
        with hurried(store), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await work("k")
        assert time.monotonic() - begun < HANG
        wire.let_go()
        assert await work("warm") == "warm"


def test_a_store_closes_while_nothing_answers(wire: Wire) -> None:
    """Sync: close ends while a call hangs."""
    store = PostgresStore(wire.url, timeout=HANG)
    use(store, "warm")
    store.wait(key("k"), 0.05)
    with silent(wire, store), ThreadPoolExecutor(2) as threads:
        call = threads.submit(store.claim, key("k"), new_owner(), b"f", TERMS)
        threads.submit(store.close).result(HANG)
        assert call.exception(HANG) is not None


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_an_async_store_closes_while_nothing_answers(wire: Wire, driver: str) -> None:
    """Async: aclose ends, with calls, a listener and connections for transactions open."""
    store = AsyncPostgresStore(wire.url, driver=driver, timeout=HANG)
    async with store.transaction("warm"):
        await ause(store, "warm")
    await store.wait(key("k"), 0.05)
    with silent(wire, store):
        call = asyncio.ensure_future(store.claim(key("k"), new_owner(), b"f", TERMS))
        await asyncio.sleep(0)
        async with asyncio.timeout(HANG):
            await store.aclose()
            assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], Exception)


SERVER = """
    import sys
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from oncekey.adapters.asgi import IdempotencyMiddleware

    async def work(request):
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/", work, methods=["GET", "POST"])])
    app = IdempotencyMiddleware(app, sys.argv[1])
    uvicorn.run(app, port=int(sys.argv[2]), log_level="error", lifespan="off")
"""


def test_a_web_server_answers_and_stops(wire: Wire) -> None:
    """The database is silent: the client gets an error, and SIGTERM ends the process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(SERVER), f"{wire.url}?timeout={SHORT}"]
    process = subprocess.Popen([*command, str(port)])
    headers = {"Authorization": "Bearer of-the-client"}

    def ask(name: str) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/", b"{}", {**headers, "Idempotency-Key": name}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=HANG) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)

    try:
        eventually(lambda: ask("warm-up-of-the-server") == 200, "serving")
        with silent(wire), ThreadPoolExecutor(1) as threads:
            assert ask("while-nothing-answers") >= 500
            threads.submit(lambda: contextlib.suppress(OSError) and ask("another-one"))
            process.send_signal(signal.SIGTERM)
            process.wait(HANG)
    finally:
        process.kill()
        process.wait()


# Transactions


@pytest.mark.parametrize("source", SYNC, ids=label)
@pytest.mark.parametrize("when", ["begin", "commit"])
def test_a_transaction_without_an_answer_ends(source: Make, wire: Wire, when: str) -> None:
    """Before the commit nothing was changed; of the commit itself it is not known."""
    with (
        source(wire.url) as (given, options),
        PostgresStore(given, timeout=HANG, **options) as store,
    ):
        with store.transaction("warm"):
            pass

        def work() -> None:
            if when == "begin":
                wire.hold()
            with store.transaction("k") as tx:
                tx.answer = 1
                if when == "commit":
                    wire.hold()

        with hurried(store):
            error = overdue(work)
        wire.let_go()
        assert error.outcome_known
        with store.transaction("k") as tx:
            assert not tx.replayed


@pytest.mark.parametrize("source", ASYNC, ids=label)
async def test_an_async_transaction_without_an_answer_ends(source: Make, wire: Wire) -> None:
    """Async: also where the task is cancelled meanwhile, which its end is shielded from."""
    async with source(wire.url) as (given, options):
        async with AsyncPostgresStore(given, timeout=HANG, **options) as store:
            async with store.transaction("warm"):
                pass

            async def work() -> None:
                async with store.transaction("k") as tx:
                    tx.answer = 1
                    wire.hold()

            with hurried(store):
                error = await aoverdue(work())
                assert error.outcome_known
                task = asyncio.ensure_future(work())
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task], timeout=HANG)
                assert task.done()
            wire.let_go()
            async with store.transaction("k") as tx:
                assert not tx.replayed


def test_a_lost_commit_is_unknown(wire: Wire) -> None:
    """The commit was sent and nothing came back: only a retry tells."""
    with PostgresStore(wire.url, timeout=HANG) as store:
        with store.transaction("warm"):
            pass
        commit = PsycopgConnection.commit

        def late(connection: PsycopgConnection) -> Any:
            wire.hold()
            return commit(connection)

        def work() -> None:
            with (
                mock.patch.object(PsycopgConnection, "commit", late),
                store.transaction("k") as tx,
            ):
                tx.answer = 1

        with hurried(store):
            error = overdue(work)
        wire.let_go()
        assert not error.outcome_known
        with store.transaction("k") as tx:
            assert tx.replayed


@pytest.mark.parametrize("library", ["psycopg", "sqlalchemy"])
def test_a_callers_connection_has_deadlines_too(wire: Wire, library: str) -> None:
    """On a connection of the caller's, which is closed then: nobody knows what is yet to come."""
    import sqlalchemy as sa

    with PostgresStore(wire.url, timeout=HANG) as store:
        if library == "psycopg":
            on: Any = psycopg.connect(wire.url)
        else:
            engine = sa.create_engine(with_driver(wire.url, "psycopg"))
            on = engine.connect()
        with store.transaction("warm", on=on):
            pass

        def work() -> None:
            with store.transaction("k", on=on):
                wire.hold()

        with hurried(store):
            error = overdue(work)
        wire.let_go()
        assert error.outcome_known
        if library == "psycopg":
            assert on.closed
        else:
            on.close()
            engine.dispose()
        with store.transaction("k") as tx:
            assert not tx.replayed


# Connections that died, while the server lives


@pytest.mark.parametrize("kind", ["sync", "asyncpg", "psycopg"])
async def test_connections_that_died_cost_a_deadline_and_no_error(wire: Wire, kind: str) -> None:
    """A guarded call and a transaction find dead connections, and go on over new ones."""
    if kind == "sync":

        def work() -> None:
            with PostgresStore(wire.url, timeout=HANG) as store:
                once = Once(store, scope="stranded")
                with once.guard("warm") as claim, store.transaction("warm"):
                    claim.answer = 1
                wire.strand()
                store.timeout = store._source._timeout = 2.0
                with once.guard("k") as claim:
                    claim.answer = 1
                with store.transaction("k") as tx:
                    assert not tx.replayed
                    tx.answer = 1

        await asyncio.to_thread(work)
        return
    async with AsyncPostgresStore(wire.url, driver=kind, timeout=HANG) as backend:
        once = AsyncOnce(backend, scope="stranded")
        async with once.guard("warm") as claim, backend.transaction("warm"):
            claim.answer = 1
        wire.strand()
        backend.timeout = backend._source._timeout = 2.0
        async with once.guard("k") as claim:
            claim.answer = 1
        async with backend.transaction("k") as tx:
            assert not tx.replayed
            tx.answer = 1


# The option


def test_the_option_is_read_from_a_url(pg_url: str) -> None:
    """``timeout`` in the URL is ours, for both stores; five seconds without it."""
    for opener in (connect, aconnect):
        assert opener(pg_url).timeout == 5.0  # type: ignore[attr-defined]
        assert opener(f"{pg_url}?timeout=2.5").timeout == 2.5  # type: ignore[attr-defined]
        with pytest.raises(StoreConfigError, match="timeout must be seconds"):
            opener(f"{pg_url}?timeout=soon")
        for wrong in (0, -1, True, "5", float("nan"), float("inf")):
            with pytest.raises(StoreConfigError, match="timeout must be seconds above 0"):
                opener(pg_url, timeout=wrong)
