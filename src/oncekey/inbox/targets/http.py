"""HTTP targets: the event's own body, byte for byte, signed anew by Standard Webhooks."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

from oncekey.errors import PolicyError, StoreConfigError
from oncekey.inbox.models import Delivery
from oncekey.inbox.targets.base import Answer
from oncekey.inbox.targets.replies import FRAMING, Client, SendError
from oncekey.signatures.standard_webhooks import StandardWebhooksProvider
from oncekey.signatures.table import provider

__all__ = ["HttpTarget"]

_OURS: Final = re.compile(r"(?i)webhook-.*|oncekey-.*|idempotency-key")
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SICK: Final = frozenset((408, 425, 429))
_GONE: Final = 410
_JSON: Final = "application/json"


class HttpTarget:
    """Posts events to a URL.

    Each request has ``webhook-id`` (the event's id, the same for every attempt),
    ``webhook-timestamp``, ``webhook-signature`` where there is a secret, ``Idempotency-Key``,
    ``oncekey-attempt`` and ``oncekey-fence``. 2xx is success; 410 gives the delivery up; anything
    else is tried again, at ``Retry-After`` where it says so. Redirects are not followed.

    Args:
        url: Where to; ``https`` or ``http``.
        secret: Standard Webhooks secrets (``whsec_...``) to sign with, the newest first.
        headers: More headers for each request, such as an ``Authorization``.
        allow_private: Also deliver to loopback and private addresses.
        connections: The most connections at a time.
        client: What speaks HTTP to the URL, in place of ``HttpClient``.

    Raises:
        PolicyError: The URL, a secret or a header can't be used.
        StoreConfigError: httptools is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: str | Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        allow_private: bool = False,
        connections: int = 16,
        client: Client | None = None,
    ) -> None:
        self._url = _checked_url(url)
        secrets = [secret] if isinstance(secret, str) else list(secret or ())
        self._signers = [_signer(one) for one in secrets]
        self._headers = _checked_headers(headers or {})
        self._client = client or _client(self._url, allow_private, connections)

    def __repr__(self) -> str:
        return f"HttpTarget({urlsplit(self._url).hostname!r})"

    async def send(self, delivery: Delivery, timeout_ms: int) -> Answer:
        """See ``Target``."""
        try:
            reply = await self._client.post(
                self.request_headers(delivery), delivery.event.body, timeout_ms / 1000
            )
        except SendError as error:
            return Answer(False, error=str(error))
        note = _readable(reply.body)
        if 200 <= reply.status < 300:
            return Answer(True, reply.status, note=note)
        kind = "redirect not followed" if 300 <= reply.status < 400 else f"HTTP {reply.status}"
        return Answer(
            False,
            reply.status,
            kind,
            note,
            retry_after_ms=_retry_after(reply.retry_after),
            permanent=reply.status == _GONE,
            sick=reply.status >= 500 or reply.status in _SICK,
        )

    def request_headers(self, delivery: Delivery) -> dict[str, str]:
        """What a delivery's request carries, signed for now."""
        event = delivery.event
        stamp = str(int(time.time()))
        kind = next((value for name, value in event.headers if name == "content-type"), _JSON)
        fields = {
            "content-type": kind,
            "user-agent": "oncekey",
            **self._headers,
            "webhook-id": event.id,
            "webhook-timestamp": stamp,
            "idempotency-key": event.id,
            "oncekey-attempt": str(delivery.attempt),
            "oncekey-fence": str(delivery.fence),
        }
        if self._signers:
            fields["webhook-signature"] = " ".join(
                signer.signature(event.id, stamp, event.body) for signer in self._signers
            )
        return fields

    async def aclose(self) -> None:
        """See ``Target``."""
        await self._client.aclose()


def _client(url: str, allow_private: bool, connections: int) -> Client:
    try:
        from oncekey.inbox.targets.client import HttpClient
    except ModuleNotFoundError:
        raise StoreConfigError(
            "HTTP targets need httptools: run pip install 'oncekey[serve]'"
        ) from None
    return HttpClient(url, allow_private=allow_private, connections=connections)


def _signer(secret: str) -> StandardWebhooksProvider:
    made = provider("standard-webhooks", secret)
    assert isinstance(made, StandardWebhooksProvider)  # noqa: S101 - by the table of providers
    return made


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or re.search(r"[\s\x00-\x1f]", url)
    ):
        raise PolicyError(
            "the URL of a target is https://host/path, or http:// for one of your own"
        )
    if not parts.hostname.isascii():
        raise PolicyError("write the host of a target in ASCII, as its registrar has it: xn--...")
    if parts.username is not None or parts.password is not None:
        raise PolicyError("the URL of a target can't hold a password: pass it in headers")
    try:
        _ = parts.port
    except ValueError:
        raise PolicyError("the port in the URL of a target is no number up to 65535") from None
    return url


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value):
            raise PolicyError(f"the header {name!r} of a target has a character that can't be sent")
        if _OURS.fullmatch(name) or name.lower() in FRAMING:
            raise PolicyError(f"the header {name!r} is set by oncekey itself: leave it out")
    return {name.lower(): value for name, value in headers.items()}


def _retry_after(value: str | None) -> int | None:
    """Milliseconds of a ``Retry-After``: seconds, or a date."""
    if value is None:
        return None
    if value.isascii() and value.isdigit() and len(value) < 10:
        return int(value) * 1000
    try:
        return max(0, round((parsedate_to_datetime(value).timestamp() - time.time()) * 1000))
    except (TypeError, ValueError, OverflowError):
        return None


def _readable(body: bytes) -> str:
    """The beginning of an answer, for people."""
    text = body[:400].decode("utf-8", "replace")
    if text.isprintable():  # nothing at all, mostly
        return text
    return "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in text)
