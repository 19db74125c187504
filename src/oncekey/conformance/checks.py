"""The checks: one promise each, in its docstring."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from oncekey._core.drive import Op
from oncekey._core.flows import new_owner
from oncekey.conformance.listings import LISTINGS
from oncekey.conformance.steps import Check, Elapse, Race, Step
from oncekey.models import ClaimVerdict, Key, Scope, State, Terms

__all__ = ["CHECKS"]

TERMS: Final = Terms(lease_ms=400, ttl_ms=60_000)
SHORT: Final = Terms(lease_ms=100, ttl_ms=150)
A, B = b"a" * 64, b"b" * 64  # two payloads


def _key(name: str = "") -> Key:
    return Key(Scope("conformance", new_owner().hex()), name or "key")


def _claim(key: Key, owner: bytes, mark: bytes = A, terms: Terms = TERMS) -> Op:
    return Op("claim", (key, owner, mark, terms))


def _complete(key: Key, owner: bytes, fence: int, answer: bytes = b"j1") -> Op:
    return Op("complete", (key, owner, fence, answer, TERMS))


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def fresh_key_is_won() -> Generator[Step, Any, None]:
    """A claim of a key that nobody used is won, as the first attempt."""
    reply = yield _claim(_key(), new_owner())
    _expect(reply.verdict is ClaimVerdict.WON, f"a fresh key gave {reply.verdict}")
    _expect(
        reply.attempts == 1 and reply.fence > 0, f"attempts and fence of a first claim: {reply}"
    )
    _expect(not reply.takeover, "a first claim is not a takeover")


def completed_key_replays_the_same_bytes() -> Generator[Step, Any, None]:
    """After complete, every claim with that payload gets the stored bytes."""
    key, owner, answer = _key(), new_owner(), b"j" + bytes(range(256))
    won = yield _claim(key, owner)
    held = yield _complete(key, owner, won.fence, answer)
    _expect(held is True, "the owner's completion must hold")
    for _ in range(3):
        reply = yield _claim(key, new_owner())
        _expect(reply.verdict is ClaimVerdict.REPLAY, f"a completed key gave {reply.verdict}")
        _expect(reply.answer == answer, "a replay must be byte-equal")


def empty_answer_is_an_answer() -> Generator[Step, Any, None]:
    """An empty answer is kept as one."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner)
    yield _complete(key, owner, won.fence, b"")
    reply = yield _claim(key, new_owner())
    _expect(
        reply.verdict is ClaimVerdict.REPLAY and reply.answer == b"", f"empty answer gave {reply}"
    )


def other_payload_conflicts() -> Generator[Step, Any, None]:
    """Another payload conflicts: in flight at once, and after completion."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner, A)
    reply = yield _claim(key, new_owner(), B)
    _expect(
        reply.verdict is ClaimVerdict.CONFLICT, f"another payload in flight gave {reply.verdict}"
    )
    yield _complete(key, owner, won.fence)
    reply = yield _claim(key, new_owner(), B)
    _expect(reply.verdict is ClaimVerdict.CONFLICT, f"another payload gave {reply.verdict}")
    _expect(reply.answer is None, "a conflict must not carry the stored answer")


def live_claim_is_in_flight() -> Generator[Step, Any, None]:
    """While a lease runs, others are told so, with what is left of it."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner)
    reply = yield _claim(key, new_owner())
    _expect(reply.verdict is ClaimVerdict.IN_FLIGHT, f"a live claim gave {reply.verdict}")
    _expect(0 < reply.lease_ms <= TERMS.lease_ms, f"remaining lease {reply.lease_ms}")
    _expect(reply.fence == won.fence, "in flight names the holder's fence")


def same_owner_claims_again() -> Generator[Step, Any, None]:
    """An owner whose reply was lost claims again and gets the same fence."""
    key, owner = _key(), new_owner()
    first = yield _claim(key, owner)
    again = yield _claim(key, owner)
    _expect(again.verdict is ClaimVerdict.WON, f"the owner's second claim gave {again.verdict}")
    _expect(again.fence == first.fence, "claiming again must not change the fence")
    _expect(again.attempts == 1, "claiming again is not another attempt")


