"""Ten million rows past their time, swept away while calls go on."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.faults.scenarios import CHOSEN

from oncekey.models import Key, Scope, Terms, Verdict
from oncekey.stores.sqlite import SQLiteStore

# All ten million in `make faults`; a twentieth where other tests have to be done as well.
ROWS = 10_000_000 if os.environ.get(CHOSEN) else 500_000
STEP = ROWS // 20
TERMS = Terms(lease_ms=600_000, ttl_ms=86_400_000)
# In the order of their keys, so that the file is written from its beginning to its end.
FILL = f"""
    WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < {ROWS})
    INSERT INTO oncekey_records SELECT
        CAST(printf('%08x', n * 400) AS BLOB), 1000, 1, 1000, 0, 1, 1, x'', x'', 'old', NULL
    FROM numbers
"""


def key(name: object) -> Key:
    return Key(Scope("once", "rows"), str(name))


def test_ten_million_rows_are_swept_in_steps(tmp_path: Path) -> None:
    """Each step removes about what it was told to, calls come in between, and all of it goes."""
    path = tmp_path / "rows.db"
    with SQLiteStore(path, durability="normal") as store:
        store.now()
        won = store.claim(key("held"), b"a" * 16, b"f", TERMS)
        with closing(sqlite3.connect(path)) as raw:
            raw.execute("PRAGMA synchronous = OFF")
            raw.execute(FILL)
            raw.commit()
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        steps = 0
        while removed := store.sweep(STEP):
            steps += 1
            assert removed <= STEP + 10_000  # a step is bounded, whatever there is to remove
            owner = os.urandom(16)
            fresh = store.claim(key(steps), owner, b"f", TERMS)
            assert fresh.verdict is Verdict.WON
            assert store.complete(key(steps), owner, fresh.fence, b"j1", TERMS)
        with closing(sqlite3.connect(path)) as raw:  # claims have swept a little by themselves
            assert raw.execute("SELECT count(*) FROM oncekey_records").fetchone() == (steps + 1,)
        assert steps > 10
        # What lives is there: the claim that was held, and all that was done meanwhile.
        assert store.complete(key("held"), b"a" * 16, won.fence, b"j1", TERMS)
        for number in range(1, steps + 1):
            assert store.claim(key(number), b"x" * 16, b"f", TERMS).verdict is Verdict.REPLAY
