"""What goes into a receiver's handlers and what comes out of a receiver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oncekey.signatures.delivery import Headers
from oncekey.signatures.verdict import VerifiedWebhookSender

__all__ = ["DeadLetter", "WebhookEvent", "WebhookResponse"]


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """One verified event, as a handler gets it.

    Attributes:
        id: The key that it is handled once under.
        type: What kind of event it is, where the provider says. Empty: it does not.
        payload: The parsed body, or the item of a batch. Bytes where the body is not JSON.
        sender: Who sent it, from the verified signature.
        body: The raw bytes of the whole delivery.
        headers: Its header fields.
        attempt: Which attempt at this event this is, from 1.
        takeover: An earlier worker died or hung with it in hand, so that part may be done.
        late: It came after its window: it may have been handled before, and nobody can tell.
    """

    id: str
    type: str
    payload: Any = field(repr=False)
    sender: VerifiedWebhookSender
    body: bytes = field(repr=False)
    headers: Headers = field(repr=False)
    attempt: int = 1
    takeover: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class WebhookResponse:
    """What to answer.

    Attributes:
        status: The HTTP status.
        headers: Header fields to send.
        body: The body to send.
        outcome: What became of the delivery: ``handled``, ``duplicate``, ``in_flight``,
            ``conflict``, ``dead``, ``failed``, ``rejected``, ``limited``, ``ignored`` (no
            handler for its type), ``unhandled`` (the same, with ``strict_types``) or
            ``unavailable`` (the store, a key set or a certificate can't be had right now).
        code: Why it was not handled, in one stable word.
        outcomes: That of each item, for a batch.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    outcome: str
    code: str = ""
    outcomes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that its handler gave up for good.

    Attributes:
        event: The event, whole, to look at and to handle by other means.
        error: The error's class and message.
    """

    event: WebhookEvent
    error: str