def lapsed_claim_is_taken_over() -> Generator[Step, Any, None]:
    """After the lease the next claim takes over with a higher fence; the old owner is fenced."""
    key, dead, heir = _key(), new_owner(), new_owner()
    first = yield _claim(key, dead)
    yield Elapse(TERMS.lease_ms)
    second = yield _claim(key, heir)
    _expect(second.verdict is ClaimVerdict.WON and second.takeover, f"no takeover: {second}")
    _expect(second.fence > first.fence, "a takeover must raise the fence")
    _expect(second.attempts == 2, f"attempts after a takeover: {second.attempts}")
    held = yield _complete(key, dead, first.fence, b"jzombie")
    _expect(held is False, "a zombie's completion must be refused")
    held = yield Op("renew", (key, dead, first.fence, TERMS))
    _expect(held is False, "a zombie's renewal must be refused")
    held = yield Op("release", (key, dead, first.fence))
    _expect(held is False, "a zombie's release must be refused")
    held = yield _complete(key, heir, second.fence, b"jheir")
    _expect(held is True, "the heir's completion must hold")
    reply = yield _claim(key, new_owner())
    _expect(reply.answer == b"jheir", "the heir's answer counts")


def lapsed_claim_keeps_its_payload() -> Generator[Step, Any, None]:
    """A lapsed claim can't be taken over with another payload."""
    key = _key()
    yield _claim(key, new_owner(), A)
    yield Elapse(TERMS.lease_ms)
    reply = yield _claim(key, new_owner(), B)
    _expect(
        reply.verdict is ClaimVerdict.CONFLICT, f"a lapsed claim, other payload: {reply.verdict}"
    )


def owner_completes_after_its_lease() -> Generator[Step, Any, None]:
    """An owner that nobody replaced may still complete after its lease."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner)
    yield Elapse(TERMS.lease_ms)
    held = yield _complete(key, owner, won.fence)
    _expect(held is True, "a late completion without a takeover must hold")


def completing_twice_is_true() -> Generator[Step, Any, None]:
    """Completing again is true, so that a lost reply can be retried, and changes nothing."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner)
    yield _complete(key, owner, won.fence, b"j1")
    held = yield _complete(key, owner, won.fence, b"j2")
    _expect(held is True, "the second completion of one owner is true")
    reply = yield _claim(key, new_owner())
    _expect(reply.answer == b"j1", "the first completion counts")


