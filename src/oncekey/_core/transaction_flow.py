"""What a transaction does, as a flow: open, claim, record the answer, commit or roll back.

The store says what to send (``TransactionRecords``), a driver's connection sends it, and the shells
in ``transact.py`` make the calls that the flow asks for.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Generator
from contextvars import ContextVar, Token
from time import perf_counter
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, cast

from oncekey._core.call import (
    CURRENT,
    Job,
    Result,
    _encode,
    refusal,
)
from oncekey._core.drive import Pause
from oncekey._core.flows import (
    FIRST_LOOK,
    Claim,
    held_here,
    new_owner,
    outer_claim,
    repeatable,
)
from oncekey._core.in_hand import Hold, in_hand
from oncekey._core.tx import UNDONE, UNSEEN, Tx
from oncekey.abc import Loan
from oncekey.drivers import DriverConnection, connection_of, is_begun, is_drivers, named
from oncekey.drivers._deadlines import Deadline, Late, end
from oncekey.errors import (
    ClaimLostError,
    StoreError,
    StoreReadOnlyError,
    TransactionRefusedError,
)
from oncekey.instrument import events
from oncekey.instrument.events import EventKind, emit, listening
from oncekey.instrument.timings import called, ended, started, store_kind
from oncekey.models import ClaimReply, ClaimVerdict

__all__ = [
    "Ask",
    "Block",
    "ErrorAnswer",
    "Step",
    "Steps",
    "Tx",
    "Whole",
    "current_transaction",
    "in_transaction",
    "open_keys",
]

logger = logging.getLogger("oncekey")

BUSY_MS: Final = 1000
FLUSHES: Final = 12  # what an ORM sends at the end is the caller's own work: so many times as long
ErrorAnswer = Callable[[Exception], Any]
T = TypeVar("T")


_current: ContextVar[Tx] = ContextVar("oncekey_transaction")
_Open = frozenset[tuple[int, bytes]]
open_keys: ContextVar[_Open] = ContextVar("oncekey_open_keys", default=frozenset())


def current_transaction() -> Tx:
    """The transaction in which the running handler works.

    Raises:
        LookupError: No transactional handler is running here.
    """
    tx = _current.get(None)
    if tx is None:
        raise LookupError(
            "no transactional handler is running here: current_transaction() is for the code "
            "inside a function or block that transaction() or wrap(transactional=True) guards"
        )
    return tx


def in_transaction() -> bool:
    """Whether a transactional handler is running here."""
    return _current.get(None) is not None


# What a flow asks for: a call of a driver, as a tuple, or one of these.


class Ask(NamedTuple):
    """A call of the store, which sees to its own deadline and errors."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()


class Whole(NamedTuple):
    """Steps that no cancellation may come between: nobody could tell what went through."""

    flow: Steps[Any]


Step = tuple[Any, ...] | Ask | Pause | Whole
Steps = Generator[Step, Any, T]

_BUSY: Final = ClaimReply(ClaimVerdict.IN_FLIGHT, 0, BUSY_MS, 0, None)
_CONFLICT: Final = ClaimReply(ClaimVerdict.CONFLICT, 0, 0, 0, None)


