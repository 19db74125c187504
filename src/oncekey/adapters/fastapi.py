"""FastAPI: a router that gives its requests to a receiver of webhooks, and a dependency.

```python
from fastapi import FastAPI

from oncekey.adapters.fastapi import webhook_lifespan, webhooks
from oncekey.receiver import AsyncWebhookReceiver
from oncekey.signatures import provider

receiver = AsyncWebhookReceiver(provider("stripe", secret="whsec_test"), "sqlite:///hooks.db")
app = FastAPI(lifespan=webhook_lifespan(receiver))
app.include_router(webhooks(receiver, "/hooks/stripe"))


@receiver.on("invoice.paid")
async def paid(event): ...
```

An endpoint of your own that looks at the outcome, or wants other dependencies:

```python
from typing import Annotated

from fastapi import Depends, Response

from oncekey.adapters.fastapi import as_response, received
from oncekey.receiver import WebhookResponse


@app.post("/hooks/counted")
async def counted(result: Annotated[WebhookResponse, Depends(received(receiver))]) -> Response:
    print(result.outcome)
    return as_response(result)
```

Everything is done before the endpoint runs: what it raises comes too late to undo the handler, and
the sender's retry is then a duplicate. What was not handled never gets there: the receiver's 4xx or
5xx is raised as an ``HTTPException``, so that no endpoint answers 200 to a bad signature. Give such
an endpoint no parameters that a request can fail to have, since a 422 is no answer that a sender
understands.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Unpack

from oncekey._core.call import is_async
from oncekey._core.placement import UnguardedWarning, users_level
from oncekey.abc import AsyncStore
from oncekey.adapters._webhooks import AnyReceiver, methods_of, missing, webhook_lifespan
from oncekey.errors import PolicyError
from oncekey.http.answer import Answer
from oncekey.http.asgi import MARK, ASGIExchange, ASGIScope, IdempotencyMiddleware, Receive, Send
from oncekey.http.coverage import uncovered
from oncekey.http.entry import aidentify, aready
from oncekey.http.header import MAX_KEY
from oncekey.http.problems import Refusal
from oncekey.http.settings import Settings
from oncekey.receiver import WebhookResponse

try:
    from fastapi import APIRouter, HTTPException, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.routing import APIRoute
except ImportError as error:
    raise missing("FastAPI", "fastapi") from error

# After it: without FastAPI, the extra to install is not Starlette's.
from oncekey.adapters.starlette import as_answer, as_response, by_state, by_user, receive_webhook

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

__all__ = [
    "IdempotencyMiddleware",
    "as_response",
    "by_state",
    "by_user",
    "idempotent",
    "idempotent_route",
    "received",
    "webhook_lifespan",
    "webhook_router",
    "webhooks",
]

_SEEN = "oncekey.webhooks"


def webhooks(
    receiver: AnyReceiver, path: str = "/webhook", *, name: str | None = None, **options: Any
) -> APIRouter:
    """A router with one route: POST requests go to a receiver.

    Args:
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.
        path: Where, after the router's prefix.
        name: The route's name.
        options: Those of ``APIRouter``: ``prefix``, ``tags``, ``dependencies``, or
            ``include_in_schema=False`` to leave it out of the OpenAPI document.

    Example:
        >>> app.include_router(webhooks(receiver, "/hooks/stripe"))  # doctest: +SKIP
    """
    router = APIRouter(**options)
    title = receiver.provider.title

    async def webhook(request: Request) -> Response:
        return as_response(await receive_webhook(request, receiver))

    kinds = [kind for kind in receiver.content_types if "*" not in kind]
    router.add_api_route(
        path,
        webhook,
        methods=methods_of(receiver),
        name=name or f"{receiver.provider.name}-webhook",
        status_code=receiver.provider.ack.status,
        response_class=Response,
        response_model=None,
        summary=f"Webhooks of {title}",
        description=f"Takes signed deliveries of {title}. Each event is handled once; any other "
        "copy of it is answered in the same way.",
        response_description="Handled, now or before",
        responses={
            400: {"description": "The body can't be read, or holds no event id"},
            401: {"description": "The signature is not right"},
            413: {"description": f"More than {receiver.settings.max_body_bytes} bytes"},
            500: {"description": "Not handled: send it again"},
            503: {"description": "Not handled yet: send it again, as Retry-After says"},
        },
        openapi_extra={
            "requestBody": {"required": True, "content": {kind: {} for kind in kinds or ["*/*"]}}
        },
    )
    return router


webhook_router = webhooks  # as it was called before


def received(
    receiver: AnyReceiver, *, raises: bool = True
) -> Callable[[Request], Awaitable[WebhookResponse]]:
    """A dependency that gives the request to a receiver, and what came of it to the endpoint.

    Used in several places of one request, it does its work once. ``request.body()`` and
    ``request.json()`` still work in the endpoint.

    Args:
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.
        raises: Raise an ``HTTPException`` with the receiver's status, headers and, as its detail,
            answer where that is no 2xx. ``False``: the endpoint runs for those too, and must
            return ``as_response`` of what it got, or the sender takes them for handled.

    Returns:
        A function for ``Depends``. It gives a ``WebhookResponse``: return ``as_response`` of it.
        See ``oncekey.adapters.starlette.receive_webhook``, also for what it raises.

    Example:
        >>> Received = Annotated[WebhookResponse, Depends(received(receiver))]  # doctest: +SKIP
    """

    # Not a generator: FastAPI runs what comes after a yield when the answer is under way.
    async def dependency(request: Request) -> WebhookResponse:
        seen: dict[AnyReceiver, WebhookResponse] = request.scope.setdefault(_SEEN, {})
        if receiver not in seen:
            seen[receiver] = await receive_webhook(request, receiver)
        answer = seen[receiver]
        if raises and answer.status >= 300:
            raise HTTPException(answer.status, json.loads(answer.body), dict(answer.headers))
        return answer

    return dependency


# Requests


def idempotent(
    store: AsyncStore | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> type[APIRoute]:
    """A class of routes that take the ``Idempotency-Key`` header, for ``APIRouter(route_class=)``.

    A key is looked at when all dependencies of the endpoint have let the request through: a replay
    passes the same authentication as a first call, and ``scope`` finds in ``request.state`` what a
    dependency put there. The header is in the OpenAPI document of the guarded routes. To guard a
    whole app, in front of its dependencies: ``app.add_middleware(IdempotencyMiddleware, ...)``.

    The class guards the routes of its own router. Those of a router that is included into it keep
    the class of theirs, which is FastAPI's rule: give each such router the same class, or an
    ``UnguardedWarning`` says which routes are not guarded.

    Takes an async store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is synchronous.

    Example:
        >>> router = APIRouter(route_class=idempotent("memory://", required=True))
        >>> @router.post("/charges", status_code=201)
        ... async def charge(amount: int) -> dict[str, int]:
        ...     return {"charged": amount}
    """
    opened, given = aready(store, settings, options)
    methods = {method.upper() for method in given.methods}
    _watch_includes()

    class IdempotentRoute(APIRoute):
        guarded_methods = methods

        def __init__(self, path: str, endpoint: Any = None, **kwargs: Any) -> None:
            if callable(path) or endpoint is None:
                raise PolicyError(
                    "this is a class of routes, no decorator: write "
                    "APIRouter(route_class=idempotent(...)), and guard its routes by that"
                )
            super().__init__(path, _after_dependencies(endpoint), **kwargs)
            passing = uncovered(self.methods or (), given)
            if passing and not hasattr(endpoint, "_oncekey_told"):  # included: a route once more
                _tell_uncovered(path, passing)
            self.endpoint._oncekey_told = True  # type: ignore[attr-defined]
            # Not around self.app: FastAPI calls another one where a router is included.
            self._guard = _LateMiddleware(super().handle, opened, settings=given)
            if not methods.isdisjoint(self.methods or ()):
                self.openapi_extra = _described(self.openapi_extra or {}, given)

        async def handle(self, scope: Any, receive: Any, send: Any) -> None:
            await self._guard(scope, receive, send)

    return IdempotentRoute


idempotent_route = idempotent  # as it was called before


def _described(extra: dict[str, Any], given: Settings) -> dict[str, Any]:
    """What the OpenAPI document says of a route, with the header."""
    described = {
        "name": given.header,
        "in": "header",
        "required": given.required,
        "description": "A fresh UUID for each operation, the same for its retries",
        "schema": {"type": "string", "maxLength": MAX_KEY},
    }
    others = [
        one
        for one in extra.get("parameters", [])
        if one.get("name") != given.header  # a router that was included in another
    ]
    return {**extra, "parameters": [*others, described]}


def _tell_uncovered(path: str, methods: list[str]) -> None:
    warnings.warn(
        f"{', '.join(methods)} {path} is not guarded: the guard of its router covers POST and "
        f"PATCH. Name the methods to guard, methods={['POST', 'PATCH', *methods]}; or "
        "methods=['POST', 'PATCH'], if this one is to pass",
        UnguardedWarning,
        stacklevel=users_level(),
    )


def _watch_includes() -> None:
    """Have ``include_router`` of a guarded router tell of routes that it does not guard.

    FastAPI makes no use of a router's class of routes there, so that nothing else could see it.
    """
    plain = APIRouter.include_router
    if hasattr(plain, "_oncekey_watches"):
        return

    @functools.wraps(plain)
    def include_router(self: APIRouter, router: APIRouter, *args: Any, **kwargs: Any) -> None:
        plain(self, router, *args, **kwargs)
        covered: set[str] = getattr(self.route_class, "guarded_methods", set())
        if covered:
            _tell_unguarded(router, covered)

    include_router._oncekey_watches = True  # type: ignore[attr-defined]
    APIRouter.include_router = include_router  # type: ignore[method-assign]


def _tell_unguarded(router: APIRouter, covered: set[str]) -> None:
    open_ones = [
        f"{', '.join(sorted(methods))} {route.path}"
        for route in _plain_routes(router)
        if (methods := covered & (route.methods or set()))
    ]
    if open_ones:
        more = f" and {len(open_ones) - 3} more" if len(open_ones) > 3 else ""
        warnings.warn(
            f"{'; '.join(open_ones[:3])}{more}: not guarded, though included into a router that "
            "is, since a route keeps the class of its own router. Give that one the same class, "
            "APIRouter(route_class=...); if these are to pass, filter "
            "oncekey.guard.UnguardedWarning",
            UnguardedWarning,
            stacklevel=users_level(),
        )


def _plain_routes(router: Any) -> Iterator[Any]:
    """The routes of a router, and of those that it includes, which have no guard of ours."""
    for route in router.routes:
        inside = getattr(route, "original_router", None)  # as newer versions have them
        if inside is not None:
            yield from _plain_routes(inside)
        elif hasattr(route, "methods") and not hasattr(route, "guarded_methods"):
            yield route


def _after_dependencies(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The endpoint, which claims the key of its request first."""
    if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
        raise PolicyError("an endpoint that yields can't be replayed: return a StreamingResponse")

    awaited = is_async(endpoint)

    @functools.wraps(endpoint)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        instead = await _claim_now()
        if instead is not None:
            return as_answer(instead)
        if awaited:
            return await endpoint(*args, **kwargs)
        return await run_in_threadpool(endpoint, *args, **kwargs)

    with contextlib.suppress(AttributeError, NameError, TypeError):
        # FastAPI would look for names in annotations among those of this module.
        guarded.__signature__ = inspect.signature(endpoint, eval_str=True)  # type: ignore[attr-defined]
    return guarded


