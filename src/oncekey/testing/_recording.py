"""Deliveries kept in a file, one a line, to be made again: ``Recorder`` and ``recorded``."""

from __future__ import annotations

import base64
import copy
import errno
import inspect
import io
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote, unquote_plus

from oncekey.errors import PolicyError
from oncekey.signatures.delivery import Headers
from oncekey.testing._samples import SignedDelivery
from oncekey.testing._targets import as_target

__all__ = ["Recorder", "recorded"]

logger = logging.getLogger("oncekey")

T = TypeVar("T")

# Names with one of these words hold somebody's credentials; those of signatures don't.
CREDENTIALS: Final = re.compile(
    r"(^|[^a-z])((x|access|api|app|auth|client)?(auth|authentication|authorization|cookie|"
    r"credentials?|jwt|key|passw(or)?d|pwd|secret|session|sid|token))(id)?([^a-z]|$)"
)
# No secrets, for all their names: ids, and what a signature was made with.
HARMLESS: Final = frozenset(
    {
        *("i-twilio-idempotency-token", "idempotency-key", "x-idempotency-key"),
        *("paypal-auth-algo", "paypal-auth-version", "x-event-key"),
    }
)
LEFT_OUT: Final = "left-out"
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


class Recorder:
    """Writes deliveries to a file of JSON lines, as they come, and passes them on.

    Bodies are recorded whole: the file, which only its owner can read, may hold what your senders
    know of your customers. Header fields and values in the query whose names speak of credentials
    (``Authorization``, ``Cookie``, ``X-Api-Key``, ``?token=``) are left out, and so is a login in
    the URL. A delivery that can't be written is logged and passed on all the same.

    Args:
        path: The file; lines are added to it. It must not be a link.
        keep: Names of header fields and query parameters to record all the same.
        clock: Seconds since 1970, for the time that a delivery came.

    Raises:
        PolicyError: The path is a link, or a file of somebody else's.

    Example:
        >>> from oncekey.receiver import WebhookReceiver
        >>> from oncekey.testing import Recorder, recorded, sample
        >>> delivery = sample("stripe")
        >>> with Recorder("deliveries.jsonl") as recorder:
        ...     receiver = recorder.wrap(WebhookReceiver(delivery.provider, "memory://"))
        ...     _ = receiver.receive(*delivery)
        >>> recorded("deliveries.jsonl")[0].body == delivery.body
        True
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._keep = HARMLESS | {name.lower() for name in keep}
        self._file = os.fdopen(_private(path), "a", encoding="utf-8")

    def wrap(self, target: T) -> T:
        """The same receiver, app or function, recorded.

        Raises:
            PolicyError: It is none of those; a URL is recorded where its app is.
        """
        found = as_target(target)
        if found.kind == "url":
            raise PolicyError("a URL can't be recorded: wrap the app or receiver that is behind it")
        wrapped: Any
        given: Any = target
        if found.kind == "receiver":
            wrapped = copy.copy(given)  # shares everything but this one method
            wrapped.receive = self._of_call(given.receive)
        elif found.kind == "wsgi":
            wrapped = self._of_wsgi(given)
        elif found.kind == "asgi":
            wrapped = self._of_asgi(given)
        else:
            wrapped = self._of_call(given)
        return wrapped  # type: ignore[no-any-return]

    def add(self, method: str, url: str, headers: Any, body: bytes) -> None:
        """Record one delivery."""
        fields = headers if isinstance(headers, Headers) else Headers(headers)
        line = {
            "method": method,
            "url": self._without_credentials(url),
            "headers": [pair for pair in fields.items() if not self._hidden(pair[0])],
            "body": base64.b64encode(body).decode(),
            "received": self._clock(),
        }
        try:
            with self._lock:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
        except (OSError, ValueError):
            logger.exception("a delivery could not be recorded")

    def _hidden(self, name: str) -> bool:
        name = name.lower()
        return name not in self._keep and CREDENTIALS.search(name) is not None

    def _without_credentials(self, url: str) -> str:
        whole, mark, query = url.partition("?")
        scheme, slashes, rest = whole.partition("://")
        host, slash, path = rest.partition("/")
        pieces = [
            f"{name}={LEFT_OUT}" if equals and self._hidden(unquote_plus(name)) else piece
            for piece in query.split("&")
            for name, equals, _ in [piece.partition("=")]
        ]
        return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}{mark}{'&'.join(pieces)}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _of_call(self, receive: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(receive):

            async def asynchronous(
                method: str, url: str, headers: Any, body: bytes, **more: Any
            ) -> Any:
                self.add(method, url, headers, body)
                return await receive(method, url, headers, body, **more)

            return asynchronous

        def synchronous(method: str, url: str, headers: Any, body: bytes, **more: Any) -> Any:
            self.add(method, url, headers, body)
            return receive(method, url, headers, body, **more)

        return synchronous

    def _of_wsgi(self, app: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(environ: dict[str, Any], start_response: Any) -> Any:
            if environ["REQUEST_METHOD"] not in _SAFE:
                stream = environ["wsgi.input"]
                length = environ.get("CONTENT_LENGTH") or ""
                if length.isdigit():
                    body = stream.read(int(length))
                else:  # chunked: only some servers say where it ends
                    body = stream.read() if environ.get("wsgi.input_terminated") else b""
                environ["wsgi.input"] = io.BytesIO(body)
                headers = [
                    (name[5:].replace("_", "-"), value)
                    for name, value in environ.items()
                    if name.startswith("HTTP_")
                ]
                headers += [
                    (name.replace("_", "-"), environ[name])
                    for name in ("CONTENT_TYPE", "CONTENT_LENGTH")
                    if environ.get(name)
                ]
                self.add(environ["REQUEST_METHOD"], _wsgi_url(environ), headers, body)
            return app(environ, start_response)

        return wrapped

    def _of_asgi(self, app: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapped(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["method"] in _SAFE:
                await app(scope, receive, send)
                return
            chunks: list[bytes] = []
            whole = False

            async def passed_on() -> Any:
                nonlocal whole
                message = await receive()
                if message["type"] == "http.request" and not whole:
                    chunks.append(message.get("body", b""))
                    whole = not message.get("more_body", False)
                    if whole:
                        headers = scope["headers"]
                        self.add(scope["method"], _asgi_url(scope), headers, b"".join(chunks))
                return message

            await app(scope, passed_on, send)

        return wrapped


def _private(path: str | os.PathLike[str]) -> int:
    """Open a file for its owner alone, also if it was there before; never through a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    try:
        opened = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PolicyError(
                f"{os.fspath(path)} is a link: name the file that deliveries are to be written to"
            ) from None
        raise
    try:
        if stat.S_IMODE(os.fstat(opened).st_mode) & 0o077:
            os.fchmod(opened, 0o600)
    except PermissionError:
        os.close(opened)
        raise PolicyError(
            f"{os.fspath(path)} belongs to somebody else, who could read the deliveries: name a "
            "file of your own"
        ) from None
    return opened


