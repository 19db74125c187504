"""Receivers and the header take the same words for outages as guards do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.receiver.test_receiver import JSON, STRIPE, deliver, event
from tests.resilience.conftest import Away
from tests.resilience.servers import Outage, outage
from tests.resilience.test_shared_limits import arequest, request

from oncekey import aconnect
from oncekey.errors import PolicyError
from oncekey.http.asgi import IdempotencyMiddleware as AsgiMiddleware
from oncekey.http.wsgi import IdempotencyMiddleware
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.receiver.receiver import _shut
from oncekey.resilience import resilient

__all__ = ["outage"]


def test_a_receiver_takes_the_same_words(
    opened: Any, aopened: Any, away: Away, tmp_path: Path
) -> None:
    """Closed, a sender is told to retry; open, its event is handled once, and goes in later."""
    handled: list[str] = []
    shut = WebhookReceiver(STRIPE, opened)
    wide = WebhookReceiver(STRIPE, opened, on_outage="open", journal=tmp_path / "one")
    for receiver in (shut, wide):
        receiver.on()(lambda one: handled.append(one.id))
    away.begin()
    assert deliver(shut, event()).status == 503
    assert [deliver(wide, event()).outcome for _ in range(2)] == ["handled", "duplicate"]
    assert handled == ["evt_1"]

    async def main() -> None:
        receiver = AsyncWebhookReceiver(STRIPE, aopened, on_outage="open", journal=tmp_path / "two")
        receiver.on()(lambda one: handled.append(one.id))
        for outcome in ("handled", "duplicate"):
            signed = STRIPE.sign("POST", "https://x.example/h", JSON, event(2))
            assert (await receiver.receive(*signed)).outcome == outcome

    asyncio.run(main())
    away.end()
    wide._store.reconcile()
    assert deliver(shut, event()).outcome == "duplicate"
    assert handled == ["evt_1", "evt_2"]


def test_nonces_never_go_on_without_the_store(opened: Any, tmp_path: Path) -> None:
    """Who may replay a signature is not a guess: that part of a receiver stays closed."""
    store = resilient(opened, on_outage="open", journal=tmp_path)
    shut: Any = _shut(store)
    assert (store.on_outage, shut.on_outage) == ("open", "closed")
    assert _shut(opened) is opened


def test_the_header_takes_the_same_words(opened: Any, away: Away, tmp_path: Path) -> None:
    """Closed, a request is refused with a 503; open, it is handled once; it needs a secret."""
    made: list[str] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        made.append(environ["HTTP_IDEMPOTENCY_KEY"])
        start_response("201 Created", [])
        return [b"made"]

    with pytest.raises(PolicyError, match="secret="):
        IdempotencyMiddleware(app, opened, on_outage="open", journal=tmp_path)
    secret = b"s" * 16
    shut = IdempotencyMiddleware(app, opened, secret=secret)
    wide = IdempotencyMiddleware(
        app, opened, secret=secret, on_outage="open", journal=tmp_path / "journal"
    )
    away.begin()
    assert request(shut, "k-1") == "503"
    assert [request(wide, "k-1"), request(wide, "k-1")] == ["201", "201"]
    assert made == ["k-1"]
    away.end()
    wide.store.reconcile()  # type: ignore[attr-defined]
    assert request(shut, "k-1") == "201"
    assert made == ["k-1"]


def test_the_header_takes_them_under_asgi(outage: Outage, tmp_path: Path) -> None:
    """The same in an event loop, with a server that is stopped and started again."""
    ran: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(dict(scope["headers"])[b"idempotency-key"].decode())
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    with pytest.raises(PolicyError, match="secret="):
        AsgiMiddleware(app, aconnect(outage.url), on_outage="open", journal=tmp_path)

    async def main() -> None:
        async with aconnect(outage.url, timeout=2.0) as store:
            secret = b"s" * 16
            shut = AsgiMiddleware(app, store, secret=secret, on_outage="closed")
            wide: Any = AsgiMiddleware(
                app, store, secret=secret, on_outage="open", journal=tmp_path / "journal"
            )
            assert await arequest(wide, "k-0") == "201"
            outage.stop()
            try:
                assert await arequest(shut, "k-1") == "503"
                assert ran == ["k-0"]
                assert [await arequest(wide, "k-1") for _ in range(2)] == ["201", "201"]
                assert ran == ["k-0", "k-1"]
            finally:
                outage.start()
            await wide.store.reconcile()
        async with aconnect(outage.url) as fresh:  # as another worker sees it
            there = AsgiMiddleware(app, fresh, secret=secret)
            assert [await arequest(there, name) for name in ("k-0", "k-1")] == ["201", "201"]
        assert ran == ["k-0", "k-1"]

    asyncio.run(main())
