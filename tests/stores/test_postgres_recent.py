"""What the last calls were like decides what is looked for first, and never what is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.servers.fixtures_pg import TERMS, key
from tests.servers.wire import Wire

from oncekey._core.flows import new_owner
from oncekey._core.transact import job_for
from oncekey.models import ClaimReply, Key, Terms, Verdict
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.postgres.calls import SURE, Recent

GONE = Terms(lease_ms=1, ttl_ms=86_400_000)  # whose lease is over a moment later


@pytest.fixture
def wire(pg_url: str) -> Iterator[Wire]:
    """A proxy before a fresh database."""
    with Wire(pg_url) as proxy:
        yield proxy


def answers(store: PostgresStore, row: int, name: str) -> list[tuple[Verdict, int, bytes | None]]:
    """What every kind of claim is told, where the claims before are taken to be ``row``."""
    told = []

    def claim(which: Key, owner: bytes, mark: bytes, terms: Terms = TERMS) -> ClaimReply:
        store._recent.in_a_row = row
        reply = store.claim(which, owner, mark, terms)
        told.append((reply.verdict, reply.attempts, reply.answer))
        return reply

    one, first, other = key(f"{name} one"), new_owner(), new_owner()
    fence = claim(one, first, b"f").fence  # new
    claim(one, first, b"f")  # once more by its owner
    claim(one, other, b"f")  # in flight
    claim(one, other, b"g")  # another payload
    assert store.release(one, first, fence)
    fence = claim(one, other, b"g").fence  # released
    assert store.complete(one, other, fence, b"j1", TERMS)
    claim(one, first, b"g")  # replayed
    claim(one, first, b"f")  # another payload
    lapsed = key(f"{name} lapsed")
    claim(lapsed, first, b"f", GONE)
    over = store.now() + GONE.lease_ms
    while store.now() <= over:
        pass  # by the clock of the server, which decides
    claim(lapsed, other, b"f")  # taken over
    with store.transaction(f"{name} held", scope="x"):
        claim(job_for(f"{name} held", None, "x", None, {}).key, other, b"f")  # busy
    return told


def test_claims_are_told_the_same_whatever_came_before(pg_url: str) -> None:
    """New ones, known ones or a mixture before it: a claim gets the same answer."""
    with PostgresStore(pg_url) as store:
        store.create_schema()
        mixed = answers(store, 0, "mixed")
        assert [verdict for verdict, *_ in mixed] == [
            Verdict.WON,
            Verdict.WON,
            Verdict.IN_FLIGHT,
            Verdict.CONFLICT,
            Verdict.WON,
            Verdict.REPLAY,
            Verdict.CONFLICT,
            Verdict.WON,
            Verdict.WON,
            Verdict.IN_FLIGHT,
        ]
        assert answers(store, SURE, "new") == mixed
        assert answers(store, -SURE, "known") == mixed


@pytest.mark.parametrize("known", [False, True])
def test_transactions_end_the_same_whatever_came_before(pg_url: str, known: bool) -> None:
    """A new key is done, a known one replayed, whichever is looked for first."""
    with PostgresStore(pg_url) as store:
        store.create_schema()
        for name in ("a", "b"):
            store._recent.transactions = not known
            with store.transaction(name) as tx:
                assert not tx.replayed
                assert tx.claim.attempts == 1
                tx.answer = name
        assert store._recent.transactions
        for name in ("a", "b"):
            store._recent.transactions = not known
            with store.transaction(name) as tx:
                assert (tx.replayed, tx.answer) == (True, name)
        assert not store._recent.transactions


def test_a_sort_that_goes_on_is_one_round_trip(wire: Wire) -> None:
    """After some replays, a replay is one look; a new key among them is two round trips."""
    with PostgresStore(wire.url) as store:
        owner = new_owner()
        fence = store.claim(key("k"), owner, b"f", TERMS).fence
        store.complete(key("k"), owner, fence, b"j1", TERMS)
        for _ in range(SURE + 1):  # and the statement is prepared
            store.claim(key("k"), new_owner(), b"f", TERMS)
        with wire.counted() as count:
            assert store.claim(key("k"), new_owner(), b"f", TERMS).verdict is Verdict.REPLAY
        assert count == [1]
        with wire.counted() as count:
            assert store.claim(key("new"), new_owner(), b"f", TERMS).verdict is Verdict.WON
        assert count == [2]


def test_what_came_before_is_counted_in_a_row() -> None:
    """A claim of the other sort begins anew."""
    recent = Recent()
    won = ClaimReply(Verdict.WON, 1, 1, 1, None)
    replay = won._replace(verdict=Verdict.REPLAY)
    found = []
    for reply in (won, won, replay, replay, replay, won):
        assert recent.claimed(reply) is (reply is won)
        found.append(recent.in_a_row)
    assert found == [1, 2, -1, -2, -3, 1]
