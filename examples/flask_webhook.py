"""A Flask receiver that gives every webhook event one effect. Needs Flask.

    WEBHOOK_SECRET=s3cret flask --app flask_webhook run

The payment and the mark "handled" are written in one SQLite transaction, so that a crash at any
point leaves both or neither.
"""

import contextlib
import hashlib
import hmac
import json
import os
import sqlite3

from flask import Flask, Response, request

from oncekey import OncekeyError, SQLiteStore, SyncWebhookDedupStore, event_id

SENDER = "acme"  # whose secret was checked; never taken from the payload


def create_app(database: str = "webhooks.db", secret: str | None = None) -> Flask:
    app = Flask(__name__)
    shared = (secret or os.environ["WEBHOOK_SECRET"]).encode()
    dedup = SyncWebhookDedupStore(SQLiteStore(database), processing_ttl_seconds=60)
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("CREATE TABLE IF NOT EXISTS payments (event TEXT, cents INTEGER)")

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

        claim = dedup.claim(*delivery)
        if claim.status == "handled":
            return Response("duplicate", 200)
        if claim.status == "in_progress":
            return Response("in progress", 503, {"Retry-After": str(claim.retry_after)})
        if claim.status == "conflict":
            return Response("this id came before with another payload", 409)
        try:
            with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                db.execute("INSERT INTO payments VALUES (?, ?)", (event["id"], event["cents"]))
                dedup.complete_on(db, *delivery, claim.claim_token)
                db.execute("COMMIT")
        except Exception:
            with contextlib.suppress(OncekeyError):  # another worker may own it by now
                dedup.release(*delivery, claim.claim_token)
            raise
        return Response("paid", 200)

    return app
