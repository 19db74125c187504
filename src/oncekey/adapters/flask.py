"""Flask: an extension that receives webhooks at URLs of an app.

```python
from flask import Flask

from oncekey.adapters.flask import Webhooks
from oncekey.signatures import provider

app = Flask(__name__)
webhooks = Webhooks(app, store="sqlite:///hooks.db")


@webhooks.on("/hooks/stripe", provider("stripe", secret="whsec_test"), "invoice.paid")
def paid(event): ...
```

``webhooks.add(rule, provider, ...)`` gives a receiver for several handlers. Both take the options
of a receiver: with ``transactional=True`` on PostgreSQL or SQLite a handler is called as
``handler(event, tx)``, and what it writes on ``tx.connection`` is committed together with the mark.
With a receiver of your own, as in other frameworks: ``app.register_blueprint(webhooks(receiver,
"/hooks/stripe"))``. ``webhook_view(receiver)`` is a view function for a route of your own; one that
looks at the outcome calls ``receive_webhook(receiver)``, then returns ``as_response`` of it.

The signature is over the raw bytes, so they are kept before a ``before_request`` function can parse
a form. Flask-WTF's ``CSRFProtect`` must be told: ``csrf.exempt("oncekey.adapters.flask.webhook")``.
The store may be opened before workers are forked. For proxies, see ``oncekey.adapters.wsgi``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from oncekey.abc import Store
from oncekey.adapters._webhooks import (
    NOT_ALLOWED,
    answer_of,
    check_sync,
    cut_short,
    methods_of,
    missing,
)
from oncekey.adapters.wsgi import lost_body, request_headers, request_url
from oncekey.errors import PolicyError
from oncekey.http.answer import Answer, fields_of
from oncekey.http.body import ClientGoneError, wsgi_body
from oncekey.http.facts import Facts, wsgi_facts
from oncekey.http.fingerprint import form_digest
from oncekey.http.routes import Routes, Seen, already_read, endless
from oncekey.http.rules import Rules
from oncekey.http.settings import Settings
from oncekey.http.wsgi import MARK
from oncekey.receiver import WebhookReceiver, WebhookResponse
from oncekey.receiver.settings import Handler
from oncekey.signatures.base import Provider
from oncekey.stores.urls import connect

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions
    from oncekey.receiver.options import ReceiverOptions

try:
    from flask import (
        Blueprint,
        Flask,
        Request,
        Response,
        current_app,
        request,
        request_started,
        session,
    )
    from werkzeug.exceptions import HTTPException
except ImportError as error:
    raise missing("Flask", "flask") from error

__all__ = [
    "Webhooks",
    "as_response",
    "by_session",
    "idempotent",
    "receive_webhook",
    "webhook_view",
    "webhooks",
]

H = TypeVar("H", bound=Handler)
V = TypeVar("V", bound=Callable[..., Any])

_KEPT: Final = "oncekey.webhook_body"


class Webhooks:
    """Receives webhooks at URLs of a Flask app.

    Args:
        app: The app, or ``None`` if ``init_app`` is called later.
        store: A sync store or a URL, for receivers that are made here.
        options: Those of ``oncekey.receiver.Settings``, such as ``transactional=True``, for all
            receivers that are made here; ``on`` and ``add`` may say otherwise for one URL.

    Example:
        >>> from oncekey.signatures import provider
        >>> stripe = provider("stripe", secret="whsec_test")
        >>> app = Flask("shop")
        >>> webhooks = Webhooks(app, store="memory://")
        >>> @webhooks.on("/hooks/stripe", stripe, "invoice.paid")
        ... def paid(event):
        ...     print("paid:", event.id)
        >>> body = b'{"id": "evt_1", "type": "invoice.paid"}'
        >>> url, kind = "http://localhost/hooks/stripe", {"Content-Type": "application/json"}
        >>> signed = stripe.sign("POST", url, kind, body)
        >>> client = app.test_client()
        >>> for _ in range(2):
        ...     client.post("/hooks/stripe", data=body, headers=signed.headers).status
        paid: evt_1
        '200 OK'
        '200 OK'
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        store: Store | str | None = None,
        **options: Unpack[ReceiverOptions],
    ) -> None:
        self._given = store
        self._options = options
        self._store: Store | None = None
        self._receivers: dict[str, WebhookReceiver] = {}
        self._apps: weakref.WeakSet[Flask] = weakref.WeakSet()
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Receive at the URLs of ``app`` too, also those that are added later."""
        if app in self._apps:
            raise PolicyError("these webhooks are at this app already: pass it once")
        self._apps.add(app)
        app.extensions.setdefault("oncekey_webhooks", []).append(self)
        for rule in self._receivers:
            self._route(app, rule)

    def add(
        self, rule: str, source: Provider | WebhookReceiver, **options: Unpack[ReceiverOptions]
    ) -> WebhookReceiver:
        """Receive deliveries at a URL.

        Args:
            rule: As in ``app.route``.
            source: The provider, or a receiver that you made.
            options: Those of ``oncekey.receiver.Settings``, if it is a provider.

        Returns:
            The receiver, for ``@receiver.on("invoice.paid")``.

        Raises:
            PolicyError: The URL is taken, there is no store, or an option can't work.
            BackendMismatchError: The receiver or the store is asynchronous.
        """
        if rule in self._receivers:
            raise PolicyError(f"there is a receiver at {rule} already: add handlers to that one")
        if isinstance(source, Provider):
            both: ReceiverOptions = {**self._options, **options}
            receiver = WebhookReceiver(source, self._shared_store(), **both)
        else:
            receiver = check_sync(source, "Flask")
            if options:
                raise PolicyError("options are for a provider: give them to your WebhookReceiver")
        self._receivers[rule] = receiver
        for app in self._apps:
            self._route(app, rule)
        return receiver

    def on(
        self,
        rule: str,
        source: Provider | WebhookReceiver,
        *types: str,
        **options: Unpack[ReceiverOptions],
    ) -> Callable[[H], H]:
        """Decorate the handler of one or several types of events that come to a URL.

        ``add`` and the receiver's ``on`` in one step. More handlers may follow for the same URL
        and the same provider; the options are given with the first.

        Args:
            rule: As in ``app.route``.
            source: The provider, or a receiver that you made.
            types: The types of events. None: every event that has no other handler.
            options: Those of ``oncekey.receiver.Settings``, if it is a provider.

        Raises:
            PolicyError: There is another provider at this URL, or a handler for that type.
        """
        receiver = self._receivers.get(rule)
        if receiver is None:
            receiver = self.add(rule, source, **options)
        elif source is not receiver and source is not receiver.provider:
            raise PolicyError(f"there is another provider at {rule}: make one, and pass it to both")
        elif options:
            raise PolicyError(f"give the options of {rule} with its first handler")
        return receiver.on(*types)

    def close(self) -> None:
        """Close the store, if it was opened here."""
        if self._store is not None and self._store is not self._given:
            self._store.close()

    def _shared_store(self) -> Store | str:
        if self._store is None:
            if self._given is None:
                raise PolicyError(
                    'where are events remembered? Pass Webhooks(store="sqlite:///webhooks.db"), or '
                    "add a WebhookReceiver, which has its own store"
                )
            self._store = connect(self._given) if isinstance(self._given, str) else self._given
        return self._store

    def _route(self, app: Flask, rule: str) -> None:
        view = webhook_view(self._receivers[rule])
        app.add_url_rule(rule, _endpoint(rule), view, methods=methods_of(self._receivers[rule]))
        _read_first(app, view, self._receivers[rule])


def webhooks(
    receiver: WebhookReceiver, path: str = "/webhook", *, name: str | None = None
) -> Blueprint:
    """A blueprint with one URL, that gives its POST requests to a receiver.

    Keeps the raw bytes where other code parses a form first.

    Args:
        receiver: A ``WebhookReceiver``.
        path: As in ``app.route``.
        name: The blueprint's name.

    Raises:
        BackendMismatchError: It is an ``AsyncWebhookReceiver``.

    Example:
        >>> app.register_blueprint(webhooks(receiver, "/hooks/stripe"))  # doctest: +SKIP
    """
    view = webhook_view(receiver)
    found = Blueprint(name or _endpoint(path), __name__)
    found.add_url_rule(path, view_func=view, methods=methods_of(receiver))
    found.record(lambda state: _read_first(state.app, view, receiver))
    return found


def _endpoint(rule: str) -> str:
    return "oncekey_webhook:" + rule.replace(".", "_")  # a dot would name a blueprint


def _read_first(app: Any, view: Callable[..., Response], receiver: WebhookReceiver) -> None:
    """Keep the raw bytes of a view's requests before anybody parses them."""

    def keep(app: Flask, **_: Any) -> None:
        if app.view_functions.get(request.endpoint or "") is view:
            with contextlib.suppress(ClientGoneError):  # the view finds out again
                _raw_body(request, receiver)

    request_started.connect(keep, app)
    app.extensions.setdefault("oncekey_kept", []).append(keep)  # the signal does not hold it


