"""Litestar: a route handler that gives its requests to a receiver of webhooks.

```python
from litestar import Litestar

from oncekey.adapters.litestar import webhook_lifespan, webhooks
from oncekey.receiver import AsyncWebhookReceiver
from oncekey.signatures import provider

receiver = AsyncWebhookReceiver(provider("stripe", secret="whsec_test"), "sqlite:///hooks.db")
app = Litestar([webhooks(receiver, "/hooks/stripe")], lifespan=[webhook_lifespan(receiver)])


@receiver.on("invoice.paid")
async def paid(event): ...
```

A delivery proves itself by its signature: the handler is left out of Litestar's CSRF checks, and
``opt={"exclude_from_auth": True}`` leaves it out of its authentication.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Unpack

from oncekey.abc import AsyncStore
from oncekey.adapters import _webhooks
from oncekey.adapters._webhooks import AnyReceiver, ClientGoneError, missing, webhook_lifespan
from oncekey.adapters.asgi import request_url
from oncekey.http.asgi import IdempotencyMiddleware
from oncekey.http.entry import aready
from oncekey.http.settings import Settings
from oncekey.receiver import WebhookResponse

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

try:
    from litestar import HttpMethod, MediaType, Request, Response, post, route
    from litestar.connection import ASGIConnection
    from litestar.exceptions import InternalServerException
    from litestar.handlers import HTTPRouteHandler
    from litestar.middleware import DefineMiddleware
except ImportError as error:
    raise missing("Litestar", "litestar") from error

__all__ = [
    "IdempotencyMiddleware",
    "as_response",
    "idempotency",
    "idempotent",
    "receive_webhook",
    "webhook_handler",
    "webhook_lifespan",
    "webhooks",
]


def webhooks(receiver: AnyReceiver, path: str = "/webhook", **options: Any) -> HTTPRouteHandler:
    """A route handler for POST that gives its requests to a receiver.

    Args:
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.
        path: Where.
        options: Those of ``litestar.post``: ``guards``, ``opt``, ``tags``, or
            ``include_in_schema=False`` to leave it out of the OpenAPI document.

    Example:
        >>> app = Litestar([webhooks(receiver, "/hooks/stripe")])  # doctest: +SKIP
    """
    title = receiver.provider.title
    given: dict[str, Any] = {
        "summary": f"Webhooks of {title}",
        "description": f"Takes signed deliveries of {title}. Each event is handled once.",
        "request_max_body_size": None,  # the receiver has a limit of its own
        "exclude_from_csrf": True,
        **options,
    }

    async def webhook(request: Request[Any, Any, Any]) -> Response[bytes]:
        return as_response(await receive_webhook(request, receiver))

    if len(methods := _webhooks.methods_of(receiver)) > 1:
        return route(path, http_method=[HttpMethod(one) for one in methods], **given)(webhook)
    return post(path, **given)(webhook)


webhook_handler = webhooks  # as it was called before


async def receive_webhook(
    request: Request[Any, Any, Any], receiver: AnyReceiver
) -> WebhookResponse:
    """Give a request to a receiver, for a handler that looks at the outcome itself.

    Args:
        request: Its body may have been read before, and can still be read afterwards, unless it
            was too long.
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.

    Returns:
        What to answer: return ``as_response`` of it, or the sender can't know what to retry. If
        the client goes away while its body is read, nothing is handled: its outcome is
        ``rejected`` and its code ``body_incomplete``.
    """

    def keep(body: bytes) -> None:
        request._body = body  # for whoever reads it afterwards

    url, length = request_url(dict(request.scope)), request.headers.get("content-length")
    fields = request.scope["headers"]
    return await _webhooks.receive(
        receiver, request.method, url, fields, _chunks(request), length, keep
    )


async def _chunks(request: Request[Any, Any, Any]) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in request.stream():
            yield chunk
    except InternalServerException as error:
        if not request.is_connected:  # "stream consumed"
            raise
        raise ClientGoneError from error


def as_response(received: WebhookResponse) -> Response[bytes]:
    """What a receiver answers, as a response of Litestar."""
    # The type is among the headers; Litestar would add a charset to one that it is told.
    return Response(
        received.body,
        status_code=received.status,
        headers=dict(received.headers),
        media_type=MediaType.TEXT,
    )


# Requests


def idempotent(
    store: AsyncStore | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> DefineMiddleware:
    """Take the ``Idempotency-Key`` header: ``middleware=[...]`` of an app, router or handler.

    A replay passes the guards of its handler, and what stands before this in the lists of
    middleware, such as authentication.

    Takes an async store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is synchronous.

    Example:
        >>> app = Litestar([charge], middleware=[idempotent("memory://")])  # doctest: +SKIP
    """
    opened, given = aready(store, settings, options)
    middleware: Any = _BeforeReplays  # Litestar's own types of messages are narrower
    return DefineMiddleware(middleware, store=opened, settings=given)


idempotency = idempotent  # as it was called before


class _BeforeReplays(IdempotencyMiddleware):
    """Litestar runs guards inside of all middleware: a replay has to be shown to them too."""

    async def admit(self, scope: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        handler = scope.get("route_handler")
        if handler is not None:
            await handler.authorize_connection(connection=ASGIConnection(scope))
