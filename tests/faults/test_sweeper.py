"""Sweepers at work while keys live for three milliseconds and are claimed again and again."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from oncekey import connect
from oncekey.abc import Sweepable
from oncekey.models import Key, Scope, Terms, Verdict

SHORT = Terms(lease_ms=3, ttl_ms=3)
HELD = Terms(lease_ms=600_000, ttl_ms=3)  # a claim that outlives the test, of an answer that won't
KEYS = 4
WORKERS = 4
ROUNDS = 150


@pytest.fixture(params=["memory", "sqlite", "postgresql", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A store of each kind. Redis sweeps by itself."""
    if request.param == "memory":
        url = "memory://"
    elif request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/sweep.db"
    elif request.param == "postgresql":
        url = str(request.getfixturevalue("own_url"))
    else:
        url = f"{request.getfixturevalue('redis_server').url}?check=off"
    with connect(url) as opened:
        yield opened


def key(name: object) -> Key:
    return Key(Scope("once", "sweep"), str(name))


def test_a_sweep_takes_no_claim_and_lowers_no_fence(store: Any) -> None:
    """Fences of a key rise through expiry and sweeps; nobody completes over another; held stays."""
    stop = threading.Event()
    errors: list[BaseException] = []
    wins: dict[int, list[tuple[int, bool]]] = defaultdict(list)  # fence, whether it completed
    lock = threading.Lock()
    owner = os.urandom(16)
    held = store.claim(key("held"), owner, b"f", HELD)

    def sweep() -> None:
        try:
            while not stop.is_set():
                store.sweep(1000)
        except BaseException as error:
            errors.append(error)

    def work(seed: int) -> None:
        try:
            for number in range(ROUNDS):
                name, own = (seed + number) % KEYS, os.urandom(16)
                reply = store.claim(key(name), own, b"f", SHORT)
                if reply.verdict is Verdict.WON:
                    kept = store.complete(key(name), own, reply.fence, own, SHORT)
                    with lock:
                        wins[name].append((reply.fence, kept))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(WORKERS)]
    sweepers = [threading.Thread(target=sweep) for _ in range(2 * isinstance(store, Sweepable))]
    for thread in (*sweepers, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    for thread in sweepers:
        thread.join()
    assert errors == []
    for name, found in wins.items():
        fences = sorted(fence for fence, _ in found)
        assert all(earlier < later for earlier, later in pairwise(fences)), (name, fences)
    # Few records are left: what is past its time does go, whoever removes it.
    assert sum(len(found) for found in wins.values()) > KEYS
    assert store.claim(key("held"), b"x" * 16, b"f", HELD).verdict is Verdict.IN_FLIGHT
    assert store.renew(key("held"), owner, held.fence, HELD)
    assert store.complete(key("held"), owner, held.fence, b"j1", HELD)
