"""Every call of a store as a flow: through its breaker, and where asked, on without the store."""

from __future__ import annotations

import time
from typing import Any, Final

from oncekey._core.drive import Flow, Op
from oncekey.errors import PolicyError, StoreUnavailableError
from oncekey.models import ClaimReply, ClaimVerdict, Key, Record, Terms
from oncekey.policy import OnOutage
from oncekey.resilience.breaker import Breaker, BreakerState
from oncekey.resilience.fallback import Fallback
from oncekey.resilience.findings import Findings
from oncekey.resilience.reconcile import Reconciled

__all__ = ["AWAY_POLL", "NO_JOURNAL", "Around"]

AWAY_POLL: Final = 0.05  # seconds between two looks of a waiter, while nothing can wake it
NO_JOURNAL: Final = (
    "on_outage='open' needs a journal, from which the store is made whole after an outage: pass "
    "journal='a directory on a local disk'"
)


class Around:
    """What both forms share: every call as a flow.

    Attributes:
        store: The store that keeps the records. Closing this one closes that one.
        breaker: What stands in front of it.
        on_outage: ``closed`` or ``open``.
    """

    def __init__(
        self, store: Any, breaker: Breaker, fallback: Fallback | None, on_outage: OnOutage
    ) -> None:
        self.store = store
        self.breaker = breaker
        self.on_outage: OnOutage = on_outage
        self.tenant: str = getattr(store, "tenant", "")
        self.poll_seconds: float = store.poll_seconds
        self.never_waits = False
        self._fallback = fallback

    def __repr__(self) -> str:
        return f"resilient({self.store!r}, {self.on_outage!r}, {self.breaker!r})"

    @property
    def no_transactions(self) -> str:
        """Why there are none, for whoever asks."""
        if self.on_outage == "open":
            return (
                "a transaction can't go on without its database, which has the effects too: use "
                "on_outage='closed' for it"
            )
        return ""

    def seen_as(self, on_outage: OnOutage) -> Any:
        """The same store, breaker and journal, for a guard with another word for outages."""
        if on_outage == self.on_outage:
            return self
        if on_outage == "open" and self._fallback is None:
            raise PolicyError(NO_JOURNAL)
        from oncekey.resilience.powers import made  # which knows both forms

        return made(self.store, self.breaker, self._fallback, on_outage)

    def _start(self, fallback: Fallback) -> None:
        """Have the journal reconciled, beside what this call does."""
        raise NotImplementedError

    def _forget_closed(self) -> None:
        """Let go of reconciliations whose event loop was closed before their end."""

    def _asked(self, what: Flow[Any]) -> Flow[Any]:
        """Ask the store, with the breaker looking on."""
        given = self.breaker.admit()
        try:
            found = yield from what
        except StoreUnavailableError as error:
            self.breaker.failed(given, error)
            raise
        except BaseException:
            self.breaker.abandoned(given)
            raise
        closed = self.breaker.succeeded(given)
        fallback = self._fallback
        if closed and fallback is not None:
            fallback.look_again()
        if fallback is not None and fallback.restless:
            self._look(fallback)
        return found

    def _look(self, fallback: Fallback) -> None:
        self._forget_closed()
        if self._is_closed() and fallback.due():
            self._start(fallback)

    def _is_closed(self) -> bool:
        return self.breaker.state is BreakerState.CLOSED

    def _op(self, method: str, *args: Any) -> Flow[Any]:
        return self._asked(_once(Op(method, args)))

    def _opens(self) -> Fallback | None:
        """What to go on with, if this guard may."""
        return self._fallback if self.on_outage == "open" else None

    def _decides(self, key: Key) -> Flow[Fallback | None]:
        """What decides of ``key`` instead of the store, if anything does.

        What happened here while the store was away goes into it first. What still runs here, and
        marks, were looked for before: for them the store is not asked, and not said to answer.
        """
        fallback = self._fallback
        if fallback is None or not fallback.knows(key):
            return None
        try:
            return None if (yield from self._asked(fallback.settle(key))) else fallback
        except StoreUnavailableError:
            if self.on_outage == "closed":
                raise
            return fallback

    def _claim(self, key: Key, owner: bytes, mark: bytes, terms: Terms) -> Flow[ClaimReply]:
        copy = None if self._fallback is None else self._fallback.copy(key, owner, mark, terms)
        if copy is not None:
            return copy
        here = yield from self._decides(key)
        if here is None:
            try:
                reply: ClaimReply = yield from self._op("claim", key, owner, mark, terms)
            except StoreUnavailableError:
                here = self._opens()
                if here is None:
                    raise
            else:
                if self._fallback is not None and reply.verdict is ClaimVerdict.WON:
                    self._fallback.won(key, owner, mark, reply, terms)
                return reply
        return (yield from here.claim(key, owner, mark, terms))

    def _complete(
        self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Flow[bool]:
        here = self._fallback
        if here is None or not here.runs(key, owner):
            try:
                held: bool = yield from self._op("complete", key, owner, fence, answer, terms)
            except StoreUnavailableError:
                here = self._opens()
                if here is None:
                    raise
            else:
                if here is not None:
                    here.settled(key, owner)
                return held
        done = yield from here.complete(key, owner, fence, answer, terms)
        self._look(here)
        return done

    def _renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> Flow[bool]:
        here = self._fallback
        if here is not None and here.runs(key, owner):
            return here.renew(key, owner, fence, terms)
        try:
            held: bool = yield from self._op("renew", key, owner, fence, terms)
        except StoreUnavailableError:
            here = self._opens()
            if here is None:
                raise
            # Nobody else can take it over now; its completion shows whether somebody did.
            held = not here.lost(key, owner)
        if held and here is not None:
            here.renewed(key, owner, terms)
        return held

    def _release(self, key: Key, owner: bytes, fence: int | None) -> Flow[bool]:
        here = self._fallback
        if here is not None and here.runs(key, owner):
            return (yield from here.release(key, owner, fence))
        if here is not None:
            here.settled(key, owner)  # whether or not the store hears of it
        held: bool = yield from self._op("release", key, owner, fence)
        return held

    def _first_seen(self, key: Key, terms: Terms) -> Flow[bool]:
        if self._fallback is not None and self._fallback.marked(key):
            return False
        here = yield from self._decides(key)
        if here is None:
            try:
                first: bool = yield from self._op("first_seen", key, terms)
            except StoreUnavailableError:
                here = self._opens()
                if here is None:
                    raise
            else:
                return first
        return (yield from here.mark(key, terms))

    def _read(self, key: Key) -> Flow[Record | None]:
        held = None if self._fallback is None else self._fallback.held(key)
        if held is not None:
            return held
        here = yield from self._decides(key)
        if here is None:
            try:
                found: Record | None = yield from self._op("read", key)
            except StoreUnavailableError:
                here = self._opens()
                if here is None:
                    raise
            else:
                return found
        return here.read(key)

    def _now(self) -> Flow[int]:
        try:
            now: int = yield from self._op("now")
        except StoreUnavailableError:
            if self._opens() is None:
                raise
            return int(time.time() * 1000)
        return now

    def _counted(self, key: Key, window_ms: int) -> Flow[tuple[int, int]]:
        try:
            counted: tuple[int, int] = yield from self._op("count", key, window_ms)
        except StoreUnavailableError:
            if self._opens() is None:
                raise
            return 0, window_ms  # who may go on without the store is not held up by its counts
        return counted

    def _wait(self, key: Key, seconds: float) -> float:
        """For how long to sleep here; 0: the store knows when to wake."""
        fallback = self._fallback
        known = fallback is not None and fallback.knows(key)
        return 0 if self._is_closed() and not known else min(seconds, AWAY_POLL)

    def _reconciled(self) -> Flow[Reconciled]:
        if self._fallback is None:
            raise PolicyError(NO_JOURNAL)
        return (yield from self._fallback.reconcile())

    @property
    def findings(self) -> Findings | None:
        """The queue of what reconciliation found; ``None`` without a journal."""
        return None if self._fallback is None else self._fallback.findings


def _once(op: Op) -> Flow[Any]:
    return (yield op)
