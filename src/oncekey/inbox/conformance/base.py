"""What the checks have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.models import (
    Arrival,
    Delivery,
    DeliveryState,
    EventDetail,
    Outcome,
    Result,
    Route,
)

__all__ = [
    "CHECKS",
    "LEASE",
    "SOON",
    "Nodes",
    "arrival",
    "check",
    "conform",
    "detail",
    "ended",
    "next_one",
    "states",
]

LEASE: Final = 30_000
SOON: Final = 5.0  # seconds after which what should come is taken not to


class Nodes:
    """Inboxes on one storage.

    Args:
        opened: Opens one more, for a node of that name.
    """

    def __init__(self, opened: Callable[[str], Awaitable[AsyncInbox]]) -> None:
        self._opened = opened
        self._inboxes: list[AsyncInbox] = []

    async def node(self, name: str = "a") -> AsyncInbox:
        """One more inbox; it is closed at the end of the check."""
        inbox = await self._opened(name)
        self._inboxes.append(inbox)
        return inbox

    async def close(self) -> None:
        """Close all of them."""
        while self._inboxes:
            await self._inboxes.pop().aclose()


Check = Callable[[Nodes], Awaitable[None]]
CHECKS: Final[dict[str, Check]] = {}


def check(function: Check) -> Check:
    """Make a function one of the checks."""
    CHECKS[getattr(function, "__name__", "check")] = function
    return function


async def conform(opened: Callable[[str], Awaitable[AsyncInbox]], name: str) -> None:
    """Run one check on an empty storage.

    Raises:
        AssertionError: The inbox does not do what it must.
    """
    nodes = Nodes(opened)
    try:
        await CHECKS[name](nodes)
    finally:
        await nodes.close()


def arrival(
    key: str, *targets: str, source: str = "shop", type: str = "paid", order: str | None = None
) -> Arrival:
    """An event of the checks'."""
    routes = tuple(Route(target, order) for target in targets)
    return Arrival(source, key, type, b"\x00\xff " + key.encode(), (("x-one", "1"),), routes)


def ended(delivery: Delivery, outcome: Outcome = Outcome.DELIVERED, **more: object) -> Result:
    """How an attempt ended."""
    return Result(delivery, outcome, ms=5, **more)  # type: ignore[arg-type]


async def detail(inbox: AsyncInbox, id: str) -> EventDetail:
    """All of an event that is there."""
    found = await inbox.event(id)
    assert found is not None
    return found


async def states(inbox: AsyncInbox, id: str) -> dict[str, DeliveryState]:
    """How the deliveries of an event stand, by target."""
    return {row.target: row.state for row in (await detail(inbox, id)).deliveries}


async def next_one(inbox: AsyncInbox, target: str = "app", lease_ms: int = LEASE) -> Delivery:
    """The next delivery of a target; waits for a lease to end if it must."""
    async with asyncio.timeout(SOON):
        while not (found := await inbox.fetch({target: 1}, lease_ms)):
            await asyncio.sleep(0.02)
    return found[0]
