"""What the two PostgreSQL stores have in common: bookkeeping, steps of statements, and URLs."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

from oncekey.drivers._deadlines import Deadline, check_timeout
from oncekey.errors import StoreConfigError, StoreError
from oncekey.instrument.events import EventKind, emit
from oncekey.models import Record, State, check_text
from oncekey.stores._batching import Job
from oncekey.stores._waiters import Waiters
from oncekey.stores.postgres.calls import Statement
from oncekey.stores.postgres.errors import named
from oncekey.stores.postgres.statements import Statements

SWEEP_EVERY: Final = 256  # new records between two steps of sweeping
SWEEP_PAGES: Final = 32  # pages a step passes over: a few times what those records fill
GRACE_MS: Final = 60_000
WORTH_HEARING: Final = 0.02  # seconds: for a shorter wait nobody is asked to announce the outcome
REGISTER_SECONDS: Final = 30
MANY_NOTES: Final = 10_000  # more than so many keys are looked through for those of the past


def held(record: Record | None, owner: bytes, fence: int) -> bool:
    """Whether this very completion is on record already: its first reply was lost."""
    return (
        record is not None
        and record.state is State.COMPLETED
        and record.owner == owner
        and record.fence == fence
    )


class Round:
    """Once around the table, from wherever the last sweeper stood."""

    def __init__(self) -> None:
        self.begun: int | None = None
        self.wrapped = False

    def over(self, page: int | None, next_page: int | None) -> bool:
        """Take note of a step. True: everything was passed over, or another sweeper is at it."""
        if page is None or next_page is None:
            return True
        if self.begun is None:
            self.begun = page
        if next_page == 0:
            if self.wrapped or self.begun == 0:
                return True
            self.wrapped = True
        return self.wrapped and next_page >= self.begun


class Face:
    """What the sync and the async store have in common."""

    poll_seconds = 0.25

    def _set_up(self, tenant: str, listen: str | bool | None, timeout: float) -> None:
        if tenant:
            check_text(tenant, "tenant", 63)
        self.tenant = tenant
        self.timeout = check_timeout(timeout)
        self._listen = listen
        self._home: Statements | None = None  # once the schema was looked at
        self._store_id = ""
        self._new_records = 0
        self._waiters = Waiters()
        self._registered: dict[bytes, float] = {}
        self._notes: dict[str, bytes] = {}  # what will be announced for a key

    def _deadline(self, jobs: Sequence[Job]) -> Deadline:
        """When a batch must be done: in time for each of its calls, however long they waited.

        A tenth of the time is given to it even so: else no batch would get anywhere after a hang.
        """
        first = min(job.begun for job in jobs)
        seconds = self.timeout
        return Deadline(seconds, max(first + seconds, time.monotonic() + seconds / 10))

    def _heard(self, digest: bytes) -> None:
        """A key was settled, here or elsewhere."""
        self._registered.pop(digest, None)
        self._waiters.wake(digest)

    def _announced_by(self, note: str | bytes, digest: bytes) -> None:
        if len(self._notes) > MANY_NOTES:
            kept = self._registered
            self._notes = {word: key for word, key in self._notes.items() if key in kept}
        self._notes[note.decode() if isinstance(note, bytes) else note] = digest

    def _noted(self, note: str) -> None:
        """A word was said on the channel. Who did not ask for it can make nothing of it."""
        digest = self._notes.pop(note, None)
        if digest is not None:
            self._heard(digest)

    def _listen_dsn(self, source: Any, prepare: bool) -> str | None:
        if isinstance(self._listen, str):
            return plain(self._listen)
        if self._listen is False or not prepare:
            return None  # behind a transaction pooler nobody can listen
        return str(source.listen_dsn) if source.listen_dsn else None

    def _must_register(self, digest: bytes) -> bool:
        now = time.monotonic()
        if self._registered.get(digest, 0.0) > now:
            return False
        if len(self._registered) > MANY_NOTES:
            self._registered = {key: at for key, at in self._registered.items() if at > now}
        self._registered[digest] = now + REGISTER_SECONDS / 2
        return True

    def _time_to_sweep(self) -> bool:
        self._new_records += 1
        if self._new_records < SWEEP_EVERY:
            return False
        self._new_records = 0
        return True

    @staticmethod
    def _swept(rows: Sequence[Sequence[Any]]) -> tuple[int, int | None, int | None]:
        removed, page, next_page, _ = rows[0]
        if removed:
            emit(EventKind.SWEPT, operation="sweep", count=removed)
        return int(removed), page, next_page


Steps = Generator[Statement, Any, Any]


def not_made(error: BaseException) -> StoreError:
    """The error for a schema that could not be made."""
    if getattr(error, "sqlstate", None) == "42501":
        return StoreConfigError(
            "this role may not make tables here: GRANT CREATE ON the schema to it, or run "
            "'oncekey migrate URL' as a role that may"
        )
    return named(error)


def drive(steps: Steps, execute: Callable[[str, list[Any]], Any]) -> Any:
    """Run the statements that ``steps`` asks for, one after the other."""
    try:
        statement = next(steps)
        while True:
            try:
                rows = execute(*statement)
            except StoreError as error:
                statement = steps.throw(error)
            else:
                statement = steps.send(rows)
    except StopIteration as stop:
        return stop.value


async def adrive(steps: Steps, execute: Callable[[str, list[Any]], Awaitable[Any]]) -> Any:
    """The asynchronous form of ``drive``."""
    try:
        statement = next(steps)
        while True:
            try:
                rows = await execute(*statement)
            except StoreError as error:
                statement = steps.throw(error)
            else:
                statement = steps.send(rows)
    except StopIteration as stop:
        return stop.value


# URLs


def need(package: str, extra: str) -> None:
    """Raise unless a driver is installed."""
    if importlib.util.find_spec(package) is None:
        raise StoreConfigError(
            f"the PostgreSQL store needs {package}: run pip install 'oncekey[{extra}]'"
        )


def driver_of(url: str) -> str | None:
    """The driver that a URL's scheme names."""
    return url.partition("://")[0].partition("+")[2] or None


def plain(url: str) -> str:
    """The URL as drivers know it."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0].lower() not in ("postgresql", "postgres"):
        if "=" in url and not separator:
            return url  # a connection string of key=value pairs
        raise StoreConfigError(
            "that is not a PostgreSQL URL: write postgresql://user:password@host:5432/database"
        )
    return f"postgresql://{rest}"


def own_options(url: str, options: dict[str, Any]) -> str:
    """Take our own options out of the URL's query; the driver gets the rest."""
    address, _, query = url.partition("?")  # no more is taken apart than must be
    rest = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "tenant":
            options.setdefault(name, value)
        elif name == "prepare":
            if value not in ("true", "false"):
                raise StoreConfigError(f"prepare must be true or false, got {value!r}")
            options.setdefault(name, value == "true")
        elif name == "timeout":
            try:
                options.setdefault(name, float(value))
            except ValueError:
                raise StoreConfigError(f"timeout must be seconds, got {value!r}") from None
        elif name == "listen":
            options.setdefault(name, False if value == "false" else value)
        else:
            rest.append((name, value))
    return address + (f"?{urlencode(rest, quote_via=quote)}" if rest else "")
