"""What goes wrong in a shop: an outage of its store, events that are late or collide, floods."""

from __future__ import annotations

import json
import tempfile
from typing import Any

from oncekey import MemoryStore, Once, SQLiteStore, StoreTimeoutError
from oncekey.receiver import WebhookReceiver
from oncekey.resilience import Breaker, resilient
from oncekey.signatures import hmac_provider
from oncekey.testing import ManualClock

NOW = 1_800_000_000.0


class Switched(SQLiteStore):
    """A store that gives no answer while it is away."""

    away = False


def _switch(name: str, real: Any) -> None:
    def asked(self: Switched, *args: Any) -> Any:
        if self.away:
            raise StoreTimeoutError("no answer")
        return real(self, *args)

    setattr(Switched, name, asked)


for _name in ("claim", "complete", "renew", "release", "first_seen", "read", "write", "now"):
    _switch(_name, getattr(SQLiteStore, _name))


def outage() -> None:
    """The store goes away, work goes on, some of it for the second time, and it comes back."""
    with tempfile.TemporaryDirectory() as folder, Switched(f"{folder}/keys.db") as inner:

        def opened() -> Any:
            return resilient(
                inner,
                on_outage="open",
                journal=f"{folder}/journal",
                breaker=Breaker(failures=1, successes=1),
            )

        def charge(store: Any, order: str) -> None:
            with Once(store, scope="rough").guard(order) as claim:
                claim.answer = order

        charge(opened(), "known before")
        inner.away = True
        later = opened()  # as another process, it knows nothing of what was before
        charge(later, "known before")
        charge(later, "new")
        inner.away = False
        later.reconcile()


def odd_events() -> None:
    """An event that comes after its window, one whose payload changed, and one too many."""
    clock = ManualClock(NOW)
    acme = hmac_provider("acme", secret="s3cret", header="X-Signature", event_id="id")
    receiver = WebhookReceiver(
        acme, MemoryStore(clock=clock), on_changed="reject", per_key=(4, 3600)
    )
    receiver.on()(lambda event: None)

    def deliver(cents: int) -> str:
        body = json.dumps({"id": "evt_1", "type": "t", "cents": cents}).encode()
        fields = {"Content-Type": "application/json"}
        sent = acme.sign("POST", "https://x.example/h", fields, body, now=clock())
        return receiver.receive(*sent, now=clock()).outcome

    seen = [deliver(1), deliver(2)]
    clock.advance(receiver._decisions.plan.terms.ttl_ms / 1000 + 60)
    seen += [deliver(1), deliver(1), deliver(1)]
    assert seen == ["handled", "conflict", "handled", "duplicate", "limited"], seen
