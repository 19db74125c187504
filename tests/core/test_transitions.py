"""The state machine against the protocol, stated here a second time and independently."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncekey._core import transitions
from oncekey._core.transitions import CLAIMS, SETTLEMENTS, Act, Event, Situation
from oncekey.models import ClaimReply, Record, State, Terms, Verdict

ME, OTHER = b"me", b"other"
A, B = b"payload-a", b"payload-b"
NOW = 1_000_000  # milliseconds
TERMS = Terms(lease_ms=400, ttl_ms=5_000)
STICKY = Terms(lease_ms=400, ttl_ms=5_000, sticky=True)
REMEMBER = Terms(lease_ms=400, ttl_ms=5_000, skew_ms=60, remember_ms=900)
ALL_TERMS = [TERMS, STICKY, REMEMBER]


def record(
    state: State,
    *,
    owner: bytes = OTHER,
    fingerprint: bytes = A,
    lease_until: int = 0,
    expires_at: int = NOW + 1_000,
    purge_at: int | None = None,
    fence: int = 70,
    answer: bytes | None = None,
) -> Record:
    """A record in the third attempt of its key."""
    purge = expires_at if purge_at is None else purge_at
    return Record(state, owner, fence, fingerprint, lease_until, expires_at, purge, 3, answer)


def pending(**values: Any) -> Record:
    return record(State.PENDING, **{"lease_until": NOW + 100, **values})


def completed(**values: Any) -> Record:
    return record(State.COMPLETED, **{"answer": b"j1", **values})


def released(**values: Any) -> Record:
    return record(State.RELEASED, **values)


def claim(found: Record | None, fingerprint: bytes, terms: Terms) -> tuple[ClaimReply, Any]:
    return transitions.claim(found, ME, fingerprint, terms, NOW * 1000)


# The protocol in this file's own words: what is found, on which terms, and what a claim with the
# same payload and one with another payload are told. "take" makes the claimer the owner under a
# higher fence, "extend" keeps the fence and restarts the lease, "-" writes nothing.
PROTOCOL = [
    # nobody there
    ("absent", None, TERMS, "won/take", "won/take"),
    ("absent, sticky", None, STICKY, "won/take", "won/take"),
    # given back by a failed call: free again; a sticky key stays bound to its first payload
    ("released", released(), TERMS, "won/take", "won/take"),
    ("released, sticky", released(), STICKY, "won/take", "conflict/-"),
    ("released, last millisecond, sticky", released(expires_at=NOW + 1), STICKY,
     "won/take", "conflict/-"),
    ("released, expired, sticky", released(expires_at=NOW), STICKY, "won/take", "won/take"),
    ("released, expired", released(expires_at=NOW), TERMS, "won/take", "won/take"),
    # my own claim, whose reply was lost
    ("mine", pending(owner=ME), TERMS, "won/extend", "conflict/-"),
    ("mine, lease over", pending(owner=ME, lease_until=NOW - 1), TERMS, "won/extend", "conflict/-"),
    ("mine, sticky", pending(owner=ME), STICKY, "won/extend", "conflict/-"),
    # somebody else's
    ("live", pending(), TERMS, "in_flight/-", "conflict/-"),
    ("live, last millisecond", pending(lease_until=NOW + 1), TERMS, "in_flight/-", "conflict/-"),
    ("live, time to live over", pending(expires_at=NOW - 9), STICKY, "in_flight/-", "conflict/-"),
    ("lapsed to the millisecond", pending(lease_until=NOW), TERMS, "won/take", "conflict/-"),
    ("lapsed", pending(lease_until=NOW - 9), TERMS, "won/take", "conflict/-"),
    ("lapsed, sticky", pending(lease_until=NOW - 9), STICKY, "won/take", "conflict/-"),
    ("lapsed and expired", pending(lease_until=NOW - 9, expires_at=NOW), TERMS,
     "won/take", "won/take"),
    # done
    ("done", completed(), TERMS, "replay/-", "conflict/-"),
    ("done by me", completed(owner=ME), TERMS, "replay/-", "conflict/-"),
    ("done, last millisecond", completed(expires_at=NOW + 1), TERMS, "replay/-", "conflict/-"),
    ("expired to the millisecond", completed(expires_at=NOW), TERMS, "won/take", "won/take"),
    ("expired, within the skew", completed(expires_at=NOW - 59, purge_at=NOW + 841), REMEMBER,
     "replay/-", "conflict/-"),
    ("expired, skew just over", completed(expires_at=NOW - 60, purge_at=NOW + 840), REMEMBER,
     "expired/-", "expired/-"),
    ("expired, last remembered millisecond", completed(expires_at=NOW - 959, purge_at=NOW + 1),
     REMEMBER, "expired/-", "expired/-"),
    ("expired and forgotten", completed(expires_at=NOW - 960, purge_at=NOW), REMEMBER,
     "won/take", "won/take"),
    ("expired, nothing to be remembered", completed(expires_at=NOW - 9, purge_at=NOW + 9), TERMS,
     "won/take", "won/take"),
]  # fmt: skip
ROWS = [
    pytest.param(found, terms, fingerprint, expected, id=f"{name}-{which}")
    for name, found, terms, same, another in PROTOCOL
    for which, fingerprint, expected in (("same", A, same), ("another", B, another))
]


@pytest.mark.parametrize("found, terms, fingerprint, expected", ROWS)
def test_a_claim_is_answered_as_the_protocol_says(
    found: Record | None, terms: Terms, fingerprint: bytes, expected: str
) -> None:
    """Each situation gives its verdict, and writes what the verdict means and nothing else."""
    verdict, act = expected.split("/")
    reply, change = claim(found, fingerprint, terms)
    assert reply.verdict.value == verdict
    if act == "-":
        assert change is None
        assert found is not None
        assert (reply.fence, reply.attempts) == (found.fence, found.attempts)
    elif act == "extend":
        assert found is not None
        lease_until = NOW + terms.lease_ms
        ends = found.expires_at
        if not terms.sticky:
            ends = max(ends, lease_until + terms.ttl_ms)
        assert change == found._replace(
            lease_until=lease_until, expires_at=ends, purge_at=max(ends, lease_until)
        )
        assert (reply.fence, reply.attempts) == (found.fence, found.attempts)
        assert reply.lease_ms == terms.lease_ms
        assert not reply.takeover
    else:
        assert (change.state, change.owner, change.answer) == (State.PENDING, ME, None)
        assert change.lease_until == NOW + terms.lease_ms
        assert (reply.fence, reply.attempts) == (change.fence, change.attempts)
        assert reply.lease_ms == terms.lease_ms
        if found is None:
            assert (change.attempts, reply.takeover) == (1, False)
        else:
            assert change.fence > found.fence
            assert change.attempts == found.attempts + 1
            assert reply.takeover == (found.state is State.PENDING)
    assert (reply.answer is not None) == (verdict == "replay"), "an answer goes to replays alone"


def test_every_situation_has_a_row_for_both_payloads() -> None:
    """No pair of situation and payload is left to chance, and no row is for a pair unknown."""
    assert set(CLAIMS) == set(itertools.product(Situation, (True, False)))
    won, nothing = Verdict.WON, Act.NOTHING
    expected = {
        "ABSENT": ((won, Act.TAKE), (won, Act.TAKE)),
        "RELEASED": ((won, Act.TAKE), (won, Act.TAKE)),
        "MINE": ((won, Act.EXTEND), (Verdict.CONFLICT, nothing)),
        "LIVE": ((Verdict.IN_FLIGHT, nothing), (Verdict.CONFLICT, nothing)),
        "LAPSED": ((won, Act.TAKE), (Verdict.CONFLICT, nothing)),
        "DONE": ((Verdict.REPLAY, nothing), (Verdict.CONFLICT, nothing)),
        "TOMBSTONE": ((Verdict.EXPIRED, nothing), (Verdict.EXPIRED, nothing)),
        "GONE": ((won, Act.TAKE), (won, Act.TAKE)),
    }
    assert {name: (CLAIMS[Situation[name], True], CLAIMS[Situation[name], False])
            for name in Situation.__members__} == expected  # fmt: skip


def test_the_rows_above_reach_every_situation() -> None:
    """The protocol's rows in this file leave no situation of the engine untried."""
    reached = {transitions.situate(found, ME, NOW, terms) for _, found, terms, _, _ in PROTOCOL}
    assert reached == set(Situation)


