"""Calls to other systems from a guarded handler: derived keys, and notes that outlive a crash."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from oncekey import (
    AsyncOnce,
    BackendMismatchError,
    ClaimLostError,
    IdempotencyStore,
    InvalidKeyError,
    MemoryBackend,
    MemoryStore,
    Once,
    PgStore,
    PolicyError,
    SQLiteStore,
    StoreCorruptError,
    StoreUnavailableError,
    ToolContext,
    TransactionRefusedError,
    current_claim,
)
from oncekey._core import call as engine
from oncekey._core.flows import Claim
from oncekey.guard import PendingCall
from oncekey.models import Key, Scope, Terms
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.signatures import provider
from oncekey.testing import ManualClock

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
Places = tuple[Callable[..., Any], ...]


def claim_of(*scope: str, name: str = "k", home: Any = None) -> Claim:
    """A claim that nobody has to win."""
    made = Claim(Key(Scope(*scope), name), b"owner", 1, 1, False, TERMS)
    if home is not None:
        made.home = lambda: home
    return made


# Derived keys


def test_a_derived_key_is_short_and_fits_in_a_url() -> None:
    """A derived key has 43 characters of the URL-safe alphabet, whatever the key was."""
    for name in ("order-1", "ü" * 1024, "a b/c?d"):
        for secret in (None, b"s", "s" * 99):
            found = claim_of("once", "x", name=name).downstream_key("stripe", secret)
            assert re.fullmatch(r"[A-Za-z0-9_-]{43}", found)
            assert name not in found


def test_derived_keys_differ_with_all_that_names_the_work() -> None:
    """Another key, scope, tenant, provider or secret gives another derived key."""

    class Tenant:
        tenant = "acme"

    class OtherTenant:
        tenant = "globex"

    found = [
        claim_of("once", "x").downstream_key("stripe"),
        claim_of("once", "x").downstream_key("stripe:receipt"),
        claim_of("once", "x").downstream_key("stripe", b"secret"),
        claim_of("once", "x").downstream_key("stripe", b"other secret"),
        claim_of("once", "x", name="kk").downstream_key("stripe"),
        claim_of("once", "y").downstream_key("stripe"),
        claim_of("request", "x").downstream_key("stripe"),
        claim_of("once", "x", "").downstream_key("stripe"),
        claim_of("once", "x", home=Tenant).downstream_key("stripe"),
        claim_of("once", "x", home=OtherTenant).downstream_key("stripe"),
        # What a separator in place of lengths would mix up.
        claim_of("once", "x", name="ks").downstream_key("tripe"),
    ]
    assert len(set(found)) == len(found)


def test_a_derived_key_is_an_hmac_that_never_changes() -> None:
    """The bytes are fixed: a new release must not give a running key another derived key."""
    claim = claim_of("once", "orders", name="o-1")
    parts = (b"", claim.key.scope.prefix, b"o-1", b"stripe")
    message = b"oncekey downstream key 1" + b"".join(len(p).to_bytes(8, "big") + p for p in parts)
    raw = hmac.new(b"secret", message, hashlib.sha256).digest()
    expected = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
    assert claim.downstream_key("stripe", b"secret") == expected
    assert claim.downstream_key("stripe", "secret") == expected
    assert expected == "pyiii1HEieB-ivpLBIbL9ZBJUNLA0HaZctct0lzkVQA"


@pytest.mark.parametrize(
    "provider, secret, error",
    [
        ("", None, InvalidKeyError),
        ("x\0", None, InvalidKeyError),
        ("x" * 1025, None, InvalidKeyError),
        (7, None, InvalidKeyError),
        ("stripe", b"", PolicyError),
        ("stripe", "", PolicyError),
    ],
)
def test_bad_providers_and_secrets_are_refused(provider: Any, secret: Any, error: type) -> None:
    """An empty provider or secret is an error, not a key that many share."""
    with pytest.raises(error):
        claim_of("once", "x").downstream_key(provider, secret)


def test_every_attempt_gets_the_same_derived_key(store: Any) -> None:
    """A retry after a failure, and a takeover in another process, derive the same key."""
    seen = []
    once = Once(store)

    @once(key="order_id")
    def charge(order_id: str) -> None:
        seen.append(current_claim().downstream_key("stripe", b"secret"))
        if len(seen) < 3:
            raise RuntimeError

    for _ in range(3):
        with suppress(RuntimeError):
            charge("o-1")
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_tenants_of_one_table_derive_different_keys(pg_url: str) -> None:
    """The same key in two tenants' stores never reaches a provider as one key."""
    found = []
    for tenant in ("acme", "globex"):
        with PgStore(pg_url, tenant=tenant) as store, Once(store).guard("o-1") as claim:
            found.append(claim.downstream_key("stripe"))
    assert found[0] != found[1]