def webhook_view(receiver: WebhookReceiver) -> Callable[..., Response]:
    """A view function that gives its requests to a receiver, for a route of your own.

    ``webhooks`` does the same, and keeps the raw bytes where other code parses a form first.

    Args:
        receiver: A ``WebhookReceiver``.

    Raises:
        BackendMismatchError: It is an ``AsyncWebhookReceiver``: Flask runs async views in an event
            loop of their own, which no async store can be shared with.

    Example:
        >>> view = webhook_view(receiver)  # doctest: +SKIP
        >>> app.add_url_rule("/hooks", view_func=view, methods=["POST"])  # doctest: +SKIP
    """
    check_sync(receiver, "Flask")

    def webhook(**values: Any) -> Response:
        return as_response(receive_webhook(receiver))

    return webhook


def receive_webhook(receiver: WebhookReceiver) -> WebhookResponse:
    """Give the current request to a receiver, for a view that looks at the outcome itself.

    By then the event is handled, and that is recorded: what the view does comes too late to undo
    it.

    Args:
        receiver: A ``WebhookReceiver``.

    Returns:
        What to answer: return ``as_response`` of it, or the sender can't know what to retry.

    Raises:
        BackendMismatchError: It is an ``AsyncWebhookReceiver``.
        OncekeyError: Other code has parsed the body before, and its bytes are lost.
    """
    check_sync(receiver, "Flask")
    if request.method not in methods_of(receiver):
        return NOT_ALLOWED
    try:
        body = _raw_body(request, receiver)
    except ClientGoneError as error:
        return cut_short(error)
    url, fields = request_url(request.environ), request_headers(request.environ)
    return receiver.receive(request.method, url, fields, body)


