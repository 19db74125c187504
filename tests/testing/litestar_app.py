"""A Litestar app, in a module of its own: Litestar looks annotations up in its globals."""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request, Response, post

from oncekey.receiver import AsyncWebhookReceiver


def litestar_app(receiver: AsyncWebhookReceiver) -> Litestar:
    @post("/hooks/stripe")
    async def hooks(request: Request[Any, Any, Any]) -> Response[bytes]:
        headers, body = list(request.headers.items()), await request.body()
        answer = await receiver.receive(request.method, str(request.url), headers, body)
        return Response(answer.body, status_code=answer.status, headers=dict(answer.headers))

    return Litestar([hooks])
