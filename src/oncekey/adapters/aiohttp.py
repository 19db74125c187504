"""aiohttp: a handler that gives its requests to a receiver of webhooks.

```python
from aiohttp import web

from oncekey.adapters.aiohttp import webhook_lifespan, webhooks
from oncekey.receiver import AsyncWebhookReceiver
from oncekey.signatures import provider

receiver = AsyncWebhookReceiver(provider("stripe", secret="whsec_test"), "sqlite:///hooks.db")
app = web.Application()
app.add_routes([webhooks(receiver, "/hooks/stripe")])
app.cleanup_ctx.append(webhook_lifespan(receiver))


@receiver.on("invoice.paid")
async def paid(event): ...
```

The limit of a body is the receiver's ``max_body_bytes``, not the app's ``client_max_size``. aiohttp
decompresses bodies before anyone sees them: the limit and the signature are over what comes out.
Behind a proxy that speaks HTTPS to the world, give a provider that signs URLs its ``public_url``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Unpack

from oncekey.abc import AsyncStore
from oncekey.adapters import _webhooks
from oncekey.adapters._webhooks import AnyReceiver, ClientGoneError, answer_of, missing
from oncekey.http.answer import Answer, fields_of
from oncekey.http.body import read_chunks
from oncekey.http.facts import facts_of
from oncekey.http.fingerprint import form_digest
from oncekey.http.problems import Refusal
from oncekey.http.routes import AsyncRoutes, Seen, already_read
from oncekey.http.settings import Settings
from oncekey.receiver import WebhookResponse

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

try:
    from aiohttp import StreamReader, web
    from multidict import CIMultiDict
except ImportError as error:
    raise missing("aiohttp", "aiohttp") from error

__all__ = [
    "as_response",
    "idempotency",
    "idempotent",
    "receive_webhook",
    "webhook_handler",
    "webhook_lifespan",
    "webhooks",
]


def webhooks(receiver: AnyReceiver, path: str = "/webhook", **options: Any) -> web.RouteDef:
    """A route for ``app.add_routes`` that gives its requests to a receiver.

    Args:
        receiver: See ``webhook_handler``.
        path: As in ``web.post``.
        options: Those of ``web.post``, such as ``name``.

    Example:
        >>> app.add_routes([webhooks(receiver, "/hooks/stripe")])  # doctest: +SKIP
    """
    if len(_webhooks.methods_of(receiver)) > 1:
        return web.route("*", path, webhook_handler(receiver), **options)
    return web.post(path, webhook_handler(receiver), **options)


def webhook_handler(receiver: AnyReceiver) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler for ``app.router.add_post`` that gives its requests to a receiver.

    If the client goes away while its body is read, nothing is handled; if it does so later, the
    handler of the event ends all the same and its outcome is recorded.

    Args:
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.

    Example:
        >>> app.router.add_post("/hooks/stripe", webhook_handler(receiver))  # doctest: +SKIP
    """

    async def webhook(request: web.Request) -> web.Response:
        if request.method not in _webhooks.methods_of(receiver):
            return as_response(_webhooks.NOT_ALLOWED)
        return as_response(await receive_webhook(request, receiver))

    return webhook


async def receive_webhook(request: web.Request, receiver: AnyReceiver) -> WebhookResponse:
    """Give a request to a receiver, for a handler that looks at the outcome itself.

    Args:
        request: Its body may have been read as a whole before, and can still be afterwards, unless
            it was too long.
        receiver: A ``WebhookReceiver``, which is run in threads, or an ``AsyncWebhookReceiver``.

    Returns:
        What to answer: return ``as_response`` of it, or the sender can't know what to retry. If
        the client goes away while its body is read, nothing is handled: its outcome is
        ``rejected`` and its code ``body_incomplete``.
    """

    def keep(body: bytes) -> None:
        request._read_bytes = body  # for whoever reads it afterwards

    target = request.raw_path
    url = f"{request.scheme}://{request.host}{target}" if target.startswith("/") else target
    length, fields = request.headers.get("Content-Length"), request.raw_headers
    return await _webhooks.receive(
        receiver, request.method, url, fields, _chunks(request), length, keep
    )


async def _chunks(request: web.Request) -> AsyncGenerator[bytes, None]:
    try:
        if not request.can_read_body:  # there is none, or it was read before and is kept
            yield await request.read()
            return
        async for chunk in request.content.iter_any():
            yield chunk
    except (OSError, web.RequestPayloadError) as error:
        raise ClientGoneError from error  # gone, or compressed in a way that can't be read


def as_response(received: WebhookResponse) -> web.Response:
    """What a receiver answers, as a response of aiohttp."""
    return _answered(answer_of(received))


