"""A delivery of our own: signed with a source's secret, through the same door as the provider's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from oncekey.errors import OncekeyError, PolicyError
from oncekey.server.settings import SourceSettings
from oncekey.signatures import Headers
from oncekey.testing import SignedDelivery, sample

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["send_copies"]


async def send_copies(gateway: Gateway, source: SourceSettings, copies: int = 5) -> str:
    """Send copies of one sample event to a source at the same time, as a provider's retries are.

    Returns:
        The id of the event that they became.

    Raises:
        PolicyError: Nothing can be signed as this provider, or it was not taken.
    """
    base = gateway.settings.public_url.rstrip("/") or "http://localhost"
    try:
        delivery = sample(source.provider, url=f"{base}/hooks/{source.name}")
    except OncekeyError as error:
        raise PolicyError(
            f"nothing can be signed as {source.provider.title} here ({error}): send a real event"
        ) from None
    found = await asyncio.gather(*(_send(gateway, source, delivery) for _ in range(copies)))
    taken = [headers for status, headers in found if 200 <= status < 300]
    if not taken:
        raise PolicyError(f"the copies were answered {found[0][0]}: see Rejected")
    return taken[0].get(b"oncekey-event", b"").decode("ascii")


async def _send(
    gateway: Gateway, source: SourceSettings, delivery: SignedDelivery
) -> tuple[int, dict[bytes, bytes]]:
    parts = urlsplit(delivery.url)
    fields = {name.lower(): value for name, value in Headers(delivery.headers).items()}
    fields.setdefault("host", parts.netloc)
    scope = {
        "type": "http",
        "method": delivery.method,
        "scheme": parts.scheme,
        "path": f"/hooks/{source.name}",
        "raw_path": parts.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in fields.items()],
    }
    answer: dict[str, Any] = {}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": delivery.body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        answer.update(message)

    await gateway.intake(scope, receive, send)
    return answer["status"], dict(answer["headers"])
