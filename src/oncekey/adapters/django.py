"""Django: a view that gives its requests to a receiver of webhooks.

```python
# urls.py
from django.conf import settings
from django.db import connection

from oncekey.adapters.django import webhooks
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider

receiver = WebhookReceiver(
    provider("stripe", secret="whsec_test"),
    f"sqlite:///{settings.DATABASES['default']['NAME']}",  # or postgresql://...: Django's own
    transactional=True,
    on=connection,
)


@receiver.on("invoice.paid")
def paid(event, tx):
    Payment.objects.create(event=event.id)  # committed together with the mark


urlpatterns = [webhooks(receiver, "hooks/stripe")]
```

Without ``transactional`` and ``on`` a handler is called as ``handler(event)`` and writes as Django
does by default, each statement on its own: after a crash it may run again.

The view needs no CSRF token and no login, since the signature says who sent the request. It is
never in the transaction of ``ATOMIC_REQUESTS``: that would be committed after the mark, so that a
crash between the two would lose the event. Settings for proxies (``SECURE_PROXY_SSL_HEADER``,
``USE_X_FORWARDED_HOST``) and ``ALLOWED_HOSTS`` hold as ever.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable
from inspect import iscoroutinefunction
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from oncekey.abc import AsyncStore, Store
from oncekey.adapters import asgi, wsgi
from oncekey.adapters._webhooks import (
    NOT_ALLOWED,
    AnyReceiver,
    answer_of,
    check_sync,
    cut_short,
    deliver,
    methods_of,
    missing,
)
from oncekey.errors import BackendMismatchError, PolicyError
from oncekey.http.answer import Answer, fields_of
from oncekey.http.body import ClientGoneError, Deadline, declared_length, whole_body, wsgi_body
from oncekey.http.callers import of_kind
from oncekey.http.facts import Facts, asgi_facts, wsgi_facts
from oncekey.http.fingerprint import form_digest
from oncekey.http.routes import AsyncRoutes, Found, Routes, Seen, already_read, endless
from oncekey.http.rules import Rules, settings_of
from oncekey.http.settings import Settings
from oncekey.receiver import AsyncWebhookReceiver, WebhookResponse
from oncekey.signatures.delivery import RawHeaders

try:
    from asgiref.sync import sync_to_async
    from django import urls
    from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
    from django.core.handlers.exception import response_for_exception
    from django.db import connections, transaction
    from django.http import Http404, HttpResponse
    from django.utils.functional import LazyObject, empty
    from django.views import View
except ImportError as error:
    raise missing("Django", "django") from error

if TYPE_CHECKING:
    from django.http import HttpRequest

    from oncekey.http.options import SettingsOptions

__all__ = ["by_user", "idempotent", "webhook_view", "webhooks"]

AnyStore = AsyncStore | Store | str
V = TypeVar("V", bound=Callable[..., Any])

_MARK: Final = "_oncekey_http"  # on a request that is guarded already
# What Django makes an answer of for the client, outside of the view.
_CLIENT_ERRORS: Final = (BadRequest, Http404, PermissionDenied, SuspiciousOperation)


def webhooks(receiver: AnyReceiver, path: str = "webhook", *, name: str | None = None) -> Any:
    """A URL pattern for ``urlpatterns`` that gives its requests to a receiver.

    Args:
        receiver: See ``webhook_view``.
        path: As in ``django.urls.path``.
        name: The pattern's name.

    Raises:
        BackendMismatchError: It is no receiver.
        ImproperlyConfigured: Django has no settings yet.
    """
    return urls.path(path.removeprefix("/"), webhook_view(receiver), name=name)


def webhook_view(receiver: AnyReceiver) -> Callable[..., Any]:
    """A view that gives its requests to a receiver.

    For an ``AsyncWebhookReceiver`` the view is async, which is meant for an ASGI server. What the
    URL pattern captures is left to the pattern.

    Args:
        receiver: Its ``settings.max_body_bytes`` is the limit, not Django's own
            ``DATA_UPLOAD_MAX_MEMORY_SIZE``.

    Raises:
        BackendMismatchError: It is no receiver.
        ImproperlyConfigured: Django has no settings yet.
    """
    if isinstance(receiver, AsyncWebhookReceiver):

        async def asynchronous(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            found = _delivery(request, receiver)
            if not isinstance(found, WebhookResponse):
                found = await deliver(receiver, *found)
            return _answered(answer_of(found))

        view: Any = asynchronous

    else:
        sync = check_sync(receiver, "a Django view")

        def synchronous(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            found = _delivery(request, sync)
            if not isinstance(found, WebhookResponse):
                found = sync.receive(*found)
            return _answered(answer_of(found))

        view = synchronous

    view.csrf_exempt = True
    view.login_required = False
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view  # type: ignore[no-any-return]


def _delivery(
    request: Any, receiver: AnyReceiver
) -> tuple[str, str, RawHeaders, bytes] | WebhookResponse:
    """What the receiver is to get, or the answer to what it is not."""
    if request.method not in methods_of(receiver):
        return NOT_ALLOWED
    try:
        settings = receiver.settings
        body = _raw_body(request, settings.max_body_bytes, settings.body_seconds)
    except ClientGoneError as error:
        return cut_short(error)
    # Django's own scheme and host know its settings for proxies, and check ALLOWED_HOSTS.
    scheme, host = request.scheme, request.get_host()
    if hasattr(request, "scope"):
        fields = [(b"host", host.encode("latin-1"))]
        url = asgi.request_url({**request.scope, "scheme": scheme, "headers": fields})
        return request.method, url, request.scope["headers"], body
    environ = {**request.environ, "wsgi.url_scheme": scheme, "HTTP_HOST": host}
    for name in ("SCRIPT_NAME", "PATH_INFO"):  # Django has decoded them there
        environ[name] = environ[name].encode("utf-8", "replace").decode("latin-1")
    return request.method, wsgi.request_url(environ), wsgi.request_headers(request.environ), body


def _raw_body(request: HttpRequest, most: int, seconds: float | None = None) -> bytes:
    """The body as it came, also where ``request.body`` or ``request.POST`` was read before.

    Raises:
        ClientGoneError: It can't be read, or there is less of it than its length says.
        OncekeyError: It was read in another way before, and is lost.
    """
    declared = request.META.get("CONTENT_LENGTH") or ""
    environ = getattr(request, "environ", {})
    if declared_length(declared) is None and environ.get("wsgi.input_terminated"):
        return wsgi_body(environ, most, seconds)  # Django takes a body without a length for empty
    if request._read_started and not hasattr(request, "_body"):
        return wsgi.lost_body(request.content_type, "let that read request.body")
    return whole_body(request.read, most, declared, Deadline(seconds, environ))


# Requests


def idempotent(
    store: AnyStore, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Callable[[V], V]:
    """Decorate a view that takes the ``Idempotency-Key`` header.

    Written below ``@login_required`` and the like, next to the view, so that a replay passes them
    as a first call does. With class-based views, and those of Django REST framework, decorate
    ``dispatch``: ``@method_decorator(idempotent(store), name="dispatch")``. What the class does
    there before it calls ``post``, such as authentication and permissions, is done for a replay
    too. Below ``@api_view`` it works as with any function.

    An async view needs an async store. The ``scope`` option is called with Django's request, or
    that of REST framework: ``by_user`` is one.

    A view under ``ATOMIC_REQUESTS`` keeps its transaction, which is committed before the answer is
    recorded. Write the record in the same transaction with ``store.transaction``, if it matters.

    Takes a store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: An async view with a sync store, or the other way round.

    Example:
        >>> @idempotent("sqlite:///keys.db", required=True)  # doctest: +SKIP
        ... def charge(request):
        ...     return JsonResponse({"charged": True}, status=201)
    """
    checked = settings_of(settings, options)
    lock = threading.Lock()
    made: dict[bool, Routes | AsyncRoutes] = {}

    def routes(is_async: bool) -> Any:
        # Made once: method_decorator decorates anew for every request.
        kind: Any = AsyncRoutes if is_async else Routes
        with lock:
            if is_async not in made:
                made[is_async] = kind(store, settings=checked)
            return made[is_async]

    def decorate(view: V) -> V:
        _check_place(view)
        guarded: Any
        if (instance := _instance(view)) is not None:
            guarded = _dispatch(routes, instance, view)
        elif iscoroutinefunction(view):
            if isinstance(store, Store):
                raise BackendMismatchError("this view is async: pass an async store, or a URL")
            guarded = _guarded_async(routes, view)
        else:
            # What method_decorator makes a sample of is no view of anybody.
            if isinstance(store, AsyncStore) and view.__module__ != "django.utils.decorators":
                raise BackendMismatchError("this view is not async: pass a sync store, or a URL")
            guarded = _guarded(routes, view)
        # Committed by Django after this returns, the writes could be lost once they are recorded
        # as done: so the view's transaction is opened inside.
        guarded._non_atomic_requests = set(connections)
        return guarded  # type: ignore[no-any-return]

    return decorate


def _check_place(view: Any) -> None:
    """Refuse a view whose doors are inside of it: a replay would pass them by."""
    if hasattr(view, "view_class") or hasattr(view, "cls"):
        raise PolicyError(
            "as_view() and @api_view give views that authenticate inside: decorate the class "
            "with @method_decorator(idempotent(...), name='dispatch'), or put idempotent below "
            "@api_view"
        )
    if hasattr(view, "redirect_field_name"):
        raise PolicyError(
            "a replay would pass by @login_required or @permission_required: put idempotent "
            "below them, next to the view"
        )


def by_user(request: Any) -> Any:
    """A scope: the caller is the user that is signed in, by model and primary key.

    Works with sync and async views, and with the request of Django REST framework.

    Raises:
        PolicyError: There is no ``request.user``.

    Example:
        >>> guard = idempotent("memory://", scope=by_user)  # doctest: +SKIP
    """
    if not hasattr(request, "user"):
        raise PolicyError(
            "by_user needs Django's request.user: decorate the view, and have "
            "AuthenticationMiddleware in MIDDLEWARE"
        )
    user = None if hasattr(request, "_request") else request.user  # REST framework knows it by now
    if not isinstance(user, LazyObject) or user._wrapped is not empty:
        return _named(request)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _named(request)
    # Not request.auser(): that is who has the session, where other code has set request.user.
    return sync_to_async(_named)(request)


def _named(request: Any) -> Any:
    user = request.user
    if user is None or not user.is_authenticated or user.pk is None:
        return None
    # Authentication may give users of several models, whose primary keys mean nothing together.
    meta = getattr(user, "_meta", None)
    kind = user.__class__.__qualname__ if meta is None else meta.concrete_model._meta.label
    return of_kind(kind, user.pk)


def _instance(view: Any) -> View | None:
    """Whose ``dispatch`` a decorator of ``method_decorator`` was given."""
    while view is not None:
        method = getattr(view, "func", None)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, View) and getattr(method, "__name__", "") == "dispatch":
            return owner
        view = getattr(view, "__wrapped__", None)
    return None


def _dispatch(routes: Any, instance: View, view: Callable[..., Any]) -> Callable[..., Any]:
    """``dispatch``, with a guard around the method that it calls in the end."""

    @functools.wraps(view)
    def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(request.method).lower()
        handler = getattr(instance, name, None)
        outside = frozenset(getattr(view, "_non_atomic_requests", ()))
        if handler is None:
            return _atomic(view, outside)(request, *args, **kwargs)
        is_async = iscoroutinefunction(handler)
        found = _keyed(routes(is_async), request)  # while nobody has parsed the body
        if isinstance(found, Answer):
            return _answered(found)
        if found is None:
            call = view if is_async else _atomic(view, outside)
            return call(request, *args, **kwargs)
        kind = _guarded_async if is_async else _guarded
        setattr(instance, name, kind(routes, handler, found))  # an instance serves one request
        return view(request, *args, **kwargs)

    return guarded


def _guarded(
    routes: Any, view: Callable[..., Any], known: Found | None = None
) -> Callable[..., Any]:
    outside = frozenset(getattr(view, "_non_atomic_requests", ()))

    @functools.wraps(view)
    def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        guard: Routes = routes(False)
        found = known or _keyed(guard, request)
        if isinstance(found, Answer):
            return _answered(found)
        call = functools.partial(_atomic(view, outside), request, *args, **kwargs)
        if found is None:
            return call()

        def seen() -> Seen[HttpResponse]:
            try:
                response = call()
            except Exception as raised:  # noqa: BLE001 - what is no answer is raised again
                response = _answer_to(request, raised)
            return _seen(request, response, guard.rules.settings.max_answer_bytes)

        key, facts, body = found
        given = guard.run(key, facts._replace(source=request), body, seen)
        return _answered(given) if isinstance(given, Answer) else given

    return guarded


def _guarded_async(
    routes: Any, view: Callable[..., Any], known: Found | None = None
) -> Callable[..., Any]:
    @functools.wraps(view)
    async def guarded(request: Any, *args: Any, **kwargs: Any) -> Any:
        guard: AsyncRoutes = routes(True)
        found = known or _keyed(guard, request)
        if isinstance(found, Answer):
            return _answered(found)
        if found is None:
            return await view(request, *args, **kwargs)

        async def seen() -> Seen[HttpResponse]:
            try:
                response = await view(request, *args, **kwargs)
            except Exception as raised:  # noqa: BLE001 - what is no answer is raised again
                response = _answer_to(request, raised)
            return _seen(request, response, guard.rules.settings.max_answer_bytes)

        key, facts, body = found
        given = await guard.run(key, facts._replace(source=request), body, seen)
        return _answered(given) if isinstance(given, Answer) else given

    return guarded


def _rest_view(request: Any) -> Any:
    """The view of Django REST framework that handles this; ``None`` if it is plain Django."""
    return (getattr(request, "parser_context", None) or {}).get("view")


def _answer_to(request: Any, raised: Exception) -> Any:
    """What the framework would answer to an error of a view, or the error."""
    rest = _rest_view(request)
    if rest is not None:
        return rest.handle_exception(raised)
    if isinstance(raised, _CLIENT_ERRORS):
        return response_for_exception(request, raised)
    raise raised


def _atomic(view: Callable[..., Any], outside: frozenset[str]) -> Callable[..., Any]:
    """The view in the transactions that ``ATOMIC_REQUESTS`` would have put it in."""
    configured: Any = connections.settings
    inside: Any = view
    for alias, options in configured.items():
        if options["ATOMIC_REQUESTS"] and alias not in outside:
            inside = transaction.atomic(using=alias)(inside)
    return inside  # type: ignore[no-any-return]


def _keyed(routes: Routes | AsyncRoutes, request: Any) -> Found | Answer | None:
    """Key, facts and body of a request; an answer to a refused one; ``None``: not guarded."""
    request = getattr(request, "_request", request)  # REST framework's has Django's inside
    if getattr(request, _MARK, False):
        return None
    rules = routes.rules

    def read(facts: Facts) -> tuple[Facts, bytes]:
        if request._read_started and not hasattr(request, "_body"):
            return facts._replace(content_type="", encoding=""), _parsed_form(request)
        body = _raw_body(request, rules.settings.max_body_bytes, rules.body_seconds)
        if not hasattr(request, "_body"):  # so that the view can read it once more
            request._body = body
            request._stream = BytesIO(body)
        return facts, body

    found = routes.found(_facts(rules, request), read)
    if isinstance(found, tuple) and not isinstance(found, Answer):
        setattr(request, _MARK, True)
    return found


def _parsed_form(request: Any) -> bytes:
    """What stands for a form that other code has parsed, such as Django's check of CSRF tokens."""
    if not hasattr(request, "_post"):
        raise already_read("let that read request.body")
    fields = [(name, one) for name, many in request.POST.lists() for one in many]
    files = [(name, one.name, one) for name, many in request.FILES.lists() for one in many]
    return form_digest(fields, files)


