"""Many processes on one SQLite file: each key is seen first once, and nobody gets a BUSY."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oncekey.models import Key, Scope, State
from oncekey.stores.sqlite import SQLiteStore

Spawn = Callable[..., "subprocess.Popen[bytes]"]

SCOPE = Scope("webhook", "webhook", "sender")


def run_together(
    spawn: Spawn, path: Path, kinds: Sequence[str], shared: int, own: int
) -> list[dict[str, Any]]:
    """Start a worker for each kind, let them loose at the same time, and give what they printed."""
    workers = [
        spawn(
            "first_seen_worker.py",
            *(path, number, kind, shared, own),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number, kind in enumerate(kinds)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(b"go\n")
        worker.stdin.flush()
    results = []
    for worker in workers:
        assert worker.stdout is not None
        results.append(json.loads(worker.stdout.read()))
        assert worker.wait() == 0
    return results


def test_shared_keys_are_new_exactly_once(spawn: Spawn, tmp_path: Path) -> None:
    """16 processes, sync and async, record the same 500 keys: 500 times True in all."""
    path = tmp_path / "seen.db"
    SQLiteStore(path).close()
    kinds = ["sync"] * 8 + ["thread"] * 4 + ["inline"] * 4
    results = run_together(spawn, path, kinds, shared=500, own=0)
    seen = Counter(name for result in results for name in result["seen"])
    # check_and_record says True when its store fails: a warning would tell.
    assert [message for result in results for message in result["logged"]] == []
    assert len(seen) == 500
    assert seen.total() == 500
    # The keys were won by many, so that the race was one.
    assert sum(bool(result["seen"]) for result in results) > 1


def test_sixteen_writers_never_see_a_busy_file(spawn: Spawn, tmp_path: Path) -> None:
    """16 processes write their own and shared keys straight to the store: no error, none lost."""
    path = tmp_path / "busy.db"
    # Nobody made the file: the first of sixteen does, beside the others.
    results = run_together(spawn, path, ["mixed"] * 16, shared=100, own=50)
    assert [message for result in results for message in result["logged"]] == []
    seen = Counter(name for result in results for name in result["seen"])
    shared = {f"shared-{number}" for number in range(100)}
    own = {f"own{worker}-{number}" for worker in range(16) for number in range(50)}
    assert seen == Counter(shared | own)
    with SQLiteStore(path) as store:
        for name in shared | own:
            record = store.read(Key(SCOPE, name))
            assert record is not None
            assert record.state is State.COMPLETED
