"""ASGI: a receiver of webhooks as an app of its own, under any ASGI server.

```python
from oncekey.adapters.asgi import webhooks
from oncekey.receiver import AsyncWebhookReceiver
from oncekey.signatures import provider

receiver = AsyncWebhookReceiver(provider("stripe", secret="whsec_test"), "sqlite:///hooks.db")
app = webhooks(receiver)  # uvicorn module:app


@receiver.on("invoice.paid")
async def paid(event): ...
```

Frameworks can mount it, but a route of theirs fits better: see ``oncekey.adapters.starlette``,
``oncekey.adapters.fastapi`` and ``oncekey.adapters.litestar``.

The URL that a signature is checked against is the one that the server saw. Behind a proxy that
speaks HTTPS to the world, tell the server so (``uvicorn --proxy-headers``), or give a provider that
signs URLs its ``public_url``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Unpack
from urllib.parse import quote, unquote

from oncekey.abc import AsyncStore
from oncekey.adapters._webhooks import (
    NOT_ALLOWED,
    AnyReceiver,
    answer_of,
    close_receiver,
    cut_short,
    deliver,
    methods_of,
    settle,
    webhook_lifespan,
)
from oncekey.errors import OncekeyError
from oncekey.http.asgi import (
    ASGIApp,
    ASGIScope,
    IdempotencyMiddleware,
    Receive,
    Send,
    send_answer,
)
from oncekey.http.body import ClientGoneError, asgi_body
from oncekey.http.entry import aready
from oncekey.http.settings import Settings
from oncekey.receiver import WebhookResponse

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

__all__ = [
    "IdempotencyMiddleware",
    "WebhookApp",
    "idempotent",
    "request_url",
    "webhook_lifespan",
    "webhooks",
]

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_PATH_CHARACTERS: Final = "/:@!$&'()*+,;=~"


class WebhookApp:
    """An ASGI app that gives every POST to a receiver and sends what it answers.

    A body over the receiver's ``max_body_bytes`` is answered with 413 and not read on. If the
    client goes away while its body is read, nothing is handled; if it does so later, the handler
    ends all the same and its outcome is recorded.

    Args:
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.
        close_on_shutdown: Close the receiver's store when the server shuts down. A mounted app
            does not hear of that: give the outer app ``webhook_lifespan(receiver)`` instead.

    Example:
        >>> app = WebhookApp(receiver, close_on_shutdown=True)  # doctest: +SKIP
    """

    def __init__(self, receiver: AnyReceiver, *, close_on_shutdown: bool = False) -> None:
        self._receiver = receiver
        self._close = close_receiver if close_on_shutdown else settle

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Serve one request, or the server's start and end.

        Raises:
            OncekeyError: A protocol that no ASGI server has today.
        """
        if scope["type"] == "http":
            answer = answer_of(await self._answer(scope, receive))
            try:
                await send_answer(send, answer, head=scope["method"] == "HEAD")
            except OSError:
                pass  # some servers say so when nobody is there to answer; what is done is recorded
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            raise OncekeyError(f"WebhookApp serves http, not {scope['type']}")

    async def _answer(self, scope: ASGIScope, receive: Receive) -> WebhookResponse:
        method: str = scope["method"]
        if method not in methods_of(self._receiver):
            return NOT_ALLOWED
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        declared = next((value for name, value in headers if name == b"content-length"), None)
        settings = self._receiver.settings
        try:
            body = await asgi_body(
                receive, settings.max_body_bytes, declared, settings.body_seconds
            )
        except ClientGoneError as error:
            return cut_short(error)  # if it is gone nobody reads it, but middleware wants some
        return await deliver(self._receiver, method, request_url(scope), headers, body)

    async def _live(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        try:
            await self._close(self._receiver)
        except Exception as error:  # noqa: BLE001 - the server's to log
            await send({"type": "lifespan.shutdown.failed", "message": repr(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})


webhooks = WebhookApp


def request_url(scope: ASGIScope) -> str:
    """The whole URL of a request, as its sender wrote it: nothing decoded, nothing put in order."""
    scheme = scope.get("scheme") or "http"
    raw: bytes | None = scope.get("raw_path")
    path = raw.decode("latin-1") if raw else quote(scope["path"], safe=_PATH_CHARACTERS)
    # A server that was told of a prefix puts it in front of the path, or leaves that to the app.
    root = str(scope.get("root_path") or "").rstrip("/")
    if root and not (unquote(path) + "/").startswith(root + "/"):
        path = quote(root, safe=_PATH_CHARACTERS) + path
    query = scope.get("query_string") or b""
    return f"{scheme}://{_authority(scope, scheme)}{path}{'?' if query else ''}" + query.decode(
        "latin-1"
    )


def _authority(scope: ASGIScope, scheme: str) -> str:
    for name, value in scope["headers"]:
        if name == b"host":
            return str(value.decode("latin-1"))
    host, port = scope.get("server") or ("localhost", None)
    if port is None:  # a Unix socket, which is known by its path
        return "localhost"
    host = f"[{host}]" if ":" in host else host
    return str(host) if port == _DEFAULT_PORTS.get(scheme) else f"{host}:{port}"


def idempotent(
    store: AsyncStore | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Callable[[ASGIApp], IdempotencyMiddleware]:
    """Guard an app that takes the ``Idempotency-Key`` header.

    Takes an async store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is synchronous.

    Example:
        >>> app = idempotent("memory://", required=True)(app)  # doctest: +SKIP
    """
    opened, given = aready(store, settings, options)
    return lambda app: IdempotencyMiddleware(app, opened, settings=given)