def _facts(rules: Rules, request: Any) -> Facts:
    if hasattr(request, "scope"):
        facts = asgi_facts(request.scope, rules.header_name, request)
    else:  # Django has decoded the path in its environ.
        facts = wsgi_facts(request.environ, rules.header, request, request.path.encode())
    # Django's own word knows its settings for proxies, and ALLOWED_HOSTS.
    host = request.get_host().lower().encode() if rules.settings.per_host else facts.host
    return facts._replace(host=host)


def _seen(request: Any, response: Any, most: int) -> Seen[HttpResponse]:
    rest = _rest_view(request)
    if rest is not None:
        response = rest.finalize_response(request, response)  # chooses how it is rendered
    render = getattr(response, "render", None)
    if render is not None and not response.is_rendered:
        response = render()  # of a template, or by Django REST framework
    body: bytes | None = None
    if not response.streaming:
        body = response.content
    elif not response.is_async and not endless(response.get("Content-Type")):
        parts, size, stream = [], 0, iter(response.streaming_content)
        for part in stream:
            parts.append(part)
            size += len(part)
            if size > most:
                break
        response.streaming_content = itertools.chain(parts, stream)
        body = b"".join(parts) if size <= most else None
    return Seen(response, Answer(response.status_code, fields_of(response.items()), body))


def _answered(answer: Answer) -> HttpResponse:
    response = HttpResponse(answer.body or b"", status=answer.status)
    del response["Content-Type"]  # Django's default is HTML
    for name, value in answer.headers:
        response[name.decode("latin-1")] = value.decode("latin-1")
    return response
