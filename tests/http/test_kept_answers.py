"""How the header keeps an answer: compressed, and for as long as its handler says."""

from __future__ import annotations

from typing import Any

import pytest
from tests.http.conftest import Make
from tests.http.doors import JSON, Calls, Handled

from oncekey import current_claim
from oncekey._core import at_hand
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
