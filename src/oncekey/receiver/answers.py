"""What senders are told: one answer for all that became of a delivery, or why it was refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from oncekey.errors import (
    CanonicalJSONError,
    IdempotencyConflictError,
    IdempotencyInFlightError,
    OncekeyError,
    StoreError,
    TransactionRefusedError,
)
from oncekey.receiver.events import WebhookResponse
from oncekey.signatures.base import Ack, Provider, UnreadableError
from oncekey.signatures.verdict import Verdict

if TYPE_CHECKING:
    from oncekey.receiver.decisions import Work

__all__ = [
    "STATUS",
    "UNAVAILABLE_RETRY",
    "Outcome",
    "answer_to",
    "failed",
    "greeted",
    "malformed",
    "refused",
    "rejected",
    "taken",
]

logger = logging.getLogger("oncekey")

IN_FLIGHT_RETRY: Final = 5  # seconds: a sender need not wait for a whole lease
UNAVAILABLE_RETRY: Final = 30
HANDLER_FAILED: Final = "HANDLER_FAILED"
MAX_RETRY: Final = 86_400

# What a sender is told about each outcome. 2xx: done with; 5xx and 429: send it again.
STATUS: Final = {
    "in_flight": 503,
    "conflict": 409,
    "failed": 500,
    "limited": 429,
    "unavailable": 503,
    "unhandled": 503,
}
_TOLD: Final = {
    "in_flight": "another copy of this event is being handled: send it again after Retry-After",
    "conflict": "this event id came before with another payload: the first one counts",
    "failed": "the event could not be handled: send it again later",
    "limited": "too many deliveries of this event, or from this sender: slow down",
    "unavailable": "the event can't be recorded right now: send it again after Retry-After",
    "unhandled": "events of this type are not taken yet: send it again after Retry-After",
}
_WORST: Final = ("unavailable", "failed", "unhandled", "in_flight", "limited", "conflict")
# Genuine or not, these can't be read: no sender needs to look for a wrong key.
_MALFORMED: Final = ("body_malformed", "id_missing", "url_malformed", "webhook_body_malformed")
_CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Outcome(NamedTuple):
    """What became of one event."""

    name: str
    code: str = ""
    retry_after: int | None = None
    late: bool = False


def failed(error: Exception, provider: Provider, work: Work) -> Outcome:
    """What the error means that a call ended with. The log says of which event."""
    if isinstance(error, IdempotencyConflictError):
        return Outcome("conflict", code=error.code)
    if isinstance(error, IdempotencyInFlightError):
        seconds = min(error.retry_after or IN_FLIGHT_RETRY, IN_FLIGHT_RETRY)
        return Outcome("in_flight", code=error.code, retry_after=seconds)
    if isinstance(error, TransactionRefusedError):
        logger.error(
            "%s: a webhook could not be recorded, its sender is told to retry, and no retry mends "
            "this (TRANSACTION_REFUSED): %s",
            provider.name,
            error,
        )
        return Outcome("unavailable", code=error.code, retry_after=UNAVAILABLE_RETRY)
    if isinstance(error, StoreError):
        logger.warning("a webhook could not be recorded, its sender is told to retry: %s", error)
        return Outcome("unavailable", code=error.code, retry_after=UNAVAILABLE_RETRY)
    facts = getattr(provider, "facts", None)
    logger.warning(
        "the handler of %s for %s failed with %s (event %s…): %s is answered %d and may send it "
        "again. Its retries: %s",
        provider.name,
        work.item.event_type or "events without a type",
        type(error).__name__,
        work.job.key.shown,
        provider.title,
        getattr(provider, "retry_status", STATUS["failed"]),
        getattr(facts, "retries", "") or "not known",
        exc_info=error,
    )
    return Outcome("failed", code=type(error).__name__)


def answer_to(provider: Provider, outcomes: list[Outcome]) -> WebhookResponse:
    """One answer for a delivery: the sender is told to retry if any event of it needs that."""
    names = tuple(outcome.name for outcome in outcomes)
    worst = next((name for name in _WORST if name in names), None)
    several = names if len(names) > 1 else ()
    if worst is None:
        done = ("handled", "dead", "duplicate")
        return taken(
            provider, next((one for one in done if one in names), "ignored"), several=several
        )
    first = next(outcome for outcome in outcomes if outcome.name == worst)
    waits = [outcome.retry_after for outcome in outcomes if outcome.retry_after is not None]
    headers = {"Content-Type": "application/json"}
    status = STATUS[worst]
    if worst == "failed":  # some providers retry few statuses
        status = getattr(provider, "retry_status", status)
    if status == 503 and not waits:
        waits = [UNAVAILABLE_RETRY]
    if waits and worst != "conflict":
        most = getattr(provider, "retry_after_most", None) or MAX_RETRY  # and wait only shortly
        headers["Retry-After"] = str(min(max(waits), most))
    # The name of a handler's error is for the log and the audit, not for who sends.
    code = HANDLER_FAILED if worst == "failed" else first.code
    told = {"error": worst, "code": code, "message": _TOLD[worst]}
    return WebhookResponse(status, headers, json.dumps(told).encode(), worst, first.code, several)


def taken(
    provider: Provider, name: str, code: str = "", several: tuple[str, ...] = ()
) -> WebhookResponse:
    """The provider's own answer to what is done with."""
    ack = provider.ack
    headers = {"Content-Type": ack.content_type} if ack.body else {}
    if name == "ignored":
        headers["Oncekey-Outcome"] = name  # a 2xx that did nothing says so
    return WebhookResponse(ack.status, headers, ack.body, name, code, several)


