"""``resilient``: a breaker in front of a store, and the one vocabulary for its outages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, overload

from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError, PolicyError
from oncekey.policy import JournalPath, OnOutage, check_on_outage
from oncekey.resilience.around import NO_JOURNAL, Around
from oncekey.resilience.breaker import Breaker
from oncekey.resilience.fallback import Fallback
from oncekey.resilience.powers import made
from oncekey.resilience.stores import (
    AsyncJournalSteps,
    AsyncResilientStore,
    JournalSteps,
    ResilientStore,
)
from oncekey.stores._encrypted import AsyncEncryptedStore, EncryptedStore, encrypted_store
from oncekey.stores.legacy import LegacyStore
from oncekey.stores.memory import AsyncMemoryStore, MemoryStore

__all__ = ["resilient", "seen_by"]

S = TypeVar("S", bound=Store | AsyncStore)


@overload
def resilient(
    store: Store,
    *,
    on_outage: OnOutage = "closed",
    journal: JournalPath | None = None,
    breaker: Breaker | None = None,
    entries: int = 10_000,
    journal_bytes: int = 67_108_864,
) -> ResilientStore: ...
@overload
def resilient(
    store: AsyncStore,
    *,
    on_outage: OnOutage = "closed",
    journal: JournalPath | None = None,
    breaker: Breaker | None = None,
    entries: int = 10_000,
    journal_bytes: int = 67_108_864,
) -> AsyncResilientStore: ...
def resilient(
    store: Store | AsyncStore,
    *,
    on_outage: OnOutage = "closed",
    journal: JournalPath | None = None,
    breaker: Breaker | None = None,
    entries: int = 10_000,
    journal_bytes: int = 67_108_864,
) -> Any:
    """A store around ``store``, with a breaker in front of it, that can do what it can.

    While the breaker is open a call fails at once (``StoreCircuitOpenError``) instead of waiting
    for a deadline. With ``on_outage="open"`` it goes on without the store instead: on a bounded
    table of this process, and a journal from which the store is made whole when it is back. What
    that can lose is a table in the documentation.

    Args:
        store: A store. If it is encrypted, the journal has its answers sealed too.
        on_outage: ``closed`` or ``open``, for guards that say nothing themselves.
        journal: A directory on a local disk, for this store alone; several processes may share it.
            Needed for ``open``, here or at a guard.
        breaker: One with other numbers, or one that is shared.
        entries: How many keys are known in this process during an outage, at most.
        journal_bytes: How large its journal may grow. Then calls fail until it is reconciled.

    Raises:
        PolicyError: An option can't work; or ``open`` without a journal.
        BackendMismatchError: The store is in memory, or has only ``get`` and ``put``.

    Example:
        >>> from oncekey import connect
        >>> from oncekey.resilience import resilient
        >>> store = resilient(connect("memory://"))
        >>> store.breaker.state.value
        'closed'
    """
    check_on_outage(on_outage)
    if entries < 1 or journal_bytes < 1:
        raise PolicyError("entries and journal_bytes must be positive")
    if on_outage == "open" and journal is None:
        raise PolicyError(NO_JOURNAL)
    if isinstance(store, Around):
        raise PolicyError("this store is resilient already: pass the one inside of it")
    return _around(store, on_outage, journal, breaker or Breaker(), entries, journal_bytes)


def _around(
    store: Any,
    on_outage: OnOutage,
    journal: JournalPath | None,
    breaker: Breaker,
    entries: int,
    journal_bytes: int,
) -> Any:
    if isinstance(store, (EncryptedStore, AsyncEncryptedStore)):
        # Inside of it: then the journal has nothing that is not sealed.
        inner = _around(store.store, on_outage, journal, breaker, entries, journal_bytes)
        return encrypted_store(inner, store.keyring, store._allow_plain)
    if journal is None:
        return made(store, breaker, None, on_outage)
    if isinstance(store, (MemoryStore, AsyncMemoryStore, LegacyStore)):
        raise BackendMismatchError(
            f"a {type(store).__name__} is in this process, and can't be away while it runs: leave "
            "journal= out"
        )
    writer: Any = JournalSteps if isinstance(store, Store) else AsyncJournalSteps
    fallback = Fallback(store, Path(journal), entries, journal_bytes, writer)
    return made(store, breaker, fallback, on_outage)


def seen_by(store: S, on_outage: OnOutage | None, journal: JournalPath | None) -> S:
    """``store`` as a guard sees it that has this word for outages.

    Raises:
        PolicyError: There is no such word; or ``open`` has no journal.
    """
    check_on_outage(on_outage)
    found: Any = store
    inner = found.store if isinstance(found, (EncryptedStore, AsyncEncryptedStore)) else found
    if isinstance(inner, Around):
        if journal is not None:
            raise PolicyError("the store has a journal of its own: pass journal= to resilient()")
        if on_outage is None or on_outage == inner.on_outage:
            return store
        view = inner.seen_as(on_outage)
        if inner is not found:
            view = encrypted_store(view, found.keyring, found._allow_plain)
        return view  # type: ignore[no-any-return]
    if on_outage != "open":
        if journal is not None:
            raise PolicyError("journal= is for on_outage='open': leave it out, or write that word")
        return store
    return resilient(found, on_outage="open", journal=journal)  # type: ignore[no-any-return]
