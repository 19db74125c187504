"""Starlette: a route that gives its requests to a receiver of webhooks.

```python
from starlette.applications import Starlette

from oncekey.adapters.starlette import webhook_lifespan, webhooks
from oncekey.receiver import AsyncWebhookReceiver
from oncekey.signatures import provider

receiver = AsyncWebhookReceiver(provider("stripe", secret="whsec_test"), "sqlite:///hooks.db")
app = Starlette(
    routes=[webhooks(receiver, "/hooks/stripe")], lifespan=webhook_lifespan(receiver)
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

import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Final, Unpack

from oncekey.abc import AsyncStore
from oncekey.adapters import _webhooks
from oncekey.adapters._webhooks import AnyReceiver, ClientGoneError, missing, webhook_lifespan
from oncekey.adapters.asgi import WebhookApp, request_url
from oncekey.errors import PolicyError
from oncekey.http.answer import Answer
from oncekey.http.asgi import IdempotencyMiddleware
from oncekey.http.callers import of_kind
from oncekey.http.coverage import Passing
from oncekey.http.entry import aready
from oncekey.http.settings import Settings
from oncekey.receiver import WebhookResponse

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

try:
    from starlette.authentication import SimpleUser
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route, request_response
except ImportError as error:
    raise missing("Starlette", "starlette") from error

logger = logging.getLogger("oncekey")

__all__ = [
    "IdempotencyMiddleware",
    "WebhookApp",
    "as_answer",
    "as_response",
    "by_state",
    "by_user",
    "idempotency",
    "idempotent",
    "receive_webhook",
    "webhook_lifespan",
    "webhook_route",
    "webhooks",
]


def webhooks(receiver: AnyReceiver, path: str = "/webhook", *, name: str | None = None) -> Route:
    """A route for POST that gives its requests to a receiver. See ``WebhookApp``.

    Args:
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.
        path: As in ``Route``.
        name: The route's name.

    Example:
        >>> app = Starlette(routes=[webhooks(receiver, "/hooks")])  # doctest: +SKIP
    """
    return Route(path, WebhookApp(receiver), methods=_webhooks.methods_of(receiver), name=name)


def webhook_route(path: str, receiver: AnyReceiver, *, name: str | None = None) -> Route:
    """``webhooks``, as it was called before."""
    return webhooks(receiver, path, name=name)


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

    def keep(body: bytes) -> None:
        request._body = body  # for whoever reads it afterwards

    fields, url = request.headers, request_url(request.scope)
    length = fields.get("content-length")
    return await _webhooks.receive(
        receiver, request.method, url, fields.raw, _chunks(request), length, keep
    )


async def _chunks(request: Request) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except RuntimeError as error:  # "Stream consumed"
        raise PolicyError(
            "the body was parsed before the receiver saw it: leave form and file parameters out, "
            "and read event.payload or event.body in the handler"
        ) from error


def as_response(received: WebhookResponse) -> Response:
    """What a receiver answers, as a response of Starlette or FastAPI."""
    return Response(received.body, received.status, received.headers)


# Requests


def idempotency(
    store: AsyncStore | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Middleware:
    """Take the ``Idempotency-Key`` header: in an app, below a mount, or at one route.

    A replay passes what stands outside of it, such as ``AuthenticationMiddleware`` of the app when
    this is at a route, or after that one in the app's list. It does not pass decorators of the
    endpoint, such as ``@requires``: for those, see ``idempotent``.

    Takes an async store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is synchronous.

    Example:
        >>> keys = idempotency("memory://", required=True)
        >>> route = Route("/charges", charge, middleware=[keys])  # doctest: +SKIP
    """
    opened, given = aready(store, settings, options)
    middleware: Any = IdempotencyMiddleware
    return Middleware(middleware, opened, settings=given)


def idempotent(
    store: AsyncStore | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an endpoint function that takes the ``Idempotency-Key`` header.

    Takes what ``idempotency`` takes. Written below ``@requires`` and the like, so that a replay
    passes them as a first call does.

    Example:
        >>> @idempotent("memory://", required=True)
        ... async def charge(request):
        ...     return Response("charged", 201)
    """
    opened, given = aready(store, settings, options)
    methods, passing = {method.upper() for method in given.methods}, Passing(given)

    def decorate(endpoint: Callable[..., Any]) -> Callable[..., Any]:
        _check_endpoint(endpoint)
        guard: Any = IdempotencyMiddleware(request_response(endpoint), opened, settings=given)

        @functools.wraps(endpoint)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            request = args[0] if args else kwargs.get("request")
            if not isinstance(request, Request) or _is_fastapis(request.scope.get("route")):
                raise PolicyError(f"{_name(endpoint)}: {_FOR_FASTAPI}")
            if request.method not in methods:
                passing.tell(request.method, request.url.path, given.header in request.headers)
            # An app in the place of a response, which Starlette then calls.
            return _read_before(guard, request) if request._stream_consumed else guard

        return guarded

    return decorate


