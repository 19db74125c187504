"""What an inbox must do: ``AsyncInbox``, proven by ``oncekey.inbox.conformance``.

The obligations:

* **Acknowledged means kept.** ``ingest`` returns after the commit. The claim of the key, the event
  and its deliveries are one transaction: all of it is there after a crash, or nothing.
* **One event a key.** Of any number of arrivals of one key, from any task, process or machine that
  shares the inbox, exactly one is new while the key is remembered. The others are on record as
  copies of it.
* **One holder a delivery.** A delivery that was fetched is nobody else's until its lease ends. Then
  it is simply due again: nobody has to rescue it.
* **Fences rise** with every fetch of a delivery, over replays too. ``finish`` with any but the last
  one changes nothing and says so.
* **The history stays.** Attempts and actions are only added; what a replay does comes after them.
* **Whose clock counts.** The inbox's: the server's own, or the machine's for a file.
* **Slots are bounds.** ``fetch`` never gives a target more than the slots that were asked for, and
  what waits for one target never keeps another's from being found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from oncekey.inbox.filters import Filter
from oncekey.inbox.models import (
    Arrival,
    AuditEntry,
    BulkReplay,
    Count,
    DeadLetter,
    Delivery,
    Depth,
    EventDetail,
    EventRow,
    Ingested,
    InHand,
    Issue,
    Page,
    Rejected,
    Result,
    TargetState,
    TargetStatus,
)
from oncekey.instrument.audit import AuditReport, Head

__all__ = ["AsyncInbox"]


class AsyncInbox(ABC):
    """A durable inbox: events come in once, and leave by deliveries to targets.

    Every method may raise ``StoreError`` (unavailable, full, corrupt); then nothing counts as kept.
    """

    url: str
    """Where it is, without a password."""

    node: str
    """Who fetches, in lists of what is running."""

    # Events come in

    @abstractmethod
    async def ingest(self, arrival: Arrival) -> Ingested:
        """Keep an event, durably, unless its key is known. Concurrent calls share a round trip.

        Raises:
            InvalidKeyError: Source or key can't be part of a key.
        """

    @abstractmethod
    def reject(self, source: str, cause: str, detail: str = "") -> None:
        """Take note of a request that became no event. Kept soon, in bounds, if at all."""

    # and leave by deliveries

    @abstractmethod
    async def fetch(self, slots: Mapping[str, int], lease_ms: int) -> list[Delivery]:
        """Take due deliveries in hand: at most so many for each target, oldest first.

        A target that is paused or disabled gives none.
        """

    @abstractmethod
    async def finish(self, results: Sequence[Result]) -> list[bool]:
        """Say how attempts ended. False: this fence is not the last, and nothing was changed.

        Concurrent calls share a round trip.
        """

    @abstractmethod
    def settled(self, result: Result) -> None:
        """Count an attempt that was finished in somebody's own transaction: see ``Consumer``."""

    @abstractmethod
    async def hand_back(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Give up what is in hand without an attempt: it is due at once, and counts as no try."""

    @abstractmethod
    async def renew(self, deliveries: Sequence[Delivery], lease_ms: int) -> list[bool]:
        """Count the leases from now. False: somebody else has it by now."""

    @abstractmethod
    async def wait_for_work(self, timeout: float) -> bool:
        """Wait until this process queued something, or the seconds are over. True: it did."""

    # What people look at

    @abstractmethod
    async def search(
        self, filter: Filter, *, limit: int = 50, after: str | None = None
    ) -> Page[EventRow]:
        """Events, newest first."""

    @abstractmethod
    async def event(self, id: str) -> EventDetail | None:
        """All that is known of one event."""

    @abstractmethod
    async def dead_letters(
        self, filter: Filter, *, limit: int = 50, after: str | None = None
    ) -> Page[DeadLetter]:
        """Deliveries that were given up, newest event first."""

    @abstractmethod
    async def issues(self, limit: int = 100) -> list[Issue]:
        """Failures by target, status and cause, the most frequent first."""

    @abstractmethod
    async def counts(self, since: int, until: int | None = None) -> list[Count]:
        """What happened in each minute, summed over nodes. The last seconds may be missing."""

    @abstractmethod
    async def depths(self) -> list[Depth]:
        """What waits for each target that anything waits for, or was given up for."""

    @abstractmethod
    async def in_hand(self, limit: int = 100) -> list[InHand]:
        """Deliveries that a worker has taken, on any node; those first whose lease ends first."""

    @abstractmethod
    async def rejected(self, *, limit: int = 50, after: str | None = None) -> Page[Rejected]:
        """Requests that became no event, newest first."""

    @abstractmethod
    async def sources(self) -> list[str]:
        """Every source that events came from."""

    @abstractmethod
    async def last_received(self, source: str) -> int | None:
        """When the last event or copy came from a source.

        Of one that others have come long after, to the minute. ``None``: none, or none that is
        still known.
        """

    # What people do; each is in the audit, in the same transaction

    @abstractmethod
    async def replay(self, id: str, targets: Sequence[str] | None = None, *, actor: str) -> int:
        """Deliver an event again, as new attempts that come after the old ones.

        Args:
            id: Which event.
            targets: To whom; ``None``: every target that it went to. One that it never went to gets
                it for the first time.
            actor: Who asks.

        Returns:
            How many deliveries were queued. One that is in hand just now is left as it is.

        Raises:
            InvalidKeyError: There is no such event.
        """

    @abstractmethod
    async def discard(self, id: str, targets: Sequence[str] | None = None, *, actor: str) -> int:
        """Give up an event's deliveries, waiting, in hand or dead, for good. Returns how many."""

    @abstractmethod
    async def set_target(
        self, name: str, status: TargetStatus, *, actor: str, reason: str = ""
    ) -> None:
        """Pause, disable or resume a target, on every node from the next fetch on."""

    @abstractmethod
    async def targets(self) -> list[TargetState]:
        """Targets that were ever paused or disabled. Any other is active."""

    @abstractmethod
    async def record(self, action: str, subject: str, detail: str = "", *, actor: str) -> None:
        """Put an action of somebody's in the audit, such as a login or an evicted key."""

    @abstractmethod
    async def audit(self, *, limit: int = 50, after: str | None = None) -> Page[AuditEntry]:
        """What was done by whom, newest first."""

    @abstractmethod
    async def verify_audit(self, expected: Head | None = None) -> AuditReport:
        """Look at every action of the audit: what was changed, removed or cut off.

        Args:
            expected: A head that was noted elsewhere, before.
        """

    # Bulk replay by filter: of dead letters, or with state:delivered of what was delivered

    @abstractmethod
    async def count_dead(self, filter: Filter) -> int:
        """How many dead letters match."""

    @abstractmethod
    async def count_replays(self, filter: Filter) -> int:
        """How many deliveries a bulk replay would send."""

    @abstractmethod
    async def begin_bulk_replay(self, filter: Filter, *, rate: float, actor: str) -> BulkReplay:
        """Start a replay of all that match now. ``advance_bulk_replays`` moves it.

        Of dead letters; with ``state:delivered`` of deliveries that were made, each once more to
        the target that has it.

        Raises:
            PolicyError: The filter is of another state, or the rate is none.
        """

    @abstractmethod
    async def advance_bulk_replays(self) -> float | None:
        """Replay what is due by the rates of those that run, on any node; small steps.

        Returns:
            The seconds until there is more to do; ``None``: none is running.
        """

    @abstractmethod
    async def cancel_bulk_replay(self, id: int, *, actor: str) -> bool:
        """Stop one. What it queued so far stays queued. False: it was not running."""

    @abstractmethod
    async def bulk_replays(self, limit: int = 20) -> list[BulkReplay]:
        """The latest ones, newest first."""

    # Small things that nodes share, such as sessions

    @abstractmethod
    async def put_note(self, name: str, value: bytes, ttl_ms: int) -> None:
        """Keep a few bytes for a time, over whatever has that name."""

    @abstractmethod
    async def get_note(self, name: str) -> bytes | None:
        """What is kept under a name, if its time is not over."""

    @abstractmethod
    async def take_note(self, name: str) -> bytes | None:
        """What is kept under a name, and forget it: of any number of takers one gets it."""

    @abstractmethod
    async def drop_note(self, name: str) -> None:
        """Forget it."""

    # Housekeeping

    @abstractmethod
    async def prune(self, keep_ms: int) -> int:
        """Remove finished events that arrived longer ago than this, with their history.

        Small steps, or whole days at once (then an event may stay for a day longer): nobody waits
        for it. Events with unfinished or dead deliveries stay.

        Returns:
            How many events were removed, at least roughly.
        """

    @abstractmethod
    async def set_up(self) -> None:
        """Make or upgrade the tables, or find that they are there.

        ``open_inbox`` does so for a file; for a server ``oncekey migrate`` or this call does.

        Raises:
            StoreConfigError: They are newer than this oncekey, or not ours.
        """

    @abstractmethod
    async def check(self, *, quick: bool = False) -> None:
        """Raise unless the inbox can be read and written now: something as large as an event is.

        Args:
            quick: Leave out what takes longer the more there is, such as a look for damage.

        Raises:
            StoreConfigError: The tables are missing, older or newer: says what to run.
            StoreCorruptError: The file is damaged.
            StoreFullError: There is no room for another event.
        """

    @abstractmethod
    async def now(self) -> int:
        """Milliseconds since 1970 on the clock that decides."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close what this inbox opened, after what is under way. Closing twice does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