@pytest.mark.parametrize("bound, asked", [(b"", A), (A, b""), (b"", b"")])
@pytest.mark.parametrize(
    "found, verdict",
    [(pending(), "in_flight"), (completed(), "replay"), (pending(lease_until=NOW), "won")],
)
def test_no_payload_equals_any(found: Record, verdict: str, bound: bytes, asked: bytes) -> None:
    """A record or a call without a fingerprint never conflicts."""
    reply, _ = claim(found._replace(fingerprint=bound), asked, TERMS)
    assert reply.verdict.value == verdict


@pytest.mark.parametrize("left", [1, 7, 100, 400])
@pytest.mark.parametrize("fingerprint", [A, B])
def test_a_duplicate_learns_what_is_left_of_the_lease(left: int, fingerprint: bytes) -> None:
    """In flight and conflict tell the holder's remaining lease, to the millisecond."""
    reply, _ = claim(pending(lease_until=NOW + left), fingerprint, TERMS)
    assert reply.lease_ms == left


# What an owner may do with its claim; any pair that is not listed is refused.
OWNERS_MAY = {
    ("PENDING", "COMPLETE"): "COMPLETED",
    ("PENDING", "RENEW"): "PENDING",
    ("PENDING", "RELEASE"): "RELEASED",
    ("COMPLETED", "COMPLETE"): "COMPLETED",  # again: true, and nothing changes
}