def wrong_owner_or_fence_changes_nothing() -> Generator[Step, Any, None]:
    """Complete, renew and release need both the owner and the fence."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner)
    for who, fence in ((new_owner(), won.fence), (owner, won.fence + 1), (owner, won.fence - 1)):
        held = yield _complete(key, who, fence)
        _expect(held is False, "a completion with a wrong owner or fence held")
        held = yield Op("renew", (key, who, fence, TERMS))
        _expect(held is False, "a renewal with a wrong owner or fence held")
        held = yield Op("release", (key, who, fence))
        _expect(held is False, "a release with a wrong owner or fence held")
    held = yield _complete(_key(), owner, won.fence)
    _expect(held is False, "completing a key that was never claimed held")
    held = yield _complete(key, owner, won.fence)
    _expect(held is True, "the real owner must still hold its claim")


def renewal_extends_the_lease() -> Generator[Step, Any, None]:
    """Renewing counts the lease from now."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner)
    for _ in range(3):
        yield Elapse(TERMS.lease_ms // 2)
        held = yield Op("renew", (key, owner, won.fence, TERMS))
        _expect(held is True, "the owner's renewal must hold")
    reply = yield _claim(key, new_owner())
    _expect(reply.verdict is ClaimVerdict.IN_FLIGHT, f"a renewed claim gave {reply.verdict}")


def claiming_again_keeps_the_record_for_the_lease() -> Generator[Step, Any, None]:
    """A claim by its owner once more counts lease and record from now: no sweep takes it."""
    for terms in (TERMS, Terms(lease_ms=400, ttl_ms=100, sticky=True)):
        key, owner = _key(), new_owner()
        yield _claim(key, owner, terms=terms)
        first: Any = yield Op("read", (key,))
        yield Elapse(50)
        yield _claim(key, owner, terms=terms)
        again: Any = yield Op("read", (key,))
        _expect(None not in (first, again), "a claim must leave a record")
        _expect(again.lease_until > first.lease_until, "a claim again must extend the lease")
        _expect(again.purge_at > first.purge_at, "a claim again must keep the record longer")
        _expect(
            again.purge_at == max(again.lease_until, again.expires_at),
            f"a record with a lease until {again.lease_until} may be swept at {again.purge_at}",
        )


def release_frees_the_key_at_once() -> Generator[Step, Any, None]:
    """A released key is won by the next, with a higher fence, with any payload."""
    key, owner = _key(), new_owner()
    first = yield _claim(key, owner, A)
    held = yield Op("release", (key, owner, first.fence))
    _expect(held is True, "the owner's release must hold")
    second = yield _claim(key, new_owner(), B)
    _expect(second.verdict is ClaimVerdict.WON, f"a released key gave {second.verdict}")
    _expect(second.fence > first.fence, "a release must not let the fence fall")
    _expect(not second.takeover, "winning a released key is not a takeover")
    held = yield _complete(key, owner, first.fence)
    _expect(held is False, "a released owner's completion must be refused")


def release_without_a_fence_needs_the_owner() -> Generator[Step, Any, None]:
    """A caller cancelled while it claimed releases by its owner id alone; others can't."""
    key, owner = _key(), new_owner()
    yield _claim(key, owner)
    held = yield Op("release", (key, new_owner(), None))
    _expect(held is False, "a stranger released a claim")
    held = yield Op("release", (key, owner, None))
    _expect(held is True, "the owner's release must hold without a fence")


def completed_record_is_final() -> Generator[Step, Any, None]:
    """A completed record can't be released or renewed by anybody."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner)
    yield _complete(key, owner, won.fence)
    held = yield Op("release", (key, owner, won.fence))
    _expect(held is False, "a completed record was released")
    held = yield Op("renew", (key, owner, won.fence, TERMS))
    _expect(held is False, "a completed record was renewed")


def expired_answer_is_a_fresh_key() -> Generator[Step, Any, None]:
    """After its time to live a key is fresh again, and its fence still rises."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner, A, SHORT)
    yield Op("complete", (key, owner, won.fence, b"j1", SHORT))
    yield Elapse(SHORT.ttl_ms)
    again = yield _claim(key, new_owner(), B, SHORT)
    _expect(again.verdict is ClaimVerdict.WON, f"an expired key gave {again.verdict}")
    _expect(again.fence > won.fence, "the fence of an expired key fell")


def remembered_key_is_refused_as_expired() -> Generator[Step, Any, None]:
    """Where expired keys are remembered, they are refused; within the skew they replay."""
    terms = Terms(lease_ms=100, ttl_ms=150, skew_ms=500, remember_ms=60_000)
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner, A, terms)
    yield Op("complete", (key, owner, won.fence, b"j1", terms))
    yield Elapse(terms.ttl_ms + 20)
    reply = yield _claim(key, new_owner(), A, terms)
    _expect(reply.verdict is ClaimVerdict.REPLAY, f"within the skew: {reply.verdict}")
    yield Elapse(terms.skew_ms)
    for mark in (A, B):
        reply = yield _claim(key, new_owner(), mark, terms)
        _expect(reply.verdict is ClaimVerdict.EXPIRED, f"past the skew: {reply.verdict}")
        _expect(reply.answer is None, "an expired key must not carry its answer")


