"""Exactly once: the claim, the caller's writes and the answer in one transaction.

Nobody but the transaction itself sees its claim before it commits, so there is no lease to keep
and nothing to take over: a crash at any point leaves all of it or nothing. A copy that comes
meanwhile finds the key in another's hand at once; it waits without a connection.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, NamedTuple, cast

from oncekey._core.call import (
    CURRENT,
    Job,
    Result,
    _encode,
    _uncancelled,
    in_background,
    refusal,
)
from oncekey._core.drive import Flow, Op, Pause, arun, run
from oncekey._core.flows import (
    FIRST_LOOK,
    Claim,
    held_here,
    new_owner,
    outer_claim,
    repeatable,
)
from oncekey.abc import AsyncStore, AsyncTransactional, Store, Transactional
from oncekey.errors import (
    ClaimLostError,
    StoreError,
    TransactionRefusedError,
)
from oncekey.instrument.events import EventKind, emit, listening
from oncekey.models import ClaimReply, Verdict

__all__ = [
    "AsyncTransaction",
    "Transaction",
    "Tx",
    "acall_in_transaction",
    "call_in_transaction",
    "check_transactional",
    "current_transaction",
    "in_transaction",
    "takes_parameter",
]

logger = logging.getLogger("oncekey")

BUSY_MS: Final = 1000
ErrorAnswer = Callable[[Exception], Any]


class Tx:
    """What a transaction hands out: where to write, and the answer if the work was done before.

    Attributes:
        connection: What to write on: the connection or session that was passed, or one of the
            store's own. ``None`` on a replay.
        replayed: The work was done before; ``answer`` is what it gave, and nothing is to be done.
        answer: The stored answer, or what was set in this block.
        claim: The claim, for its fence and attempts. ``None`` on a replay.
    """

    def __init__(self, connection: Any, claim: Claim | None, answer: Any = None) -> None:
        self.connection = connection
        self.claim = claim
        self.replayed = claim is None
        self.answer = answer

    @property
    def session(self) -> Any:
        """The same as ``connection``, where that is a session."""
        return self.connection


_current: ContextVar[Tx] = ContextVar("oncekey_transaction")
_Open = frozenset[tuple[int, bytes]]
_open_keys: ContextVar[_Open] = ContextVar("oncekey_open_keys", default=frozenset())


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


class _Hold:
    """What one block has: a key in hand, and a connection. Known to it before it has them."""

    __slots__ = ("fingerprint", "hand")

    def __init__(self) -> None:
        self.fingerprint = b""  # of the payload, once the key is won
        self.hand: Any = None


class _InHand:
    """The keys that transactions of this process hold, store by store: one tries, others wait.

    With each key that was won stands the payload that it was won with: nobody else can see that
    before the commit, and a copy with another payload need not wait to learn that it conflicts.
    Taking a key again and giving it twice do nothing, so that whoever was interrupted may do both.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start over: in a forked child nothing is in hand."""
        self._lock = threading.Lock()
        self._keys: weakref.WeakKeyDictionary[Any, dict[bytes, _Hold]] = weakref.WeakKeyDictionary()

    def take(self, store: Any, digest: bytes, hold: _Hold) -> bool:
        with self._lock:
            return self._keys.setdefault(store, {}).setdefault(digest, hold) is hold

    def differs(self, store: Any, digest: bytes, fingerprint: bytes) -> bool:
        """Whether the key was won here with another payload."""
        with self._lock:
            hold = self._keys.get(store, {}).get(digest)
        held = b"" if hold is None else hold.fingerprint
        return bool(held and fingerprint) and held != fingerprint

    def give(self, store: Any, digest: bytes, hold: _Hold) -> None:
        with self._lock:
            keys = self._keys.get(store, {})
            if keys.get(digest) is hold:
                del keys[digest]


_in_hand = _InHand()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_hand.clear)


class _Entered(NamedTuple):
    """How ``_enter`` ended: with a claim in a hand, or with the reply that there is instead."""

    hold: _Hold
    claim: Claim | None
    reply: ClaimReply

    @property
    def hand(self) -> Any:
        return self.hold.hand


def _enter(store: Any, on: Any, job: Job, hold: _Hold) -> Flow[_Entered]:
    """Open a transaction and claim the key in it, waiting for another holder as the plan says."""
    job.codec.check()
    key, plan = job.key, job.plan
    digest, terms, monotonic = key.digest, plan.terms, plan.monotonic
    opened = _open_keys.get()
    if (id(store), digest) in opened:
        raise TransactionRefusedError(
            f"{job.operation} opens a transaction for a key that this code has open already: it "
            "would wait for itself. Use one block for the key, or another key for the inner step"
        )
    if on is None and store.one_writer and any(where == id(store) for where, _ in opened):
        raise TransactionRefusedError(
            f"{job.operation} opens a second transaction on a store with one writer at a time, "
            "inside the first: it would wait for itself. Pass on=tx.connection to join the first"
        )
    begun = monotonic()
    look = FIRST_LOOK
    waited = False
    failures = 0
    while True:
        reply = _BUSY
        joined = False
        # After a wait the answer is most likely there: look before taking a connection for it.
        known: ClaimReply | None = None
        if waited:
            known = yield Op("peek", (key, job.fingerprint, terms))
        if known is not None:
            reply = known
        elif _in_hand.take(store, digest, hold):
            hold.hand = hand = store.hand(on)
            try:
                entered = yield from _attempt(hold, job, begun)
            except BaseException as error:
                _in_hand.give(store, digest, hold)
                # Nothing has been done yet: what a serialization failure or a lost connection
                # undid can be begun anew, unless the transaction is the caller's own.
                again = isinstance(error, StoreError) and repeatable(error)
                elsewhere = getattr(hand, "left", False) and not failures
                if not (again or elsewhere) or hand.joined or failures >= 2:
                    raise
                failures += 1
                if not elsewhere:  # there the next connection may do at once
                    yield Pause(key, look)
                continue
            if entered.claim is not None:
                hold.fingerprint = job.fingerprint
                return entered
            _in_hand.give(store, digest, hold)
            reply, joined = entered.reply, hand.joined
        elif not waited:
            # Held in this process, perhaps by a copy that only gets the answer.
            known = yield Op("peek", (key, job.fingerprint, terms))
            reply = known or reply
        if reply is _BUSY and _in_hand.differs(store, digest, job.fingerprint):
            reply = _CONFLICT
        left = begun + plan.wait - monotonic()
        if reply.verdict is not Verdict.IN_FLIGHT or left <= 0 or joined:
            break
        if held_here(key, store, reply):  # by a guard around this transaction
            reply = reply._replace(own=True)
            break
        waited = True
        pause = min(look * random.uniform(0.7, 1.3), left)  # noqa: S311 - jitter, not a secret
        yield Pause(key, pause)
        look = min(look * 2, store.poll_seconds)
    _tell(_KINDS[reply.verdict], job, monotonic() - begun, reply.fence, reply.attempts)
    return _Entered(hold, None, reply)


_BUSY: Final = ClaimReply(Verdict.IN_FLIGHT, 0, BUSY_MS, 0, None)
_CONFLICT: Final = ClaimReply(Verdict.CONFLICT, 0, 0, 0, None)
_KINDS: Final = {
    Verdict.REPLAY: EventKind.REPLAY,
    Verdict.IN_FLIGHT: EventKind.IN_FLIGHT,
    Verdict.CONFLICT: EventKind.CONFLICT,
    Verdict.EXPIRED: EventKind.EXPIRED,
}


def _tell(kind: EventKind, job: Job, spent: float, fence: int, attempts: int) -> None:
    if listening():
        emit(kind, job.key, job.operation, duration=spent, fence=fence, attempts=attempts)


def _attempt(hold: _Hold, job: Job, begun: float) -> Flow[_Entered]:
    """One try on one connection. Without a win the connection is given back as it was."""
    hand = hold.hand
    owner = new_owner()
    terms = job.plan.terms
    yield Op("open", (), hand)
    try:
        reply: ClaimReply = yield Op("claim", (job.key, owner, job.fingerprint, terms), hand)
        if reply.verdict is Verdict.WON:
            claim = Claim(
                job.key, owner, reply.fence, reply.attempts, reply.takeover, terms, job.operation
            )
            claim.started = begun
            claim.outer = outer_claim()
            claim.leased_at = float("inf")  # held by the transaction, not by a lease
            kind = EventKind.TAKEOVER if reply.takeover else EventKind.FIRST
            _tell(kind, job, job.plan.monotonic() - begun, reply.fence, reply.attempts)
            return _Entered(hold, claim, reply)
    except BaseException:
        yield from _roll_back(hand)
        raise
    yield Op("rollback", (), hand)
    return _Entered(hold, None, reply)


def _roll_back(hand: Any) -> Flow[None]:
    """Undo, whatever state the connection is in: the error that led here is what counts."""
    try:
        yield Op("rollback", (), hand)
    except StoreError as error:  # the server undoes what nobody commits
        logger.debug("rolling back failed: %s", error)


def _record(store: Any, job: Job, entered: _Entered, value: Any) -> Flow[Result]:
    """Record the answer and commit, or roll back if it is not one to keep."""
    hand, claim = entered.hand, entered.claim
    assert claim is not None  # noqa: S101 - for the type checker
    if not job.keeps(value):
        try:
            yield Op("rollback", (), hand)
        finally:
            yield from _over(store, job, entered, EventKind.RELEASED)
        return Result(value, False)
    try:
        args = (job.key, claim.owner, claim.fence, _encode(job, value), job.plan.terms)
        held: bool = yield Op("complete", args, hand)
        if not held:
            claim.lost = True
            raise ClaimLostError(
                f"{job.operation} lost its claim inside its own transaction: the block or handler "
                "rolled back or changed oncekey's tables. Nothing of it was committed"
            )
        yield Op("commit", (), hand)
    except BaseException:
        yield from _roll_back(hand)
        yield from _over(store, job, entered, EventKind.FENCED)
        raise
    yield from _over(store, job, entered, EventKind.COMPLETED)
    return Result(value, False)


def _over(store: Any, job: Job, entered: _Entered, kind: EventKind) -> Flow[None]:
    claim = entered.claim
    assert claim is not None  # noqa: S101 - for the type checker
    claim.settled = claim.ended = True
    _in_hand.give(store, job.key.digest, entered.hold)
    if not entered.hand.joined:  # else nothing is settled before the caller commits
        store.settled_here(job.key)
    _tell(kind, job, job.plan.monotonic() - claim.started, claim.fence, claim.attempts)
    return
    yield  # a flow like the others


def _fail(
    store: Any, job: Job, entered: _Entered, error: BaseException, error_answer: ErrorAnswer | None
) -> Flow[Result | None]:
    """Undo the handler's writes. With an answer for its error, record that; else free the key."""
    hand, claim = entered.hand, entered.claim
    assert claim is not None  # noqa: S101 - for the type checker
    answer = None
    if error_answer is not None and isinstance(error, Exception):
        try:
            answer = error_answer(error)
        except BaseException:
            yield from _roll_back(hand)
            yield from _over(store, job, entered, EventKind.RELEASED)
            raise
    if answer is not None:
        try:
            yield Op("undo", (), hand)
        except StoreError as failed:
            logger.warning("%s: its error could not be recorded: %s", job.operation, failed)
        else:
            result = yield from _record(store, job, entered, answer)
            return result
    yield from _roll_back(hand)
    yield from _over(store, job, entered, EventKind.RELEASED)
    return None


