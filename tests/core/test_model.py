"""Every store in lockstep with a plain model of the protocol, under random operations.

The model is written from the protocol's words and shares no code with the engine. All stores run
on one clock that only the test moves, and must agree with the model after every step.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.scale import scaled

from oncekey import AsyncSQLiteStore, MemoryBackend, MemoryStore, SQLiteStore
from oncekey.models import Key, Record, Scope, Terms
from oncekey.testing import ManualClock

START = 1_700_000_000_000  # ms
KEYS = [Key(Scope("model", "a"), name) for name in ("one", "two")] + [
    Key(Scope("model", "b"), "one")
]
PAYLOADS = {"a": b"a" * 64, "b": b"b" * 64, "none": b""}
TERMS = [
    Terms(lease_ms=400, ttl_ms=5_000),
    Terms(lease_ms=400, ttl_ms=1_500, sticky=True),
    Terms(lease_ms=250, ttl_ms=1_000, skew_ms=300, remember_ms=2_000),
    Terms(lease_ms=700, ttl_ms=300, skew_ms=60, remember_ms=1_000, sticky=True),
]
ANSWERS = {"one": b"j1", "bytes": b"j" + bytes(range(256)), "empty": b"", "long": b"x" * 5_000}


class Model:
    """One dict of plain dicts. Times are milliseconds."""

    def __init__(self) -> None:
        self.records: dict[Key, dict[str, Any]] = {}

    @staticmethod
    def _compatible(one: bytes, other: bytes) -> bool:
        return one == b"" or other == b"" or one == other

    def claim(
        self, now: int, key: Key, owner: bytes, payload: bytes, terms: Terms
    ) -> dict[str, Any]:
        found = self.records.get(key)
        if found is None:
            return self._take(now, key, owner, payload, terms, None, window=None)
        compatible = self._compatible(found["payload"], payload)
        told = {"attempts": found["attempts"], "left": 0, "answer": None, "takeover": False}
        conflict = {**told, "verdict": "conflict"}
        state = found["state"]
        if state == "completed":
            if now < found["expires"] + terms.skew_ms:
                if not compatible:
                    return conflict
                return {**told, "verdict": "replay", "answer": found["answer"]}
            if terms.remember_ms > 0 and now < found["purge"]:
                return {**told, "verdict": "expired"}
            return self._take(now, key, owner, payload, terms, found, window=None)
        window = found["expires"] if now < found["expires"] else None
        if state == "released":
            if window is not None and terms.sticky and not compatible:
                return conflict
            return self._take(now, key, owner, payload, terms, found, window)
        left = max(0, found["lease"] - now)
        if found["owner"] == owner:
            if not compatible:
                return {**conflict, "left": left}
            self._extend(found, now, terms)
            return {**told, "verdict": "won", "left": terms.lease_ms}
        if now < found["lease"]:
            return {**told, "verdict": "in_flight" if compatible else "conflict", "left": left}
        if window is not None and not compatible:
            return conflict
        return self._take(now, key, owner, payload, terms, found, window)

    def _take(
        self,
        now: int,
        key: Key,
        owner: bytes,
        payload: bytes,
        terms: Terms,
        found: dict[str, Any] | None,
        window: int | None,
    ) -> dict[str, Any]:
        lease = now + terms.lease_ms
        expires = now + terms.ttl_ms if terms.sticky else lease + terms.ttl_ms
        if terms.sticky and window is not None and found is not None:
            expires, payload = window, found["payload"] or payload
        attempts = 1 if found is None else found["attempts"] + 1
        takeover = found is not None and found["state"] == "pending"
        self.records[key] = {
            "state": "pending",
            "owner": owner,
            "payload": payload,
            "lease": lease,
            "expires": expires,
            "purge": max(expires, lease),
            "attempts": attempts,
            "answer": None,
        }
        return {
            "verdict": "won",
            "attempts": attempts,
            "left": terms.lease_ms,
            "answer": None,
            "takeover": takeover,
        }

    def _held(self, key: Key, owner: bytes, fence_is_right: bool) -> dict[str, Any] | None:
        found = self.records.get(key)
        if found is None or found["owner"] != owner or not fence_is_right:
            return None
        return found

    def complete(
        self, now: int, key: Key, owner: bytes, fence_is_right: bool, answer: bytes, terms: Terms
    ) -> bool:
        found = self._held(key, owner, fence_is_right)
        if found is None or found["state"] == "released":
            return False
        if found["state"] == "pending":
            expires = found["expires"] if terms.sticky else now + terms.ttl_ms
            purge = expires + terms.skew_ms + terms.remember_ms
            found.update(state="completed", answer=answer, expires=expires, purge=purge)
        return True

    def renew(self, now: int, key: Key, owner: bytes, fence_is_right: bool, terms: Terms) -> bool:
        found = self._held(key, owner, fence_is_right)
        if found is None or found["state"] != "pending":
            return False
        self._extend(found, now, terms)
        return True

    @staticmethod
    def _extend(found: dict[str, Any], now: int, terms: Terms) -> None:
        found["lease"] = now + terms.lease_ms
        if not terms.sticky:
            found["expires"] = max(found["expires"], found["lease"] + terms.ttl_ms)
        found["purge"] = max(found["expires"], found["lease"])

    def release(self, key: Key, owner: bytes, fence_is_right: bool) -> bool:
        found = self._held(key, owner, fence_is_right)
        if found is None or found["state"] != "pending":
            return False
        found["state"] = "released"
        return True

    def _put(self, key: Key, payload: bytes, answer: bytes | None, expires: int) -> None:
        self.records[key] = {
            "state": "completed",
            "owner": b"",
            "payload": payload,
            "lease": 0,
            "expires": expires,
            "purge": expires,
            "attempts": 1,
            "answer": answer,
        }

    def first_seen(self, now: int, key: Key, terms: Terms) -> bool:
        found = self.records.get(key)
        if found is not None:
            if found["state"] == "completed":
                if now < found["expires"] + terms.skew_ms:
                    return False
                if terms.remember_ms > 0 and now < found["purge"]:
                    return False
            elif found["state"] == "pending" and now < found["lease"]:
                return False
        self._put(key, b"", None, now + terms.ttl_ms)
        return True

    def write(self, key: Key, payload: bytes, answer: bytes, expires: int) -> None:
        self._put(key, payload, answer, expires)

    def sweep(self, now: int) -> int:
        dead = [key for key, found in self.records.items() if found["purge"] <= now]
        for key in dead:
            del self.records[key]
        return len(dead)


def shape(record: Record | None) -> dict[str, Any] | None:
    """A store's record in the model's terms. The fence is looked at apart."""
    if record is None:
        return None
    state = record.state.name.lower()
    return {
        "state": state,
        "owner": record.owner,
        "payload": record.fingerprint,
        "lease": record.lease_until if state == "pending" else None,
        "expires": record.expires_at,
        "purge": record.purge_at,
        "attempts": record.attempts,
        "answer": record.answer,
    }


class Lockstep(RuleBasedStateMachine):
    """Does each operation on the model and on every store, and compares."""

    numbers = itertools.count()

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.now = START
        self.clock = ManualClock()
        self._pass(0)
        self.model = Model()
        self.runner = asyncio.Runner()
        path = directory / f"{next(self.numbers)}"

        def database(name: str) -> dict[str, Any]:
            return {"path": f"{path}-{name}.db", "durability": "normal", "clock": self.clock}

        self.sync_stores = {
            "MemoryStore": MemoryStore(clock=self.clock),
            "SQLiteStore": SQLiteStore(**database("sync")),
        }
        self.async_stores = {
            "MemoryBackend": MemoryBackend(clock=self.clock),
            "AsyncSQLiteStore thread": AsyncSQLiteStore(**database("thread"), commit="thread"),
            "AsyncSQLiteStore inline": AsyncSQLiteStore(**database("inline"), commit="inline"),
        }
        self.highest = dict.fromkeys(KEYS, 0)
        self.calls: list[tuple[Key, bytes, int]] = []  # claims won: key, owner, fence
        self.owners = 0

    def teardown(self) -> None:
        for store in self.sync_stores.values():
            store.close()
        for backend in self.async_stores.values():
            self.runner.run(backend.aclose())
        self.runner.close()

    def each(self, method: str, *args: Any) -> dict[str, Any]:
        """What every store answers."""
        answers = {name: getattr(s, method)(*args) for name, s in self.sync_stores.items()}

        async def ask() -> None:
            for name, store in self.async_stores.items():
                answers[name] = await getattr(store, method)(*args)

        self.runner.run(ask())
        return answers

    def agree(self, expected: Any, answers: dict[str, Any]) -> None:
        for name, answer in answers.items():
            assert answer == expected, f"{name} says {answer}, the model {expected}"

    def _new_owner(self) -> bytes:
        self.owners += 1
        return b"owner-%010d" % self.owners

    def _call(self, which: int, key: Key) -> tuple[Key, bytes, int]:
        """One of the claims won lately, or one that never was."""
        if not self.calls:
            return key, b"nobody", 1
        return self.calls[-1 - which % len(self.calls)]

    # Claims

    def _claim(self, key: Key, owner: bytes, payload: bytes, terms: Terms) -> None:
        found = self.model.records.get(key)
        again = found is not None and found["state"] == "pending" and found["owner"] == owner
        expected = self.model.claim(self.now, key, owner, payload, terms)
        replies = self.each("claim", key, owner, payload, terms)
        told = {
            name: {
                "verdict": reply.verdict.value,
                "attempts": reply.attempts,
                "left": reply.lease_ms,
                "answer": reply.answer,
                "takeover": reply.takeover,
            }
            for name, reply in replies.items()
        }
        self.agree(expected, told)
        if expected["verdict"] == "won":
            fence = replies["MemoryStore"].fence
            self.agree(fence, {name: reply.fence for name, reply in replies.items()})
            if again:
                assert fence == self.highest[key], "a repeated claim keeps its fence"
            else:
                assert fence > self.highest[key], "a win has a higher fence than all before"
                self.calls.append((key, owner, fence))
            self.highest[key] = fence

    @rule(
        key=st.sampled_from(KEYS),
        payload=st.sampled_from(list(PAYLOADS)),
        terms=st.sampled_from(TERMS),
    )
    def claim_as_a_new_call(self, key: Key, payload: str, terms: Terms) -> None:
        self._claim(key, self._new_owner(), PAYLOADS[payload], terms)

    @rule(
        which=st.integers(0, 3),
        payload=st.sampled_from(list(PAYLOADS)),
        terms=st.sampled_from(TERMS),
    )
    def claim_again(self, which: int, payload: str, terms: Terms) -> None:
        key, owner, _ = self._call(which, KEYS[0])
        self._claim(key, owner, PAYLOADS[payload], terms)

    @rule(key=st.sampled_from(KEYS), terms=st.sampled_from(TERMS), which=st.integers(0, 3))
    def claim_another_key_with_an_old_owner(self, key: Key, terms: Terms, which: int) -> None:
        self._claim(key, self._call(which, key)[1], PAYLOADS["a"], terms)

    # What owners do

    def _settle(self, method: str, which: int, off: int, *rest: Any) -> None:
        key, owner, fence = self._call(which, KEYS[0])
        model: Callable[..., bool] = getattr(self.model, method)
        right = fence + off == self.highest[key]
        now = () if method == "release" else (self.now,)
        expected = model(*now, key, owner, right, *rest)
        self.agree(expected, self.each(method, key, owner, fence + off, *rest))

    @rule(
        which=st.integers(0, 3),
        off=st.sampled_from([0, 0, 0, 0, -1, 1]),
        answer=st.sampled_from(list(ANSWERS)),
        terms=st.sampled_from(TERMS),
    )
    def complete(self, which: int, off: int, answer: str, terms: Terms) -> None:
        self._settle("complete", which, off, ANSWERS[answer], terms)

    @rule(
        which=st.integers(0, 3), off=st.sampled_from([0, 0, 0, -1, 1]), terms=st.sampled_from(TERMS)
    )
    def renew(self, which: int, off: int, terms: Terms) -> None:
        self._settle("renew", which, off, terms)

    @rule(which=st.integers(0, 3), off=st.sampled_from([0, 0, 0, -1, 1]))
    def release(self, which: int, off: int) -> None:
        self._settle("release", which, off)

    @rule(which=st.integers(0, 3))
    def release_without_a_fence(self, which: int) -> None:
        key, owner, _ = self._call(which, KEYS[0])
        expected = self.model.release(key, owner, True)
        self.agree(expected, self.each("release", key, owner, None))

    @rule(key=st.sampled_from(KEYS), method=st.sampled_from(["renew", "complete", "release"]))
    def a_stranger_settles_nothing(self, key: Key, method: str) -> None:
        rest: tuple[Any, ...] = {
            "renew": (TERMS[0],),
            "complete": (ANSWERS["one"], TERMS[0]),
            "release": (),
        }[method]
        self.agree(False, self.each(method, key, b"stranger", self.highest[key], *rest))

    # The rest

    @rule(key=st.sampled_from(KEYS), terms=st.sampled_from(TERMS))
    def first_seen(self, key: Key, terms: Terms) -> None:
        expected = self.model.first_seen(self.now, key, terms)
        self.agree(expected, self.each("first_seen", key, terms))

    @rule(
        key=st.sampled_from(KEYS),
        payload=st.sampled_from(list(PAYLOADS)),
        answer=st.sampled_from(list(ANSWERS)),
        lasts=st.sampled_from([-1, 0, 1, 333, 4_000]),
    )
    def write(self, key: Key, payload: str, answer: str, lasts: int) -> None:
        args = (key, PAYLOADS[payload], ANSWERS[answer], self.now + lasts)
        self.model.write(*args)
        self.each("write", *args)

    def _pass(self, ms: int) -> None:
        self.now += ms
        # In the middle of a millisecond, where no rounding of floats can reach its edges.
        self.clock.set((self.now + 0.5) / 1000)

    @rule(ms=st.sampled_from([1, 7, 83, 249, 251, 399, 401, 1_013, 4_999, 61_007]))
    def time_passes(self, ms: int) -> None:
        self._pass(ms)

    @precondition(lambda self: self.model.records)
    @rule(
        what=st.sampled_from(["lease", "expires", "purge"]),
        which=st.integers(0, 2),
        past=st.sampled_from([-1, 0, 1]),
        skew=st.sampled_from([0, 0, 60, 300]),
    )
    def time_passes_to_an_edge(self, what: str, which: int, past: int, skew: int) -> None:
        records = list(self.model.records.values())
        edge = records[which % len(records)][what] + past + skew
        self._pass(max(0, edge - self.now))

    @precondition(lambda self: self.model.records)
    @rule(
        what=st.sampled_from(["lease", "expires", "purge"]),
        which=st.integers(0, 2),
        past=st.sampled_from([-1, 0]),
        payload=st.sampled_from(list(PAYLOADS)),
        terms=st.sampled_from(TERMS),
    )
    def claim_at_an_edge(
        self, what: str, which: int, past: int, payload: str, terms: Terms
    ) -> None:
        key = list(self.model.records)[which % len(self.model.records)]
        edge = self.model.records[key][what] + past
        if what == "expires":
            edge += terms.skew_ms
        self._pass(max(0, edge - self.now))
        self._claim(key, self._new_owner(), PAYLOADS[payload], terms)

    @rule()
    def sweep(self) -> None:
        self.agree(self.model.sweep(self.now), self.each("sweep"))
        # A swept key's fence starts from the clock, which moves on between two statements.
        self._pass(1)

    @invariant()
    def records_are_equal(self) -> None:
        for key in KEYS:
            found = self.model.records.get(key)
            expected = None
            if found is not None:
                lease = found["lease"] if found["state"] == "pending" else None
                expected = {**found, "lease": lease}
            self.agree(expected, {n: shape(r) for n, r in self.each("read", key).items()})


def test_stores_agree_with_the_model(tmp_path: Path) -> None:
    """Memory and SQLite, sync and async, do as the protocol says, in runs of 50 steps."""
    run_state_machine_as_test(
        lambda: Lockstep(tmp_path),
        settings=settings(
            max_examples=scaled(200),
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            # To make a failure shorter add Phase.shrink: it takes minutes, so it is off.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_fences_rise_though_the_clock_went_back(kind: str, tmp_path: Path) -> None:
    """A win after a first-seen mark still has the highest fence, with a clock that was set back."""
    clock = ManualClock(1_700_000_100.0)
    terms = Terms(lease_ms=400, ttl_ms=1_000)
    store = (
        MemoryStore(clock=clock)
        if kind == "memory"
        else SQLiteStore(tmp_path / "back.db", durability="normal", clock=clock)
    )
    with store:
        first = store.claim(KEYS[0], b"one", b"a", terms)
        assert store.release(KEYS[0], b"one", first.fence)
        clock.set(1_700_000_000.0)
        assert store.first_seen(KEYS[0], terms)
        clock.advance(2)
        second = store.claim(KEYS[0], b"two", b"a", terms)
        assert second.verdict == "won"
        assert second.fence > first.fence