def sticky_payload_survives_a_release() -> Generator[Step, Any, None]:
    """With sticky terms a release keeps the payload bound, and retries don't extend the window."""
    terms = Terms(lease_ms=100, ttl_ms=2_000, sticky=True)
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner, A, terms)
    before = yield Op("read", (key,))
    yield Op("release", (key, owner, won.fence))
    reply = yield _claim(key, new_owner(), B, terms)
    _expect(reply.verdict is ClaimVerdict.CONFLICT, f"sticky, other payload: {reply.verdict}")
    yield Elapse(50)
    heir = new_owner()
    reply = yield _claim(key, heir, A, terms)
    _expect(reply.verdict is ClaimVerdict.WON, f"sticky, same payload: {reply.verdict}")
    yield Op("complete", (key, heir, reply.fence, b"j", terms))
    after = yield Op("read", (key,))
    _expect(after.expires_at == before.expires_at, "a retry extended a sticky window")


def first_seen_is_true_once() -> Generator[Step, Any, None]:
    """first_seen is true once in the window, then again after it."""
    key = _key()
    first = yield Op("first_seen", (key, SHORT))
    second = yield Op("first_seen", (key, SHORT))
    third = yield Op("first_seen", (key, SHORT))
    seen = [first, second, third]
    _expect(seen == [True, False, False], f"first_seen gave {seen}")
    yield Elapse(SHORT.ttl_ms)
    again = yield Op("first_seen", (key, SHORT))
    _expect(again is True, "after the window the key is new again")


def first_seen_respects_claims() -> Generator[Step, Any, None]:
    """A key that is claimed or completed was seen; one that was marked is handled."""
    key, owner = _key(), new_owner()
    won = yield _claim(key, owner)
    _expect((yield Op("first_seen", (key, TERMS))) is False, "a claimed key counted as new")
    yield _complete(key, owner, won.fence)
    _expect((yield Op("first_seen", (key, TERMS))) is False, "a completed key counted as new")
    marked = _key()
    yield Op("first_seen", (marked, TERMS))
    reply = yield _claim(marked, new_owner())
    _expect(reply.verdict is ClaimVerdict.REPLAY, f"a marked key gave {reply.verdict}")


def scopes_and_names_are_kept_apart() -> Generator[Step, Any, None]:
    """Keys that would be equal as joined strings are different keys."""
    pairs = [
        (("a", "bc"), "d"),
        (("ab", "c"), "d"),
        (("a", "b"), "cd"),
        (("a:b",), "c"),
        (("a",), "b:c"),
        (("a", "b", "c"), "d"),
        (("a",), "B"),
        (("A",), "b"),
        (("a",), "b"),
        (("a",), "b "),
        (("é",), "b"),
        (("e\u0301",), "b"),
    ]
    run = new_owner().hex()
    for parts, name in pairs:
        key = Key(Scope("conformance", run, *parts), name)
        reply = yield _claim(key, new_owner())
        _expect(reply.verdict is ClaimVerdict.WON, f"{parts!r}, {name!r} collided with another key")


def long_and_odd_names_work() -> Generator[Step, Any, None]:
    """Names of 1,024 characters, of any script, are keys like any other."""
    for name in ("x" * 1024, "ключ-🎉", "a'b\"c;--", "\x01\x7f", " "):
        key, owner = _key(name), new_owner()
        won = yield _claim(key, owner)
        _expect(
            (yield _complete(key, owner, won.fence)) is True, f"{name[:9]!r} can't be completed"
        )
        reply = yield _claim(key, new_owner())
        _expect(reply.verdict is ClaimVerdict.REPLAY, f"{name[:9]!r} gave {reply.verdict}")


def large_answers_come_back_whole() -> Generator[Step, Any, None]:
    """A megabyte of any bytes comes back as it was."""
    key, owner = _key(), new_owner()
    answer = bytes(range(256)) * 4096
    won = yield _claim(key, owner)
    yield _complete(key, owner, won.fence, answer)
    reply = yield _claim(key, new_owner())
    _expect(reply.answer == answer, "a large answer came back changed")


