"""Sending a signed webhook from a command: where to, under which id, and what came back."""

from __future__ import annotations

import argparse
import http.client
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from oncekey.cli._output import printable
from oncekey.errors import PolicyError

if TYPE_CHECKING:
    from oncekey.signatures import Provider, SignedRequest

__all__ = ["LOCAL_GATEWAY", "Answer", "check_url", "deliver", "with_one_id"]

LOCAL_GATEWAY = "http://127.0.0.1:8080"
"""Where ``oncekey serve`` listens if nothing else is said."""

SHOWN = 200


class Answer(NamedTuple):
    """What a receiver said; a status of 0 is nothing."""

    status: int
    milliseconds: float
    text: str
    retry_after: str = ""

    @property
    def taken(self) -> bool:
        """Whether the delivery is done with."""
        return 200 <= self.status < 300


def check_url(url: str) -> None:
    """See that something can be sent there.

    Raises:
        PolicyError: It is no URL of HTTP.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise PolicyError("that is no URL to send to; write it like http://host/path")


def with_one_id(maker: Provider, arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments, with an id where the provider has it in a header: copies are one event."""
    if maker.event_id and maker.event_id.startswith("header:") and not arguments.event_id:
        return argparse.Namespace(**{**vars(arguments), "event_id": str(uuid.uuid4())})
    return arguments


def deliver(request: SignedRequest, timeout: float) -> Answer:
    """Send it, and wait for the answer."""
    parts = urlsplit(request.url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    begun = time.perf_counter()
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    later = ""
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(request.method, target, request.body, request.headers)
        answer = connection.getresponse()
        status, text = answer.status, answer.read(SHOWN).decode("utf-8", "replace")
        later = answer.getheader("Retry-After") or ""
    except (OSError, http.client.HTTPException, ValueError) as error:
        status, text = 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return Answer(status, (time.perf_counter() - begun) * 1000, printable(text), later)
