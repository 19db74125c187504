"""Where statements run: connections of our own, or those of a pool or an engine that was passed in.

A source of our own keeps one connection for each lane, so that claims and completions don't wait
for each other. Others are borrowed for one batch and given back. Nothing takes longer than its
deadline: a connection that did not answer in time is closed.
"""

from __future__ import annotations

import contextlib
import functools
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from oncekey._core.forks import Forking, watch_forks
from oncekey.drivers import is_drivers
from oncekey.drivers._deadlines import (
    Attempts,
    Deadline,
    Late,
    end,
    engine_connection,
    limited,
    to_driver,
)
from oncekey.errors import (
    StoreClosedError,
    StoreConfigError,
    StoreError,
    StoreReadOnlyError,
)
from oncekey.stores.postgres.errors import bad_address, named, unreadable

__all__ = ["sync_source"]

LANES: Final = ("claim", "settle", "other")
CONNECT_SECONDS: Final = 10  # for one host; a call itself waits no longer than its deadline
SPARE: Final = 32  # connections that wait for the next transaction

# A machine that vanishes within a transaction must not keep its key for as long as the server's
# system believes in the connection, which is hours. What the server's owner has set stays.
BOUNDS: Final = {
    "idle_in_transaction_session_timeout": "300000",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
_VALUES: Final = ", ".join(f"('{name}', '{value}')" for name, value in BOUNDS.items())
SESSION: Final = (
    "SELECT pg_catalog.set_config(s.name, b.value, false) FROM pg_catalog.pg_settings s, "
    f"(VALUES {_VALUES}) AS b (name, value) WHERE s.name = b.name AND s.source = 'default'"
)
# For lanes, where nothing but our own statements runs. A plan that was made while the table was
# tiny would go on scanning it when it has grown; and as what scans all the same then counts as
# very dear, the server would compile each of these short statements.
LANE: Final = f"{SESSION}; SET enable_seqscan = off; SET jit = off"
# The same on our side of the connection.
KEEPALIVE: Final = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}

Rows = list[Any]


def sync_source(given: Any, prepare: bool, timeout: float) -> Any:
    """The source for what a ``PostgresStore`` was given."""
    if isinstance(given, str):
        return PsycopgSource(given, prepare, timeout)
    kind = to_driver(given)
    if kind == "psycopg_pool" and hasattr(given, "getconn"):
        return LentSource(functools.partial(_from_pool, given), prepare, timeout, given.conninfo)
    if kind == "sqlalchemy" or callable(given):
        engine = engine_of(given)
        if engine is not None and not hasattr(engine, "sync_engine"):
            engine = checked_engine(engine, "psycopg")
            return LentSource(functools.partial(_from_engine, engine), prepare, timeout)
    raise StoreConfigError(
        f"PostgresStore can't use a {type(given).__name__}: pass a URL, a "
        "psycopg_pool.ConnectionPool, a SQLAlchemy Engine or a sessionmaker; async ones go to "
        "AsyncPostgresStore"
    )


def engine_of(given: Any) -> Any:
    """The engine of an engine, or of the sessions that a factory makes."""
    if hasattr(given, "dialect") and hasattr(given, "connect"):
        return given
    if callable(given):
        session: Any = given()
        bind = getattr(session, "bind", None)
        if bind is None and hasattr(session, "get_bind"):
            bind = session.get_bind()
        return bind if hasattr(bind, "sync_engine") else getattr(bind, "engine", bind)
    return None


def checked_engine(engine: Any, *drivers: str) -> Any:
    """An engine whose statements are transactions of their own.

    Raises:
        StoreConfigError: It is not one of PostgreSQL, on a driver that we know.
    """
    if engine.dialect.name != "postgresql" or engine.dialect.driver not in drivers:
        wanted = " or ".join(f"postgresql+{driver}" for driver in drivers)
        raise StoreConfigError(
            f"this engine is {engine.dialect.name}+{engine.dialect.driver}: make it with {wanted}"
        )
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def closed_error() -> StoreClosedError:
    """The error for a call after the store was closed."""
    return StoreClosedError("this store is closed: connect again")


