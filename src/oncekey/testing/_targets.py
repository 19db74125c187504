"""What can be tested: a receiver, an ASGI or WSGI app, a URL, or a function of yours."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from oncekey.errors import PolicyError
from oncekey.testing._samples import SignedDelivery
from oncekey.testing._wire import call_asgi, call_http, call_wsgi

__all__ = [
    "Answer",
    "Destination",
    "NoWorkerError",
    "WorkerKilled",
    "as_target",
    "asend",
    "send",
    "store_of",
]

_RETRIED: Final = frozenset({408, 425, 429})
_SHOWN: Final = 200


class WorkerKilled(BaseException):
    """Ends a worker at a chosen step, as a crash would. Nothing catches it by ``Exception``."""


class NoWorkerError(PolicyError):
    """A process that was to be a worker ended before it was one. No answer, but a wrong call."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a delivery was answered.

    Attributes:
        status: The HTTP status; 0 if no answer came.
        headers: Its header fields.
        body: Its body.
        outcome: What a receiver says became of it; empty for other targets.
        code: Why it was rejected, as a receiver says it.
        error: What was raised, or why no answer came.
        seconds: How long it took.
        event: Which event it is an answer to, where several were sent.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes = b""
    outcome: str = ""
    code: str = ""
    error: str = ""
    seconds: float = 0.0
    event: str = ""

    @property
    def ok(self) -> bool:
        """Whether the sender is told that the event is done with."""
        return 200 <= self.status < 300

    @property
    def retryable(self) -> bool:
        """Whether senders retry after this: no answer, 5xx, 429 and their kin."""
        return not self.status or self.status in _RETRIED or self.status >= 500

    @property
    def excerpt(self) -> str:
        """The error, or the beginning of the body: one line, nothing that a terminal obeys."""
        text = self.error or self.body[:_SHOWN].decode("utf-8", "replace")
        return "".join(letter if letter.isprintable() else " " for letter in text)[:_SHOWN]


class Destination(NamedTuple):
    """Something to deliver to.

    Attributes:
        kind: What it is.
        call: Takes a delivery and gives an answer, or something to await for one.
        is_async: Which of both.
        receiver: The receiver, if it is one.
        url: Where it is, if it is reached over HTTP.
    """

    kind: Literal["url", "receiver", "function", "asgi", "wsgi", "process"]
    call: Callable[[SignedDelivery], Any]
    is_async: bool
    receiver: Any = None
    url: str = ""


def as_target(target: object) -> Destination:
    """See what ``target`` is.

    Raises:
        PolicyError: It is nothing that a delivery can be made to.
    """
    if isinstance(target, Destination):
        return target
    if isinstance(target, str):
        _check_url(target)
        return Destination("url", lambda one: Answer(*call_http(one)), False, url=target)
    receive = getattr(target, "receive", None)
    if callable(receive) and hasattr(target, "provider"):

        def call(one: SignedDelivery) -> Any:
            return receive(*one, now=one.now)

        return Destination("receiver", call, inspect.iscoroutinefunction(receive), receiver=target)
    if callable(target):
        function: Callable[..., Any] = target
        asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - of objects that are apps
        )
        number = _parameters(function)
        if number == 4:
            return Destination("function", lambda one: function(*one), asynchronous)
        if number == 3:
            return Destination("asgi", lambda one: _of_asgi(function, one), True)
        if number == 2 and not asynchronous:
            return Destination("wsgi", lambda one: Answer(*call_wsgi(function, one)), False)
    raise PolicyError(
        f"{type(target).__name__} is no target: pass a receiver, an ASGI or WSGI app, a URL such "
        "as http://localhost:8000/hooks, or a function of method, url, headers and body that "
        "gives a status"
    )


def store_of(target: Destination) -> Any:
    """The store of a receiver, or ``None``."""
    return getattr(target.receiver, "_store", None)


def send(target: Destination, delivery: SignedDelivery, event: str = "") -> Answer:
    """Make one delivery to a target that is not async."""
    ready = _addressed(target, delivery)
    begun = time.perf_counter()
    try:
        given = target.call(ready)
    except BaseException as error:  # noqa: BLE001 - what is no answer is raised again
        given = _of_error(error)
    found = _as_answer(given)
    return replace(found, seconds=time.perf_counter() - begun, event=event)


async def asend(target: Destination, delivery: SignedDelivery, event: str = "") -> Answer:
    """Make one delivery to an async target."""
    ready = _addressed(target, delivery)
    begun = time.perf_counter()
    try:
        given = await target.call(ready)
    except BaseException as error:  # noqa: BLE001 - what is no answer is raised again
        given = _of_error(error)
    found = _as_answer(given)
    return replace(found, seconds=time.perf_counter() - begun, event=event)


async def _of_asgi(app: Callable[..., Any], delivery: SignedDelivery) -> Answer:
    return Answer(*await call_asgi(app, delivery))


def _as_answer(value: Any) -> Answer:
    if isinstance(value, Answer):
        return value
    if isinstance(value, int):
        return Answer(value)
    found = (getattr(value, name, None) for name in ("status_code", "status"))
    status = next((one for one in found if isinstance(one, int)), None)
    if status is None:
        raise PolicyError(
            f"the target gave a {type(value).__name__}: give a status, or an object that has one"
        )
    body = getattr(value, "body", b"")
    return Answer(
        status,
        dict(getattr(value, "headers", None) or {}),
        body if isinstance(body, bytes) else b"",
        getattr(value, "outcome", ""),
        getattr(value, "code", ""),
    )


def _of_error(error: BaseException) -> Answer:
    """What a server makes of an error: 500. Of a worker that is killed there is no answer."""
    if isinstance(error, BaseExceptionGroup) and error.subgroup(WorkerKilled):
        error = WorkerKilled("killed")
    if isinstance(error, WorkerKilled):
        return Answer(0, error="the worker was killed")
    if isinstance(error, Exception) and not isinstance(error, NoWorkerError):
        return Answer(500, error=f"{type(error).__name__}: {error}")
    raise error


def _addressed(target: Destination, delivery: SignedDelivery) -> SignedDelivery:
    """The delivery for where the target is; signed anew, since signatures may cover the URL."""
    if not target.url:
        return delivery
    there, own = urlsplit(target.url), urlsplit(delivery.url)
    path, query = there.path, there.query
    if path in ("", "/"):
        path, query = own.path, own.query
    url = urlunsplit((there.scheme, there.netloc, path or "/", query, ""))
    return delivery if url == delivery.url else delivery.again(url)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise PolicyError(f"{url!r} is no URL to deliver to; write it like http://host:port/path")


def _parameters(function: Callable[..., Any]) -> int:
    """How many arguments a call must have."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in found)
