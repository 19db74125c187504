"""The Idempotency-Key header in AWS Lambda, in each shape that an HTTP event has."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from oncekey import InvalidRequestError, MemoryStore
from oncekey.adapters.awslambda import idempotent


def http_api(key: str | None, body: bytes) -> dict[str, Any]:
    headers = {"content-type": "application/json", "authorization": "Bearer shop"}
    headers |= {"idempotency-key": key} if key else {}
    return {
        "version": "2.0",
        "rawPath": "/charges",
        "rawQueryString": "",
        "headers": headers,
        "body": base64.b64encode(body).decode(),
        "isBase64Encoded": True,
        "requestContext": {"domainName": "shop.example", "http": {"method": "POST"}},
    }


def rest_api(key: str | None, body: bytes) -> dict[str, Any]:
    headers = {"Content-Type": ["application/json"], "Authorization": ["Bearer shop"]}
    if key:
        headers["Idempotency-Key"] = [key]
    return {
        "httpMethod": "POST",
        "path": "/charges",
        "headers": {name: values[0] for name, values in headers.items()},
        "multiValueHeaders": headers,
        "body": body.decode(),
        "isBase64Encoded": False,
        "requestContext": {"domainName": "shop.example", "path": "/charges"},
    }


def balancer(key: str | None, body: bytes) -> dict[str, Any]:
    event = rest_api(key, body)
    del event["headers"]
    return {**event, "requestContext": {"elb": {"targetGroupArn": "arn:aws:x"}}}


SHAPES = pytest.mark.parametrize("shape", [http_api, rest_api, balancer])


def fields(answer: dict[str, Any]) -> dict[str, str]:
    many = answer.get("multiValueHeaders") or {}
    found = {name: values[0] for name, values in many.items()} or answer.get("headers") or {}
    return {name.lower(): value for name, value in found.items()}


@SHAPES
def test_one_charge_for_each_key(shape: Any) -> None:
    """A retry is replayed in the shape of its event, another body conflicts, no key is a 400."""
    charged: list[str] = []

    @idempotent(MemoryStore(), required=True)
    def handler(event: Any, context: Any) -> dict[str, Any]:
        charged.append("one")
        headers = {"Content-Type": "application/json", "Set-Cookie": "s=1"}
        return {"statusCode": 201, "headers": headers, "body": '{"charge": 1}'}

    first, again = (handler(shape("key-1", b'{"a":1}'), None) for _ in range(2))
    assert first["statusCode"] == again["statusCode"] == 201
    assert json.loads(again["body"]) == {"charge": 1}
    assert fields(again)["idempotent-replayed"] == "true"
    assert "set-cookie" in fields(first)
    assert "set-cookie" not in fields(again)
    assert handler(shape("key-1", b'{"a":2}'), None)["statusCode"] == 422
    assert handler(shape(None, b'{"a":2}'), None)["statusCode"] == 400
    assert charged == ["one"]


def test_bytes_come_back_as_bytes() -> None:
    """An answer in base64 is replayed in base64."""
    raw = base64.b64encode(b"\xff\x00").decode()

    @idempotent(MemoryStore())
    def handler(event: Any, context: Any) -> dict[str, Any]:
        return {"statusCode": 200, "body": raw, "isBase64Encoded": True}

    for _ in range(2):
        answer = handler(http_api("key-1", b"{}"), None)
        assert (answer["body"], answer["isBase64Encoded"]) == (raw, True)


def test_callers_by_the_authorizer() -> None:
    """The scope is a function of the event."""

    @idempotent(MemoryStore(), scope=lambda event: event["requestContext"].get("user"))
    def handler(event: Any, context: Any) -> dict[str, Any]:
        return {"statusCode": 200, "body": event["requestContext"]["user"]}

    def call(user: str | None) -> dict[str, Any]:
        event = http_api("key-1", b"{}")
        event["requestContext"]["user"] = user
        return handler(event, None)

    assert [call("ann")["body"], call("bob")["body"], call("ann")["body"]] == ["ann", "bob", "ann"]
    assert call(None)["statusCode"] == 401


def test_what_is_no_answer_frees_the_key() -> None:
    """A handler that returns something else fails, and may be tried again."""
    answers: list[Any] = ["charged", {"statusCode": 200}]

    @idempotent(MemoryStore())
    def handler(event: Any, context: Any) -> Any:
        return answers.pop(0)

    with pytest.raises(InvalidRequestError, match="statusCode"):
        handler(http_api("key-1", b"{}"), None)
    assert handler(http_api("key-1", b"{}"), None) == {"statusCode": 200}
    with pytest.raises(InvalidRequestError, match="no HTTP request"):
        handler({"Records": []}, None)