class Lent:
    """A source that is somebody else's: it stays open when the store is closed.

    Args:
        borrow: Lends a driver's connection for one statement, by the deadline, and takes it back.
        prepare: Use prepared statements.
        timeout: Seconds that a call may take.
        listen_dsn: Where to listen, if it is known.
    """

    stepped = False
    _closed = False

    def __init__(
        self,
        borrow: Callable[[Deadline], Any],
        prepare: bool,
        timeout: float,
        listen_dsn: str | None = None,
    ) -> None:
        self._borrow = borrow
        self._prepare = prepare
        self._timeout = timeout
        self.listen_dsn = listen_dsn or None

    def _begin(self, deadline: Deadline | None) -> Deadline:
        if self._closed:
            raise closed_error()
        return deadline or Deadline(self._timeout)

    @staticmethod
    def _failed(error: BaseException, deadline: Deadline) -> StoreError:
        """The error to raise for what a pool or driver raised."""
        if isinstance(error, StoreError):
            return error
        inner = getattr(error, "orig", None) or error
        if isinstance(inner, Late) or (isinstance(inner, TimeoutError) and not deadline.sent):
            return deadline.missed()
        return named(inner)

    def close(self) -> None:
        """What was passed in is the caller's."""
        self._closed = True

    async def aclose(self) -> None:
        """What was passed in is the caller's."""
        self._closed = True


def _run(connection: Any, sql: str, args: list[Any], prepare: bool, deadline: Deadline) -> Rows:
    import psycopg
    from psycopg.rows import tuple_row

    cursor: Any
    deadline.sent = True
    with (
        limited(connection, deadline),
        psycopg.RawCursor(connection, row_factory=tuple_row) as cursor,
    ):
        cursor.execute(sql, args, prepare=prepare, binary=True)
        return cursor.fetchall() if cursor.description else []


def stale(connection: Any) -> bool:
    """Whether the server has hung up while nobody was looking: something came in unasked."""
    if connection.closed:
        return True
    if not hasattr(select, "poll"):  # Windows: the first call after a restart fails instead
        return False
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(0))


def psycopg_options(dsn: str) -> dict[str, Any]:
    """How psycopg connects, but for what the address says itself."""
    options = {"connect_timeout": CONNECT_SECONDS, **KEEPALIVE}
    return {
        "autocommit": True,
        "client_encoding": "UTF8",
        **{name: value for name, value in options.items() if name not in dsn},
    }


