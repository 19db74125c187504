"""Webhooks in AWS Lambda: every shape of event that carries an HTTP request."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.adapters.webhook_scenarios import JSON, SCENARIOS, fresh
from tests.adapters.webhook_sites import Site, made, serve

from oncekey import BackendMismatchError, MemoryStore
from oncekey.adapters.awslambda import webhook_handler
from oncekey.errors import InvalidRequestError
from oncekey.receiver import AsyncWebhookReceiver, WebhookEvent, WebhookReceiver
from oncekey.signatures import hmac_provider

UNTOLD = {
    "function-url": (),
    "http-api": ("odd path",),
    "rest": ("odd query",),
    "alb": ("query with repeats", "odd query"),
    "alb-multi": ("odd query",),
}
# What is in front of a function waits for the whole body, and never calls it without.
OF_SERVERS = ("chunked_body", "cut_short")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from serve("lambda", tmp_path_factory.mktemp("site"), chunked=False)


@pytest.fixture(params=UNTOLD)
def site(everything: Site, request: pytest.FixtureRequest) -> Site:
    """A function behind one of the things that may be in front of it."""
    url = f"{everything.url}/{request.param}"
    return everything._replace(url=url, untold=UNTOLD[request.param])


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in OF_SERVERS])
def test_a_function_does_what_every_adapter_must(site: Site, scenario: str) -> None:
    """Each scenario of ``webhook_scenarios`` holds, whatever is in front of the function."""
    SCENARIOS[scenario](site)


# Events as AWS documents them (read in November 2026):
# apigateway/latest/developerguide/http-api-develop-integrations-lambda.html
# apigateway/latest/developerguide/set-up-lambda-proxy-integrations.html
# lambda/latest/dg/urls-invocation.html
# elasticloadbalancing/latest/application/lambda-functions.html

HTTP_API: dict[str, Any] = {
    "version": "2.0",
    "routeKey": "$default",
    "rawPath": "/my/path",
    "rawQueryString": "parameter1=value1&parameter1=value2&parameter2=value",
    "cookies": ["cookie1", "cookie2"],
    "headers": {"header1": "value1", "header2": "value1,value2"},
    "queryStringParameters": {"parameter1": "value1,value2", "parameter2": "value"},
    "requestContext": {
        "accountId": "123456789012",
        "apiId": "api-id",
        "authentication": None,
        "domainName": "id.execute-api.us-east-1.amazonaws.com",
        "domainPrefix": "id",
        "http": {
            "method": "POST",
            "path": "/my/path",
            "protocol": "HTTP/1.1",
            "sourceIp": "192.0.2.1",
            "userAgent": "agent",
        },
        "requestId": "id",
        "routeKey": "$default",
        "stage": "$default",
        "time": "12/Mar/2020:19:03:58 +0000",
        "timeEpoch": 1583348638390,
    },
    "body": "Hello from Lambda",
    "pathParameters": {"parameter1": "value1"},
    "isBase64Encoded": False,
    "stageVariables": {"stageVariable1": "value1"},
}
HTTP_API_1: dict[str, Any] = {
    "version": "1.0",
    "resource": "/my/path",
    "path": "/my/path",
    "httpMethod": "POST",
    "headers": {"header1": "value1", "header2": "value2"},
    "multiValueHeaders": {"header1": ["value1"], "header2": ["value1", "value2"]},
    "queryStringParameters": {"parameter1": "value1", "parameter2": "value"},
    "multiValueQueryStringParameters": {
        "parameter1": ["value1", "value2"],
        "parameter2": ["value"],
    },
    "requestContext": {
        "accountId": "123456789012",
        "apiId": "id",
        "authorizer": {"claims": None, "scopes": None},
        "domainName": "id.execute-api.us-east-1.amazonaws.com",
        "domainPrefix": "id",
        "extendedRequestId": "request-id",
        "httpMethod": "POST",
        "identity": {"sourceIp": "192.0.2.1", "userAgent": "user-agent"},
        "path": "/my/path",
        "protocol": "HTTP/1.1",
        "requestId": "id=",
        "requestTime": "04/Mar/2020:19:15:17 +0000",
        "requestTimeEpoch": 1583349317135,
        "resourceId": None,
        "resourcePath": "/my/path",
        "stage": "$default",
    },
    "pathParameters": None,
    "stageVariables": None,
    "body": "Hello from Lambda!",
    "isBase64Encoded": False,
}
REST: dict[str, Any] = {
    "resource": "/my/path",
    "path": "/my/path",
    "httpMethod": "POST",
    "headers": {"header1": "value1", "header2": "value2"},
    "multiValueHeaders": {"header1": ["value1"], "header2": ["value1", "value2"]},
    "queryStringParameters": {"parameter1": "value1", "parameter2": "value"},
    "multiValueQueryStringParameters": {
        "parameter1": ["value1", "value2"],
        "parameter2": ["value"],
    },
    "requestContext": {
        "accountId": "123456789012",
        "apiId": "id",
        "domainName": "id.execute-api.us-east-1.amazonaws.com",
        "domainPrefix": "id",
        "extendedRequestId": "request-id",
        "httpMethod": "POST",
        "identity": {"sourceIp": "192.0.2.1", "userAgent": "user-agent", "clientCert": None},
        "path": "/prod/my/path",
        "protocol": "HTTP/1.1",
        "requestId": "id=",
        "requestTime": "04/Mar/2020:19:15:17 +0000",
        "requestTimeEpoch": 1583349317135,
        "resourceId": "abc",
        "resourcePath": "/my/path",
        "stage": "prod",
    },
    "pathParameters": None,
    "stageVariables": None,
    "body": "Hello from Lambda!",
    "isBase64Encoded": False,
}
FUNCTION_URL: dict[str, Any] = {
    "version": "2.0",
    "routeKey": "$default",
    "rawPath": "/my/path",
    "rawQueryString": "parameter1=value1&parameter1=value2&parameter2=value",
    "cookies": ["cookie1", "cookie2"],
    "headers": {"header1": "value1", "header2": "value1,value2", "x-forwarded-proto": "https"},
    "queryStringParameters": {"parameter1": "value1,value2", "parameter2": "value"},
    "requestContext": {
        "accountId": "anonymous",
        "apiId": "url-id",
        "authentication": None,
        "domainName": "url-id.lambda-url.us-west-2.on.aws",
        "domainPrefix": "url-id",
        "http": {
            "method": "POST",
            "path": "/my/path",
            "protocol": "HTTP/1.1",
            "sourceIp": "123.123.123.123",
            "userAgent": "agent",
        },
        "requestId": "id",
        "routeKey": "$default",
        "stage": "$default",
        "time": "12/Mar/2020:19:03:58 +0000",
        "timeEpoch": 1583348638390,
    },
    "body": "Hello from client!",
    "pathParameters": None,
    "isBase64Encoded": False,
    "stageVariables": None,
}
ELB = "arn:aws:elasticloadbalancing:us-east-2:123456789012:targetgroup/hooks/6d0ecf831eec9f09"
ALB_FIELDS = {
    "accept": "text/html,application/xhtml+xml",
    "host": "lambda-846800462-us-east-2.elb.amazonaws.com",
    "x-amzn-trace-id": "Root=1-5bdb40ca-556d8b0c50dc66f0511bf520",
    "x-forwarded-for": "72.21.198.66",
    "x-forwarded-port": "443",
    "x-forwarded-proto": "https",
}
ALB: dict[str, Any] = {
    "requestContext": {"elb": {"targetGroupArn": ELB}},
    "httpMethod": "POST",
    "path": "/my/path",
    "queryStringParameters": {"parameter1": "value%201", "parameter2": "value"},
    "headers": ALB_FIELDS,
    "isBase64Encoded": False,
    "body": "request_body",
}
ALB_MULTI: dict[str, Any] = {
    "requestContext": {"elb": {"targetGroupArn": ELB}},
    "httpMethod": "POST",
    "path": "/my/path",
    "multiValueQueryStringParameters": {"parameter1": ["value%201", "2"], "parameter2": ["value"]},
    "multiValueHeaders": {name: [value] for name, value in ALB_FIELDS.items()},
    "isBase64Encoded": False,
    "body": "request_body",
}
SHAPES = {
    "http-api": HTTP_API,
    "http-api-1.0": HTTP_API_1,
    "rest": REST,
    "function-url": FUNCTION_URL,
    "alb": ALB,
    "alb-multi": ALB_MULTI,
}
QUERY = "parameter1=value1&parameter1=value2&parameter2=value"
GATEWAY = "https://id.execute-api.us-east-1.amazonaws.com"
BALANCER = "https://lambda-846800462-us-east-2.elb.amazonaws.com"
URLS = {
    "http-api": f"{GATEWAY}/my/path?{QUERY}",
    "http-api-1.0": f"{GATEWAY}/my/path?{QUERY}",
    "rest": f"{GATEWAY}/prod/my/path?{QUERY}",
    "function-url": f"https://url-id.lambda-url.us-west-2.on.aws/my/path?{QUERY}",
    "alb": f"{BALANCER}/my/path?parameter1=value%201&parameter2=value",
    "alb-multi": f"{BALANCER}/my/path?parameter1=value%201&parameter1=2&parameter2=value",
}
URL_SIGNER = hmac_provider(
    "acme",
    secret="s3cret",
    header="X-Acme-Signature",
    signed="{method}{url}{body}",
    event_id="id",
    allowed_hosts="*",
)


def event_of(shape: str, headers: dict[str, str], body: bytes, **changes: Any) -> dict[str, Any]:
    """A documented event with other headers and another body."""
    event = copy.deepcopy(SHAPES[shape])
    if "multiValueHeaders" in event:
        event["multiValueHeaders"] |= {name: [value] for name, value in headers.items()}
    if "headers" in event:
        event["headers"] |= headers
    return {**event, "body": body.decode(), **changes}


def receiver_of(seen: list[WebhookEvent], source: Any = URL_SIGNER) -> WebhookReceiver:
    receiver = WebhookReceiver(source, MemoryStore())
    receiver.on()(seen.append)
    return receiver


@pytest.mark.parametrize("encoded", [False, True], ids=["text", "base64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_documented_event_is_verified_and_answered(shape: str, encoded: bool) -> None:
    """The URL as it was called, the headers and the raw bytes arrive; the answer has its shape."""
    seen: list[WebhookEvent] = []
    handler = webhook_handler(receiver_of(seen))
    name = fresh()
    body = json.dumps({"id": name, "city": "Málaga"}, ensure_ascii=False).encode()
    signed = URL_SIGNER.sign("POST", URLS[shape], JSON, body)
    event = event_of(shape, signed.headers, body)
    if encoded:
        event |= {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}
    before = copy.deepcopy(event)
    answers = [handler(event, object()) for _ in range(2)]
    expected: dict[str, Any] = {"statusCode": 200, "isBase64Encoded": False, "body": ""}
    if shape.startswith("alb"):
        expected["statusDescription"] = "200 OK"
    expected["multiValueHeaders" if shape == "alb-multi" else "headers"] = {}
    assert answers == [expected] * 2
    assert event == before
    (found,) = seen
    assert (found.id, found.body) == (name, body)
    if "cookies" in event:
        assert found.headers.one("cookie") == "cookie1; cookie2"
    if shape in ("rest", "http-api-1.0"):
        assert found.headers.all("header2") == ["value1", "value2"]
    assert json.dumps(answers[0])  # Lambda writes it as JSON


@pytest.mark.parametrize("shape", SHAPES)
def test_a_refusal_has_the_shape_too(shape: str) -> None:
    """A bad signature is a 401 and another method a 405, with headers in the form expected."""
    handler = webhook_handler(receiver_of([]))
    signed = URL_SIGNER.sign("POST", URLS[shape] + "x", JSON, b'{"id": "e"}')
    answer = handler(event_of(shape, signed.headers, signed.body), None)
    assert (answer["statusCode"], json.loads(answer["body"])["error"]) == (
        401,
        "signature_mismatch",
    )
    other = event_of(shape, {}, b"")
    if "httpMethod" in other:
        other["httpMethod"] = "GET"
    else:
        other["requestContext"]["http"]["method"] = "GET"
    answer = handler(other, None)
    many = shape == "alb-multi"
    assert answer["statusCode"] == 405
    assert answer["multiValueHeaders" if many else "headers"]["Allow"] == (
        ["POST"] if many else "POST"
    )
    assert answer.get("statusDescription") == (
        "405 Method Not Allowed" if shape.startswith("alb") else None
    )


@pytest.mark.parametrize(
    "shape, changes, url",
    [
        # A custom domain with a base path: it is in the context's path.
        (
            "rest",
            {
                "path": "/v1/my/path",
                "requestContext": {"domainName": "api.shop.example", "path": "/v1/my/path"},
                "queryStringParameters": None,
                "multiValueQueryStringParameters": None,
            },
            "https://api.shop.example/v1/my/path",
        ),
        # Decoded by the gateway, and escaped again.
        (
            "rest",
            {"multiValueQueryStringParameters": {"q x": ["a&b", "é+"]}},
            f"{GATEWAY}/prod/my/path?q%20x=a%26b&q%20x=%C3%A9%2B",
        ),
        # A stage is in the path; a path that was decoded is escaped again.
        ("http-api", {"rawPath": "/dev/a b", "rawQueryString": ""}, f"{GATEWAY}/dev/a%20b"),
        ("http-api", {"rawPath": "/é?#", "rawQueryString": "a"}, f"{GATEWAY}/%C3%A9%3F%23?a"),
        ("http-api", {"rawPath": "/100%", "rawQueryString": ""}, f"{GATEWAY}/100%25"),
        # An escape is left alone.
        (
            "function-url",
            {"rawPath": "/a%2fb%20c;d=@", "rawQueryString": "a=%7e&&b"},
            "https://url-id.lambda-url.us-west-2.on.aws/a%2fb%20c;d=@?a=%7e&&b",
        ),
        ("alb", {"path": "/a%2Fb", "queryStringParameters": {}}, f"{BALANCER}/a%2Fb"),
    ],
)
def test_the_url_is_the_one_that_was_called(shape: str, changes: dict[str, Any], url: str) -> None:
    """Domain, stage or base path, and query are put together as the sender wrote them."""
    seen: list[WebhookEvent] = []
    signed = URL_SIGNER.sign("POST", url, JSON, b'{"id": "e"}')
    event = event_of(shape, signed.headers, signed.body, **changes)
    assert webhook_handler(receiver_of(seen))(event, None)["statusCode"] == 200
    assert len(seen) == 1


def test_an_answer_that_is_no_text_is_encoded() -> None:
    """Bytes that are no UTF-8 come in base64."""
    acme = hmac_provider("acme", secret="s3cret", header="X-Acme-Signature", event_id="id")
    acme.ack = acme.ack._replace(body=b"\xff\x00", content_type="application/octet-stream")
    signed = acme.sign("POST", URLS["http-api"], JSON, b'{"id": "e"}')
    handler = webhook_handler(receiver_of([], acme))
    answer = handler(event_of("http-api", signed.headers, signed.body), None)
    assert answer == {
        "statusCode": 200,
        "isBase64Encoded": True,
        "body": base64.b64encode(b"\xff\x00").decode(),
        "headers": {"Content-Type": "application/octet-stream"},
    }


@pytest.mark.parametrize(
    "event, named",
    [
        ({"Records": [{"eventSource": "aws:sqs", "body": "secret"}]}, "it has Records"),
        ({"source": "aws.events", "detail": {}, "id": "1"}, "it has detail, id, source"),
        ({"requestContext": {"connectionId": "x", "eventType": "CONNECT"}}, "requestContext"),
        ({}, "no fields"),
        ([1, 2], "no fields"),
        (None, "no fields"),
    ],
)
def test_an_event_that_is_no_request_is_an_error(event: Any, named: str) -> None:
    """A queue's or a timer's event is told apart; the error names what to do, and no content."""
    handler = webhook_handler(receiver_of([]))
    with pytest.raises(InvalidRequestError, match=f"{named}.*Lambda proxy integration") as found:
        handler(event, None)
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"requestContext": {"domainName": "x"}},
        {"isBase64Encoded": True, "body": "not base64!"},
        {"body": {"id": "e"}},
        {"rawPath": None},
    ],
)
def test_an_event_that_is_not_as_documented_is_an_error(changes: dict[str, Any]) -> None:
    """Such an event was made by hand: the error says so, rather than a 401 that misleads."""
    handler = webhook_handler(receiver_of([]))
    with pytest.raises(InvalidRequestError, match="not as AWS documents it"):
        handler({**event_of("http-api", {}, b""), **changes}, None)


def test_a_receiver_that_must_be_awaited_is_refused() -> None:
    """Lambda calls a plain function."""
    waiting: Any = AsyncWebhookReceiver(made("stripe"), "memory://")
    with pytest.raises(BackendMismatchError, match="AWS Lambda needs a WebhookReceiver"):
        webhook_handler(waiting)