# Notes


def test_the_next_attempt_finds_the_notes(places: Places) -> None:
    """After a failure another process sees which calls may have been made, when and by whom."""
    with places[0]() as first, suppress(TimeoutError), Once(first).guard("o-1") as claim:
        assert claim.pending_calls() == []
        claim.before_call("stripe", "ch-1")
        claim.before_call("mail", "m-1")
        claim.before_call("stripe", "ch-1")  # noted before
        assert claim.pending_calls() == []  # our own are not pending
        began = first.now() / 1000
        raise TimeoutError
    with places[0]() as second, Once(second).guard("o-1") as claim:
        found = claim.pending_calls()
        assert [(call.provider, call.request_id, call.attempt) for call in found] == [
            ("stripe", "ch-1", 1),
            ("mail", "m-1", 1),
        ]
        assert all(began - 60 < call.at <= began for call in found)
        claim.before_call("stripe", "ch-1")
        claim.before_call("stripe", "ch-2")
        assert claim.pending_calls() == found
        claim.answer = "done"
        claims = current_claim()
    assert claims.attempts == 2


def test_whoever_takes_over_finds_the_notes(places: Places) -> None:
    """A worker that vanishes without a word leaves its notes to the one that takes the key over."""
    with places[0]() as first, places[0]() as second:
        job = Once(first)._block("o-1", None, {"lease": 0.05})
        gone = engine.open_claim(first, job)  # without a heartbeat
        assert isinstance(gone, Claim)
        gone.monotonic = lambda: 0.0  # time does not pass for it
        gone.before_call("stripe", "ch-1")
        with Once(second).guard("o-1") as claim:  # waits for the lease to end
            assert claim.takeover
            assert [call.request_id for call in claim.pending_calls()] == ["ch-1"]


async def test_the_next_attempt_finds_the_notes_async(places: Places) -> None:
    """The asynchronous form writes and reads the same notes."""
    async with places[1]() as store:
        once = AsyncOnce(store)
        with suppress(TimeoutError):
            async with once.guard("o-1") as claim:
                assert await claim.apending_calls() == []
                await asyncio.gather(*(claim.abefore_call("stripe", f"ch-{n}") for n in range(5)))
                raise TimeoutError
        async with once.guard("o-1") as claim:
            found = await claim.apending_calls()
            assert {call.request_id for call in found} == {f"ch-{n}" for n in range(5)}
            await claim.abefore_call("mail", "m-1")
            raise_later = current_claim()
        assert raise_later.notes[-1].provider == "mail"
        record = await store.read(Key(Scope("calls", "once", "default"), "o-1"))
        assert record is not None
        assert len(json.loads(record.answer[1:])["calls"]) == 6


def test_notes_of_threads_are_all_kept(store: Any) -> None:
    """Calls that several threads of one handler make at once are all noted before each is made."""
    once = Once(store)
    made: list[str] = []
    start = threading.Barrier(4)

    def call(claim: Any, number: int) -> None:
        start.wait()
        claim.before_call("stripe", f"ch-{number}")
        kept = store.read(Key(Scope("calls", "once", "default"), "o-1"))
        assert f"ch-{number}" in kept.answer.decode()
        made.append(f"ch-{number}")

    with suppress(TimeoutError), once.guard("o-1") as claim:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda number: call(claim, number), range(4)))
        raise TimeoutError
    with once.guard("o-1") as claim:
        assert sorted(one.request_id for one in claim.pending_calls()) == sorted(made)


WORKER = """
import os, signal, sys
from oncekey import Once, SQLiteStore, current_claim

once = Once(SQLiteStore(sys.argv[1]), scope="orders", lease=60)

@once(key="order_id", name="charge")
def charge(order_id: str) -> str:
    claim = current_claim()
    request_id = claim.downstream_key("stripe")
    claim.before_call("stripe", request_id)
    with open(sys.argv[2], "a") as provider:
        provider.write(request_id + "\\n")  # the call
    os.kill(os.getpid(), signal.SIGKILL)  # before its outcome is recorded

charge("o-1")
"""


