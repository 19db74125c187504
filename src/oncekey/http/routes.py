"""Guards for single routes: for frameworks that call a function and get a response object.

An adapter translates its framework's request into ``Facts`` and its response into an ``Answer``,
and sends either the response that the view gave, or the ``Answer`` that this gives instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from oncekey._core.call import (
    CURRENT,
    agive_up,
    arecord,
    give_up,
    guarded,
    record,
)
from oncekey._core.heartbeat import Beat
from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError, ClaimLostError, OncekeyError, StoreError
from oncekey.http.answer import Answer, Fields
from oncekey.http.asgi import ready
from oncekey.http.entry import aenter, aidentify, enter, identify
from oncekey.http.facts import Facts
from oncekey.http.problems import Refusal
from oncekey.http.rules import Rules, settings_of
from oncekey.http.settings import Settings
from oncekey.stores.urls import connect

__all__ = ["AsyncRoutes", "Routes", "Seen", "already_read", "endless", "fields_of"]

R = TypeVar("R")


class Seen(NamedTuple, Generic[R]):
    """What a view gave: the framework's response, and the same as an answer."""

    response: R
    answer: Answer


def fields_of(pairs: Iterable[tuple[str, str]]) -> Fields:
    """Header fields of a framework as an answer has them."""
    return tuple(
        (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in pairs
    )


def endless(kind: str | None) -> bool:
    """Whether an answer of this type has no end to wait for, so that its body is not kept."""
    return (kind or "").startswith("text/event-stream")


def already_read(instead: str) -> OncekeyError:
    """The error where other code has read a body, and left nothing to compare it by."""
    return OncekeyError(
        f"other code read the body of a keyed request before its guard could: {instead}"
    )


class _Routes:
    """What both forms share."""

    def __init__(self, settings: Settings) -> None:
        self.rules = Rules(settings)

    def key(self, facts: Facts) -> str | None:
        """The key of a request; ``None``: call the view, unguarded.

        Raises:
            Refusal: Answer this instead, by ``refused``. The body need not be read.
        """
        return self.rules.key(facts)

    def refused(self, no: Refusal) -> Answer:
        """The answer to a refusal."""
        return self.rules.refusal(no)

    def _failed(self, error: OncekeyError) -> Answer:
        return self.rules.refusal(self.rules.failure(error))


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
        self, store: Store | str, *, settings: Settings | None = None, **options: Any
    ) -> None:
        super().__init__(settings_of(settings, options))
        self.store: Store = connect(store) if isinstance(store, str) else store
        if not isinstance(self.store, Store):
            raise BackendMismatchError(
                f"this needs a sync store, got {type(store).__name__}: pass a URL, MemoryStore(), "
                "SQLiteStore('file.db') or connect(url)"
            )

    def run(self, key: str, facts: Facts, body: bytes, view: Callable[[], Seen[R]]) -> R | Answer:
        """The view's response, or what to answer instead. Errors of the view are raised.

        Args:
            key: From ``key(facts)``.
            facts: The request.
            body: Its whole body.
            view: Calls the framework's view.
        """
        try:
            job = self.rules.job(key, identify(self.rules, self.store, facts), facts, body)
            claim = enter(self.rules, self.store, job, facts)
        except Refusal as no:
            return self.rules.refusal(no)
        if isinstance(claim, Answer):
            return claim
        token = CURRENT.set(claim)
        try:
            with Beat(self.store, claim, job.plan):
                seen = view()
        except BaseException as error:
            give_up(self.store, job, claim, error)
            raise
        finally:
            CURRENT.reset(token)
        kept = self.rules.kept(job, seen.answer)
        try:
            result = record(self.store, job, claim, kept)
        except (ClaimLostError, StoreError) as error:
            return self._failed(error)
        if result.replayed:
            return self.rules.replay(result.value, facts)  # another worker's outcome counts
        if kept is not None and self.rules.local is not None:
            self.rules.local.put(job, kept)
        return seen.response


class AsyncRoutes(_Routes):
    """Runs a view once for each key, in an event loop. Takes an async store."""

    def __init__(
        self, store: AsyncStore | str, *, settings: Settings | None = None, **options: Any
    ) -> None:
        self.store, checked = ready(store, settings, options)
        super().__init__(checked)

    async def run(
        self, key: str, facts: Facts, body: bytes, view: Callable[[], Awaitable[Seen[R]]]
    ) -> R | Answer:
        """See ``Routes.run``."""
        try:
            caller = await aidentify(self.rules, self.store, facts)
            job = self.rules.job(key, caller, facts, body)
            claim = await aenter(self.rules, self.store, job, facts)
        except Refusal as no:
            return self.rules.refusal(no)
        if isinstance(claim, Answer):
            return claim
        try:
            with guarded(self.store, job, claim):
                seen = await view()
        except GeneratorExit:
            raise  # thrown away with its loop: the lease frees the key
        except BaseException as error:
            await agive_up(self.store, job, claim, error)
            if isinstance(error, ClaimLostError) and claim.lost:
                return self._failed(error)
            raise
        kept = self.rules.kept(job, seen.answer)
        try:
            result = await arecord(self.store, job, claim, kept)
        except (ClaimLostError, StoreError) as error:
            return self._failed(error)
        if result.replayed:
            return self.rules.replay(result.value, facts)
        if kept is not None and self.rules.local is not None:
            self.rules.local.put(job, kept)
        return seen.response
