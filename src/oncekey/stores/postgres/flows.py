"""What the two PostgreSQL stores have in common: bookkeeping, and flows that both of them run."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, Final

from oncekey._core.drive import Flow, Op
from oncekey.abc import Loan
from oncekey.drivers import driver_error, in_one_transaction
from oncekey.drivers._deadlines import check_timeout
from oncekey.errors import OncekeyError, StoreConfigError, StoreError
from oncekey.instrument.events import EventKind, emit
from oncekey.models import Key, Record, State, check_text
from oncekey.stores._waiters import Waiters
from oncekey.stores.postgres.addresses import plain
from oncekey.stores.postgres.calls import Recent, Statement
from oncekey.stores.postgres.errors import named
from oncekey.stores.postgres.schema import Migration
from oncekey.stores.postgres.statements import Statements

__all__ = ["Flows", "migrated"]

SWEEP_EVERY: Final = 256  # new records between two steps of sweeping
SWEEP_PAGES: Final = 32  # pages a step passes over: a few times what those records fill
GRACE_MS: Final = 60_000
WORTH_HEARING: Final = 0.02  # seconds: for a shorter wait nobody is asked to announce the outcome
REGISTER_SECONDS: Final = 30
MANY_NOTES: Final = 10_000  # more than so many keys are looked through for those of the past


class Flows:
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
        self._recent = Recent()
        self._new_records = 0
        self._start_over()

    def _start_over(self) -> None:
        """Nobody waits yet, or any more: after a fork."""
        self._waiters = Waiters()
        self._registered: dict[bytes, float] = {}
        self._notes: dict[str, bytes] = {}  # what will be announced for a key

    # Who waits

    def _heard(self, digest: bytes) -> None:
        """A key was settled, here or elsewhere."""
        self._registered.pop(digest, None)
        self._waiters.wake(digest)

    def _noted(self, note: str) -> None:
        """A word was said on the channel. Who did not ask for it can make nothing of it."""
        digest = self._notes.pop(note, None)
        if digest is not None:
            self._heard(digest)

    def _listen_dsn(self, source: Any, prepare: bool) -> str | None:
        if isinstance(self._listen, str):
            return str(plain(self._listen))
        if self._listen is False or not prepare:
            return None  # behind a transaction pooler nobody can listen
        return str(source.listen_dsn) if source.listen_dsn else None

    def _announced(self, listener: Any, key: Key, seconds: float) -> Flow[bool]:
        """Ask to be told of the outcome; True if it is there already."""
        if listener is None or seconds < WORTH_HEARING:
            return False
        listener.want()
        digest, now = key.digest, time.monotonic()
        if self._registered.get(digest, 0.0) > now:
            return False
        if len(self._registered) > MANY_NOTES:
            self._registered = {
                one: until for one, until in self._registered.items() if until > now
            }
        self._registered[digest] = now + REGISTER_SECONDS / 2
        try:
            args = [self.tenant, digest, REGISTER_SECONDS * 1000]
            rows = yield Op("_fetch", ("await_change", args))
            self._announced_by(rows[0][0], digest)
            record: Record | None = yield Op("read", (key,))
        except StoreError as error:
            self._registered.pop(digest, None)
            if not error.retryable:
                raise
            return False  # whoever waits looks for itself meanwhile
        if record is None or record.state is State.PENDING:
            return False
        self._heard(digest)  # also for those who wait because we had asked
        return True

    def _announced_by(self, note: str | bytes, digest: bytes) -> None:
        if len(self._notes) > MANY_NOTES:
            kept = self._registered
            self._notes = {word: key for word, key in self._notes.items() if key in kept}
        self._notes[note.decode() if isinstance(note, bytes) else note] = digest

    # Sweeping

    def _step_of_sweeping(self) -> Flow[None]:
        try:
            self._swept((yield Op("_fetch", ("sweep", [SWEEP_PAGES, None, GRACE_MS]))))
        except StoreError:
            pass  # the call itself succeeded; a later step finds what this one left

    def _round_of_sweeping(self, limit: int, now: int | None) -> Flow[int]:
        """Once around the table, from wherever the last sweeper stood."""
        cutoff = (yield Op("now", ())) if now is None else now
        removed, begun, wrapped = 0, None, False
        while removed < limit:
            rows = yield Op("_fetch", ("sweep", [SWEEP_PAGES * 8, cutoff, 0]))
            dead, page, following = self._swept(rows)
            removed += dead
            if page is None or following is None:
                break  # another sweeper is at it
            begun = page if begun is None else begun
            if following == 0:
                if wrapped or begun == 0:
                    break
                wrapped = True
            if wrapped and following >= begun:
                break
        return removed

    @staticmethod
    def _swept(rows: Sequence[Sequence[Any]]) -> tuple[int, int | None, int | None]:
        removed, page, next_page, _, lag = rows[0]
        if removed:
            late = int(lag) / 1000
            emit(EventKind.SWEPT, None, "sweep", count=removed, store="postgres", lateness=late)
        return int(removed), page, next_page


def migrated(
    store: Any, steps: Generator[Statement, Any, list[Migration]], asynchronous: bool
) -> Generator[tuple[Any, ...], Any, list[str]]:
    """Bring the tables up to date, in one transaction of the store's own; says what was done."""
    loan = Loan()  # all of it on one connection, whatever the pool
    try:
        yield store.lend, loan
        done = yield from in_one_transaction(loan, store.timeout, asynchronous, steps)
    except Exception as error:
        if isinstance(error, OncekeyError):
            raise
        raise _not_made(driver_error(error)) from error
    return [f"{one.version:03d} {one.name} ({one.step})" for one in done]


def _not_made(error: BaseException) -> StoreError:
    """The error for a schema that could not be made."""
    if getattr(error, "sqlstate", None) == "42501":
        return StoreConfigError(
            "this role may not make tables here: GRANT CREATE ON the schema to it, or run "
            "'oncekey migrate URL' as a role that may"
        )
    return named(error)
