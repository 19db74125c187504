"""Starlette: a route that gives its requests to a receiver of webhooks.

```python
from starlette.applications import Starlette

from oncekey.adapters.starlette import webhook_lifespan, webhook_route
from oncekey.receiver import AsyncWebhookReceiver
from oncekey.signatures import provider

receiver = AsyncWebhookReceiver(provider("stripe", secret="whsec_test"), "sqlite:///hooks.db")
app = Starlette(
    routes=[webhook_route("/hooks/stripe", receiver)], lifespan=webhook_lifespan(receiver)
)


@receiver.on("invoice.paid")
async def paid(event): ...
```

An endpoint of your own may look at the outcome: ``received = await receive_webhook(request,
receiver)``, then ``return as_response(received)``. Middleware in front may read ``request.body()``.

``Mount("/hooks", WebhookApp(receiver))`` takes everything below a path. Starlette answers the bare
``/hooks`` with a redirect, which senders do not follow: have them call ``/hooks/``.
"""

from __future__ import annotations

from typing import Any

from oncekey.abc import AsyncStore
from oncekey.adapters._webhooks import (
    AnyReceiver,
    ClientGoneError,
    cut_short,
    deliver,
    missing,
    read_chunks,
    webhook_lifespan,
)
from oncekey.adapters.asgi import WebhookApp, request_url
from oncekey.errors import PolicyError
from oncekey.http.asgi import IdempotencyMiddleware, ready
from oncekey.http.settings import Settings
from oncekey.receiver import WebhookResponse

try:
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise missing("Starlette", "starlette") from error

__all__ = [
    "IdempotencyMiddleware",
    "WebhookApp",
    "as_response",
    "idempotency",
    "receive_webhook",
    "webhook_lifespan",
    "webhook_route",
]


def webhook_route(path: str, receiver: AnyReceiver, *, name: str | None = None) -> Route:
    """A route for POST that gives its requests to a receiver. See ``WebhookApp``.

    Args:
        path: As in ``Route``.
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.
        name: The route's name.

    Example:
        >>> app = Starlette(routes=[webhook_route("/hooks", receiver)])  # doctest: +SKIP
    """
    return Route(path, WebhookApp(receiver), methods=["POST"], name=name)


async def receive_webhook(request: Request, receiver: AnyReceiver) -> WebhookResponse:
    """Give a request to a receiver, for an endpoint that looks at the outcome itself.

    Args:
        request: Its body may have been read as a whole before, but not parsed as a form. It can
            still be read afterwards, unless it was too long.
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.

    Returns:
        What to answer: return ``as_response`` of it, or the sender can't know what to retry. If
        the client goes away while its body is read, nothing is handled: its outcome is
        ``rejected`` and its code ``body_incomplete``.

    Raises:
        PolicyError: The body was parsed before, and is lost.

    Example:
        >>> async def endpoint(request):
        ...     received = await receive_webhook(request, receiver)
        ...     return as_response(received)
    """
    most = receiver.settings.max_body_bytes
    try:
        declared = request.headers.get("content-length")
        body = await read_chunks(request.stream(), most, declared, receiver.settings.body_seconds)
    except (ClientDisconnect, ClientGoneError) as error:
        return cut_short(error)
    except RuntimeError as error:  # "Stream consumed"
        raise PolicyError(
            "the body was parsed before the receiver saw it: leave form and file parameters out, "
            "and read event.payload or event.body in the handler"
        ) from error
    if len(body) <= most:
        request._body = body  # for whoever reads it afterwards
    return await deliver(
        receiver, request.method, request_url(request.scope), request.headers.raw, body
    )


def as_response(received: WebhookResponse) -> Response:
    """What a receiver answers, as a response of Starlette or FastAPI."""
    return Response(received.body, received.status, received.headers)


# Requests


def idempotency(
    store: AsyncStore | str, *, settings: Settings | None = None, **options: Any
) -> Middleware:
    """Take the ``Idempotency-Key`` header: in an app, below a mount, or at one route.

    Args:
        store: An async store, or a URL.
        settings: An ``oncekey.http.Settings``.
        options: Its options, given singly instead.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is synchronous.

    Example:
        >>> keys = idempotency("memory://", required=True)
        >>> route = Route("/charges", charge, middleware=[keys])  # doctest: +SKIP
    """
    opened, given = ready(store, settings, options)
    middleware: Any = IdempotencyMiddleware
    return Middleware(middleware, opened, settings=given)
