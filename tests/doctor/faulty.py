"""Receivers and apps with a fault each, and good ones."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from oncekey import connect
from oncekey.adapters.asgi import IdempotencyMiddleware
from oncekey.models import Key, Scope, Terms
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider

SECRET = "whsec_doctor_test_0123456789abcdef"
STRIPE = provider("stripe", secret=SECRET)
Handle = Callable[[dict[str, str], bytes], int]


@contextlib.contextmanager
def served(handle: Handle, date_offset: float = 0.0) -> Iterator[str]:
    """The URL of a server that answers as ``handle`` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = handle(dict(self.headers.items()), body)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            import time

            return super().date_time_string(time.time() + date_offset)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/hooks"
        finally:
            server.shutdown()
            thread.join()


class Good:
    """A receiver of oncekey's, as the documentation has it."""

    def __init__(self, store_url: str, secret: str = SECRET, **options: Any) -> None:
        self.store_url = store_url
        self.receiver = WebhookReceiver(provider("stripe", secret=secret), store_url, **options)
        self.handled: list[str] = []
        self.receiver.on()(lambda event: self.handled.append(event.id))

    def answer(self, headers: dict[str, str], body: bytes, now: float | None = None) -> Any:
        return self.receiver.receive("POST", "http://127.0.0.1/hooks", headers, body, now=now)

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        return int(self.answer(headers, body).status)


class Conflicts(Good):
    """Answers 409 to duplicates."""

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        answer = self.answer(headers, body)
        return 409 if answer.outcome == "duplicate" else int(answer.status)


class TakesAnything(Good):
    """Verifies nothing."""

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        return 200


class FailsOnForgeries(Good):
    """Answers 500 to a bad signature: an error that nobody catches."""

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        status = super().__call__(headers, body)
        return 500 if status == 401 else status


class WritesAnew(Good):
    """Verifies what it parsed and wrote again."""

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        again = json.dumps(json.loads(body), separators=(",", ":")).encode()
        return super().__call__(headers, again)


class AnyTime(Good):
    """Takes signatures of any age."""

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        found = re.search(r"t=(\d+)", headers.get("Stripe-Signature", ""))
        return int(self.answer(headers, body, float(found[1]) if found else None).status)


class Impatient(Good):
    """Takes signatures of the last ten seconds only."""

    def __init__(self, store_url: str) -> None:
        super().__init__(store_url)
        tight = provider("stripe", secret=SECRET, tolerance=10)
        self.receiver = WebhookReceiver(tight, store_url)
        self.receiver.on()(lambda event: None)


class NoSuchType(Good):
    """Refuses types that it does not know."""

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        status = super().__call__(headers, body)
        return 400 if b"oncekey.doctor.unknown" in body and status == 200 else status


class Collides(Good):
    """A unique constraint that nobody catches: a copy of what is in hand gets a 500."""

    def __init__(self, store_url: str) -> None:
        super().__init__(store_url)
        self.lock = threading.Lock()
        self.copies: dict[str, int] = {}
        self.collided = threading.Event()

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        if not STRIPE.verify("POST", "http://127.0.0.1/hooks", headers, body).ok:
            return 401
        name = json.loads(body)["id"]
        with self.lock:
            self.copies[name] = self.copies.get(name, 0) + 1
            first, fourth = self.copies[name] == 1, len(self.copies) == 4
        if not fourth:  # the fourth event is the one whose copies come at once
            return 200
        if first:
            self.collided.wait(60)
            return 200
        self.collided.set()
        return 500


class StoresFirst(Good):
    """Records the id before it looks at the signature."""

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        with connect(self.store_url) as store:
            name = str(json.loads(body)["id"])
            store.first_seen(Key(Scope("mine"), name), Terms(lease_ms=1, ttl_ms=10**10))
        return super().__call__(headers, body)


class Forgets(Good):
    """Remembers events for an hour."""

    def __call__(self, headers: dict[str, str], body: bytes) -> int:
        if not STRIPE.verify("POST", "http://127.0.0.1/hooks", headers, body).ok:
            return 401
        with connect(self.store_url) as store:
            name = str(json.loads(body)["id"])
            store.first_seen(Key(Scope("mine"), name), Terms(lease_ms=1, ttl_ms=3_600_000))
        return 200


# Apps


async def shop(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI app that charges."""
    if scope["type"] != "http":
        return
    shop.number += 1  # type: ignore[attr-defined]
    await receive()
    body = json.dumps({"charge": shop.number}).encode()  # type: ignore[attr-defined]
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


shop.number = 0  # type: ignore[attr-defined]


def good_app(url: str) -> Any:
    return IdempotencyMiddleware(shop, url)


def unguarded_app(url: str) -> Any:
    return shop


def one_caller_app(url: str) -> Any:
    """Says of everybody that they are the same."""
    return IdempotencyMiddleware(shop, url, scope=lambda request: "everybody")


def blind_app(url: str) -> Any:
    """Does not compare bodies."""
    return IdempotencyMiddleware(shop, url, fingerprint=lambda body, kind: "same")


def scattered_app(url: str) -> Any:
    """Two workers with a memory each."""
    workers = [IdempotencyMiddleware(shop, f"memory://worker-{n}-{id(url)}") for n in range(2)]
    turn = iter(range(10**6))

    async def balanced(scope: Any, receive: Any, send: Any) -> None:
        # One key goes to both, in turn.
        await workers[next(turn) % 2](scope, receive, send)

    return balanced


def failing_app(url: str) -> Any:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return IdempotencyMiddleware(broken, url)
