"""Litestar: what its handler has that other adapters have not."""

from __future__ import annotations

from typing import Any

import httpx
from litestar import Litestar, Request, Response, post
from litestar.exceptions import NotAuthorizedException
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult
from tests.adapters.hooks import Hook, make_hook, signed

from oncekey.adapters.litestar import as_response, receive_webhook, webhook_handler


async def send(app: Litestar, hook: Hook, path: str) -> httpx.Response:
    request = signed(hook, "evt_1")
    transport: Any = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://x.example") as client:
        return await client.post(path, content=request.body, headers=request.headers)


async def test_openapi() -> None:
    """Several handlers of one provider are described, and one can be kept to oneself."""
    hook = make_hook("async")
    app = Litestar(
        [
            webhook_handler(hook.receiver, "/a", tags=["hooks"]),
            webhook_handler(hook.receiver, "/b"),
            webhook_handler(hook.receiver, "/c", include_in_schema=False),
        ]
    )
    paths = app.openapi_schema.to_schema()["paths"]
    assert list(paths) == ["/a", "/b"]
    assert paths["/a"]["post"]["summary"] == "Webhooks of Stripe"
    assert paths["/a"]["post"]["tags"] == ["hooks"]
    assert (await send(app, hook, "/c")).status_code == 200
    assert (await send(app, hook, "/a")).status_code == 200
    assert hook.outcomes() == ["first", "duplicate"]


class NobodyMayEnter(AbstractAuthenticationMiddleware):
    async def authenticate_request(self, connection: Any) -> AuthenticationResult:
        raise NotAuthorizedException


async def test_options_reach_litestar() -> None:
    """A handler is behind the app's authentication unless its options say otherwise."""
    hook = make_hook("async")
    app = Litestar(
        [
            webhook_handler(hook.receiver, "/open", opt={"exclude_from_auth": True}),
            webhook_handler(hook.receiver, "/shut"),
        ],
        middleware=[NobodyMayEnter],
    )
    assert (await send(app, hook, "/shut")).status_code == 401
    assert hook.outcomes() == []
    assert (await send(app, hook, "/open")).status_code == 200


async def test_handler_of_ones_own() -> None:
    """A handler may look at the outcome and answer with more than the receiver says."""
    hook = make_hook("async")

    @post("/own")
    async def own(request: Request[Any, Any, Any]) -> Response[bytes]:
        received = await receive_webhook(request, hook.receiver)
        response = as_response(received)
        response.headers["X-Outcome"] = received.outcome
        assert (await request.json())["type"] == "paid"  # it can be read once more
        return response

    app = Litestar([own])
    answers = [await send(app, hook, "/own") for _ in range(2)]
    assert [answer.headers["X-Outcome"] for answer in answers] == ["handled", "duplicate"]