def webhook_lifespan(*receivers: AnyReceiver) -> Callable[[web.Application], AsyncIterator[None]]:
    """For ``app.cleanup_ctx``: wait for deliveries under way at the end, and close the stores.

    Args:
        receivers: Whose stores are closed, also those that they did not open themselves.

    Example:
        >>> app.cleanup_ctx.append(webhook_lifespan(receiver))  # doctest: +SKIP
    """

    async def context(app: web.Application) -> AsyncIterator[None]:
        async with _webhooks.webhook_lifespan(*receivers)(app):
            yield

    return context


# Requests

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# In a request that is guarded already. Newer versions warn of plain names.
_GUARDED: Final[Any] = (
    web.RequestKey("oncekey.http", bool) if hasattr(web, "RequestKey") else "oncekey.http"
)


def idempotency(
    store: AsyncStore | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    """A middleware that takes the ``Idempotency-Key`` header, for ``web.Application``.

    Of answers that a handler writes itself, piece by piece, only status and headers are kept.

    Takes an async store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is synchronous.

    Example:
        >>> app = web.Application(middlewares=[idempotency("memory://")])
    """
    routes = AsyncRoutes(store, settings=settings, **options)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _guarded(routes, request, handler)

    return middleware


def idempotent(
    store: AsyncStore | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Callable[[Handler], Handler]:
    """Decorate a handler that takes the ``Idempotency-Key`` header. Takes what the other takes.

    Example:
        >>> @idempotent("memory://", required=True)
        ... async def charge(request):
        ...     return web.json_response({"charged": True}, status=201)
    """
    routes = AsyncRoutes(store, settings=settings, **options)

    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def guarded(request: web.Request) -> web.StreamResponse:
            if request.method not in routes.rules.methods:
                keyed = routes.rules.header in request.headers
                routes.passing.tell(request.method, request.path, keyed)
            return await _guarded(routes, request, handler)

        return guarded

    return decorate


async def _guarded(
    routes: AsyncRoutes, request: web.Request, handler: Handler
) -> web.StreamResponse:
    if _GUARDED in request or request.method not in routes.rules.methods:
        return await handler(request)
    target = request.raw_path.encode("utf-8", "surrogateescape")
    facts = facts_of(
        request.method,
        target,
        request.headers.items(),
        routes.rules.header,
        request,
        encoding="",  # aiohttp has decompressed the body
        host=request.host.lower().encode(
            "utf-8", "surrogateescape"
        ),  # as a middleware for proxies may have set it
    )
    try:
        key = routes.rules.key(facts)
        if key is None:
            return await handler(request)
        most = routes.rules.settings.max_body_bytes
        parsed = _is_lost(request)
        if parsed:
            facts, body = facts._replace(content_type=""), _parsed_form(request)
        else:
            seconds = routes.rules.body_seconds
            body = await read_chunks(_chunks(request), most, facts.length, seconds)
    except (Refusal, ClientGoneError) as error:
        return _answered(routes.refused(error))
    if not parsed:
        _put_back(request, body)
    request[_GUARDED] = True

    async def view() -> Seen[web.StreamResponse]:
        try:
            response = await handler(request)
        except web.HTTPException as raised:
            response = raised
        return Seen(response, _seen(response))

    given = await routes.run(key, facts, body, view)
    if isinstance(given, Answer):
        return _answered(given)
    if isinstance(given, web.HTTPException):
        raise given
    return given


def _is_lost(request: web.Request) -> bool:
    """Whether other code has read the body, and not kept it."""
    read = request._read_bytes is None and not request.can_read_body
    return read and request.content.total_bytes > 0


def _parsed_form(request: web.Request) -> bytes:
    """What stands for a form that other code has parsed, such as a check of tokens."""
    if request._post is None:
        raise already_read("let that call request.read()")
    found = list(request._post.items())
    files = [
        (name, one.filename, one.file) for name, one in found if isinstance(one, web.FileField)
    ]
    fields = [
        (name, one if isinstance(one, str) else bytes(one).decode("latin-1"))
        for name, one in found
        if not isinstance(one, web.FileField)
    ]
    return form_digest(fields, files)


def _put_back(request: web.Request, body: bytes) -> None:
    """Let the handler read the body, as a whole or as a stream."""
    request._read_bytes = body
    # A limit over its length, or the stream would pause the connection that it came from.
    stream = StreamReader(request.protocol, len(body) + 1, loop=asyncio.get_running_loop())
    stream.feed_data(body)
    stream.feed_eof()
    request._payload = stream


def _seen(response: web.StreamResponse) -> Answer:
    """A response as an answer; without a body where it is written piece by piece."""
    body: bytes | None = None
    if isinstance(response, web.Response) and not response.prepared:
        given = response.body
        if given is None or isinstance(given, (bytes, bytearray)):
            body = bytes(given or b"")
    return Answer(response.status, fields_of(response.headers.items()), body)


def _answered(answer: Answer) -> web.Response:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
    return web.Response(body=answer.body, status=answer.status, headers=CIMultiDict(headers))