class _Block:
    """What the sync and the async block have in common."""

    _tx: Tx | None = None
    _raises = True  # an error reaches the caller also where an answer was made of it

    def __init__(self, store: Any, on: Any, job: Job, error_answer: ErrorAnswer | None) -> None:
        self._store = store
        self._on = on
        self._job = job
        self._error_answer = error_answer
        self._hold = _Hold()
        self._entered: _Entered | None = None
        self._tokens: list[tuple[ContextVar[Any], Token[Any]]] = []

    def _opened(self, entered: _Entered) -> Tx:
        job = self._job
        claim = entered.claim
        if claim is None:
            if entered.reply.verdict is Verdict.REPLAY:
                return Tx(None, None, job.codec.decode(entered.reply.answer or b"j"))
            raise refusal(entered.reply, job.operation, job.plan.terms)
        claim.home = weakref.ref(self._store)
        self._entered = entered
        self._tx = tx = Tx(entered.hand.target, claim)
        keys = _open_keys.get() | {(id(self._store), job.key.digest)}
        for variable, value in ((CURRENT, claim), (_current, tx), (_open_keys, keys)):
            self._tokens.append((variable, cast("ContextVar[Any]", variable).set(value)))
        return tx

    def _left(self) -> None:
        while self._tokens:
            variable, token = self._tokens[-1]
            try:
                variable.reset(token)
            except (ValueError, RuntimeError):
                pass  # another context, for a coroutine that is thrown away; or done already
            self._tokens.pop()

    def _enter_flow(self) -> Flow[_Entered]:
        entered = yield from _enter(self._store, self._on, self._job, self._hold)
        if entered.claim is not None and self._error_answer is not None:
            try:
                yield Op("mark", (), entered.hand)
            except BaseException:
                yield from _roll_back(entered.hand)
                _in_hand.give(self._store, self._job.key.digest, self._hold)
                raise
        return entered

    def _exit_flow(self, error: BaseException | None) -> Flow[Result | None]:
        entered, tx = self._entered, self._tx
        if entered is None or tx is None:
            return None
        if error is None:
            try:
                yield Op("flush", (), entered.hand)
            except Exception as late:
                # What an ORM sends only now is the handler's work, and so are its errors.
                failed = yield from _fail(self._store, self._job, entered, late, self._error_answer)
                if failed is None or self._raises:
                    raise
                return failed
            result = yield from _record(self._store, self._job, entered, tx.answer)
            return result
        failed = yield from _fail(self._store, self._job, entered, error, self._error_answer)
        return failed