def test_a_killed_worker_leaves_a_note(tmp_path: Path) -> None:
    """kill -9 between the call and its record: whoever takes over can ask, and does not call."""
    file, provider = tmp_path / "orders.db", tmp_path / "provider"
    command = [sys.executable, "-c", WORKER, str(file), str(provider)]
    killed = subprocess.run(command, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    made = provider.read_text().split()
    with SQLiteStore(file, clock=lambda: time.time() + 61) as store:  # its lease is over
        once = Once(store, scope="orders")

        @once(key="order_id", name="charge")
        def charge(order_id: str) -> str:
            claim = current_claim()
            assert claim.takeover
            for call in claim.pending_calls():
                if call.request_id in provider.read_text().split():
                    return f"found {call.request_id}"
            raise AssertionError("the call would be made again")

        assert charge("o-1") == f"found {made[0]}"
    assert provider.read_text().split() == made


def test_a_lost_claim_makes_no_note(clock: ManualClock) -> None:
    """A worker that another took over from is told so before its call, and writes nothing."""
    store = MemoryStore(clock=clock)
    once = Once(store, lease=30)
    with once.guard("o-1") as claim:
        assert claim.claim is not None
        claim.claim.lost = True
        with pytest.raises(ClaimLostError):
            claim.before_call("stripe", "ch-1")
    assert store.read(Key(Scope("calls", "once", "default"), "o-1")) is None


def test_a_claim_that_is_lost_while_it_is_noted_is_told_so(clock: ManualClock) -> None:
    """A note that took too long to write is not followed by the call."""

    class Slow(MemoryStore):
        def write(self, *args: Any) -> None:
            super().write(*args)
            held.lost = True

    once = Once(Slow(clock=clock))
    with once.guard("o-1") as claim:
        assert claim.claim is not None
        held = claim.claim
        with pytest.raises(ClaimLostError):
            claim.before_call("stripe", "ch-1")


def test_a_note_that_cant_be_written_is_an_error() -> None:
    """If the store fails the call must not be made, and the key is free again."""

    class Down(MemoryStore):
        def write(self, *args: Any) -> None:
            raise StoreUnavailableError("down")

    once = Once(Down())
    with pytest.raises(StoreUnavailableError), once.guard("o-1") as claim:
        claim.before_call("stripe", "ch-1")
    with once.guard("o-1") as claim:
        assert claim.attempts == 2


def test_the_first_note_of_a_first_attempt_costs_one_write() -> None:
    """Nothing is read where nothing can be there; a call that was noted costs nothing."""
    asked = []

    class Counting(MemoryStore):
        def read(self, key: Key) -> Any:
            asked.append("read")
            return super().read(key)

        def write(self, *args: Any) -> None:
            asked.append("write")
            super().write(*args)

    with Once(Counting()).guard("o-1") as claim:
        claim.before_call("stripe", "ch-1")
        claim.before_call("stripe", "ch-1")
        assert claim.pending_calls() == []
    assert asked == ["write"]


def test_notes_end_with_the_key(clock: ManualClock) -> None:
    """A key that is used anew after its time knows nothing of the calls before."""
    once = Once(MemoryStore(clock=clock), ttl=60, lease=10)
    with once.guard("o-1") as claim:
        claim.before_call("stripe", "ch-1")
    clock.advance(71)
    with once.guard("o-1") as claim:
        assert not claim.replayed
        assert claim.attempts == 2
        assert claim.pending_calls() == []


def test_damaged_notes_are_an_error() -> None:
    """Notes that can't be read stop the attempt: it must not call as if there were none."""
    store = MemoryStore()
    store.write(Key(Scope("calls", "once", "default"), "o-1"), b"", b"j[]", store.now() + 60_000)
    with pytest.raises(StoreCorruptError), Once(store).guard("o-1") as claim:
        claim.pending_calls()


@pytest.mark.parametrize("name", ["", "x\0y", "x" * 1025, None])
def test_bad_names_of_calls_are_refused(name: Any) -> None:
    """Provider and request id must be text that can be kept."""
    with Once(MemoryStore()).guard("o-1") as claim:
        for arguments in ((name, "ch-1"), ("stripe", name)):
            with pytest.raises(InvalidKeyError):
                claim.before_call(*arguments)


def test_a_replay_has_no_calls_to_make() -> None:
    """In a block that finds the work done there is no claim to ask."""
    once = Once(MemoryStore())
    for again in (False, True):
        with once.guard("o-1") as claim:
            assert claim.replayed is again
    for ask in (lambda: claim.downstream_key("x"), lambda: claim.pending_calls()):
        with pytest.raises(LookupError, match="replayed"):
            ask()


async def test_forms_must_match() -> None:
    """A sync call of an async claim, or the other way round, names the right one."""
    async with AsyncOnce(MemoryBackend()).guard("o-1") as claim:
        with pytest.raises(BackendMismatchError, match="abefore_call"):
            claim.before_call("stripe", "ch-1")
        with pytest.raises(BackendMismatchError, match="apending_calls"):
            claim.pending_calls()
    with Once(MemoryStore()).guard("o-1") as blocking:
        with pytest.raises(BackendMismatchError, match=r"claim\.before_call"):
            await blocking.abefore_call("stripe", "ch-1")
        with pytest.raises(BackendMismatchError, match=r"claim\.pending_calls"):
            await blocking.apending_calls()
    with pytest.raises(LookupError, match="current_claim"):
        claim_of("once", "x").before_call("stripe", "ch-1")


# Wherever a handler runs


def fails_after(calls: list[Any], request_id: str) -> None:
    """What a handler does: look, note, and fail in the first attempt."""
    claim = current_claim()
    calls.append([call.request_id for call in claim.pending_calls()])
    claim.before_call("stripe", request_id)
    if len(calls) == 1:
        raise TimeoutError


async def afails_after(calls: list[Any], request_id: str) -> None:
    """The same in an asynchronous handler."""
    claim = current_claim()
    calls.append([call.request_id for call in await claim.apending_calls()])
    await claim.abefore_call("stripe", request_id)
    if len(calls) == 1:
        raise TimeoutError


async def test_handlers_of_requests_have_the_claim() -> None:
    """``IdempotencyStore.wrap``, sync and async."""
    calls: list[Any] = []
    acalls: list[Any] = []
    caller = ToolContext(caller_identity="acme")

    @IdempotencyStore(MemoryStore()).wrap
    def create(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        fails_after(calls, "r-1")
        return {}

    @IdempotencyStore(MemoryBackend()).wrap
    async def acreate(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        await afails_after(acalls, "r-1")
        return {}

    for _ in range(3):
        with suppress(TimeoutError):
            create({"idempotency_key": "k"}, caller)
        with suppress(TimeoutError):
            await acreate({"idempotency_key": "k"}, caller)
    assert calls == acalls == [[], ["r-1"]]


async def test_handlers_of_webhooks_have_the_claim() -> None:
    """Receivers, sync and async."""
    scheme = provider("stripe", secret="whsec_test")
    body = b'{"id": "evt_1", "type": "invoice.paid"}'
    request = scheme.sign("POST", "https://x/", {"Content-Type": "application/json"}, body)
    calls: list[Any] = []
    acalls: list[Any] = []
    receiver = WebhookReceiver(scheme, MemoryStore())
    areceiver = AsyncWebhookReceiver(scheme, MemoryBackend())
    receiver.on()(lambda event: fails_after(calls, "r-1"))

    @areceiver.on()
    async def handle(event: Any) -> None:
        await afails_after(acalls, "r-1")

    statuses = []
    for _ in range(3):
        statuses.append(receiver.receive(*request).status)
        statuses.append((await areceiver.receive(*request)).status)
    assert calls == acalls == [[], ["r-1"]]
    assert [status // 100 for status in statuses] == [5, 5, 2, 2, 2, 2]


def test_a_note_outlives_a_transaction_that_is_rolled_back(pg_url: str) -> None:
    """In PostgreSQL a note is committed at once, beside the transaction of its handler."""
    with PgStore(pg_url) as store:
        once = Once(store)
        for attempt in range(2):
            with suppress(TimeoutError), once.transaction("o-1") as tx:
                assert tx.claim is not None
                found = tx.claim.pending_calls()
                tx.claim.before_call("stripe", f"ch-{attempt}")
                if attempt == 0:
                    assert found == []
                    raise TimeoutError
                assert [call.request_id for call in found] == ["ch-0"]
        with once.transaction("o-1") as tx:
            assert tx.replayed


def test_sqlite_refuses_a_note_inside_its_transaction(tmp_path: Path) -> None:
    """There the note would have to wait for its own transaction: refused at once, with the fix."""
    with SQLiteStore(tmp_path / "x.db") as store, Once(store).transaction("o-1") as tx:
        assert tx.claim is not None
        assert tx.claim.pending_calls() == []
        with pytest.raises(TransactionRefusedError, match="outside of it"):
            tx.claim.before_call("stripe", "ch-1")


def test_a_pending_call_says_what_it_is() -> None:
    """The public value has names, and is a tuple."""
    call = PendingCall("stripe", "ch-1", 1, 1.5)
    assert call == ("stripe", "ch-1", 1, 1.5)
    assert call._fields == ("provider", "request_id", "attempt", "at")
