"""What a target's HTTP client is asked, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

__all__ = ["FRAMING", "Client", "Reply", "SendError"]

FRAMING: Final = frozenset(
    (
        *("connection", "content-length", "expect", "host", "http2-settings", "keep-alive"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    )
)
"""Headers that say where a message ends, or whom it is for: the client's own to say."""


class SendError(Exception):
    """A request that got no answer. Its text is a short cause, the same for failures alike."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The beginning of an answer."""

    status: int
    retry_after: str | None
    body: bytes = field(repr=False)


class Client(Protocol):
    """Posts to one URL. Follows no redirects, uses no proxy of the environment's."""

    async def post(self, headers: Mapping[str, str], body: bytes, seconds: float) -> Reply:
        """Send a request and read the beginning of its answer, all within the time.

        Sends it once: whoever calls decides whether it is sent again.

        Raises:
            SendError: There was no answer. The target may have the request all the same.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...
