"""Guards for single routes: for frameworks that call a function and get a response object.

An adapter translates its framework's request into ``Facts`` and its response into an ``Answer``,
reads a body, and makes a response of an ``Answer``. When a view runs is decided here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, Unpack

from oncekey._core.call import CURRENT, Job, Result, acall, call
from oncekey._core.drive import arun, run
from oncekey._core.flows import Claim
from oncekey.abc import AsyncStore, Store
from oncekey.errors import OncekeyError
from oncekey.http.answer import Answer
from oncekey.http.body import ClientGoneError
from oncekey.http.coverage import Passing
from oncekey.http.entry import aidentify, aready, identify, ready
from oncekey.http.facts import Facts
from oncekey.http.problems import Refusal, unread
from oncekey.http.rules import Rules
from oncekey.http.settings import Settings
from oncekey.models import Scope

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

__all__ = ["AsyncRoutes", "Found", "Routes", "Seen", "already_read", "endless"]

R = TypeVar("R")


class Seen(NamedTuple, Generic[R]):
    """What a view gave: the framework's response, and the same as an answer."""

    response: R
    answer: Answer


def endless(kind: str | None) -> bool:
    """Whether an answer of this type has no end to wait for, so that its body is not kept."""
    return (kind or "").startswith("text/event-stream")


def already_read(instead: str) -> OncekeyError:
    """The error where other code has read a body, and left nothing to compare it by."""
    return OncekeyError(
        f"other code read the body of a keyed request before its guard could: {instead}"
    )


Found = tuple[str, Facts, bytes]
"""A request that is guarded: its key, the facts and the whole body."""


class _Routes:
    """What both forms share."""

    def __init__(self, settings: Settings) -> None:
        self.rules = Rules(settings)
        self.passing = Passing(settings)

    def found(
        self, facts: Facts, read: Callable[[Facts], tuple[Facts, bytes]]
    ) -> Found | Answer | None:
        """A request that is guarded, or the answer to a refused one; ``None``: call the view.

        Args:
            facts: The request.
            read: Reads its body; may give other facts, where other code has parsed it.
        """
        if facts.method not in self.rules.methods:
            path = facts.path.decode("utf-8", "replace")
            self.passing.tell(facts.method, path, bool(facts.keys))
            return None
        try:
            key = self.rules.key(facts)
            return None if key is None else (key, *read(facts))
        except (Refusal, ClientGoneError) as error:
            return self.refused(error)

    def refused(self, error: Exception) -> Answer:
        """The answer to a request that is refused, or whose body does not come."""
        return self.rules.refusal(error if isinstance(error, Refusal) else unread(error))


class _Work:
    """The view of one request, as the engine calls it. Gives what is to be kept."""

    job: Job
    response: Any = None
    claim: Claim | None = None
    kept: Answer | None = None
    raised = False  # by the view: an error that may look like one of the engine's

    def __init__(self, rules: Rules, facts: Facts, view: Callable[[], Any]) -> None:
        self.rules = rules
        self.facts = facts
        self.view = view

    def at_hand(self, key: str, owner: Scope, body: bytes) -> Answer | None:
        """Know what is to be done once; or give the answer, where this process has it."""
        self.job = job = self.rules.job(key, owner, self.facts, body)
        return self.rules.at_hand(job.key, job.fingerprint, job.operation, self.facts.source)

    def __call__(self) -> Answer | None:
        self.claim = CURRENT.get()
        self.rules.limits.count(self.claim)
        try:
            return self._seen(self.view())
        except OncekeyError:
            self.raised = True
            raise

    async def awaited(self) -> Answer | None:
        """The same for a view that is awaited."""
        self.claim = CURRENT.get()
        self.rules.limits.count(self.claim)
        try:
            return self._seen(await self.view())
        except OncekeyError:
            self.raised = True
            raise

    def _seen(self, seen: Seen[Any]) -> Answer | None:
        self.response = seen.response
        self.kept = self.rules.kept(self.job, seen.answer)
        return self.kept

    def given(self, result: Result) -> Any:
        """What to send: the view's own response, or an answer instead."""
        source = self.facts.source
        instead = self.rules.recorded(self.job, self.kept, result, source, self.claim)
        return self.response if instead is None else instead

    def failed(self, error: Exception) -> Answer:
        """What to answer to a refusal, or an error of the engine. The view's own are raised."""
        if isinstance(error, OncekeyError):
            if self.raised:
                raise error
            error = self.rules.failure(error)
        return self.rules.refusal(error)  # type: ignore[arg-type]


class Routes(_Routes):
    """Runs a view once for each key, on a sync store.

    Args:
        store: A sync store, or a URL.
        settings: A ``Settings``; its options may be given singly instead.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is asynchronous.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        settings: Settings | None = None,
        **options: Unpack[SettingsOptions],
    ) -> None:
        self.store, checked = ready(store, settings, options)
        super().__init__(checked)

    def run(self, key: str, facts: Facts, body: bytes, view: Callable[[], Seen[R]]) -> R | Answer:
        """The view's response, or what to answer instead. Errors of the view are raised.

        Args:
            key: From ``found``, as are the next two.
            facts: The request.
            body: Its whole body.
            view: Calls the framework's view.
        """
        work, store = _Work(self.rules, facts, view), self.store
        try:
            at_hand = work.at_hand(key, identify(self.rules, store, facts), body)
            if at_hand is not None:
                return at_hand
            run(self.rules.limits.check(work.job), store)
            return work.given(call(store, work.job, work))  # type: ignore[no-any-return]
        except (Refusal, OncekeyError) as error:
            return work.failed(error)


class AsyncRoutes(_Routes):
    """Runs a view once for each key, in an event loop. Takes an async store."""

    def __init__(
        self,
        store: AsyncStore | str,
        *,
        settings: Settings | None = None,
        **options: Unpack[SettingsOptions],
    ) -> None:
        self.store, checked = aready(store, settings, options)
        super().__init__(checked)

    async def run(
        self, key: str, facts: Facts, body: bytes, view: Callable[[], Awaitable[Seen[R]]]
    ) -> R | Answer:
        """See ``Routes.run``."""
        work, store = _Work(self.rules, facts, view), self.store
        try:
            at_hand = work.at_hand(key, await aidentify(self.rules, store, facts), body)
            if at_hand is not None:
                return at_hand
            await arun(self.rules.limits.check(work.job), store)
            return work.given(await acall(store, work.job, work.awaited))  # type: ignore[no-any-return]
        except (Refusal, OncekeyError) as error:
            return work.failed(error)
