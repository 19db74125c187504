"""A Flask receiver that gives every webhook event one effect. Needs Flask.

    WEBHOOK_SECRET=s3cret flask --app flask_webhook run

The payment and the mark "handled" are written in one SQLite transaction, so that a crash at any
point leaves both or neither.
"""

import contextlib
import os
import sqlite3
from typing import Any

from flask import Flask, Response

from oncekey.adapters.flask import as_response, receive_webhook
from oncekey.receiver import WebhookEvent, WebhookReceiver
from oncekey.signatures import hmac_provider


def create_app(database: str = "webhooks.db", secret: str | None = None) -> Flask:
    app = Flask(__name__)
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("CREATE TABLE IF NOT EXISTS payments (event TEXT, cents INTEGER)")

    # One of your own; those of Stripe, GitHub and others are known: provider("stripe", secret=...)
    acme = hmac_provider(
        "acme",
        secret=secret or os.environ["WEBHOOK_SECRET"],
        header="X-Signature",
        event_id="id",
    )
    receiver = WebhookReceiver(
        acme,
        f"sqlite:///{database}",
        transactional=True,
        on_changed="reject",  # the same id with another payload is a 409
    )

    @receiver.on()
    def pay(event: WebhookEvent, tx: Any) -> None:
        row = (event.id, event.payload["cents"])
        tx.connection.execute("INSERT INTO payments VALUES (?, ?)", row)

    # Webhooks(app).add("/webhook", receiver) is all it takes. A view of your own can look at the
    # outcome: by now the event is handled, and that is recorded.
    @app.post("/webhook")
    def webhook() -> Response:
        received = receive_webhook(receiver)
        if received.outcome == "handled":
            return Response("paid")
        if received.outcome == "duplicate":
            return Response("duplicate")
        return as_response(received)

    return app
