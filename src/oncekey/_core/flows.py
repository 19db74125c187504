"""The claim protocol as flows: acquire a key, then complete or release it.

A flow returns a value for everything that can happen; only the shells above raise.
"""

from __future__ import annotations

import os
import random
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from oncekey._core import notes, waiters
from oncekey._core.drive import Flow, Op, Pause
from oncekey._core.notes import PendingCall
from oncekey.errors import ClaimLostError, PolicyError, StoreError, StoreTimeoutError
from oncekey.instrument import events
from oncekey.instrument.events import EventKind, emit
from oncekey.models import ClaimReply, ClaimVerdict, Key, Terms
from oncekey.policy import Duration, Policy, milliseconds

__all__ = [
    "CURRENT",
    "Claim",
    "Plan",
    "acquire",
    "complete",
    "held_here",
    "new_owner",
    "outer_claim",
    "release",
    "renew",
    "repeatable",
    "retry_after",
    "tell_claimed",
    "won",
]

TTL_BOUNDS = 1, 315_360_000_000  # of an answer that has one of its own: up to ten years
FIRST_LOOK = 0.005  # a waiter looks again after 5 ms, then backs off up to the store's poll_seconds


_owners: list[bytes] = []  # a stock, as each read from the system costs as much as a claim
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_owners.clear)