# Where the application says when

_LATER: ContextVar[ASGIExchange | None] = ContextVar("oncekey_later", default=None)


async def _claim_now() -> Answer | None:
    """Claim the key of the request that is being handled, where that was left to its endpoint.

    Returns:
        What to answer instead of running; ``None``: go on.
    """
    exchange = _LATER.get()
    if exchange is None:
        return None
    _LATER.set(None)
    try:
        facts, rules = exchange.facts, exchange.rules
        if exchange.refused is not None:
            raise exchange.refused
        owner = await aidentify(rules, exchange.store, facts)
        instead = await exchange.open(rules.job(exchange.key, owner, facts, exchange.body))
    except Refusal as no:
        return exchange.rules.refusal(no)
    exchange.hold()
    return instead


class _LateMiddleware(IdempotencyMiddleware):
    """Leaves it to the application to ``_claim_now``, when its own checks let a request through."""

    async def pass_on(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """See the other. A handler that calls its own application has a key of its own."""
        await self._with(_LATER.get() if MARK in scope else None, self.app(scope, receive, send))

    def at_once(self, scope: ASGIScope, receive: Receive, send: Send) -> ASGIExchange:
        """See the other: nothing, before the application has said when."""
        return ASGIExchange(self, scope, receive, send)

    async def enter(self, exchange: ASGIExchange) -> Answer | None:
        """Read the body: that is all for now."""
        try:
            if not exchange.look():
                return None
        except Refusal as no:
            if no.name != "key-missing":
                raise
            exchange.refused = no  # who is nobody is told that first
        await exchange.read()
        return None

    async def run(self, exchange: ASGIExchange, child: ASGIScope) -> None:
        """Run the application, as the one that will hold the key."""
        # What the framework's checks find out stands in the scope that they are given.
        exchange.facts = exchange.facts._replace(source=child)
        exchange.source = child
        await self._with(exchange, super().run(exchange, child))

    @staticmethod
    async def _with(exchange: ASGIExchange | None, work: Awaitable[None]) -> None:
        """Let ``_claim_now`` find this request, and nobody after it: the endpoint may not run."""
        before = _LATER.get()
        _LATER.set(exchange)
        try:
            await work
        finally:
            _LATER.set(before)
