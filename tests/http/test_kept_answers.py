"""How the header keeps an answer: compressed, and for as long as its handler says."""

from __future__ import annotations

from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from tests.http.conftest import Make
from tests.http.doors import JSON, Calls, Handled

from oncekey import current_claim
from oncekey._core import at_hand
from oncekey.http.answer import Answer
from oncekey.http.facts import wsgi_facts
from oncekey.http.routes import Routes, Seen
from oncekey.instrument import EventKind, subscribe
from oncekey.testing import ManualClock

BODY = b'"%b"' % (b"the same again " * 1000)


def test_the_header_compresses(make: Make, store: Any) -> None:
    """A long HTTP answer is replayed from its compressed form."""
    door = make(Calls(lambda _: (201, [JSON], BODY)), store, compress_above=1000)
    first, again = door.post(), door.post()
    assert again.replayed
    assert first.body == again.body == BODY


def test_a_handler_says_how_long(make: Make, store: Any, clock: ManualClock) -> None:
    """An answer is replayed for the time that its handler sets, and not longer."""

    def handler(body: bytes) -> Handled:
        current_claim().ttl = 10
        return 201, [JSON], b"1"

    calls = Calls(handler)
    door = make(calls, store, ttl=3600)
    door.post()
    clock.advance(9)
    assert door.post().replayed
    clock.advance(2)
    assert not door.post().replayed
    assert calls.count == 2


def test_what_is_at_hand_ends_with_it(
    make: Make, store: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that a process has at hand is there for half of the time that its handler set."""
    now = [100.0]
    monkeypatch.setattr(
        at_hand, "time", type("Time", (), {"monotonic": staticmethod(lambda: now[0])})
    )

    def handler(body: bytes) -> Handled:
        current_claim().ttl = 10
        return 201, [JSON], b"1"

    calls = Calls(handler)
    door = make(calls, store, ttl=3600, cache_entries=9)
    door.post()
    clock.advance(11)
    now[0] += 4.9
    assert door.post().replayed
    now[0] += 0.2
    assert not door.post().replayed


def test_a_replay_of_the_store_is_not_at_hand(make: Make, store: Any, clock: ManualClock) -> None:
    """When its record ends is not known: another process would replay it past its end."""

    def handler(body: bytes) -> Handled:
        current_claim().ttl = 10
        return 201, [JSON], b"1"

    calls = Calls(handler)
    doors = [make(calls, store, ttl=3600, cache_entries=9) for _ in range(2)]
    doors[0].post()
    clock.advance(9)
    assert doors[1].post().replayed
    clock.advance(2)
    assert not doors[1].post().replayed


def test_replays_at_hand_are_told(make: Make, store: Any) -> None:
    """A replay that the store knows nothing of is an event as any other: metrics count them."""
    door = make(Calls(lambda _: (201, [JSON], b"1")), store, cache_entries=9)
    seen: list[tuple[EventKind, str]] = []
    with subscribe(lambda event: seen.append((event.kind, event.operation))):
        for _ in range(3):
            door.post()
    replays = [one for one in seen if one[0] is EventKind.REPLAY]
    assert replays == [(EventKind.REPLAY, "POST")] * 2


def test_long_answers_are_not_at_hand(make: Make, store: Any, clock: ManualClock) -> None:
    """Over 64 KiB the store is asked, so that their number bounds their memory."""
    for length, run_again in ((60_000, False), (66_000, True)):
        calls = Calls(lambda _, length=length: (201, [JSON], b"1" * length))
        door = make(calls, store, ttl=60, cache_entries=9)
        door.post(str(length))
        clock.advance(61)  # gone from the store, and there by this process's own clock
        assert door.post(str(length)).replayed is not run_again


def test_replays_at_hand_of_a_route_are_told() -> None:
    """The same where a single view is guarded."""
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ |= {"REQUEST_METHOD": "POST", "HTTP_AUTHORIZATION": "Bearer a"}
    facts = wsgi_facts(environ, "Idempotency-Key", environ)
    routes: Any = Routes("memory://", cache_entries=9)
    seen: list[EventKind] = []
    with subscribe(lambda event: seen.append(event.kind)):
        for _ in range(3):
            routes.run("k", facts, b"{}", lambda: Seen("made", Answer(201, (), b"1")))
    assert seen.count(EventKind.REPLAY) == 2
    assert seen.count(EventKind.FIRST) == 1