def new_owner() -> bytes:
    """A fresh owner id for one call. Never per process: a fork would share it."""
    try:
        return _owners.pop()
    except IndexError:
        block = os.urandom(4096)
        _owners.extend(block[at : at + 16] for at in range(16, 4096, 16))
        return block[:16]


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy made ready for the engine: seconds as floats, terms for the store.

    Attributes:
        max_answer_bytes: Answers up to so many bytes are stored as they are,
        pack_up_to: and those up to so many compressed.
        ttl_bounds: The least and the most that a handler may choose for its own answer, in
            milliseconds.
        claiming: Terms for the claim alone, where a record that gets no outcome is to be forgotten
            earlier than one that does.
    """

    terms: Terms
    wait: float
    max_run: float | None
    max_answer_bytes: int
    retry_safe: bool
    max_waiters: int | None = None
    monotonic: Callable[[], float] = time.monotonic
    claiming: Terms | None = None
    pack_up_to: int = 0
    ttl_bounds: tuple[int, int] = TTL_BOUNDS
    replay_errors: tuple[type[Exception], ...] = ()

    @classmethod
    def of(cls, policy: Policy) -> Plan:
        """Compile ``policy``."""
        max_run, most, packs = policy.max_run, policy.max_answer_bytes, policy.compress_above
        return cls(
            terms=policy.terms(),
            wait=milliseconds(policy.wait, "wait") / 1000,
            max_run=None if max_run is None else milliseconds(max_run, "max_run") / 1000,
            max_answer_bytes=most if packs is None else min(packs, most),
            retry_safe=policy.retry_safe,
            max_waiters=policy.max_waiters,
            pack_up_to=0 if packs is None else most,
            replay_errors=policy.replay_errors,
        )


def _nowhere() -> None:
    """The store of a claim that has none."""


def _somewhere() -> object:
    """The block of a claim that is for a call."""
    return True


@dataclass(slots=True)
class Claim:
    """The right to run the work of one key, as its owner holds it.

    Attributes:
        key: What was claimed.
        fence: Rises with every claim of this key. Hand it to systems that can refuse an older one.
        attempts: How many claims of this key were won so far, this one included.
        takeover: The claim was won from an owner whose lease ran out, so that its work may have
            been done in part.
        lost: Somebody else took the key over; whatever this owner does will not be recorded.
    """

    key: Key
    owner: bytes
    fence: int
    attempts: int
    takeover: bool
    terms: Terms
    operation: str = ""
    started: float = 0.0
    leased_at: float = 0.0  # when the claim or its last renewal was sent, on the monotonic clock
    lost: bool = False
    settled: bool = field(default=False, repr=False)
    ended: bool = field(default=False, repr=False)  # its handler has, so that nobody renews it
    monotonic: Callable[[], float] = field(default=time.monotonic, repr=False)
    # Where it was claimed. Weakly: a claim may be remembered for longer than its store is open.
    home: Callable[[], Any] = field(default=_nowhere, repr=False, compare=False)
    notes: Any = field(default=None, repr=False, compare=False)  # of calls, once they are read
    lock: Any = field(default=None, repr=False, compare=False)  # while one is added
    outer: Claim | None = field(default=None, repr=False, compare=False)  # under which this one is
    # Gives None once the block that it is for is gone: an interrupt may have kept it from ending.
    block: Callable[[], object] = field(default=_somewhere, repr=False, compare=False)
    ttl_bounds: tuple[int, int] = field(default=TTL_BOUNDS, repr=False, compare=False)

    @property
    def over(self) -> bool:
        """Whether no code runs under it any more."""
        return self.settled or self.ended or self.block() is None

    @property
    def ttl(self) -> float:
        """How long the answer of this call is replayed, in seconds. Set it while the work runs.

        Raises:
            PolicyError: It is no duration or out of bounds; or the answer is recorded already; or
                the guard is ``sticky``, whose time runs from the first claim.
        """
        return self.terms.ttl_ms / 1000

    @ttl.setter
    def ttl(self, value: Duration) -> None:
        terms = self.terms
        if self.over or terms.sticky:
            why = "its time to live runs from the first claim" if terms.sticky else "it is recorded"
            raise PolicyError(
                f"the ttl of this answer can't be changed: {why}. Set it while the work runs, with "
                "a guard that is not sticky"
            )
        least, most = self.ttl_bounds
        lasts = milliseconds(value, "ttl", least=least)
        if lasts > most:
            raise PolicyError(f"ttl must be at most {most / 1000:g} s, got {value!r}")
        self.terms = terms._replace(ttl_ms=lasts)

    def check(self) -> None:
        """Raise if the claim was lost. Call it before a step that can't be undone.

        Raises:
            ClaimLostError: Another worker took the key over, or may have: the lease ran out and
                could not be renewed.
        """
        overdue = self.monotonic() >= self.leased_at + self.terms.lease_ms / 1000
        if self.lost or (overdue and not self.settled):
            raise ClaimLostError(
                f"{self.operation or 'the call'} lost its claim to another worker: stop here, "
                "nothing more of it will be recorded. If handlers often outlive their lease, "
                "raise the lease"
            )

    def downstream_key(self, provider: str, secret: bytes | str | None = None) -> str:
        """A key to pass on to another system: the same for every attempt, whoever makes it.

        It differs with the key, its scope and tenant, and ``provider``; it has 43 characters out
        of ``A-Za-z0-9_-``. The key itself can't be read from it. Without a secret, somebody who
        can guess the key can check the guess.

        Args:
            provider: A name for whom the key is for. A handler that calls a provider twice needs
                two, such as ``stripe:charge`` and ``stripe:receipt``.
            secret: Yours, one for each provider: it makes an HMAC of what is a plain hash without.
                Another secret gives other keys, so keep it for as long as keys live.

        Raises:
            PolicyError: The secret is empty.
            InvalidKeyError: ``provider`` is empty, too long or holds a NUL.

        Example:
            >>> from oncekey import Once, current_claim
            >>> once = Once("memory://")
            >>> @once(key="order_id")
            ... def charge(order_id: str) -> str:
            ...     return current_claim().downstream_key("stripe", secret=b"of 32 random bytes")
            >>> len(charge("o-1"))
            43
        """
        tenant = str(getattr(self.home(), "tenant", ""))
        return notes.derived_key(self.key, tenant, provider, secret)

    def before_call(self, provider: str, request_id: str) -> None:
        """Note, before you make it, a call that can't be undone. The note outlives a crash.

        An attempt that comes after this one, because it died or failed, finds it in
        ``pending_calls()``. Noting the same call again does nothing. For a handful of calls: each
        note is written together with those before it.

        Args:
            provider: Who is called.
            request_id: What the call can be found by, there: the ``downstream_key`` that you send,
                or an id of your own. It is stored as it is, unless the store encrypts.

        Raises:
            ClaimLostError: Another worker has the key: don't make the call.
            StoreError: The note could not be written: don't make the call.
            TransactionRefusedError: A transaction on SQLite holds its only writer.
            BackendMismatchError: The store is asynchronous: use ``abefore_call``.
        """
        notes.before_call(self, provider, request_id)

    async def abefore_call(self, provider: str, request_id: str) -> None:
        """``before_call`` for a claim in an asynchronous store."""
        await notes.abefore_call(self, provider, request_id)

    def pending_calls(self) -> list[PendingCall]:
        """The calls that earlier attempts of this key have noted, in their order.

        Whether they took effect is not known here: ask the provider, by their ``request_id``.

        Raises:
            StoreError: They could not be read.
            BackendMismatchError: The store is asynchronous: use ``apending_calls``.
        """
        return notes.pending_calls(self)

    async def apending_calls(self) -> list[PendingCall]:
        """``pending_calls`` for a claim in an asynchronous store."""
        return await notes.apending_calls(self)


CURRENT: ContextVar[Claim] = ContextVar("oncekey_claim")


def outer_claim() -> Claim | None:
    """The innermost claim that is open in this context.

    Settled ones are taken out of the chain on the way: tasks that start each other without end
    would make it ever longer.
    """
    claim = CURRENT.get(None)
    while claim is not None and claim.over:
        claim = claim.outer
    if claim is not None:
        while claim.outer is not None and claim.outer.over:
            claim.outer = claim.outer.outer
    return claim


def held_here(key: Key, store: Any, reply: ClaimReply | None = None) -> bool:
    """Whether this very code holds ``key`` further out, so that it would wait for itself.

    The store's reply tells by its fence. A transaction shows its claim to nobody before it commits,
    so that one is known by its store, without asking.
    """
    claim = None if CURRENT.get(None) is None else outer_claim()
    while claim is not None:
        if claim.key == key and not claim.settled:
            if reply is not None and reply.fence == claim.fence:
                return True
            if claim.leased_at == float("inf") and claim.home() is store:
                return True
        claim = claim.outer
    return False


_OWN = ClaimReply(ClaimVerdict.IN_FLIGHT, 0, 1000, 0, None, own=True)


def repeatable(error: StoreError) -> bool:
    """Whether to ask once more at once: not where all the time was spent waiting for a turn."""
    return error.retryable and not (isinstance(error, StoreTimeoutError) and error.outcome_known)


def won(
    key: Key,
    owner: bytes,
    reply: ClaimReply,
    plan: Plan,
    operation: str,
    begun: float,
    store: Any,
) -> Claim:
    """The claim that a reply gives, its lease counted from ``begun``."""
    return Claim(
        key,
        owner,
        reply.fence,
        reply.attempts,
        reply.takeover,
        plan.terms,
        operation,
        begun,
        begun,
        monotonic=plan.monotonic,
        home=_nowhere if store is None else weakref.ref(store),
        outer=None if CURRENT.get(None) is None else outer_claim(),
        ttl_bounds=plan.ttl_bounds,
    )


def acquire(
    key: Key,
    fingerprint: bytes,
    plan: Plan,
    operation: str,
    poll: float,
    owner: bytes,
    store: Any = None,
) -> Flow[Claim | ClaimReply]:
    """Claim ``key``, waiting for another holder as the plan says.

    Returns:
        A ``Claim`` if this call is to run, else the reply: a replay, a conflict, an expired key,
        or a holder that was still running when the wait ended. Nobody waits for itself.
    """
    # Long: it is the protocol, to be read in one piece, and each part of it needs what the others
    # have found out.
    if held_here(key, store):
        return _OWN
    monotonic = plan.monotonic
    terms = plan.claiming or plan.terms
    begun = sent = monotonic()
    look = FIRST_LOOK
    waited = False
    try:
        while True:
            op = Op("claim", (key, owner, fingerprint, terms))
            reply: ClaimReply
            try:
                reply = yield op
            except StoreError as error:
                if not repeatable(error):
                    raise
                sent = monotonic()
                reply = yield op  # the first may have been won: the same owner wins it again
            if reply.verdict is ClaimVerdict.WON:
                claim = won(key, owner, reply, plan, operation, begun, store)
                # A reply can arrive after its lease is over (a stopped process, a slow network).
                # Starting then would run beside whoever took over.
                fresh = terms.lease_ms / 1000 * 0.9
                held = True
                while held and monotonic() - sent >= fresh:
                    sent = monotonic()
                    held = yield from renew(claim)
                if held:
                    claim.leased_at = sent
                    answer: Claim | ClaimReply = claim
                    break
                sent = monotonic()
                continue
            answer = reply
            if reply.verdict is not ClaimVerdict.IN_FLIGHT:
                break
            if held_here(key, store, reply):
                answer = reply = reply._replace(own=True)
                break
            now = monotonic()
            left = begun + plan.wait - now
            if left <= 0 or not (waited or waiters.join(key, store, plan.max_waiters)):
                break
            waited = True
            pause = min(look * random.uniform(0.7, 1.3), left)  # noqa: S311 - jitter, not a secret
            yield Pause(key, min(pause, reply.lease_ms / 1000 + 0.001))
            look = min(look * 2, poll)
            sent = monotonic()
    finally:
        if waited:
            waiters.leave(key, store)
    if events._listeners:
        spent = monotonic() - begun
        if waited:
            emit(EventKind.WAITED, key, operation, duration=spent)
        tell_claimed(key, operation, reply, spent)
    return answer


def tell_claimed(key: Key, operation: str, reply: ClaimReply, spent: float = 0.0) -> None:
    """Tell what a claim was answered: the one place that says which event that is."""
    if reply.verdict is not ClaimVerdict.WON:
        kind = EventKind(reply.verdict.value)  # they have the same names
    else:
        kind = EventKind.TAKEOVER if reply.takeover else EventKind.FIRST
    emit(kind, key, operation, duration=spent, fence=reply.fence, attempts=reply.attempts)


def renew(claim: Claim) -> Flow[bool]:
    """Count the lease from now. False if somebody else has the key."""
    held: bool = yield Op("renew", (claim.key, claim.owner, claim.fence, claim.terms))
    return held


def complete(claim: Claim, answer: bytes, monotonic: Callable[[], float]) -> Flow[bool]:
    """Record the outcome. False: fenced off, another owner's outcome counts.

    Tried twice: a store error may hide a completion that happened, and completing again
    is true for the same owner.
    """
    op = Op("complete", (claim.key, claim.owner, claim.fence, answer, claim.terms))
    try:
        held: bool = yield op
    except StoreError as error:
        if not repeatable(error):
            raise
        held = yield op
    claim.settled = True
    if not held:
        claim.lost = True
    if events._listeners:
        _tell_settled(claim, EventKind.COMPLETED, held, monotonic)
    return held


def release(
    claim: Claim, error: BaseException | None, monotonic: Callable[[], float]
) -> Flow[bool]:
    """Give the key back, so that the next attempt may run at once."""
    op = Op("release", (claim.key, claim.owner, claim.fence))
    held: bool
    try:
        held = yield op
    except StoreError as failed:
        if not repeatable(failed):
            raise
        held = yield op
    claim.settled = True
    if events._listeners:
        reason = type(error).__name__ if error is not None else ""
        _tell_settled(claim, EventKind.RELEASED, held, monotonic, reason)
    return held


def _tell_settled(
    claim: Claim, kind: EventKind, held: bool, monotonic: Callable[[], float], error: str = ""
) -> None:
    """Tell how a claim ended, or that it was another's by then."""
    emit(
        kind if held else EventKind.FENCED,
        claim.key,
        claim.operation,
        duration=monotonic() - claim.started,
        fence=claim.fence,
        attempts=claim.attempts,
        error=error,
    )


def retry_after(reply: ClaimReply, terms: Terms) -> int:
    """Whole seconds after which a retry makes sense: the remaining lease, within the TTL."""
    return max(1, min(ceil(reply.lease_ms / 1000), max(1, terms.ttl_ms // 1000)))
