"""Reconciliation: what went on without the store goes into it, and what was done twice is told.

A flow for each entry of a journal. It can stop anywhere and be run again: an outcome goes in under
the owner that it was done by, so that its own record is known when it is met again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oncekey._core.codec import DONE
from oncekey._core.drive import Flow, Op, arun, run
from oncekey.abc import AsyncStore, Store
from oncekey.errors import PolicyError, StoreCorruptError
from oncekey.instrument.events import EventKind, emit
from oncekey.models import ClaimReply, ClaimVerdict, Record, State
from oncekey.resilience.findings import Finding, Findings, Side, finding_id
from oncekey.resilience.journal import (
    Entry,
    Page,
    check_private,
    held,
    own_directory,
    pages,
    pages_beside,
    put_away,
    read_page,
)

__all__ = [
    "Reconciled",
    "Reconciling",
    "areconcile",
    "findings_in",
    "reconcile",
    "settle_entry",
    "store_name",
]

LEAST_TTL_MS = 1000


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What a reconciliation did.

    Attributes:
        inserted: Outcomes that the store did not have.
        present: Outcomes that it had already, from a reconciliation that was cut short.
        duplicates: Keys whose work was done more than once.
        unfinished: Claims whose process died before there was an outcome.
        damaged: Lines that can't be read.
        files: Journals that are done with.
        busy: Journals whose process lives, or that somebody else reconciles.
    """

    inserted: int = 0
    present: int = 0
    duplicates: int = 0
    unfinished: int = 0
    damaged: int = 0
    files: int = 0
    busy: int = 0

    def __add__(self, other: Reconciled) -> Reconciled:
        return Reconciled(*(a + b for a, b in zip(_numbers(self), _numbers(other), strict=True)))


def _numbers(made: Reconciled) -> tuple[int, ...]:
    return (
        made.inserted,
        made.present,
        made.duplicates,
        made.unfinished,
        made.damaged,
        made.files,
        made.busy,
    )


def findings_in(directory: Path) -> Findings:
    """The queue that lies beside the journals of a directory."""
    own_directory(directory)
    return Findings(str(directory / "findings.db"))


def reconcile(
    directory: str | Path, store: Store, *, findings: Findings | None = None
) -> Reconciled:
    """Put what went on without ``store`` into it, from the journals of processes that are gone.

    Journals of processes that live are theirs: they reconcile them by themselves.

    Args:
        directory: Where the journals are.
        store: The store that was away.
        findings: The queue for what is found. Default: ``findings.db`` beside the journals.

    Raises:
        StoreError: The store is away still. What is done stays done.
        PolicyError: The journals are of another kind of store, or another tenant's; or others may
            write to their directory.
    """
    inner: Any = innermost(store)
    work = Reconciling(Path(directory), store_name(inner), findings)
    return run(work.all(), inner)


async def areconcile(
    directory: str | Path, store: AsyncStore, *, findings: Findings | None = None
) -> Reconciled:
    """``reconcile`` for an asynchronous store."""
    inner: Any = innermost(store)
    work = Reconciling(Path(directory), store_name(inner), findings)
    return await arun(work.all(), inner)


def innermost(store: Any) -> Any:
    """The store that keeps the records: answers in a journal are as that one has them, sealed."""
    while isinstance(getattr(store, "store", None), (Store, AsyncStore)):
        store = store.store
    return store


def store_name(store: Any) -> str:
    """What a store is to its journals, whether it is sync or async: its kind and tenant."""
    kind = type(store).__name__.removeprefix("Async")
    tenant = str(getattr(store, "tenant", ""))
    return f"{kind} {tenant}" if tenant else kind


def settle_entry(entry: Entry) -> Flow[tuple[str, Record | None]]:
    """Put one outcome into the store.

    Returns:
        ``inserted``, ``present`` or ``duplicate``, and the record of whoever did it as well.
    """
    other: Record | None = yield Op("read", (entry.key,))
    now: int = yield Op("now", ())
    if other is not None and entry.what != "mark" and other.owner == entry.owner:
        if other.state is State.COMPLETED:
            return "present", None
        other = None
    elif other is not None and _is_over(other, now):
        other = None
    left = max(LEAST_TTL_MS, entry.at + entry.terms.ttl_ms - now)
    terms = entry.terms._replace(ttl_ms=left, sticky=False)
    if entry.what == "mark":
        first: bool = yield Op("first_seen", (entry.key, terms))
        return ("inserted", None) if first else ("duplicate", other)
    reply: ClaimReply = yield Op("claim", (entry.key, entry.owner, entry.fingerprint, terms))
    if reply.verdict is not ClaimVerdict.WON:
        return "duplicate", (yield Op("read", (entry.key,)))
    answer = DONE if entry.answer is None else entry.answer
    yield Op("complete", (entry.key, entry.owner, reply.fence, answer, terms))
    return ("inserted", None) if other is None else ("duplicate", other)


def _is_over(record: Record, now: int) -> bool:
    """Whether it says of no work that was done, or might have been."""
    return record.state is State.RELEASED or record.expires_at <= now


