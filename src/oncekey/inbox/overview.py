"""``overview``: how an inbox stands, in one look, for commands and health checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.models import Depth, InHand, TargetStatus

__all__ = ["Overview", "overview"]

HOUR_MS: Final = 3_600_000
_LATE_MS: Final = 5_000  # a worker looks several times a second for what is due


@dataclass(frozen=True, slots=True)
class Overview:
    """How an inbox stands.

    Attributes:
        at: When, in milliseconds since 1970, on the inbox's clock.
        depths: What waits and what was given up, by target.
        in_hand: Deliveries that workers have taken, the first 500.
        lapsed: Those of them that nobody takes again though their lease is over: no worker runs.
        stopped: Targets that are paused or disabled, and what they are.
        totals: What happened in the last hour: ``received``, ``duplicate``, ``delivered``,
            ``failed``, ``dead``, ``rejected``.
    """

    at: int
    depths: tuple[Depth, ...]
    in_hand: tuple[InHand, ...]
    lapsed: tuple[InHand, ...]
    stopped: dict[str, str]
    totals: dict[str, int]

    @property
    def waiting(self) -> int:
        """Deliveries that are not finished."""
        return sum(one.waiting for one in self.depths)

    @property
    def dead(self) -> int:
        """Deliveries that were given up."""
        return sum(one.dead for one in self.depths)

    @property
    def oldest_ms(self) -> int | None:
        """How old the oldest event is that is not delivered; ``None``: nothing waits."""
        times = [one.oldest_at for one in self.depths if one.oldest_at is not None]
        return max(0, self.at - min(times)) if times else None


async def overview(inbox: AsyncInbox) -> Overview:
    """Look at an inbox. Changes nothing."""
    now = await inbox.now()
    held = await inbox.in_hand(500)
    totals: dict[str, int] = {}
    for one in await inbox.counts(now - HOUR_MS):
        if one.kind != "late":  # each is counted as delivered, too: this is how long it took
            totals[one.kind] = totals.get(one.kind, 0) + one.n
    targets = await inbox.targets()
    return Overview(
        at=now,
        depths=tuple(await inbox.depths()),
        in_hand=tuple(held),
        lapsed=tuple(one for one in held if one.lease_until + _LATE_MS < now),
        stopped={
            one.name: str(one.status) for one in targets if one.status is not TargetStatus.ACTIVE
        },
        totals=totals,
    )