class PsycopgSource(Forking):
    """Connections of our own, one a lane."""

    def __init__(self, dsn: str, prepare: bool, timeout: float) -> None:
        import psycopg

        self._connect = psycopg.connect
        self._dsn = dsn
        self.listen_dsn: str | None = dsn
        self._prepare = prepare
        self._timeout = timeout
        self._closed = False
        self._inherited: list[Any] = []
        self._open: dict[str, Any] = {}
        self._spare: list[Any] = []
        self._start_over()
        watch_forks(self)

    def _start_over(self) -> None:
        self._attempts = Attempts()
        self._locks = {lane: threading.RLock() for lane in LANES}

    def after_fork_in_child(self) -> None:
        """Leave the parent's connections alone: closing them would end the parent's sessions."""
        self._inherited.extend(self._open.values())
        self._inherited.extend(self._spare)
        self._open = {}
        self._spare = []
        self._start_over()

    def fetch(self, lane: str, sql: str, args: list[Any], deadline: Deadline | None = None) -> Rows:
        deadline = deadline or Deadline(self._timeout)
        lock = self._locks[lane]
        try:
            if not lock.acquire(timeout=deadline.left()):
                raise Late
            with lock:  # from here on no interrupt can leave it held
                lock.release()
                return self._in_lane(lane, sql, args, deadline)
        except BaseException as error:
            if lock._is_owned():  # type: ignore[attr-defined]
                lock.release()  # interrupted before the ``with``
            if isinstance(error, Late):
                self._drop_spares()  # they may well be on the same dead way
                raise deadline.missed() from None
            raise

    def _in_lane(self, lane: str, sql: str, args: list[Any], deadline: Deadline) -> Rows:
        used = self._open.get(lane)
        fresh = used is None or used.closed
        try:
            return self._once(lane, sql, args, deadline)
        except StoreReadOnlyError:
            if fresh:
                raise
            # A primary no longer: the address may lead to another by now.
            return self._once(lane, sql, args, deadline)

    def _once(self, lane: str, sql: str, args: list[Any], deadline: Deadline) -> Rows:
        connection = self._open.get(lane)
        try:
            if connection is None or stale(connection):
                if connection is not None:
                    connection.close()
                connection = self._open[lane] = self._new(LANE, deadline)
            return _run(connection, sql, args, self._prepare, deadline)
        except (StoreError, Late):
            raise
        except BaseException as error:
            failed = named(error) if _is_answer(error) else None
            broken = self._open.get(lane)
            if broken is not None and (
                broken.broken or failed is None or isinstance(failed, StoreReadOnlyError)
            ):
                broken.close()
                del self._open[lane]
            if failed is None:
                raise
            raise failed from error

    def _new(self, settings: str, deadline: Deadline) -> Any:
        if self._closed:
            raise closed_error()
        connection = self._attempts.wait(self._reach, deadline)
        try:
            if self._prepare:
                with limited(connection, deadline):
                    connection.execute(settings)
            else:
                connection.prepare_threshold = None
        except BaseException:
            end(connection)
            raise
        return connection

    def _reach(self) -> Any:
        try:
            return self._connect(self._dsn, **psycopg_options(self._dsn))
        except Exception as error:
            if unreadable(error):
                raise bad_address() from None
            raise

    def borrow(self) -> Any:
        """A connection for a transaction of its own."""
        if self._closed:
            raise closed_error()
        while self._spare:
            connection = self._spare.pop()
            if not stale(connection):
                return connection
            connection.close()
        deadline = Deadline(self._timeout)
        try:
            return self._new(SESSION, deadline)
        except Late:
            raise deadline.missed() from None

    def give_back(self, connection: Any) -> None:
        """Take a borrowed connection back; one that is not idle is closed."""
        idle = connection.info.transaction_status == 0 and not connection.broken
        if idle and not self._closed and len(self._spare) < SPARE:
            self._spare.append(connection)
            return
        if connection.broken:
            self._drop_spares()  # what ended this one may have ended them
        connection.close()

    def _drop_spares(self) -> None:
        while self._spare:
            self._spare.pop().close()

    def close(self) -> None:
        self._closed = True
        self._attempts.drop(lambda connection: connection.close())
        for lane in LANES:
            # A call that is under way ends at its deadline, and finds the store closed.
            if self._locks[lane].acquire(timeout=self._timeout + 1):
                try:
                    connection = self._open.pop(lane, None)
                    if connection is not None:
                        connection.close()
                finally:
                    self._locks[lane].release()
        self._drop_spares()


def _is_answer(error: BaseException) -> bool:
    """Whether it is about the call, not an interrupt that came in the middle of it."""
    ours = (StoreError, Late, OSError, ValueError, TypeError)
    return isinstance(error, ours) or is_drivers(error)


class LentSource(Lent):
    """Connections of a pool or an engine of the caller's, by psycopg."""

    def fetch(self, lane: str, sql: str, args: list[Any], deadline: Deadline | None = None) -> Rows:
        deadline = self._begin(deadline)
        try:
            with self._borrow(deadline) as connection, left_if_read_only(connection):
                return _run(connection, sql, args, self._prepare, deadline)
        except Exception as error:
            if not _is_answer(error):
                raise
            raise self._failed(error, deadline) from error


@contextlib.contextmanager
def left_if_read_only(connection: Any) -> Iterator[None]:
    """Close a connection to a server that is no primary any more: its pool makes another."""
    try:
        yield
    except Exception as error:
        if isinstance(named(error), StoreReadOnlyError):
            end(connection)
        raise


@contextlib.contextmanager
def _from_pool(pool: Any, deadline: Deadline) -> Iterator[Any]:
    """One statement, one transaction, whatever the pool's owner has set; given back as it was."""
    with pool.connection(timeout=deadline.left()) as connection:
        before = connection.autocommit
        if not before:
            connection.autocommit = True
        try:
            yield connection
        finally:
            if not before and not connection.closed:
                connection.autocommit = False


@contextlib.contextmanager
def _from_engine(engine: Any, deadline: Deadline) -> Iterator[Any]:
    with engine_connection(engine, deadline) as connection:
        driver = connection.connection.driver_connection
        try:
            yield driver
        finally:
            if driver.closed:
                connection.invalidate()  # the pool does not see what goes past it
