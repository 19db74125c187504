"""WSGI: a receiver of webhooks as an app of its own, under any WSGI server.

```python
from oncekey.adapters.wsgi import webhooks
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider

receiver = WebhookReceiver(provider("stripe", secret="whsec_test"), "sqlite:///hooks.db")
app = webhooks(receiver)  # gunicorn module:app


@receiver.on("invoice.paid")
def paid(event): ...
```

The store may be opened before workers are forked. The URL that a signature is checked against is
the one that the server saw. Behind a proxy that speaks HTTPS to the world, put it right with a
middleware such as werkzeug's ``ProxyFix``, or give a provider that signs URLs its ``public_url``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Unpack
from urllib.parse import quote, unquote_to_bytes

from oncekey.abc import Store
from oncekey.adapters._webhooks import (
    NOT_ALLOWED,
    answer_of,
    check_sync,
    cut_short,
    methods_of,
)
from oncekey.errors import OncekeyError
from oncekey.http.body import ClientGoneError, wsgi_body
from oncekey.http.entry import ready
from oncekey.http.settings import Settings
from oncekey.http.wsgi import IdempotencyMiddleware, WSGIApp, give_answer
from oncekey.receiver import WebhookReceiver, WebhookResponse

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from oncekey.http.options import SettingsOptions

__all__ = [
    "IdempotencyMiddleware",
    "WebhookApp",
    "idempotent",
    "request_headers",
    "request_url",
    "webhooks",
]

# What a path may hold as it is (RFC 3986, 3.3). Senders that escape more need a server that tells
# the URL as it came: see _target.
PATH_SAFE: Final = "/:@!$&'()*+,;=-._~"
_VISIBLE: Final = "".join(map(chr, range(0x21, 0x7F)))
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}


class WebhookApp:
    """A WSGI application that gives every POST to a receiver, whatever its path.

    Args:
        receiver: A ``WebhookReceiver``.

    Raises:
        BackendMismatchError: It is an ``AsyncWebhookReceiver``.
    """

    def __init__(self, receiver: WebhookReceiver) -> None:
        self.receiver = check_sync(receiver, "WSGI")

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        given = give_answer(start_response, answer_of(self._answer(environ)))
        return given if environ["REQUEST_METHOD"] != "HEAD" else []

    def _answer(self, environ: WSGIEnvironment) -> WebhookResponse:
        method = environ["REQUEST_METHOD"]
        if method not in methods_of(self.receiver):
            return NOT_ALLOWED
        try:
            settings = self.receiver.settings
            body = wsgi_body(environ, settings.max_body_bytes, settings.body_seconds)
        except ClientGoneError as error:
            return cut_short(error)
        return self.receiver.receive(method, request_url(environ), request_headers(environ), body)


webhooks = WebhookApp


def idempotent(
    store: Store | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Callable[[WSGIApp], IdempotencyMiddleware]:
    """Guard an application that takes the ``Idempotency-Key`` header.

    Takes a sync store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is asynchronous.

    Example:
        >>> app = idempotent("memory://", required=True)(app)  # doctest: +SKIP
    """
    opened, given = ready(store, settings, options)
    return lambda app: IdempotencyMiddleware(app, opened, settings=given)


# Requests


def request_url(environ: WSGIEnvironment) -> str:
    """The whole URL of a request, as its sender wrote it: nothing decoded, nothing put in order."""
    scheme = environ["wsgi.url_scheme"]
    host = environ.get("HTTP_HOST")
    if not host:
        host, port = environ["SERVER_NAME"], environ.get("SERVER_PORT", "")
        if port and port != _DEFAULT_PORTS.get(scheme):
            host = f"{host}:{port}"
    return f"{scheme}://{host}{_target(environ)}"


def _target(environ: WSGIEnvironment) -> str:
    """Path and query as the sender wrote them.

    Gunicorn, uWSGI, mod_wsgi and werkzeug tell them. Of others only the decoded path is known,
    which is escaped again where it has to be: a sender that escapes more signs another URL.
    """
    script, path = _octets(environ.get("SCRIPT_NAME", "")), _octets(environ.get("PATH_INFO", ""))
    sent = _origin_form(environ.get("REQUEST_URI") or environ.get("RAW_URI") or "")
    if not sent:
        query = environ.get("QUERY_STRING", "")
        sent = (quote(script + path, PATH_SAFE) or "/") + (query and f"?{query}")
    else:
        # A proxy may have cut off a prefix, which a middleware then put into SCRIPT_NAME.
        whole, known = script + path, unquote_to_bytes(sent.partition("?")[0])
        before = whole[: len(whole) - len(known)]
        if before and whole.endswith(known) and script.startswith(before):
            sent = quote(before, PATH_SAFE) + sent
    return quote(_octets(sent), _VISIBLE)


def _origin_form(target: str) -> str:
    """``/path?query`` of a request line, which may hold a whole URL; empty if it has none."""
    if target.startswith("/"):
        return target
    scheme, found, rest = target.partition("://")
    if not found or not scheme.isalpha():
        return ""
    return "/" + rest.partition("?")[0].partition("/")[2] + "".join(rest.partition("?")[1:])


def request_headers(environ: WSGIEnvironment) -> dict[str, str]:
    """The header fields.

    A server has joined those that came more than once by commas, so that a receiver can't see it:
    two signatures become one that is malformed, or a list where the provider's form has lists.
    """
    found = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            found[name] = environ[name]
    return {name.replace("_", "-"): value for name, value in found.items()}


def lost_body(content_type: str | None, instead: str) -> bytes:
    """What to take for a body that other code has parsed, so that its bytes are gone.

    Nothing, if it is a multipart form: no provider sends one, and it is refused by its type.

    Raises:
        OncekeyError: It is anything else.
    """
    if (content_type or "").lower().startswith("multipart/"):
        return b""
    raise OncekeyError(f"other code read the webhook's body before its view could: {instead}")


def _octets(text: str) -> bytes:
    """What a server wrote as latin-1, as it has to."""
    return text.encode("latin-1", "replace")