_FOR_FASTAPI: Final = (
    "this guard is for endpoints of Starlette, endpoint(request). One of FastAPI is guarded by "
    "its router: APIRouter(route_class=idempotent(...)), from oncekey.adapters.fastapi"
)


def _name(endpoint: Callable[..., Any]) -> str:
    return getattr(endpoint, "__qualname__", type(endpoint).__name__)


def _check_endpoint(endpoint: Callable[..., Any]) -> None:
    """Refuse what Starlette can't call with a request and nothing else, as FastAPI's endpoints."""
    try:
        signature = inspect.signature(endpoint)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError:
        raise PolicyError(f"{_name(endpoint)}{signature}: {_FOR_FASTAPI}") from None


def _is_fastapis(route: object) -> bool:
    return any(kind.__module__.startswith("fastapi.") for kind in type(route).__mro__)


def _read_before(guard: Any, request: Request) -> Any:
    """The guard for a request whose body a decorator outside of it has read."""
    if not hasattr(request, "_body"):
        raise PolicyError(
            "the body was parsed before the guard saw it: call await request.body() before "
            "request.form() in what is outside of idempotent"
        )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = iter([{"type": "http.request", "body": request._body, "more_body": False}])

        async def again() -> Any:
            return next(body, None) or await receive()

        await guard(scope, again, send)

    return app


def as_answer(answer: Answer) -> Response:
    """A replay or a refusal, as a response."""
    response = Response(answer.body, answer.status)
    said = [field for field in response.raw_headers if field[0] == b"content-length"]
    response.raw_headers = [*answer.headers, *said]
    return response


def by_user(scope: Any) -> Any:
    """A scope: the caller is the user that ``AuthenticationMiddleware`` found.

    Takes the user's class and ``identity``, which must be its own: two users of one name are two.

    Raises:
        PolicyError: No authentication ran outside of this, or its users have no ``identity``.

    Example:
        >>> keys = idempotency("memory://", scope=by_user)
    """
    if "user" not in scope:
        raise PolicyError("by_user: put AuthenticationMiddleware outside of the guard")
    user = scope["user"]
    if not user.is_authenticated:
        return None
    kind = type(user).__qualname__
    try:
        found = user.username if isinstance(user, SimpleUser) else user.identity
    except (AttributeError, NotImplementedError):
        raise PolicyError(f"by_user: give {kind} an identity") from None
    # Several ways to authenticate may give users of several classes, with one identity.
    return of_kind(kind, found)


def by_state(name: str) -> Callable[[Any], Any]:
    """A scope: the caller is whom your authentication put into ``request.state`` by this name.

    Where nothing is there by this name, the caller is unknown, and the log says so once, with the
    names that are there.

    Example:
        >>> keys = idempotency("memory://", scope=by_state("user_id"))
    """
    told = False

    def scope(connection: Any) -> Any:
        nonlocal told
        state = connection.get("state") or {}
        if not told and name not in state:
            told = True
            there = ", ".join(sorted(map(repr, state))) or "nothing"
            logger.warning(
                "by_state(%r) found nobody: request.state has %s there. If your authentication "
                "uses another name, give that one; if it found nobody, all is well. Said once",
                *(name, there),
            )
        return state.get(name)

    return scope
