"""What a client is told when its request is refused: RFC 9457 problem documents, or Stripe's form.

``type`` never changes for a problem, so that clients can switch on it. No problem carries anything
of a stored answer or of the first request.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from oncekey.http.answer import Answer
from oncekey.http.body import SlowBodyError

__all__ = ["PROBLEMS", "Profile", "Refusal", "problem", "unread"]

Profile = Literal["ietf", "stripe"]

PROBLEMS: Final[dict[str, tuple[int, str]]] = {
    # name: the status, and the title, which stays the same for every request
    "key-missing": (400, "This request needs an idempotency key"),
    "key-invalid": (400, "The idempotency key can't be used"),
    "key-reused": (422, "The idempotency key was used for another request"),
    "in-flight": (409, "A request with this idempotency key is being handled"),
    "body-too-large": (413, "The body is too large to be guarded by an idempotency key"),
    "body-malformed": (400, "The body can't be read"),
    "body-slow": (408, "The body took too long"),
    "caller-unknown": (401, "An idempotency key needs an authenticated caller"),
    "rate-limited": (429, "Too many new idempotency keys"),
    "scope-invalid": (500, "The server can't tell who is calling"),
    "store-unavailable": (503, "Idempotency keys can't be checked right now"),
    "body-unavailable": (200, "The request was done before, its answer was not kept"),
}

# How Stripe's API words the same things, for clients that were written for it.
_STRIPE: Final[dict[str, tuple[int, str, str]]] = {
    "key-reused": (400, "idempotency_error", "idempotency_key_reused"),
    "in-flight": (409, "idempotency_error", "idempotency_key_in_use"),
    "store-unavailable": (503, "api_error", "idempotency_unavailable"),
}


class Refusal(Exception):
    """A request that goes no further.

    Attributes:
        name: Which of ``PROBLEMS``.
        detail: What is wrong with this request, and what to do about it.
        retry_after: Seconds after which a retry makes sense.
        status: The status, where it is not the problem's usual one.
    """

    def __init__(
        self,
        name: str,
        detail: str,
        *,
        retry_after: int | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.name = name
        self.detail = detail
        self.retry_after = retry_after
        self.status = status


_ENDED_EARLY: Final = Refusal("body-malformed", "The body ended too early.")
_TOO_SLOW: Final = Refusal("body-slow", "The body was not here in time: send the request again.")


def unread(error: Exception) -> Refusal:
    """Why a body could not be read."""
    return _TOO_SLOW if isinstance(error, SlowBodyError) else _ENDED_EARLY


def problem(refusal: Refusal, profile: Profile, docs_url: str, challenge: str = "") -> Answer:
    """The answer to a refused request."""
    status, title = PROBLEMS[refusal.name]
    status = refusal.status or status
    document: dict[str, Any]
    if profile == "stripe":
        usual = (status, "invalid_request_error", refusal.name.replace("-", "_"))
        styled, kind, code = _STRIPE.get(refusal.name, usual)
        status = refusal.status or styled
        error = {"type": kind, "code": code, "message": refusal.detail, "doc_url": docs_url}
        document, content_type = {"error": error}, b"application/json"
    else:
        document = {
            "type": f"urn:oncekey:problem:{refusal.name}",
            "title": title,
            "status": status,
            "detail": refusal.detail,
            "documentation": docs_url,
        }
        content_type = b"application/problem+json"
    headers = [
        (b"content-type", content_type),
        (b"link", f'<{docs_url}>; rel="help"'.encode()),
        (b"cache-control", b"no-store"),
    ]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after))
    if status == 401 and challenge:
        headers.append((b"www-authenticate", challenge.encode()))
    return Answer(status, tuple(headers), json.dumps(document).encode())
