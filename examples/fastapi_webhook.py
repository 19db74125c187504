"""A FastAPI receiver that gives every webhook event one effect. Needs fastapi, uvicorn, aiosqlite.

    WEBHOOK_SECRET=s3cret uvicorn --factory fastapi_webhook:create_app

The row that the handler writes and the mark "handled" are committed in one SQLite transaction, so
that a crash at any point leaves both or neither. What the handler does elsewhere is not undone: it
may run again for an event whose transaction did not commit.
"""

import contextlib
import os
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Response

from oncekey.adapters.fastapi import received, webhook_lifespan
from oncekey.receiver import AsyncWebhookReceiver, WebhookEvent, WebhookResponse
from oncekey.signatures import hmac_provider


async def print_event(payload: dict[str, Any]) -> None:
    print("handling", payload["id"])


def create_app(
    database: str = "webhooks.db",
    secret: str | None = None,
    handle: Callable[[dict[str, Any]], Awaitable[None]] = print_event,
) -> FastAPI:
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("CREATE TABLE IF NOT EXISTS events (id TEXT, body TEXT)")

    # One of your own; those of Stripe, GitHub and others are known: provider("stripe", secret=...)
    acme = hmac_provider(
        "acme",
        secret=secret or os.environ["WEBHOOK_SECRET"],
        header="X-Signature",
        event_id="id",
    )
    receiver = AsyncWebhookReceiver(
        acme,
        f"sqlite:///{database}",
        transactional=True,
        on_changed="reject",  # the same id with another payload is a 409
        wait=1,  # second, for a copy of what is being handled; then it is told to come back
    )

    @receiver.on()
    async def handle_event(event: WebhookEvent, tx: Any) -> None:
        row = (event.id, event.body.decode())
        await tx.connection.execute("INSERT INTO events VALUES (?, ?)", row)
        await handle(event.payload)

    app = FastAPI(lifespan=webhook_lifespan(receiver))

    # app.include_router(webhooks(receiver, "/webhook")) is all it takes. An endpoint of your
    # own can look at the outcome: by now the event is handled, and that is recorded. What was not
    # handled does not get here: it is answered with the receiver's 4xx or 5xx.
    @app.post("/webhook")
    async def webhook(
        result: Annotated[WebhookResponse, Depends(received(receiver))],
    ) -> Response:
        return Response(result.outcome)

    return app
