"""Receivers for the tests of adapters, and a journal of what each of them did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from contextvars import ContextVar
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from oncekey import MemoryBackend, MemoryStore
from oncekey.adapters._webhooks import AnyReceiver
from oncekey.receiver import AsyncWebhookReceiver, AuditEntry, WebhookEvent, WebhookReceiver
from oncekey.signatures import hmac_provider, provider
from oncekey.signatures.base import Ack, Provider, SignedRequest

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
SMALL = 1000  # bytes that the hook "small" takes
PATIENCE = 30  # seconds until a test that hangs fails; decides nothing else

STRIPE = provider("stripe", secret="whsec_test")
URL_SIGNERS = ("twilio", "square", "hubspot")

CONTEXT: ContextVar[str] = ContextVar("CONTEXT", default="")
"""Set by what is in front of an adapter; its handlers must see it."""


class _Counts:
    """Counts the calls to a store."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.closed = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("claim", "complete", "release", "renew", "first_seen", "read", "write"):
            self.calls.append(name)
        return super().__getattribute__(name)


class Counted(_Counts, MemoryStore):
    def close(self) -> None:
        self.closed = True
        super().close()


class AsyncCounted(_Counts, MemoryBackend):
    async def aclose(self) -> None:
        self.closed = True
        await super().aclose()


class Hook:
    """A receiver at a path, and what came of its deliveries."""

    def __init__(
        self, name: str, receiver: AnyReceiver, store: Any = None, rest: str = "/in"
    ) -> None:
        self.name = name
        self.receiver = receiver
        self.store = store
        self.path = f"/{name}{rest}"
        self.handled: list[WebhookEvent] = []
        self.contexts: dict[str, str] = {}
        self.audits: SimpleQueue[AuditEntry] = receiver.settings.audit.__self__  # type: ignore[union-attr]
        self.started: SimpleQueue[str] = SimpleQueue()
        self.gates: dict[str, threading.Event] = {}
        self.failing: set[str] = set()
        handler = self._async if isinstance(receiver, AsyncWebhookReceiver) else self._sync
        receiver.on()(handler)

    def outcomes(self) -> list[str]:
        """What the receiver decided since the last time."""
        found = []
        while not self.audits.empty():
            found.append(self.audits.get().outcome)
        return found

    def ids(self, prefix: str) -> list[str]:
        return [event.id for event in self.handled if event.id.startswith(prefix)]

    def _seen(self, event: WebhookEvent) -> threading.Event | None:
        self.handled.append(event)
        self.contexts[event.id] = CONTEXT.get()
        gate = self.gates.get(event.id)
        if gate is not None:
            self.started.put(event.id)
        return gate

    def _check(self, event: WebhookEvent) -> None:
        if event.id in self.failing:
            self.failing.discard(event.id)
            raise RuntimeError("not now")

    async def _async(self, event: WebhookEvent, tx: Any = None) -> None:
        gate = self._seen(event)
        if gate is not None:
            await asyncio.to_thread(gate.wait, PATIENCE)
        if tx is not None:
            await tx.connection.execute("INSERT INTO effects VALUES (?)", (event.id,))
        self._check(event)

    def _sync(self, event: WebhookEvent, tx: Any = None) -> None:
        gate = self._seen(event)
        if gate is not None:
            gate.wait(PATIENCE)
        if tx is not None:
            tx.connection.execute("INSERT INTO effects VALUES (?)", (event.id,))
        self._check(event)


def make_hook(name: str, source: Provider = STRIPE, *, rest: str = "/in", **options: Any) -> Hook:
    """A hook on a counted store in memory; one named ``sync...`` has a sync receiver."""
    options["audit"] = SimpleQueue().put
    if name.startswith("sync"):
        store = Counted()
        return Hook(name, WebhookReceiver(source, store, **options), store, rest)
    backend = AsyncCounted()
    return Hook(name, AsyncWebhookReceiver(source, backend, **options), backend, rest)


def make_hooks(folder: Path) -> dict[str, Hook]:
    """One hook of each kind that the scenarios need."""
    quiet = hmac_provider("quiet", secret="s", header="X-Signature", event_id="id")
    quiet.ack = Ack(204)
    hooks = [
        make_hook("async"),
        make_hook("sync"),
        make_hook("small", max_body_bytes=SMALL),
        make_hook("quiet", quiet),
        *(
            make_hook(name, provider(name, secret="s", allowed_hosts="*"), rest="/{rest:path}")
            for name in URL_SIGNERS
        ),
    ]
    for name, kind in (("tx", AsyncWebhookReceiver), ("synctx", WebhookReceiver)):
        database = folder / f"{name}.db"
        with contextlib.closing(sqlite3.connect(database)) as db:
            db.execute("CREATE TABLE effects (event TEXT)")
        receiver = kind(
            STRIPE, f"sqlite:///{database}", transactional=True, audit=SimpleQueue().put
        )
        hooks.append(Hook(name, receiver, database))
    return {hook.name: hook for hook in hooks}


def effects(hook: Hook, event: str) -> int:
    """How many rows the handler of an event has written."""
    with contextlib.closing(sqlite3.connect(hook.store)) as db:
        query = "SELECT count(*) FROM effects WHERE event = ?"
        return int(db.execute(query, (event,)).fetchone()[0])


def signed(hook: Hook, event: str, base: str = "http://x.example", **more: Any) -> SignedRequest:
    """A delivery of an event, genuine."""
    body = json.dumps({"id": event, "type": "paid", **more}).encode()
    return hook.receiver.provider.sign("POST", base + hook.path, JSON, body)