def read_and_write_see_the_same_record() -> Generator[Step, Any, None]:
    """Write puts a completed record that read and claim see; its fence rises."""
    key, owner = _key(), new_owner()
    _expect((yield Op("read", (key,))) is None, "an absent key has a record")
    won = yield _claim(key, owner)
    record = yield Op("read", (key,))
    _expect(record is not None, "a claimed key has no record")
    _expect(record.state is State.PENDING and record.fingerprint == A, f"pending: {record}")
    now = yield Op("now", ())
    yield Op("write", (key, B, b"jput", now + 60_000))
    record = yield Op("read", (key,))
    _expect(record.state is State.COMPLETED and record.answer == b"jput", f"written: {record}")
    _expect(record.fence > won.fence, "a write must raise the fence")
    _expect((yield _complete(key, owner, won.fence)) is False, "write must fence the old owner")
    reply = yield _claim(key, new_owner(), B)
    _expect(
        reply.verdict is ClaimVerdict.REPLAY and reply.answer == b"jput", f"after write: {reply}"
    )


def racing_claims_have_one_winner() -> Generator[Step, Any, None]:
    """Of 32 claims at the same time, one wins; the others learn that it runs."""
    for _ in range(8):
        key = _key()
        replies = yield Race([_claim(key, new_owner()) for _ in range(32)])
        won = [reply for reply in replies if reply.verdict is ClaimVerdict.WON]
        _expect(len(won) == 1, f"{len(won)} of 32 racing claims won")
        rest = {reply.verdict for reply in replies if reply not in won}
        _expect(rest == {ClaimVerdict.IN_FLIGHT}, f"the losers got {rest}")


def racing_takeovers_have_one_winner() -> Generator[Step, Any, None]:
    """Of 16 that find a lapsed claim at the same time, one takes over."""
    key = _key()
    first = yield _claim(key, new_owner())
    yield Elapse(TERMS.lease_ms)
    replies = yield Race([_claim(key, new_owner()) for _ in range(16)])
    won = [reply for reply in replies if reply.verdict is ClaimVerdict.WON]
    _expect(len(won) == 1, f"{len(won)} of 16 racing takeovers won")
    _expect(won[0].fence > first.fence, "a racing takeover must raise the fence")


def racing_first_seen_is_true_once() -> Generator[Step, Any, None]:
    """Of 32 first_seen at the same time, one is true."""
    for _ in range(8):
        key = _key()
        seen = yield Race([Op("first_seen", (key, TERMS)) for _ in range(32)])
        _expect(sum(seen) == 1, f"{sum(seen)} of 32 racing first_seen were true")


def completion_races_a_takeover() -> Generator[Step, Any, None]:
    """A late completion and a takeover at the same time: exactly one of them holds."""
    for _ in range(8):
        key, owner, heir = _key(), new_owner(), new_owner()
        won = yield _claim(key, owner)
        yield Elapse(TERMS.lease_ms)
        held, reply = yield Race([_complete(key, owner, won.fence), _claim(key, heir)])
        took = reply.verdict is ClaimVerdict.WON
        _expect(held != took, f"completed: {held}, taken over: {took}")


CHECKS: Final[tuple[Check, ...]] = (
    fresh_key_is_won,
    completed_key_replays_the_same_bytes,
    empty_answer_is_an_answer,
    other_payload_conflicts,
    live_claim_is_in_flight,
    same_owner_claims_again,
    lapsed_claim_is_taken_over,
    lapsed_claim_keeps_its_payload,
    owner_completes_after_its_lease,
    completing_twice_is_true,
    wrong_owner_or_fence_changes_nothing,
    renewal_extends_the_lease,
    claiming_again_keeps_the_record_for_the_lease,
    release_frees_the_key_at_once,
    release_without_a_fence_needs_the_owner,
    completed_record_is_final,
    expired_answer_is_a_fresh_key,
    remembered_key_is_refused_as_expired,
    sticky_payload_survives_a_release,
    first_seen_is_true_once,
    first_seen_respects_claims,
    scopes_and_names_are_kept_apart,
    long_and_odd_names_work,
    large_answers_come_back_whole,
    read_and_write_see_the_same_record,
    racing_claims_have_one_winner,
    racing_takeovers_have_one_winner,
    racing_first_seen_is_true_once,
    completion_races_a_takeover,
    *LISTINGS,
)