class Reconciling:
    """One reconciliation of a directory."""

    def __init__(
        self,
        directory: Path,
        store: str,
        findings: Findings | None,
        settled: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self.directory = directory
        self._store = store
        self._findings = findings
        self._settled = settled
        self._owners: dict[bytes, tuple[str, float]] | None = None

    def all(self) -> Flow[Reconciled]:
        """Every journal that nobody holds."""
        check_private(self.directory)
        total = Reconciled()
        for path in list(pages(self.directory)):
            with held(path) as ours:
                if not ours:
                    total += Reconciled(busy=1)
                    continue
                total += yield from self.page(read_page(path))
                put_away(path)
        if total.inserted or total.present:
            emit(EventKind.RECONCILED, None, "reconcile", count=total.inserted + total.present)
        return total

    def page(self, page: Page) -> Flow[Reconciled]:
        """One journal."""
        if page.store not in (self._store, ""):
            raise PolicyError(
                f"{page.path} is of a {page.store}, and this is a {self._store}: give each store a "
                "journal directory of its own, and reconcile it with its own store"
            )
        made = Reconciled(files=1, damaged=page.damaged)
        began: dict[bytes, Entry] = {}
        freed = {entry.owner for entry in page.entries if entry.what == "free"}
        for entry in page.entries:
            if entry.what in ("claim", "mark") and entry.owner in freed:
                continue  # a mark that was taken back: nobody was told that it was the first
            if entry.what == "claim":
                began[entry.owner] = entry
                continue
            if entry.what == "free":
                continue
            claim = began.pop(entry.owner, None)
            how, other = yield from settle_entry(entry)
            if how == "duplicate":
                self._tell(page, claim, entry, other)
                made += Reconciled(duplicates=1)
            else:
                made += Reconciled(**{how: 1})
            self._settled(entry)
        for entry in self._unfinished(page, began):
            made += Reconciled(unfinished=1)
            self._tell_unfinished(page, entry)
        if page.damaged:
            note = f"{page.damaged} lines of {page.path.name} can't be read"
            self._add(Finding(finding_id("damaged", page.path.name), "damaged", "", "", 0.0), note)
        return made

    def _unfinished(self, page: Page, began: dict[bytes, Entry]) -> Iterable[Entry]:
        """Claims that have no outcome in any file: they may have been carried to a later one.

        Somebody else may be at that one already, and so may look at this one: only one of the two
        may leave it to the other.
        """
        if began:
            for other, later in pages_beside(page):
                for entry in other.entries:
                    if later or entry.what != "claim":
                        began.pop(entry.owner, None)
        return list(began.values())

    def _tell(self, page: Page, claim: Entry | None, entry: Entry, other: Record | None) -> None:
        """Report work that was done more than once, with both sides."""
        ours = Side(
            "journal",
            page.process,
            "completed",
            (claim.at if claim is not None else entry.fence // 1000 or entry.at) / 1000,
            entry.at / 1000,
            entry.owner.hex()[:12],
        )
        same: bool | None = None
        theirs = Side("store", "", "expired", 0.0, 0.0)
        if other is not None:
            if entry.fingerprint and other.fingerprint:
                same = entry.fingerprint == other.fingerprint
            theirs = self._theirs(page, other)
        shown = entry.digest.hex()
        name = finding_id("duplicate", entry.digest, entry.owner)
        found = Finding(name, "duplicate", shown, entry.scope, 0.0, (ours, theirs), same)
        emit(EventKind.SLIPPED, entry.key, "reconcile", fence=entry.fence)
        self._add(found, "")

    def _theirs(self, page: Page, other: Record) -> Side:
        """The other side, as the store has it; and who that was, if a journal knows."""
        states = {State.COMPLETED: "completed", State.PENDING: "running"}
        state = states.get(other.state, "unfinished")
        if other.state is State.PENDING and other.lease_until <= time.time() * 1000:
            state = "unfinished"
        process, ended = self._by_owner(page, other.owner)
        began = other.fence / 1_000_000 if other.owner else 0.0  # a mark's lies past its window
        return Side("store", process, state, began, ended, other.owner.hex()[:12])

    def _by_owner(self, page: Page, owner: bytes) -> tuple[str, float]:
        if self._owners is None:
            self._owners = {}
            for one in (*(other for other, _ in pages_beside(page)), page):
                for entry in one.entries:
                    if entry.what != "claim" or entry.owner not in self._owners:
                        self._owners[entry.owner] = one.process, entry.at / 1000
        return self._owners.get(owner, ("", 0.0))

    def _tell_unfinished(self, page: Page, entry: Entry) -> None:
        side = Side(
            "journal", page.process, "unfinished", entry.at / 1000, 0.0, entry.owner.hex()[:12]
        )
        name = finding_id("unfinished", entry.digest, entry.owner)
        shown = entry.digest.hex()
        note = (
            "it has no outcome, as its process died or it was cut off: look whether it took "
            "effect. A retry runs it again"
        )
        self._add(Finding(name, "unfinished", shown, entry.scope, 0.0, (side,)), note)

    def _add(self, finding: Finding, note: str) -> None:
        if self._findings is None:
            self._findings = findings_in(self.directory)
        try:
            self._findings.add(replace(finding, found_at=time.time(), note=note))
        except Exception as error:
            raise StoreCorruptError(
                f"a finding could not be kept ({type(error).__name__}), so that its journal stays "
                f"as it is: look at {self.directory / 'findings.db'}"
            ) from error