def test_the_settlement_table_is_the_protocols() -> None:
    """Owners have four moves, and the table has no fifth."""
    table = {(state.name, event.name): to.name for (state, event), to in SETTLEMENTS.items()}
    assert table == OWNERS_MAY


@pytest.mark.parametrize("terms", ALL_TERMS)
@pytest.mark.parametrize("late", [-50, 0, 50, 10_000], ids=lambda ms: f"{ms}ms-after-the-lease")
@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_only_the_listed_moves_change_a_state(
    state: State, event: Event, late: int, terms: Terms
) -> None:
    """With owner and fence right, the listed moves hold, also after the lease; others don't."""
    answer = b"j1" if state is State.COMPLETED else None
    lease = NOW - late if state is State.PENDING else 0
    found = record(state, owner=ME, lease_until=lease, answer=answer)
    held, change = transitions.settle(found, event, ME, found.fence, terms, NOW, b"j2")
    target = OWNERS_MAY.get((state.name, event.name))
    assert held == (target is not None)
    if target is None or state is State.COMPLETED:
        assert change is None
        return
    assert change is not None
    assert change.state.name == target
    kept = ("owner", "fence", "fingerprint", "attempts")
    assert [getattr(change, name) for name in kept] == [getattr(found, name) for name in kept]
    assert change.answer == (b"j2" if event is Event.COMPLETE else None)


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("owner, fence", [(OTHER, 70), (ME, 69), (ME, 71), (OTHER, 71), (b"", 70)])
def test_the_wrong_owner_or_fence_is_fenced_off(
    state: State, event: Event, owner: bytes, fence: int
) -> None:
    """Neither another owner nor an older or newer fence of the right one changes anything."""
    found = record(state, owner=ME, lease_until=NOW + 100)
    result = transitions.settle(found, event, owner, fence, TERMS, NOW, b"j2")
    assert result == (False, None)


@pytest.mark.parametrize("event", Event)
def test_nothing_settles_an_absent_key(event: Event) -> None:
    """Without a record there is nothing to complete, renew or release."""
    assert transitions.settle(None, event, ME, 70, TERMS, NOW, b"j") == (False, None)


def test_a_release_without_a_fence_goes_by_the_owner() -> None:
    """A caller cancelled before it learnt its fence gives back its own claim and no other."""
    found = pending(owner=ME)
    held, change = transitions.settle(found, Event.RELEASE, ME, None, TERMS, NOW)
    assert held
    assert change is not None
    assert change.state is State.RELEASED
    result = transitions.settle(found, Event.RELEASE, OTHER, None, TERMS, NOW)
    assert result == (False, None)


def test_a_release_keeps_the_record() -> None:
    """What is given back stays as a tombstone with its fence, so that the next one is higher."""
    found = pending(owner=ME)
    _, tombstone = transitions.settle(found, Event.RELEASE, ME, found.fence, TERMS, NOW)
    assert tombstone is not None
    assert tombstone.fence == found.fence
    reply, _ = transitions.claim(tombstone, OTHER, A, TERMS, 1)
    assert reply.fence > found.fence


