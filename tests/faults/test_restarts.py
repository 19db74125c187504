"""Servers that crash and come back between the steps of a leased call."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.servers.postgres import running
from tests.servers.redis import Server, eventually

from oncekey.errors import StoreError
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.stores.postgres import PostgresStore

TERMS = Terms(lease_ms=60_000, ttl_ms=86_400_000)
PRINT = b"f" * 64
A, B = b"a" * 16, b"b" * 16
STEPS = ["claimed", "renewed", "completed", "released"]


def key(name: str) -> Key:
    return Key(Scope("once", "restarts"), name)


def walk(store: Any) -> dict[str, int]:
    """Bring one key to each step; gives their fences."""
    fences = {step: int(store.claim(key(step), A, PRINT, TERMS).fence) for step in STEPS}
    assert store.renew(key("renewed"), A, fences["renewed"], TERMS)
    assert store.complete(key("completed"), A, fences["completed"], b"j1", TERMS)
    assert store.release(key("released"), A, fences["released"])
    assert store.first_seen(key("mark"), TERMS)
    return fences


def all_is_there(store: Any, fences: dict[str, int]) -> None:
    """What was acknowledged before the crash holds after it."""
    assert {step: store.read(key(step)).fence for step in STEPS} == fences
    replies = {step: store.claim(key(step), B, PRINT, TERMS) for step in STEPS}
    for step in ("claimed", "renewed"):
        assert replies[step].verdict is Verdict.IN_FLIGHT
        assert store.complete(key(step), A, fences[step], b"j1", TERMS)  # the owner goes on
    assert (replies["completed"].verdict, replies["completed"].answer) == (Verdict.REPLAY, b"j1")
    # A repetition, as of a caller whose reply was lost, is true and changes nothing.
    assert store.complete(key("completed"), A, fences["completed"], b"j2", TERMS)
    assert store.read(key("completed")).answer == b"j1"
    assert (replies["released"].verdict, replies["released"].attempts) == (Verdict.WON, 2)
    assert replies["released"].fence > fences["released"]
    assert store.first_seen(key("mark"), TERMS) is False


def test_postgresql_has_all_that_it_acknowledged() -> None:
    """A crash after any step: the records are there as they were, and calls go on."""
    for server in running():  # it syncs, unlike the server that other tests share
        with PostgresStore(server.database()) as store:
            store.create_schema()
            fences = walk(store)
            server.crash()
            with pytest.raises(StoreError) as caught:
                store.claim(key("claimed"), B, PRINT, TERMS)
            assert caught.value.retryable
            server.start()
            all_is_there(store, fences)


def test_redis_with_aof_has_all_that_it_acknowledged(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """``appendfsync always``, and a kill after any step: nothing is forgotten."""
    server = make_server(appendfsync="always")
    store = open_redis(server.url, prefix="r")
    fences = walk(store)
    server.kill()
    server.start()
    eventually(store.now, "the store's finding its server again")
    all_is_there(store, fences)


def test_redis_without_aof_forgets_and_runs_again_under_a_higher_fence(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """No persistence: keys are fresh after a kill, and the first owner is still fenced off."""
    server = make_server(appendonly="no")
    store = open_redis(server.url, prefix="r", check="off")
    old = store.claim(key("k"), A, PRINT, TERMS)
    done = store.claim(key("done"), A, PRINT, TERMS)
    assert store.complete(key("done"), A, done.fence, b"j1", TERMS)
    server.kill()
    server.start()
    eventually(store.now, "the store's finding its server again")
    assert store.complete(key("k"), A, old.fence, b"j1", TERMS) is False  # nothing is held
    new = store.claim(key("k"), B, PRINT, TERMS)
    assert (new.verdict, new.attempts) == (Verdict.WON, 1)
    assert new.fence > old.fence
    assert store.complete(key("k"), A, old.fence, b"of the first", TERMS) is False
    assert store.complete(key("k"), B, new.fence, b"of the second", TERMS) is True
    assert store.read(key("k")).answer == b"of the second"
    again = store.claim(key("done"), os.urandom(16), PRINT, TERMS)  # lost: it runs a second time
    assert again.verdict is Verdict.WON
    assert again.fence > done.fence
    assert store.read(key("done")).state is State.PENDING