def rejected(
    status: int,
    code: str,
    message: str,
    headers: Mapping[str, str] | None = None,
    *,
    outcome: str = "rejected",
) -> WebhookResponse:
    """An answer that says what is wrong."""
    body = json.dumps({"error": code, "message": message}).encode()
    fields = {"Content-Type": "application/json", **(headers or {})}
    return WebhookResponse(status, fields, body, outcome, code)


def greeted(ack: Ack | None) -> WebhookResponse:
    """The answer to a GET request: to the provider's check of the endpoint, or to anything else."""
    if ack is None:
        return rejected(
            403, "verify_token", "no check of this endpoint, or with another token than was agreed"
        )
    # Nobody's browser is to make anything of what a stranger has sent back to itself.
    headers = {"Content-Type": ack.content_type, "X-Content-Type-Options": "nosniff"}
    return WebhookResponse(ack.status, headers, ack.body, "ignored", "handshake")


def refused(provider: Provider, verdict: Verdict) -> WebhookResponse:
    """The answer to a delivery that is not genuine, or that can't be verified right now."""
    # It stands in a header: whoever wrote the provider, no quote or line break may get there.
    code = verdict.code if _CODE.fullmatch(verdict.code) else "signature_invalid"
    if verdict.transient:
        again = {"Retry-After": str(UNAVAILABLE_RETRY)}
        return rejected(503, code, verdict.message, again, outcome="unavailable")
    if code in _MALFORMED:
        return rejected(400, code, verdict.message)
    own = getattr(provider, "rejection_headers", None)
    challenge = {"WWW-Authenticate": f'Signature error="{code}"'}
    return rejected(401, code, verdict.message, own(verdict) if own else challenge)


def malformed(error: OncekeyError) -> WebhookResponse:
    """The answer to a genuine delivery that can't be handled: without a key, say."""
    if type(error) is OncekeyError:  # the fault of a provider's code: no sender can mend it
        logger.error("a verified webhook can't be handled: %s", error)
        return rejected(500, "failed", _TOLD["failed"], outcome="failed")
    code = "id_missing"
    if isinstance(error, CanonicalJSONError):  # no form of it that two copies could be compared by
        code = "body_malformed"
    elif isinstance(error, UnreadableError):
        code = error.reason
    return rejected(400, code, str(error))