@pytest.mark.parametrize(
    "terms, expires_at, purge_at",
    [
        (TERMS, NOW + 5_000, NOW + 5_000),  # counted from completion
        (STICKY, NOW + 1_000, NOW + 1_000),  # counted from the first claim
        (REMEMBER, NOW + 5_000, NOW + 5_960),  # kept for the skew and the memory after it
    ],
)
def test_how_long_an_answer_lasts(terms: Terms, expires_at: int, purge_at: int) -> None:
    """The time to live runs from completion, or from the first claim where it is sticky."""
    found = pending(owner=ME)
    _, change = transitions.settle(found, Event.COMPLETE, ME, found.fence, terms, NOW, b"j")
    assert change is not None
    assert (change.expires_at, change.purge_at) == (expires_at, purge_at)


@pytest.mark.parametrize(
    "found", [released(), pending(lease_until=NOW)], ids=["released", "lapsed"]
)
def test_a_sticky_window_is_not_extended_by_retries(found: Record) -> None:
    """A retry inherits the first claim's window and payload; one after the window starts anew."""
    _, change = claim(found, b"", STICKY)
    assert (change.expires_at, change.fingerprint) == (found.expires_at, A)
    _, change = claim(found._replace(expires_at=NOW), B, STICKY)
    assert (change.expires_at, change.fingerprint) == (NOW + STICKY.ttl_ms, B)


def test_renewing_counts_the_lease_from_now() -> None:
    """A renewal moves the lease, and the record outlives it, but a sticky window stays."""
    found = pending(owner=ME, lease_until=NOW + 10, expires_at=NOW + 100)
    _, change = transitions.settle(found, Event.RENEW, ME, found.fence, TERMS, NOW)
    assert change is not None
    assert (change.lease_until, change.expires_at) == (NOW + 400, NOW + 5_400)
    _, change = transitions.settle(found, Event.RENEW, ME, found.fence, STICKY, NOW)
    assert change is not None
    assert (change.lease_until, change.expires_at) == (NOW + 400, NOW + 100)
    assert change.purge_at >= change.lease_until, "no sweep takes a claim that is held"


@pytest.mark.parametrize(
    "found, first",
    [
        (None, True),
        (released(), True),
        (pending(lease_until=NOW), True),
        (completed(expires_at=NOW), True),
        (pending(), False),
        (completed(), False),
        (completed(expires_at=NOW + 1), False),
    ],
)
def test_first_seen_marks_what_nobody_holds(found: Record | None, first: bool) -> None:
    """A key is new if it is absent, given back, lapsed or expired; else it was seen."""
    mark = transitions.mark(found, TERMS, NOW * 1000)
    assert (mark is not None) == first
    if mark is not None:
        assert mark.state is State.COMPLETED
        assert mark.expires_at == NOW + TERMS.ttl_ms
        assert found is None or mark.fence > found.fence


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "complete", "release", "renew", "mark"]),
        st.integers(0, 2),  # who
        st.integers(-20_000_000, 20_000_000),  # how far the clock moves, in us, also back
        st.sampled_from(ALL_TERMS),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(STEPS)
def test_fences_rise_whatever_the_clock_does(steps: list[tuple[str, int, int, Terms]]) -> None:
    """Each win has a higher fence than all before it, with clocks that move back too."""
    found: Record | None = None
    now_us, highest = NOW * 1000, 0
    fences: dict[bytes, int] = {}
    for what, who, moved, terms in steps:
        now_us = max(1, now_us + moved)
        owner = b"owner-%d" % who
        before = found
        if what == "claim":
            reply, change = transitions.claim(found, owner, A, terms, now_us)
            if reply.verdict is Verdict.WON:
                again = found is not None and found.state is State.PENDING and found.owner == owner
                assert reply.fence == highest if again else reply.fence > highest
                highest = max(highest, reply.fence)
                fences[owner] = reply.fence
        elif what == "mark":
            change = transitions.mark(found, terms, now_us)
            if change is not None:
                assert change.fence > highest
                highest = change.fence
        else:
            fence = fences.get(owner, 0)
            event = Event[what.upper()]
            held, change = transitions.settle(
                found, event, owner, fence, terms, now_us // 1000, b"j"
            )
            assert not held or fence == highest, "an older fence never settles anything"
        found = change or found
        assert before is None or found is not None, "no event removes a record"
        assert found is None or found.fence == highest
