"""What one caller can put into the store is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from pathlib import Path

import pytest
from tests.http.conftest import Make
from tests.http.doors import JSON, Calls, Door, Reply, WsgiDoor

from oncekey import MemoryStore, PolicyError, SQLiteStore
from oncekey._core import secret
from oncekey.http import Settings
from oncekey.testing import ManualClock

ANN = [("Authorization", "Bearer of-ann")]
BOB = [("Authorization", "Bearer of-bob")]


def test_new_keys_of_a_caller_are_limited(make: Make) -> None:
    """The third new key is a 429 with Retry-After and doesn't run; retries and others pass."""
    calls = Calls()
    door = make(calls, max_new_keys=(2, 3600))
    for key in ("a", "b"):
        assert door.post(key, headers=ANN).status == 201
        assert all(door.post(key, headers=ANN).replayed for _ in range(5))
    reply = door.post("c", headers=ANN)
    assert (reply.status, reply.problem, calls.count) == (429, "rate-limited", 2)
    assert int(reply.header("retry-after") or 0) > 0
    assert door.post("a", headers=ANN).replayed
    assert door.post("c", headers=BOB).status == 201
    assert door.post(None, headers=ANN).status == 201


def test_a_key_that_is_tried_again_is_no_new_one(make: Make) -> None:
    """A request whose answer was not kept may be retried at the limit."""
    door = make(lambda _: (503, [JSON], b"{}"), max_new_keys=(1, 3600))
    assert [door.post("a", headers=ANN).status for _ in range(4)] == [503] * 4
    assert door.post("b", headers=ANN).status == 429


def test_there_is_a_limit_by_default() -> None:
    """Nobody has to ask for one; ``None`` is none."""
    assert Settings().max_new_keys == (3600, 60)
    assert Settings(max_new_keys=None).max_new_keys is None
    for bad in ((0, 60), (1, 0), (1,), (1, 2, 3)):
        with pytest.raises(PolicyError, match="max_new_keys"):
            Settings(max_new_keys=bad)  # type: ignore[arg-type]


def test_refusals_before_a_login_fill_no_store(tmp_path: Path) -> None:
    """A hundred requests that are answered 422 with a megabyte each leave next to nothing."""
    with SQLiteStore(tmp_path / "keys.db", durability="normal") as store:
        door = Door(WsgiDoor(lambda body: (422, [JSON], body * 1000), store))
        for number in range(100):
            assert len(door.post(f"k-{number}", b"x" * 1000, json=False).body) == 1_000_000
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8_000_000


@pytest.mark.parametrize("option", ["max_caller_bytes", "max_total_bytes"])
def test_stored_bytes_are_bounded(
    make: Make, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    """Past the budget only status and headers are kept, with a warning; nothing runs twice."""
    calls = Calls(lambda body: (201, [JSON, ("location", "/1")], b'"%b"' % (b"x" * 1000)))
    door = make(calls, **{option: 2000})
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert [len(door.post(key, headers=ANN).body) for key in "abcd"] == [1002] * 4
    assert caplog.text.count("max_caller_bytes") == 1
    again = [door.post(key, headers=ANN) for key in "abcd"]
    assert [reply.status for reply in again] == [201] * 4
    assert [reply.header("location") for reply in again] == ["/1"] * 4
    assert [len(reply.body) == 1002 for reply in again] == [True, True, False, False]
    assert again[3].problem == "body-unavailable"
    door.post("e", headers=BOB)
    assert (len(door.post("e", headers=BOB).body) == 1002) == (option == "max_caller_bytes")
    assert calls.count == 5


@pytest.mark.parametrize("option", ["max_caller_bytes", "max_total_bytes"])
def test_a_budget_of_nothing_stores_no_body(make: Make, option: str) -> None:
    """0 is none at all, not one."""
    door = make(Calls(), **{option: 0})
    door.post()
    again = door.post()
    assert (again.replayed, again.problem) == (True, "body-unavailable")


def test_other_hosts_are_no_other_limits(make: Make) -> None:
    """With ``per_host``, who makes up hosts gets no more new keys than at one of them."""
    door = make(Calls(), per_host=True, max_new_keys=(2, 60), anonymous="refuse")
    replies = [
        door.post(f"k-{number}", headers=[("Authorization", "a"), ("Host", f"h{number}.example")])
        for number in range(3)
    ]
    assert [reply.status for reply in replies] == [201, 201, 429]


def test_a_guard_that_would_stall_a_loop_does_not_blame_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sync guard called in an event loop that has to wait: a 503, and a log line."""
    store = MemoryStore()
    door = Door(WsgiDoor(Calls(), store, anonymous="refuse"))
    # As if another process was making the store's secret just now.
    store.claim(secret._KEY, b"o" * 16, b"secret", secret._TERMS)

    async def call() -> Reply:
        return door.post(headers=[("Authorization", "a")])

    refused = asyncio.run(call())
    assert (refused.status, refused.problem) == (503, "store-unavailable")
    assert "stall the event loop" in caplog.text


def test_keys_without_an_answer_are_forgotten_soon(tmp_path: Path) -> None:
    """Refused requests of made-up callers leave records that go in minutes; answers stay."""
    clock = ManualClock()
    store = SQLiteStore(tmp_path / "keys.db", clock=clock)
    status = 401
    door = Door(WsgiDoor(lambda _: (status, [JSON], b"{}"), store))
    for number in range(50):
        made_up = [("Authorization", f"Bearer {number}")]
        assert door.post(f"k-{number}", headers=made_up).status == 401
    status = 201
    assert door.post("kept", headers=ANN).status == 201
    clock.advance(700)
    while store.sweep():
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.db")) as found:
        [count] = found.execute("SELECT count(*) FROM oncekey_records").fetchone()
    assert count == 2  # the answer, and the secret of the store
    assert door.post("kept", headers=ANN).replayed
    store.close()
