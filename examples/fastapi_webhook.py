"""A FastAPI receiver with one recorded outcome for every event. Needs FastAPI and uvicorn.

    WEBHOOK_SECRET=s3cret uvicorn --factory fastapi_webhook:create_app

The handler runs under a lease: if this process dies in the middle, the next delivery of the event
runs it again. Make the handler itself safe against that, or see flask_webhook.py.
"""

import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from oncekey import OncekeyError, SQLiteBackend, WebhookDedupStore, event_id

SENDER = "acme"  # whose secret was checked; never taken from the payload


async def print_event(event: dict) -> None:
    print("handling", event["id"])


def create_app(
    database: str = "webhooks.db",
    secret: str | None = None,
    handle: Callable[[dict], Awaitable[None]] = print_event,
) -> FastAPI:
    app = FastAPI()
    shared = (secret or os.environ["WEBHOOK_SECRET"]).encode()
    dedup = WebhookDedupStore(SQLiteBackend(database), processing_ttl_seconds=60)

    @app.post("/webhook")
    async def receive(request: Request) -> Response:
        body = await request.body()
        signature = hmac.new(shared, body, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(signature, request.headers.get("x-signature", "").encode()):
            return Response("bad signature", 401)
        try:
            event = json.loads(body)
            delivery = (SENDER, event_id(event), hashlib.sha256(body).hexdigest())
        except ValueError as error:
            return Response(str(error), 400)

        claim = await dedup.claim(*delivery)
        if claim.status == "handled":
            return Response("duplicate", 200)
        if claim.status == "in_progress":
            return Response("in progress", 503, {"Retry-After": str(claim.retry_after)})
        if claim.status == "conflict":
            return Response("this id came before with another payload", 409)
        try:
            await handle(event)
        except Exception:
            with contextlib.suppress(OncekeyError):  # another worker may own it by now
                await dedup.release(*delivery, claim.claim_token)
            raise
        await dedup.complete(*delivery, claim.claim_token)
        return Response("handled", 200)

    return app