def as_response(received: WebhookResponse) -> Response:
    """What a receiver answers, as a response of Flask."""
    return _answered(answer_of(received))


def _raw_body(request: Request, receiver: WebhookReceiver) -> bytes:
    """The body as it came, also where it was read before as a whole.

    Raises:
        ClientGoneError: There is less of it than its length says.
        OncekeyError: It was parsed before, and is lost.
    """
    environ = request.environ
    kept: bytes | ClientGoneError | None = environ.get(_KEPT)
    if kept is None:
        try:
            settings = receiver.settings
            kept = _read_body(request, settings.max_body_bytes, settings.body_seconds)
        except ClientGoneError as error:
            kept = error
        environ[_KEPT] = kept
    if isinstance(kept, ClientGoneError):
        raise kept
    return kept


def _read_body(request: Request, most: int, seconds: float | None = None) -> bytes:
    if "stream" not in vars(request):  # nobody has asked for it yet
        body = wsgi_body(request.environ, most, seconds)
        request.environ["wsgi.input"] = BytesIO(body)  # for whoever wants to parse it too
        return body
    body = request.get_data(cache=False)
    if not body and (request.content_length or request.form or request.files):
        instead = "use Webhooks(app).add(...), or call request.get_data() first"
        return lost_body(request.content_type, instead)
    return body


