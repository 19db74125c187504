"""AWS Lambda: a handler that gives HTTP requests to a receiver of webhooks.

```python
from oncekey.adapters.awslambda import webhooks
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider

receiver = WebhookReceiver(provider("stripe", secret="whsec_test"), "postgresql://...")
handler = webhooks(receiver)


@receiver.on("invoice.paid")
def paid(event): ...
```

The event tells what is in front: a REST API, an HTTP API (payload 1.0 or 2.0), a Function URL, or a
load balancer with or without multi-value headers. The answer has the shape that it expects.

Providers that sign the URL (Twilio, Square, HubSpot) get it as the sender called it, with these
limits of what AWS tells. Where one of them matters, give the provider a ``public_url``:

- An HTTP API tells the path decoded: ``%2F`` and ``/`` look the same. With an API mapping of a
  custom domain, it tells the stage in place of the mapping.
- A REST API tells the query decoded and in no order; a load balancer without multi-value headers
  tells only the last of several parameters with one name.

A function that runs into its timeout is killed, and its event is free again when the lease ends:
a ``lease`` of a little more than that timeout is right.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Callable, Mapping
from http.client import responses
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack
from urllib.parse import quote, urlencode

from oncekey.abc import Store
from oncekey.adapters._webhooks import NOT_ALLOWED, check_sync, methods_of
from oncekey.adapters.wsgi import PATH_SAFE
from oncekey.errors import InvalidRequestError
from oncekey.http.answer import Answer, fields_of
from oncekey.http.facts import facts_of
from oncekey.http.routes import Routes, Seen
from oncekey.http.settings import Settings
from oncekey.receiver import WebhookReceiver

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

__all__ = ["idempotent", "webhook_handler", "webhooks"]

_NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")

LambdaHandler = Callable[[Mapping[str, Any], Any], dict[str, Any]]


class _Request(NamedTuple):
    method: str
    url: str
    headers: list[tuple[str, str]]
    body: bytes


def webhooks(receiver: WebhookReceiver) -> LambdaHandler:
    """The function for Lambda to call: ``handler(event, context)``.

    Args:
        receiver: A ``WebhookReceiver``; make it once, outside of the handler.

    Raises:
        BackendMismatchError: It is an ``AsyncWebhookReceiver``; Lambda calls a plain function.

    The handler raises an ``InvalidRequestError`` for an event that is no HTTP request.

    Example:
        >>> from oncekey.signatures import provider
        >>> stripe = provider("stripe", secret="whsec_test")
        >>> handler = webhooks(WebhookReceiver(stripe, "memory://"))
        >>> answer = handler({
        ...     "version": "2.0", "rawPath": "/hooks", "rawQueryString": "",
        ...     "headers": {"content-type": "application/json"}, "body": "{}",
        ...     "requestContext": {"domainName": "shop.example", "http": {"method": "POST"}},
        ... }, None)
        >>> answer["statusCode"]
        401
    """
    check_sync(receiver, "AWS Lambda")

    def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        request = _request(event)
        allowed = request.method in methods_of(receiver)
        found = receiver.receive(*request) if allowed else NOT_ALLOWED
        return _answer(event, found.status, found.headers, found.body)

    return handler


webhook_handler = webhooks  # as it was called before


def _request(event: Mapping[str, Any]) -> _Request:
    """The HTTP request of an event.

    Raises:
        InvalidRequestError: The event has none.
    """
    context = event.get("requestContext") if isinstance(event, Mapping) else None
    if isinstance(context, Mapping):
        try:
            if "rawPath" in event:
                return _of_http_api(event, context)
            if "httpMethod" in event:
                return _of_rest_or_balancer(event, context)
        except (KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise InvalidRequestError(
                f"this HTTP event of Lambda is not as AWS documents it: {type(error).__name__}"
            ) from error
    names = ", ".join(sorted(map(str, event))[:8]) if isinstance(event, Mapping) else ""
    raise InvalidRequestError(
        f"this event is no HTTP request (it has {names or 'no fields'}): connect the function to "
        "API Gateway with Lambda proxy integration, a Function URL or an Application Load Balancer"
    )


def _of_http_api(event: Mapping[str, Any], context: Mapping[str, Any]) -> _Request:
    """An HTTP API with payload 2.0, or a Function URL."""
    headers = list((event.get("headers") or {}).items())
    if event.get("cookies"):
        headers.append(("cookie", "; ".join(event["cookies"])))
    url = _url(context, headers, event["rawPath"], event.get("rawQueryString") or "")
    return _Request(context["http"]["method"], url, headers, _body(event))


def _of_rest_or_balancer(event: Mapping[str, Any], context: Mapping[str, Any]) -> _Request:
    """A REST API, an HTTP API with payload 1.0, or a load balancer."""
    headers = _pairs(event, "multiValueHeaders", "headers")
    given = _pairs(event, "multiValueQueryStringParameters", "queryStringParameters")
    if "elb" in context:
        # As the sender wrote it, unlike API Gateway's.
        query = "&".join(f"{name}={value}" for name, value in given)
        path = event["path"]
    else:
        query = urlencode(given, quote_via=quote)
        path = context.get("path") or event["path"]  # the first knows the stage or base path
    return _Request(event["httpMethod"], _url(context, headers, path, query), headers, _body(event))


def _pairs(event: Mapping[str, Any], many: str, one: str) -> list[tuple[str, str]]:
    if event.get(many):
        return [(name, value) for name, values in event[many].items() for value in values]
    return list((event.get(one) or {}).items())


def _url(context: Mapping[str, Any], headers: list[tuple[str, str]], path: str, query: str) -> str:
    fields = {name.lower(): value for name, value in headers}
    host = context.get("domainName") or fields.get("host", "")
    scheme = "http" if fields.get("x-forwarded-proto") == "http" else "https"
    # Decoded or not, only what can't stand in a path is escaped, and never an escape.
    path = quote(_NO_ESCAPE.sub("%25", path), PATH_SAFE + "%")
    return f"{scheme}://{host}{path}" + (query and f"?{query}")


def _body(event: Mapping[str, Any]) -> bytes:
    body = event.get("body") or ""
    if event.get("isBase64Encoded"):
        return base64.b64decode(body, validate=True)
    return bytes(body.encode("utf-8", "surrogatepass"))


def _answer(
    event: Mapping[str, Any], status: int, headers: Mapping[str, str], body: bytes
) -> dict[str, Any]:
    """An answer in the shape that is expected by what sent the event."""
    answer: dict[str, Any] = {"statusCode": status, "isBase64Encoded": False}
    try:
        answer["body"] = body.decode()
    except UnicodeDecodeError:
        answer |= {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}
    if "elb" in event["requestContext"]:
        answer["statusDescription"] = f"{status} {responses.get(status, '')}"
        if event.get("multiValueHeaders"):  # a load balancer takes one form or the other
            answer["multiValueHeaders"] = {name: [value] for name, value in headers.items()}
            return answer
    answer["headers"] = dict(headers)
    return answer


# Requests


def idempotent(
    store: Store | str, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]
) -> Callable[[LambdaHandler], LambdaHandler]:
    """Decorate a handler of HTTP events that takes the ``Idempotency-Key`` header.

    The handler returns a dict with ``statusCode``, as Lambda proxy integration wants it. The
    ``scope`` option is called with the event: ``event["requestContext"]["authorizer"]`` knows the
    caller. Give a ``lease`` of a little more than the function's timeout.

    Takes a sync store or a URL, and an ``oncekey.http.Settings`` or its options singly.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is asynchronous.

    Example:
        >>> @idempotent("memory://", required=True)
        ... def handler(event, context):
        ...     return {"statusCode": 201, "body": "charged"}
    """
    routes = Routes(store, settings=settings, **options)

    def decorate(handler: LambdaHandler) -> LambdaHandler:
        @functools.wraps(handler)
        def guarded(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
            return _guarded(routes, event, lambda: handler(event, context))

        return guarded

    return decorate


def _guarded(
    routes: Routes, event: Mapping[str, Any], handler: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    found = _request(event)
    facts = facts_of(
        found.method,
        found.url.encode("utf-8", "surrogatepass"),
        found.headers,
        routes.rules.header,
        event,
        length=str(len(found.body)),
    )
    guarded = routes.found(facts, lambda facts: (facts, found.body))
    if guarded is None:
        return handler()
    if isinstance(guarded, Answer):
        return _answered(event, guarded)

    def view() -> Seen[dict[str, Any]]:
        given = handler()
        if not isinstance(given, Mapping) or "statusCode" not in given:
            raise InvalidRequestError("a handler of HTTP events must return a dict with statusCode")
        return Seen(given, _seen(given))

    given = routes.run(*guarded, view)
    return _answered(event, given) if isinstance(given, Answer) else given


def _answered(event: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    fields: dict[str, str] = {}
    for name, value in answer.headers:
        shown, text = name.decode("latin-1"), value.decode("latin-1")
        fields[shown] = f"{fields[shown]}, {text}" if shown in fields else text
    return _answer(event, answer.status, fields, answer.body or b"")


def _seen(given: Mapping[str, Any]) -> Answer:
    raw = given.get("body") or ""
    body = base64.b64decode(raw) if given.get("isBase64Encoded") else str(raw).encode()
    pairs = [(name, str(value)) for name, value in (given.get("headers") or {}).items()]
    for name, values in (given.get("multiValueHeaders") or {}).items():
        pairs += [(name, str(value)) for value in values]
    return Answer(int(given["statusCode"]), fields_of(pairs), body)
