"""GET requests by which a provider checks an endpoint, through each adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.testing import sample_provider

PATH = "/hooks?hub.mode=subscribe&hub.challenge=1158201444&hub.verify_token=vibecoding"
Ask = Callable[[str, str], tuple[int, bytes]]


def made(name: str, kind: Any = WebhookReceiver) -> Any:
    options = {"verify_token": "vibecoding"} if name == "meta" else {}
    return kind(sample_provider(name, **options), "memory://")


def by_asgi(app: Any) -> Ask:
    def ask(method: str, path: str) -> tuple[int, bytes]:
        async def call() -> tuple[int, bytes]:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
                answer = await client.request(method, path)
                return answer.status_code, answer.content

        return asyncio.run(call())

    return ask


def by_wsgi(app: Any) -> Ask:
    def ask(method: str, path: str) -> tuple[int, bytes]:
        transport = httpx.WSGITransport(app)
        with httpx.Client(transport=transport, base_url="http://site") as client:
            answer = client.request(method, path)
            return answer.status_code, answer.content

    return ask


def asgi_site(name: str) -> Ask:
    from oncekey.adapters.asgi import WebhookApp

    return by_asgi(WebhookApp(made(name, AsyncWebhookReceiver)))


def wsgi_site(name: str) -> Ask:
    from oncekey.adapters.wsgi import WebhookApp

    return by_wsgi(WebhookApp(made(name)))


def starlette_site(name: str) -> Ask:
    from starlette.applications import Starlette

    from oncekey.adapters.starlette import webhooks

    return by_asgi(Starlette(routes=[webhooks(made(name, AsyncWebhookReceiver), "/hooks")]))


def fastapi_site(name: str) -> Ask:
    from fastapi import FastAPI

    from oncekey.adapters.fastapi import webhooks

    app = FastAPI()
    app.include_router(webhooks(made(name, AsyncWebhookReceiver), "/hooks"))
    return by_asgi(app)


def litestar_site(name: str) -> Ask:
    from litestar import Litestar

    from oncekey.adapters.litestar import webhooks

    return by_asgi(Litestar([webhooks(made(name, AsyncWebhookReceiver), "/hooks")]))


def flask_site(name: str) -> Ask:
    from flask import Flask

    from oncekey.adapters.flask import webhooks

    app = Flask("greetings")
    app.register_blueprint(webhooks(made(name), "/hooks"))
    return by_wsgi(app)


def lambda_site(name: str) -> Ask:
    from oncekey.adapters.awslambda import webhook_handler

    handler = webhook_handler(made(name))

    def ask(method: str, path: str) -> tuple[int, bytes]:
        where, _, query = path.partition("?")
        answer = handler(
            {
                "version": "2.0",
                "rawPath": where,
                "rawQueryString": query,
                "headers": {},
                "requestContext": {"domainName": "site", "http": {"method": method}},
            },
            None,
        )
        return answer["statusCode"], answer["body"].encode()

    return ask


SITES = (
    *(asgi_site, wsgi_site, starlette_site, fastapi_site, litestar_site, flask_site, lambda_site),
)


@pytest.mark.parametrize("site", SITES)
def test_a_check_by_get_is_answered(site: Callable[[str], Ask]) -> None:
    """Meta's check gets its challenge, a wrong token a 403, and who checks nothing a 405."""
    meta, stripe = site("meta"), site("stripe")

    assert meta("GET", PATH) == (200, b"1158201444")
    assert meta("GET", PATH + "x")[0] == 403
    assert meta("PUT", PATH)[0] == 405
    assert stripe("GET", PATH)[0] == 405