# Requests


def idempotent(
    store: Store | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Callable[[V], V]:
    """Decorate a view that takes the ``Idempotency-Key`` header.

    Written next to the view, below ``@login_required`` and the like, so that a replay passes them,
    and every ``before_request`` function, as a first call does. The ``scope`` option is called with
    Flask's ``request``: ``by_session("user_id")`` is one; with Flask-Login write ``lambda request:
    current_user.get_id()``, which is ``None`` for nobody.

    To guard a whole app, in front of all of its checks: ``app.wsgi_app =
    IdempotencyMiddleware(app.wsgi_app, store)``, with the one of ``oncekey.http.wsgi``.

    Takes a sync store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is asynchronous.

    Example:
        >>> app = Flask("shop")
        >>> @app.post("/charges")
        ... @idempotent("memory://", required=True)
        ... def charge():
        ...     return {"charged": True}, 201
        >>> app.test_client().post("/charges").status_code
        400
    """
    routes = Routes(store, settings=settings, **options)

    def decorate(view: V) -> V:
        @functools.wraps(view)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            call = current_app.ensure_sync(view)
            return _guarded(routes, functools.partial(call, *args, **kwargs))

        return guarded  # type: ignore[return-value]

    return decorate


def by_session(name: str) -> Callable[[Request], Any]:
    """A scope: the caller is whom the app has put into Flask's signed session by this name.

    Example:
        >>> guard = idempotent("memory://", scope=by_session("user_id"))
    """
    return lambda request: session.get(name)


def _guarded(routes: Routes, view: Callable[[], Any]) -> Any:
    environ, rules = request.environ, routes.rules
    if MARK in environ:
        return view()
    facts = wsgi_facts(environ, rules.header, request)
    found = routes.found(facts, lambda facts: _comparable(facts, rules))
    if found is None:
        return view()
    if isinstance(found, Answer):
        return _answered(found)
    environ[MARK] = True

    def seen() -> Seen[Response]:
        try:
            response = current_app.make_response(view())
        except HTTPException as raised:  # abort(404) is an answer, too
            response = current_app.make_response(current_app.handle_user_exception(raised))
        body = _body(response, rules.settings.max_answer_bytes)
        return Seen(
            response, Answer(response.status_code, fields_of(response.headers.items()), body)
        )

    given = routes.run(*found, seen)
    return _answered(given) if isinstance(given, Answer) else given


def _comparable(facts: Facts, rules: Rules) -> tuple[Facts, bytes]:
    """The body, or what stands for one that other code has parsed, such as a check of tokens."""
    if "stream" not in vars(request):  # nobody has asked for it yet
        return facts, _read_body(request, rules.settings.max_body_bytes, rules.body_seconds)
    body = request.get_data()
    if not body and "form" in vars(request):
        files = [(name, one.filename, one.stream) for name, one in request.files.items(multi=True)]
        plain = facts._replace(content_type="", encoding="")
        return plain, form_digest(request.form.items(multi=True), files)
    if not body and (request.content_length or "HTTP_TRANSFER_ENCODING" in request.environ):
        raise already_read("let that call request.get_data()")
    return facts, body


def _body(response: Response, most: int) -> bytes | None:
    """The body, read ahead as far as it is kept; of a longer one, ``None``."""
    if endless(response.content_type):
        return None
    if not response.is_streamed and not response.direct_passthrough:
        return response.get_data()
    parts: list[bytes] = []
    size = 0
    stream = response.iter_encoded()
    for part in stream:
        parts.append(part)
        size += len(part)
        if size > most:
            response.response = itertools.chain(parts, stream)
            return None
    response.response = parts
    return b"".join(parts)


def _answered(answer: Answer) -> Response:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
    response = Response(answer.body, answer.status)
    del response.headers["Content-Type"]  # Flask's default is HTML
    response.headers.extend(headers)
    return response
