"""Whose clock counts in PostgreSQL: the server's, wherever it goes, and never the client's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest
from tests.servers.fixtures_pg import TERMS, key
from tests.servers.postgres import Postgres, faketime

from oncekey._core.flows import new_owner
from oncekey.models import State, Terms, Verdict
from oncekey.stores.postgres import PostgresStore

LEASE = Terms(lease_ms=30_000, ttl_ms=3_600_000)


def test_a_server_that_goes_ahead_ends_leases(timed_postgres: Postgres, timed_url: str) -> None:
    """The server's clock jumps a minute: a lease of half a minute is over, the old owner fenced."""
    with PostgresStore(timed_url) as store:
        first = store.claim(key("k"), dead := new_owner(), b"f", LEASE)
        assert store.claim(key("k"), new_owner(), b"f", LEASE).verdict is Verdict.IN_FLIGHT
        timed_postgres.clock("+60")
        second = store.claim(key("k"), heir := new_owner(), b"f", LEASE)
        assert (second.verdict, second.takeover) == (Verdict.WON, True)
        assert second.fence > first.fence
        assert not store.complete(key("k"), dead, first.fence, b"jdead", LEASE)
        assert store.complete(key("k"), heir, second.fence, b"jheir", LEASE)


def test_fences_rise_when_the_clock_goes_back(timed_postgres: Postgres, timed_url: str) -> None:
    """The server's clock jumps to and fro by hours; every win still has a higher fence."""
    fences = []
    with PostgresStore(timed_url) as store:
        for offset in ("+0", "-3600", "+60", "-7200", "-7199", "+3600", "-86400"):
            timed_postgres.clock(offset)
            own = new_owner()
            won = store.claim(key("k"), own, b"f", LEASE)
            assert won.verdict is Verdict.WON, offset
            fences.append(won.fence)
            assert store.release(key("k"), own, won.fence)
    assert fences == sorted(set(fences))
    assert len(fences) == 7


def test_a_lease_runs_by_the_clock_as_it_is(timed_postgres: Postgres, timed_url: str) -> None:
    """After the clock went back an hour, leases are counted from the time that it shows."""
    with PostgresStore(timed_url) as store:
        timed_postgres.clock("-3600")
        own = new_owner()
        won = store.claim(key("k"), own, b"f", LEASE)
        timed_postgres.clock("-3575")
        reply = store.claim(key("k"), new_owner(), b"f", LEASE)
        assert reply.verdict is Verdict.IN_FLIGHT
        assert 0 < reply.lease_ms <= 5000
        assert store.renew(key("k"), own, won.fence, LEASE)
        timed_postgres.clock("-3560")
        assert store.claim(key("k"), new_owner(), b"f", LEASE).verdict is Verdict.IN_FLIGHT
        timed_postgres.clock("-3540")
        assert store.claim(key("k"), new_owner(), b"f", LEASE).takeover


def test_a_completed_record_outlives_a_clock_that_goes_back(
    timed_postgres: Postgres, timed_url: str
) -> None:
    """An answer replays, and a mark stays a mark, when the clock goes back behind their making."""
    with PostgresStore(timed_url) as store:
        won = store.claim(key("k"), own := new_owner(), b"f", LEASE)
        assert store.complete(key("k"), own, won.fence, b"j1", LEASE)
        assert store.first_seen(key("m"), LEASE)
        timed_postgres.clock("-3600")
        assert store.claim(key("k"), new_owner(), b"f", LEASE).answer == b"j1"
        assert not store.first_seen(key("m"), LEASE)
        timed_postgres.clock("+3601")
        assert store.claim(key("k"), new_owner(), b"f", LEASE).verdict is Verdict.WON
        assert store.first_seen(key("m"), LEASE)


def test_an_owner_completes_across_a_jump(timed_postgres: Postgres, timed_url: str) -> None:
    """A handler that ran while the clock went back an hour still records its outcome."""
    with PostgresStore(timed_url) as store:
        won = store.claim(key("k"), own := new_owner(), b"f", LEASE)
        timed_postgres.clock("-3600")
        assert store.renew(key("k"), own, won.fence, LEASE)
        assert store.complete(key("k"), own, won.fence, b"j1", LEASE)
        record = store.read(key("k"))
        assert record is not None
        assert (record.state, record.fence) == (State.COMPLETED, won.fence)


CLIENT = """
    import sys, time
    from oncekey._core.flows import new_owner
    from oncekey.models import Key, Scope, Terms
    from oncekey.stores.postgres import PostgresStore

    key = lambda name: Key(Scope("once", "postgres"), name)
    terms = Terms(lease_ms=3_600_000, ttl_ms=86_400_000)
    with PostgresStore(sys.argv[1]) as store:
        own = new_owner()
        won = store.claim(key("theirs"), own, b"f", terms)
        found = store.claim(key("ours"), new_owner(), b"f", terms)
        times = store.read(key("theirs"))[4:6]
        print(round(time.time()), store.now(), won.fence, found.verdict, *times)
        store.first_seen(key("mark"), terms)
"""


@pytest.mark.parametrize("shift", ["+30d", "-30d"])
def test_the_clients_clock_is_of_no_account(pg_url: str, shift: str) -> None:
    """A client whose clock is a month off claims, and is refused, by the server's time."""
    with PostgresStore(pg_url) as store:
        # An hour is less than the month, and longer than a busy machine needs for a process.
        hour = Terms(lease_ms=3_600_000, ttl_ms=86_400_000)
        assert store.claim(key("ours"), new_owner(), b"f", hour).verdict is Verdict.WON
        before = store.now()
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CLIENT), pg_url],
            env={
                **os.environ,
                "LD_PRELOAD": str(faketime()),
                "FAKETIME": shift,
                "DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            },
            capture_output=True,
            text=True,
            check=True,
        )
        after = store.now()
        clock, now, fence, verdict, *times = done.stdout.split()
        assert abs(int(clock) - time.time()) > 86_400 * 29
        assert before <= int(now) <= after
        assert before * 1000 <= int(fence) <= after * 1000 + 999
        assert verdict == "in_flight"
        lease_until, expires_at = map(int, times)
        assert before + 3_600_000 <= lease_until <= after + 3_600_000
        assert expires_at == lease_until + 86_400_000
        assert not store.first_seen(key("mark"), TERMS)
        reply = store.claim(key("theirs"), new_owner(), b"f", TERMS)
        assert reply.verdict is Verdict.IN_FLIGHT


def test_no_call_asks_for_the_time_here(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a client clock that stands at 1970 everything goes on as ever."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    with PostgresStore(pg_url) as store:
        won = store.claim(key("k"), own := new_owner(), b"f", TERMS)
        assert won.fence > 1_600_000_000_000_000
        assert store.renew(key("k"), own, won.fence, TERMS)
        assert store.complete(key("k"), own, won.fence, b"j1", TERMS)
        assert store.claim(key("k"), new_owner(), b"f", TERMS).verdict is Verdict.REPLAY
        assert store.sweep() == 0
