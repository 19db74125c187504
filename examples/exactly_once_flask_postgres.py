"""A Flask receiver on PostgreSQL: every webhook event has its effect exactly once.

    pip install flask "oncekey[postgres]"
    export DATABASE_URL=postgresql://user:password@localhost/shop WEBHOOK_SECRET=s3cret
    oncekey migrate "$DATABASE_URL"
    psql "$DATABASE_URL" -c 'CREATE TABLE payments (event text, cents int)'
    flask --app exactly_once_flask_postgres run

The payment and the mark "handled" are one transaction: a crash at any point leaves both or neither,
and there is nothing to complete or to give back.
"""

import hashlib
import hmac
import json
import os

from flask import Flask, Response, request

from oncekey import (
    IdempotencyConflictError,
    IdempotencyInFlightError,
    PgStore,
    StoreError,
    SyncWebhookDedupStore,
    event_id,
)

SENDER = "acme"  # whose secret was checked; never taken from the payload


def create_app(database: str | None = None, secret: str | None = None) -> Flask:
    app = Flask(__name__)
    shared = (secret or os.environ["WEBHOOK_SECRET"]).encode()
    store = PgStore(database or os.environ["DATABASE_URL"])
    dedup = SyncWebhookDedupStore(store)
    app.extensions["oncekey"] = store  # for whoever ends the app to close

    @app.post("/webhook")
    def receive() -> Response:
        body = request.get_data()
        signature = hmac.new(shared, body, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(signature, request.headers.get("X-Signature", "").encode()):
            return Response("bad signature", 401)
        try:
            event = json.loads(body)
            delivery = (SENDER, event_id(event), hashlib.sha256(body).hexdigest())
        except ValueError as error:
            return Response(str(error), 400)

        try:
            with dedup.transaction(*delivery, wait_seconds=1) as tx:
                if tx.replayed:
                    return Response("duplicate", 200)
                row = (event["id"], event["cents"])
                tx.connection.execute("INSERT INTO payments VALUES (%s, %s)", row)
        except IdempotencyConflictError:
            return Response("this id came before with another payload", 409)
        except IdempotencyInFlightError as error:
            return Response("in progress", 503, {"Retry-After": str(error.retry_after)})
        except StoreError as error:
            return Response(error.code, 503)
        return Response("paid", 200)

    return app