class Transaction(_Block):
    """``with store.transaction(...)``: see the store's method."""

    def _abandon(self) -> None:
        """Leave nothing open, wherever an interrupt came. What is settled stays as it is."""
        try:
            if self._tx is not None and self._tx.claim is not None:
                self._tx.claim.ended = True
            self._left()
            here = (id(self._store), self._job.key.digest)
            if self._tx is not None and here in _open_keys.get():  # set, and not noted yet
                _open_keys.set(_open_keys.get() - {here})
            if self._hold.hand is not None:
                self._hold.hand.rollback()
        except StoreError as error:
            logger.debug("rolling back failed: %s", error)
        finally:
            _in_hand.give(self._store, self._job.key.digest, self._hold)
        self.__class__ = Transaction  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> Tx:
        self.__class__ = _OpenTransaction  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return self._opened(run(self._enter_flow(), self._store))
        except BaseException:
            self._abandon()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._left()
            run(self._exit_flow(exc), self._store)
        except BaseException:
            self._abandon()
            raise
        self.__class__ = Transaction  # pyright: ignore[reportAttributeAccessIssue]


class _OpenTransaction(Transaction):
    """One that is under way. Only it has a finalizer: an interrupt that came in one is lost."""

    def __del__(self) -> None:
        self._abandon()  # interrupted before the first step of __exit__