def recorded(path: str | os.PathLike[str]) -> list[SignedDelivery]:
    """The deliveries of a recording. Their ``now`` is the time they came.

    Raises:
        PolicyError: A line is none of a recording; says which.
    """
    found: list[SignedDelivery] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                found.append(_read(line, f"{os.fspath(path)}:{number}"))
    return found


def _read(line: str, where: str) -> SignedDelivery:
    try:
        fields = json.loads(line)
        headers = [(str(name), str(value)) for name, value in fields["headers"]]
        names = {name.lower() for name, _ in headers}
        return SignedDelivery(
            str(fields["method"]),
            str(fields["url"]),
            dict(headers) if len(names) == len(headers) else headers,
            base64.b64decode(fields["body"], validate=True),
            now=float(fields["received"]),
        )
    except (KeyError, TypeError, ValueError):
        raise PolicyError(
            f"{where} is no recorded delivery: it must be a line of JSON with method, url, "
            "headers, body (base64) and received"
        ) from None


def _host(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name == b"host"), None)


def _asgi_url(scope: dict[str, Any]) -> str:
    host = _host(scope["headers"]) or ":".join(map(str, scope.get("server") or ("localhost",)))
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string", b"")
    url = f"{scope.get('scheme', 'http')}://{host}{path.decode('latin-1')}"
    return f"{url}?{query.decode('latin-1')}" if query else url


def _wsgi_url(environ: dict[str, Any]) -> str:
    host = environ.get("HTTP_HOST") or f"{environ['SERVER_NAME']}:{environ['SERVER_PORT']}"
    raw = environ.get("RAW_URI") or environ.get("REQUEST_URI")
    if not raw or not raw.startswith("/"):  # the server kept only the decoded path
        raw = quote((environ.get("SCRIPT_NAME", "") + environ["PATH_INFO"]).encode("latin-1"))
        query = environ.get("QUERY_STRING")
        raw = f"{raw}?{query}" if query else raw
    return f"{environ['wsgi.url_scheme']}://{host}{raw}"
