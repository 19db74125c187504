"""A Flask receiver on PostgreSQL, step by step: verify, claim, write, commit in one transaction.

    pip install flask "oncekey[postgres]"
    export DATABASE_URL=postgresql://user:password@localhost/shop WEBHOOK_SECRET=s3cret
    oncekey migrate "$DATABASE_URL"
    psql "$DATABASE_URL" -c 'CREATE TABLE payments (event text, cents int)'
    flask --app exactly_once_flask_postgres run

The payment and the mark "handled" are one transaction: a crash at any point leaves both or neither,
and there is nothing to complete or to give back. This is what a receiver does by itself, see
sports_stack_flask.py; step by step it fits into a view that does other things too.
"""

import hashlib
import json
import os

from flask import Flask, Response, request

from oncekey import (
    IdempotencyConflictError,
    IdempotencyInFlightError,
    PostgresStore,
    StoreError,
    WebhookDedup,
)
from oncekey.signatures import hmac_provider


def create_app(database: str | None = None, secret: str | None = None) -> Flask:
    app = Flask(__name__)
    store = PostgresStore(database or os.environ["DATABASE_URL"])
    dedup = WebhookDedup(store)
    app.extensions["oncekey"] = store  # for whoever ends the app to close
    acme = hmac_provider(
        "acme",
        secret=secret or os.environ["WEBHOOK_SECRET"],
        header="X-Signature",
        event_id="id",
    )

    @app.post("/webhook")
    def receive() -> Response:
        body = request.get_data()
        verdict = acme.verify(request.method, request.url, dict(request.headers), body)
        if verdict.sender is None or verdict.event_id is None:
            genuine = verdict.code in ("body_malformed", "id_missing")
            return Response(verdict.message, 400 if genuine else 401)
        # Who sent it comes from the signature, never from the payload.
        sender, digest = verdict.sender.as_sender_identity(), hashlib.sha256(body).hexdigest()
        try:
            with dedup.transaction(sender, verdict.event_id, digest, wait_seconds=1) as tx:
                if tx.replayed:
                    return Response("duplicate", 200)
                row = (verdict.event_id, json.loads(body)["cents"])
                tx.connection.execute("INSERT INTO payments VALUES (%s, %s)", row)
        except IdempotencyConflictError:
            return Response("this id came before with another payload", 409)
        except IdempotencyInFlightError as error:
            return Response("in progress", 503, {"Retry-After": str(error.retry_after)})
        except StoreError as error:
            return Response(error.code, 503)
        return Response("paid", 200)

    return app