class AsyncTransaction(_Block):
    """``async with store.transaction(...)``: see the store's method."""

    def _thrown_away(self, error: BaseException) -> None:
        """A generator was closed inside the block, where nothing can be awaited."""
        _in_hand.give(self._store, self._job.key.digest, self._hold)
        work = arun(self._exit_flow(error), self._store)
        try:
            in_background(work)
        except RuntimeError:  # its loop is gone too: the server rolls back
            work.close()

    async def __aenter__(self) -> Tx:
        return self._opened(await arun(self._enter_flow(), self._store))

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left()
        if isinstance(exc, GeneratorExit):
            self._thrown_away(exc)
            return
        # The outcome is decided whatever happens to this task meanwhile.
        await _uncancelled(arun(self._exit_flow(exc), self._store))


def takes_parameter(handler: Callable[..., Any], name: str) -> bool:
    """Whether ``handler`` has a parameter of that name."""
    return name in inspect.signature(handler).parameters


def check_transactional(store: Any) -> None:
    """Raise unless ``store`` can share a transaction."""
    if not isinstance(store, (Transactional, AsyncTransactional)):
        raise TransactionRefusedError(
            f"{type(store).__name__} has no transactions to share: use a PostgreSQL or SQLite "
            "store on the database that your own tables are in"
        )


def call_in_transaction(
    store: Store,
    on: Any,
    job: Job,
    handler: Callable[[Tx], Any],
    error_answer: ErrorAnswer | None = None,
) -> Result:
    """Run ``handler`` in a transaction if nobody else did, else give its stored answer back."""
    block = Transaction(store, on, job, error_answer)
    block._raises = False
    try:
        tx = block.__enter__()
        if tx.replayed:
            block.__class__ = Transaction
            return Result(tx.answer, True)
        try:
            tx.answer = handler(tx)
        except BaseException as error:
            block._left()
            result = run(block._exit_flow(error), store)
            if result is None:
                raise
        else:
            block._left()
            result = cast("Result", run(block._exit_flow(None), store))
    except BaseException:
        block._abandon()
        raise
    block.__class__ = Transaction
    return result


async def acall_in_transaction(
    store: AsyncStore,
    on: Any,
    job: Job,
    handler: Callable[[Tx], Awaitable[Any]],
    error_answer: ErrorAnswer | None = None,
) -> Result:
    """Run ``handler`` in a transaction if nobody else did, else give its stored answer back."""
    block = AsyncTransaction(store, on, job, error_answer)
    block._raises = False
    tx = await block.__aenter__()
    if tx.replayed:
        return Result(tx.answer, True)
    try:
        try:
            tx.answer = await handler(tx)
        finally:
            block._left()
    except GeneratorExit as error:
        block._thrown_away(error)
        raise
    except BaseException as error:
        failed = await _uncancelled(arun(block._exit_flow(error), store))
        if failed is None:
            raise
        return failed
    return cast("Result", await _uncancelled(arun(block._exit_flow(None), store)))