class Block:
    """What a transaction does, whoever makes the calls."""

    awaits: bool  # whether calls are awaited
    _tx: Tx | None = None
    _claim: Claim | None = None
    _connection: DriverConnection | None = None
    _records: Any = None  # the store's, for this transaction
    _raises = True  # an error reaches the caller also where an answer was made of it
    _sent = False  # the commit is under way
    _flushing = False  # the caller's own work is under way
    _left = False  # the connection was, as another may do better
    _replay: Tx | None = None  # what was handed out where the work was done before
    _undoes: Any = None  # what undoes all that a block writes for which there is nothing to do

    def __init__(self, store: Any, on: Any, job: Job, error_answer: ErrorAnswer | None) -> None:
        self._store = store
        self._on = on
        self._job = job
        self._error_answer = error_answer
        self._seconds = store.timeout  # that a call of a driver may take
        self._digest = job.key.digest
        self._hold = Hold()
        self._loan = Loan()
        self._tokens: list[tuple[ContextVar[Any], Token[Any]]] = []

    def _whole(self, flow: Steps[T]) -> Steps[T]:
        raise NotImplementedError

    # Into the block

    def _enter_flow(self) -> Steps[ClaimReply]:
        """Open a transaction and claim the key in it, waiting for another holder as planned."""
        job, store, digest, hold = self._job, self._store, self._digest, self._hold
        job.codec.check()
        if open_keys.get():
            self._check_nesting()
        key, plan = job.key, job.plan
        question = Ask(store.peek, (key, job.fingerprint, plan.terms))
        begun = plan.monotonic()
        look = FIRST_LOOK
        waited = joined = False
        failures = 0
        while True:
            reply = _BUSY
            # After a wait the answer is most likely there: look before taking a connection for it.
            known: ClaimReply | None = (yield question) if waited else None
            if known is not None:
                reply = known
            elif in_hand.take(store, digest, hold):
                try:
                    reply = yield from self._attempt(begun)
                except BaseException as error:
                    in_hand.give(store, digest, hold)
                    failures += 1
                    if not self._may_try_again(error, failures):
                        raise
                    if not self._left or failures > 1:  # else the next connection may do at once
                        yield Pause(key, look)
                    continue
                if reply.verdict is ClaimVerdict.WON:
                    hold.fingerprint = job.fingerprint
                    return reply
                in_hand.give(store, digest, hold)
                joined = self._connection is not None and self._connection.joined
            elif not waited:
                # Held in this process, perhaps by a copy that only gets the answer.
                reply = (yield question) or reply
            if reply is _BUSY and in_hand.differs(store, digest, job.fingerprint):
                reply = _CONFLICT
            left = begun + plan.wait - plan.monotonic()
            if reply.verdict is not ClaimVerdict.IN_FLIGHT or left <= 0 or joined:
                break
            if held_here(key, store, reply):  # by a guard around this transaction
                reply = reply._replace(own=True)
                break
            waited = True
            jittered = look * random.uniform(0.7, 1.3)  # noqa: S311 - jitter, not a secret
            yield Pause(key, min(jittered, left))
            look = min(look * 2, store.poll_seconds)
        if listening():
            if waited:
                self._tell(EventKind.WAITED, begun, 0, 0)
            kind = EventKind(reply.verdict.value)  # they have the same names
            self._tell(kind, begun, reply.fence, reply.attempts)
        return reply

    def _check_nesting(self) -> None:
        opened = open_keys.get()
        operation, store = self._job.operation, self._store
        if (id(store), self._digest) in opened:
            raise TransactionRefusedError(
                f"{operation} opens a transaction for a key that this code has open already: it "
                "would wait for itself. Use one block for the key, or another key for the inner "
                "step"
            )
        if self._on is None and store.one_writer and any(at == id(store) for at, _ in opened):
            raise TransactionRefusedError(
                f"{operation} opens a second transaction on a store with one writer at a time, "
                "inside the first: it would wait for itself. Pass on=tx.connection to join the "
                "first"
            )

    def _may_try_again(self, error: BaseException, failures: int) -> bool:
        """Whether to begin anew: nothing has been done yet that a failure did not undo."""
        if failures > 2 or (self._connection is not None and self._connection.joined):
            return False  # or the transaction is the caller's own
        again = isinstance(error, StoreError) and repeatable(error)
        return again or (self._left and failures == 1)

    def _attempt(self, begun: float) -> Steps[ClaimReply]:
        """One try on one connection. Without a win the connection is given back as it was."""
        store, self._loan = self._store, Loan()
        loan, self._connection, self._left = self._loan, None, False
        try:
            self._records = yield Ask(store.records)
            loan.source = self._on
            if self._on is None:
                yield Ask(store.lend, (loan,))
            try:
                # No word to the server yet: to wait for a pool may be cancelled.
                self._connection = yield from connection_of(
                    loan.source, loan.close, store.timeout, self.awaits
                )
            except Exception as error:
                if not is_drivers(error):
                    raise
                self._raise(error, None)
            return (yield from self._whole(self._claim_flow(begun)))
        except BaseException:
            yield from self._whole(self._roll_back())
            raise

    def _claim_flow(self, begun: float) -> Steps[ClaimReply]:
        """Begin, and claim the key."""
        connection, records, job = self._connection, self._records, self._job
        assert connection is not None  # noqa: S101 - for the type checker
        if connection.flavour != records.flavour:
            raise TransactionRefusedError(
                f"this connection is to {connection.flavour}, the store is {records.flavour}: only "
                "what lies in one database commits together"
            )
        sent = perf_counter()
        yield from connection.begin()
        owner, terms = new_owner(), job.plan.terms
        reply: ClaimReply = yield from records.claim(
            connection, job.key, owner, job.fingerprint, terms
        )
        if events._timers:
            called("claim", store_kind(self._store), sent)
        if reply.verdict is not ClaimVerdict.WON:
            yield from connection.rollback()
            return reply
        if self._error_answer is not None:
            yield from connection.savepoint()
        claim = Claim(
            job.key, owner, reply.fence, reply.attempts, reply.takeover, terms, job.operation, begun
        )
        claim.outer, claim.ttl_bounds = outer_claim(), job.plan.ttl_bounds
        claim.leased_at = float("inf")  # held by the transaction, not by a lease
        self._claim = claim
        kind = EventKind.TAKEOVER if reply.takeover else EventKind.FIRST
        if listening():
            self._tell(kind, begun, reply.fence, reply.attempts)
        return reply

    def _opened(self, reply: ClaimReply) -> Tx:
        job, claim, connection = self._job, self._claim, self._connection
        if claim is None or connection is None:
            if reply.verdict is ClaimVerdict.REPLAY:
                if is_begun(self._on) is False:
                    self._undoes = self._on.rollback
                self._replay = Tx(None, None, job.codec.decode(reply.answer or b"j"))
                return self._replay
            raise refusal(reply, job.operation, job.plan.terms)
        claim.home = weakref.ref(self._store)
        self._tx = tx = Tx(connection.target, claim)
        keys = open_keys.get() | {(id(self._store), self._digest)}
        for variable, value in ((CURRENT, claim), (_current, tx), (open_keys, keys)):
            self._tokens.append((variable, cast("ContextVar[Any]", variable).set(value)))
        if events._timers:
            started(claim)
        return tx

    # Out of it

    def _leave(self) -> None:
        if events._timers and self._claim is not None:
            ended(self._claim)
        while self._tokens:
            variable, token = self._tokens[-1]
            try:
                variable.reset(token)
            except (ValueError, RuntimeError):
                pass  # another context, for a coroutine that is thrown away; or done already
            self._tokens.pop()

    def _exit_flow(self, error: BaseException | None) -> Steps[Result | None]:
        tx, connection = self._tx, self._connection
        if tx is None or connection is None:
            if error is None and self._replay is not None and not self._replay.seen:
                yield from self._undo_unseen()
            return None
        if error is not None:
            return (yield from self._fail(error))
        self._flushing = True
        if self._store.timeout is not None:
            self._seconds = self._store.timeout * FLUSHES
        try:
            yield from connection.flush()
        except Exception as late:
            # What an ORM sends only now is the handler's work, and so are its errors.
            self._flushing, self._seconds = False, self._store.timeout
            failed = yield from self._fail(late)
            if failed is None or self._raises:
                raise
            return failed
        self._flushing, self._seconds = False, self._store.timeout
        return (yield from self._record(tx._answer))

    def _undo_unseen(self) -> Steps[NoReturn]:
        """Tell of a block that ran for a key that was done before, and never looked."""
        told = UNSEEN
        if self._undoes is not None:
            try:
                yield Ask(self._undoes)
                told = UNDONE
            except Exception as error:  # noqa: BLE001 - what it did not see is told in any case
                logger.warning("%s: rolling back failed: %s", self._job.operation, error)
        raise TransactionRefusedError(f"{self._job.operation}: {told}")

    def _record(self, value: Any) -> Steps[Result]:
        """Record the answer and commit, or roll back if it is not one to keep."""
        job, claim, connection = self._job, self._claim, self._connection
        assert claim is not None and connection is not None  # noqa: S101, PT018 - for types
        kind = EventKind.RELEASED
        try:
            if job.keeps(value):
                kind = EventKind.FENCED
                connection.must_be_open()
                answer = _encode(job, value)
                sent = perf_counter()
                held: bool = yield from self._records.complete(
                    connection, job.key, claim.owner, claim.fence, answer, claim.terms
                )
                if not held:
                    claim.lost = True
                    raise ClaimLostError(
                        f"{job.operation} lost its claim inside its own transaction: the block or "
                        "handler rolled back or changed oncekey's tables. Nothing of it was "
                        "committed"
                    )
                self._sent = True
                yield from connection.commit()
                kind = EventKind.COMPLETED
                if events._timers:
                    called("complete", store_kind(self._store), sent)
            else:
                yield from connection.rollback()
        except BaseException:
            self._sent = False
            yield from self._roll_back()
            self._over(kind)
            raise
        self._over(kind)
        return Result(value, False)

    def _fail(self, error: BaseException) -> Steps[Result | None]:
        """Undo the handler's writes. Record the answer for its error, or free the key."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - for the type checker
        answer = None
        if self._error_answer is not None and isinstance(error, Exception):
            try:
                answer = self._error_answer(error)
            except BaseException:
                yield from self._roll_back()
                self._over(EventKind.RELEASED)
                raise
        if answer is not None:
            try:
                yield from connection.undo()
            except StoreError as failed:
                what = self._job.operation
                logger.warning("%s: its error could not be recorded: %s", what, failed)
            else:
                return (yield from self._record(answer))
        yield from self._roll_back()
        self._over(EventKind.RELEASED)
        return None

    def _roll_back(self) -> Steps[None]:
        """Undo, whatever state the connection is in: the error that led here is what counts."""
        loan = self._loan
        try:
            if self._connection is not None:
                yield from self._connection.rollback()
            elif loan.close is not None:
                yield loan.close, loan.source
        except StoreError as error:  # the server undoes what nobody commits
            logger.debug("rolling back failed: %s", error)

    def _over(self, kind: EventKind) -> None:
        claim = self._claim
        assert claim is not None  # noqa: S101 - for the type checker
        if claim.settled:
            return
        claim.settled = claim.ended = True
        in_hand.give(self._store, self._digest, self._hold)
        if self._connection is None or not self._connection.joined:
            self._store.settled_here(self._job.key)  # else nothing is before the caller commits
        if listening():
            self._tell(kind, claim.started, claim.fence, claim.attempts)

    def _tell(self, kind: EventKind, begun: float, fence: int, attempts: int) -> None:
        job = self._job
        spent = job.plan.monotonic() - begun
        emit(kind, job.key, job.operation, duration=spent, fence=fence, attempts=attempts)

    def _raise(self, error: Exception, deadline: Deadline | None) -> NoReturn:
        """Raise what an error of a driver means.

        A call that is late ends the connection, and with it the transaction: what it did is undone,
        unless it was the commit. A connection that is not the caller's is left if another may do
        better.
        """
        connection = self._connection
        late = isinstance(error, Late)
        if deadline is not None and (late or (connection is None and type(error) is TimeoutError)):
            deadline.sent = self._sent
            failed: Exception = deadline.missed()
        elif self._flushing:
            raise error  # the caller's own
        else:
            failed = named(error, self._records.named)
            if connection is not None and self._on is not None:
                failed = connection.explained(failed, error)
        dead = late or isinstance(failed, StoreReadOnlyError)
        if dead and connection is not None and connection.close is not None:
            self._left = True
            end(connection.raw)
        if failed is error:
            raise error
        raise failed from error
