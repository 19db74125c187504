"""The stream of events: what is told, what is hidden, and what it costs when nobody listens."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest

from oncekey import (
    IdempotencyConflictError,
    IdempotencyExpiredError,
    IdempotencyInFlightError,
    MemoryStore,
    Once,
    StoreError,
    SyncWebhookDedupStore,
)
from oncekey.instrument import Event, EventKind, events, subscribe
from oncekey.instrument.logging import log_events
from oncekey.testing import ManualClock

KEY = "key-0123456789abcdef"


def test_every_kind_is_told(clock: ManualClock) -> None:
    """One stream tells of each thing that can happen, with what is known of it."""
    store = MemoryStore(clock=clock)
    once = Once(store, scope="shop", lease=10, ttl=100, wait=0, remember_expired=1000)
    told: list[Event] = []

    def kinds() -> list[str]:
        found = [event.kind.value for event in told]
        told.clear()
        return found

    with subscribe(told.append):
        with once.guard(KEY, payload=1):
            with pytest.raises(IdempotencyInFlightError):
                once.guard(KEY, payload=1).__enter__()
        assert kinds() == ["first", "in_flight", "completed"]
        with once.guard(KEY, payload=1) as again:
            assert again.replayed
        with pytest.raises(IdempotencyConflictError):
            once.guard(KEY, payload=2).__enter__()
        assert kinds() == ["replay", "conflict"]
        clock.advance(101)
        with pytest.raises(IdempotencyExpiredError):
            once.guard(KEY, payload=1).__enter__()
        assert kinds() == ["expired"]
        with pytest.raises(RuntimeError), once.guard("other"):
            raise RuntimeError
        assert told[-1].error == "RuntimeError"
        assert kinds() == ["first", "released"]
        stale = once.guard("stale")
        stale.__enter__()
        clock.advance(11)
        with once.guard("stale") as claim:
            assert claim.takeover
        assert kinds() == ["first", "takeover", "completed"]
        stale.__exit__(None, None, None)
        assert kinds() == ["fenced"]
        clock.advance(10_000)
        store.sweep()
        assert told[-1].count == 3
        assert kinds() == ["swept"]
    with once.guard("unheard"):
        pass
    assert told == []


def test_events_are_frozen_and_hide_secrets() -> None:
    """Hashes of key and scope, and nothing can be changed."""
    told: list[Event] = []
    with subscribe(told.append):
        SyncWebhookDedupStore(MemoryStore()).check_and_record("secret-sender", KEY)
    [event] = told
    assert event.kind is EventKind.FIRST
    assert re.fullmatch(r"[0-9a-f]{12}", event.key)
    assert KEY[:4] not in repr(event)
    assert "secret" not in repr(event)
    assert len(event.scope) == 12
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.key = "x"  # type: ignore[misc]


@pytest.mark.parametrize("key", ["o-1", "order\nforged line", "jo@x.org", "card\r\n\x1b[2J"])
def test_no_part_of_a_key_is_logged(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Short keys, private ones and those with line ends: log lines hold a hash, on one line."""

    class Down(MemoryStore):
        def first_seen(self, *args: object) -> bool:  # type: ignore[override]
            raise StoreError("down")

        def complete(self, *args: object) -> bool:  # type: ignore[override]
            raise StoreError("down")

    caplog.set_level(logging.DEBUG)
    with log_events():
        SyncWebhookDedupStore(Down()).check_and_record("sender", key)
        with pytest.raises(StoreError), Once(Down(), scope="s").guard(key):
            pass
    assert caplog.messages
    for line in caplog.messages:
        assert line.isprintable()
        assert key.split(maxsplit=1)[0] not in line


def test_store_errors_are_told() -> None:
    """A store that fails is told of, with the error's class."""

    class Down(MemoryStore):
        def first_seen(self, *args: object) -> bool:  # type: ignore[override]
            raise StoreError("down")

    told: list[Event] = []
    with subscribe(told.append):
        SyncWebhookDedupStore(Down()).check_and_record("s", KEY)
    assert [(e.kind, e.error) for e in told] == [(EventKind.STORE_ERROR, "StoreError")]


def test_a_failing_listener_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A listener that raises is logged; the work and other listeners go on."""
    told: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("listener bug")

    with subscribe(broken), subscribe(told.append):
        assert SyncWebhookDedupStore(MemoryStore()).check_and_record("s", KEY) is True
    assert len(told) == 1
    assert "listener bug" in caplog.text


def test_nobody_listening_builds_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a listener no event object is ever made."""

    def explode(*args: object) -> None:
        raise AssertionError("an event was built for nobody")

    monkeypatch.setattr(events, "Event", explode)
    once = Once(MemoryStore())
    for again in (False, True):
        with once.guard("k") as claim:
            assert claim.replayed is again
    SyncWebhookDedupStore(MemoryStore()).check_and_record("s", "k")


def test_events_as_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The logging exporter writes levels by kind, and never a whole key or a scope."""
    clock = ManualClock()
    once = Once(MemoryStore(clock=clock), scope="the-scope", lease=10)
    with caplog.at_level(logging.DEBUG, logger="oncekey.events"), log_events() as subscription:
        once.guard(KEY).__enter__()
        clock.advance(11)
        with once.guard(KEY):
            pass
        subscription.close()
        with once.guard("unheard"):
            pass
    levels = [(r.oncekey["kind"], r.levelname) for r in caplog.records]  # type: ignore[attr-defined]
    assert levels == [("first", "DEBUG"), ("takeover", "WARNING"), ("completed", "DEBUG")]
    assert KEY[:4] not in caplog.text
    assert "the-scope" not in caplog.text
    assert len({r.oncekey["key"] for r in caplog.records}) == 1  # type: ignore[attr-defined]
