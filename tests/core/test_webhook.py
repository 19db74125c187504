"""``WebhookDedupStore``: marks, claims, scopes, and what a failing store means."""

from __future__ import annotations

import asyncio
import logging
import pathlib
import sqlite3
import time
from typing import Any

import pytest

from oncekey import (
    AsyncSQLiteStore,
    BackendMismatchError,
    IdempotencyStore,
    InvalidKeyError,
    InvalidRequestError,
    MemoryBackend,
    MemoryStore,
    OncekeyError,
    SQLiteStore,
    StoreError,
    SyncWebhookDedupStore,
    ToolContext,
    WebhookDedupOwnershipError,
    WebhookDedupStore,
)
from oncekey._core import tasks
from oncekey.errors import StoreConfigError
from oncekey.testing import ManualClock

HASH, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def dedup(clock: ManualClock) -> WebhookDedupStore:
    return WebhookDedupStore(MemoryBackend(clock=clock), processing_ttl_seconds=30)


async def test_first_copy_is_new_and_others_are_not(dedup: WebhookDedupStore) -> None:
    """True once for each sender and key."""
    assert await dedup.check_and_record("s", "e1") is True
    assert await dedup.check_and_record("s", "e1") is False
    assert await dedup.check_and_record("s", "e2") is True
    assert await dedup.check_and_record("s2", "e1") is True


async def test_plain_memory_backends_take_the_short_way() -> None:
    """The memory store's own first_seen is called without a detour; an override is not skipped."""

    class Counting(MemoryBackend):
        calls = 0

        async def first_seen(self, key: Any, terms: Any) -> bool:
            self.calls += 1
            return await super().first_seen(key, terms)

    counting, plain = Counting(), MemoryBackend()
    for backend in (counting, plain):
        dedup = WebhookDedupStore(backend)
        assert [await dedup.check_and_record("s", "e") for _ in range(3)] == [True, False, False]
        assert bool(dedup._markers) is (backend is plain)
    assert counting.calls == 3


async def test_the_window_ends(dedup: WebhookDedupStore, clock: ManualClock) -> None:
    """After the TTL the key is new again; a copy does not prolong it."""
    await dedup.check_and_record("s", "e")
    clock.advance(86_399)
    assert await dedup.check_and_record("s", "e") is False
    clock.advance(1)
    assert await dedup.check_and_record("s", "e") is True


async def test_the_stores_clock_can_be_injected(clock: ManualClock) -> None:
    """``clock=`` of the dedup store decides where the backend has no clock of its own."""
    dedup = WebhookDedupStore(MemoryBackend(), clock=clock)
    await dedup.check_and_record("s", "e")
    clock.advance(86_401)
    assert await dedup.check_and_record("s", "e") is True


async def test_concurrent_copies_have_one_winner() -> None:
    """Of many tasks at once, one is told that the event is new."""
    dedup = WebhookDedupStore(MemoryBackend())
    seen = await asyncio.gather(*(dedup.check_and_record("s", "e") for _ in range(200)))
    assert sum(seen) == 1


@pytest.mark.parametrize("ttl", [86_399, 604_801, 0])
@pytest.mark.parametrize("kind", [WebhookDedupStore, SyncWebhookDedupStore])
def test_ttl_bounds_are_named(ttl: int, kind: Any) -> None:
    """A TTL out of bounds is a ValueError that names the bounds and the value."""
    backend = MemoryBackend() if kind is WebhookDedupStore else MemoryStore()
    with pytest.raises(ValueError, match=rf"\[86400, 604800\].*{ttl}"):
        kind(backend, ttl)


@pytest.mark.parametrize("lease", [0, -1, 90_000])
def test_processing_ttl_is_bounded(lease: int) -> None:
    """A claim can't be held for no time, or for longer than the delivery is remembered."""
    with pytest.raises(ValueError, match="processing_ttl_seconds"):
        WebhookDedupStore(MemoryBackend(), processing_ttl_seconds=lease)


async def test_empty_and_odd_names_are_refused(dedup: WebhookDedupStore) -> None:
    """Empty, long, NUL and half-surrogate names are ValueErrors that name the argument."""
    for sender, key, what in (
        ("", "e", "sender_id"),
        ("s", "", "idempotency_key"),
        ("s", "x" * 1_000_000, "idempotency_key"),
        ("s\0", "e", "sender_id"),
        ("s", "e\0", "idempotency_key"),
        ("s", "\udfff", "idempotency_key"),
        ("x" * 1025, "e", "sender_id"),
    ):
        with pytest.raises(ValueError, match=what):
            await dedup.check_and_record(sender, key)
        with pytest.raises(InvalidKeyError, match=what):
            await dedup.claim(sender, key, HASH)
    with pytest.raises(ValueError, match="payload_hash"):
        await dedup.claim("s", "e", "")
    with pytest.raises(ValueError, match="namespace"):
        WebhookDedupStore(MemoryBackend(), namespace="")


async def test_namespaces_and_requests_are_apart() -> None:
    """One backend serves requests and several webhook namespaces without a collision."""
    backend = MemoryBackend()
    stores = [
        WebhookDedupStore(backend),
        WebhookDedupStore(backend, namespace="request"),
        WebhookDedupStore(backend, namespace="list-changes"),
        WebhookDedupStore(backend, namespace="webhook:s"),
    ]
    for dedup in stores:
        assert await dedup.check_and_record("s", "key") is True
        assert await dedup.check_and_record("s:s", "key") is True
    runs = []
    requests = IdempotencyStore(backend)

    @requests.wrap
    async def handler(params: Any, context: Any = None) -> dict[str, int]:
        runs.append(1)
        return {}

    for principal in ("s", "webhook:s", "request:s", "webhook"):
        await handler({"idempotency_key": "key"}, ToolContext(principal))
    assert len(runs) == 4


async def test_a_store_failure_processes_rather_than_drops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failing store is a WARNING and True; neither key nor sender is logged."""

    class Down(MemoryBackend):
        async def first_seen(self, *args: Any) -> bool:
            raise StoreError("unreachable")

    dedup = WebhookDedupStore(Down())
    with caplog.at_level(logging.WARNING, logger="oncekey"):
        assert await dedup.check_and_record("the-sender", "event-123456789") is True
    assert "dedup failed" in caplog.text
    assert "key=" in caplog.text
    assert "event-12" not in caplog.text
    assert "the-sender" not in caplog.text


async def test_claim_complete_and_handled(dedup: WebhookDedupStore) -> None:
    """A claimed delivery is in progress for others, and handled once it is completed."""
    claim = await dedup.claim("s", "e", HASH)
    assert claim.status == "claimed"
    assert claim.claim_token
    other = await dedup.claim("s", "e", HASH)
    assert (other.status, other.claim_token, other.retry_after) == ("in_progress", None, 30)
    assert await dedup.complete("s", "e", HASH, claim.claim_token) is True
    assert (await dedup.claim("s", "e", HASH)).status == "handled"
    assert await dedup.check_and_record("s", "e") is False


async def test_completing_again_is_true(dedup: WebhookDedupStore) -> None:
    """An owner whose reply was lost may complete again."""
    claim = await dedup.claim("s", "e", HASH)
    assert claim.claim_token
    assert await dedup.complete("s", "e", HASH, claim.claim_token) is True
    assert await dedup.complete("s", "e", HASH, claim.claim_token) is True


async def test_a_changed_payload_conflicts_and_the_first_stays_bound(
    dedup: WebhookDedupStore,
) -> None:
    """Another payload is a conflict in flight, after a release and after completion."""
    claim = await dedup.claim("s", "e", HASH)
    assert claim.claim_token
    assert (await dedup.claim("s", "e", OTHER)).status == "conflict"
    await dedup.release("s", "e", HASH, claim.claim_token)
    assert (await dedup.claim("s", "e", OTHER)).status == "conflict"
    again = await dedup.claim("s", "e", HASH)
    assert again.status == "claimed"
    assert not again.takeover
    assert again.claim_token
    await dedup.complete("s", "e", HASH, again.claim_token)
    assert (await dedup.claim("s", "e", OTHER)).status == "conflict"


async def test_a_crashed_handler_is_taken_over_and_fenced(
    dedup: WebhookDedupStore, clock: ManualClock
) -> None:
    """After the lease another worker takes over; the old one can neither complete nor release."""
    dead = await dedup.claim("s", "e", HASH)
    assert dead.claim_token
    clock.advance(30)
    heir = await dedup.claim("s", "e", HASH)
    assert heir.status == "claimed"
    assert heir.takeover
    assert heir.claim_token
    with pytest.raises(WebhookDedupOwnershipError, match="took it over"):
        await dedup.complete("s", "e", HASH, dead.claim_token)
    with pytest.raises(WebhookDedupOwnershipError):
        await dedup.release("s", "e", HASH, dead.claim_token)
    assert await dedup.renew("s", "e", dead.claim_token) is False
    await dedup.complete("s", "e", HASH, heir.claim_token)
    assert await dedup.complete("s", "e", HASH, dead.claim_token) is False


async def test_tokens_are_for_one_delivery_and_payload(dedup: WebhookDedupStore) -> None:
    """No token, a token of another delivery, or another payload: each says what is wrong."""
    claim = await dedup.claim("s", "e", HASH)
    other = await dedup.claim("s", "e2", HASH)
    assert claim.claim_token
    assert other.claim_token
    missing: Any = (await dedup.claim("s", "e", HASH)).claim_token
    with pytest.raises(WebhookDedupOwnershipError, match="claim_token is None"):
        await dedup.complete("s", "e", HASH, missing)
    with pytest.raises(WebhookDedupOwnershipError, match="another delivery's"):
        await dedup.complete("s", "e", HASH, other.claim_token)
    with pytest.raises(WebhookDedupOwnershipError, match="another payload"):
        await dedup.complete("s", "e", OTHER, claim.claim_token)
    assert await dedup.complete("s", "e", HASH, claim.claim_token) is True


async def test_renewing_keeps_a_slow_handler_alive(
    dedup: WebhookDedupStore, clock: ManualClock
) -> None:
    """A renewed claim is not taken over."""
    claim = await dedup.claim("s", "e", HASH)
    assert claim.claim_token
    for _ in range(5):
        clock.advance(20)
        assert await dedup.renew("s", "e", claim.claim_token) is True
    assert (await dedup.claim("s", "e", HASH)).status == "in_progress"


async def test_the_window_runs_from_the_first_claim(
    dedup: WebhookDedupStore, clock: ManualClock
) -> None:
    """Retries and a late completion don't extend how long a delivery is remembered."""
    claim = await dedup.claim("s", "e", HASH)
    assert claim.claim_token
    clock.advance(1000)
    await dedup.release("s", "e", HASH, claim.claim_token)
    again = await dedup.claim("s", "e", HASH)
    assert again.claim_token
    await dedup.complete("s", "e", HASH, again.claim_token)
    clock.advance(86_400 - 1000 - 1)
    assert (await dedup.claim("s", "e", HASH)).status == "handled"
    clock.advance(1)
    assert (await dedup.claim("s", "e", OTHER)).status == "claimed"


@pytest.mark.parametrize(
    "token", ["", "nonsense", "zz.1", "00.", "aa" * 16 + ".1", "aa" * 16 + ".1.0"]
)
async def test_a_wrong_token_owns_nothing(dedup: WebhookDedupStore, token: str) -> None:
    """A token that was made up is refused and changes nothing."""
    claim = await dedup.claim("s", "e", HASH)
    with pytest.raises(WebhookDedupOwnershipError):
        await dedup.complete("s", "e", HASH, token)
    with pytest.raises(WebhookDedupOwnershipError):
        await dedup.release("s", "e", HASH, token)
    assert claim.claim_token
    assert await dedup.complete("s", "e", HASH, claim.claim_token) is True


async def test_a_cancelled_claim_is_given_back(tmp_path: pathlib.Path) -> None:
    """A receiver cancelled while it claims does not block the event for a whole lease."""
    async with AsyncSQLiteStore(tmp_path / "x.db") as backend:
        dedup = WebhookDedupStore(backend)
        for number in range(20):
            task = asyncio.create_task(dedup.claim("s", f"e{number}", HASH))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        await asyncio.wait(tasks._background or {asyncio.create_task(asyncio.sleep(0))})
        claims = [await dedup.claim("s", f"e{number}", HASH) for number in range(20)]
        assert [claim.status for claim in claims] == ["claimed"] * 20


def test_the_sync_store_does_the_same(clock: ManualClock) -> None:
    """Every method of the sync store behaves as its async twin."""
    dedup = SyncWebhookDedupStore(MemoryStore(clock=clock), processing_ttl_seconds=30)
    assert dedup.check_and_record("s", "m") is True
    assert dedup.check_and_record("s", "m") is False
    claim = dedup.claim("s", "e", HASH)
    assert claim.claim_token
    assert dedup.claim("s", "e", HASH).status == "in_progress"
    assert dedup.claim("s", "e", OTHER).status == "conflict"
    assert dedup.renew("s", "e", claim.claim_token) is True
    assert dedup.release("s", "e", HASH, claim.claim_token) is True
    second = dedup.claim("s", "e", HASH)
    assert second.claim_token
    clock.advance(30)
    third = dedup.claim("s", "e", HASH)
    assert third.takeover
    assert third.claim_token
    with pytest.raises(WebhookDedupOwnershipError):
        dedup.complete("s", "e", HASH, second.claim_token)
    assert dedup.complete("s", "e", HASH, third.claim_token) is True
    assert dedup.claim("s", "e", HASH).status == "handled"


def test_backends_must_match() -> None:
    """A sync backend for the async store, or the other way round, says what to pass."""
    with pytest.raises(BackendMismatchError, match="aconnect"):
        WebhookDedupStore(MemoryStore())  # type: ignore[arg-type]
    with pytest.raises(BackendMismatchError, match="connect"):
        SyncWebhookDedupStore(MemoryBackend())  # type: ignore[arg-type]


class TestCompleteOn:
    """The mark and the caller's writes in one SQLite transaction."""

    @pytest.fixture
    def path(self, tmp_path: pathlib.Path) -> str:
        return str(tmp_path / "app.db")

    @pytest.fixture
    def connection(self, path: str) -> Any:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("CREATE TABLE ledger (event TEXT)")
        yield connection
        connection.close()

    def test_mark_and_writes_commit_together(self, path: str, connection: Any) -> None:
        """Rolled back, neither is there; committed, both are."""
        with SQLiteStore(path) as store:
            dedup = SyncWebhookDedupStore(store)
            claim = dedup.claim("s", "e", HASH)
            assert claim.claim_token
            for ending, status, rows in (("ROLLBACK", "in_progress", 0), ("COMMIT", "handled", 1)):
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO ledger VALUES ('e')")
                assert dedup.complete_on(connection, "s", "e", HASH, claim.claim_token) is True
                connection.execute(ending)
                assert dedup.claim("s", "e", HASH).status == status
                assert connection.execute("SELECT count(*) FROM ledger").fetchone() == (rows,)

    def test_a_fenced_worker_must_roll_back(self, path: str, connection: Any) -> None:
        """After a takeover the old worker's transaction is told so."""
        clock = ManualClock(time.time())
        with SQLiteStore(path, clock=clock) as store:
            dedup = SyncWebhookDedupStore(store, processing_ttl_seconds=5)
            claim = dedup.claim("s", "e", HASH)
            clock.advance(6)
            assert dedup.claim("s", "e", HASH).takeover
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(WebhookDedupOwnershipError):
                dedup.complete_on(connection, "s", "e", HASH, claim.claim_token or "")
            connection.execute("ROLLBACK")

    def test_what_cant_be_safe_is_refused(
        self, path: str, connection: Any, tmp_path: pathlib.Path
    ) -> None:
        """Autocommit, another file and a store without transactions are refused with the fix."""
        with SQLiteStore(path) as store:
            dedup = SyncWebhookDedupStore(store)
            token = dedup.claim("s", "e", HASH).claim_token or ""
            with pytest.raises(StoreConfigError, match="BEGIN IMMEDIATE"):
                dedup.complete_on(connection, "s", "e", HASH, token)
            other = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
            other.execute("CREATE TABLE t (x)")
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreConfigError, match="connection to"):
                dedup.complete_on(other, "s", "e", HASH, token)
            other.close()
        memory = SyncWebhookDedupStore(MemoryStore())
        with pytest.raises(OncekeyError, match="SQLiteStore"):
            memory.complete_on(connection, "s", "e", HASH, token)


async def test_senders_as_a_verifier_gives_them() -> None:
    """A verified sender is its identity; where only those are taken, text is refused."""
    from oncekey.signatures import provider

    stripe = provider("stripe", secret="whsec_test", account="shop")
    request = stripe.sign("POST", "https://x.example/h", {}, b'{"id": "evt_1"}')
    sender = stripe.verify(*request).sender
    assert sender is not None
    dedup = WebhookDedupStore(MemoryBackend(), require_verified=True)
    seen = [await dedup.check_and_record(sender, "evt_1") for _ in range(3)]
    assert seen == [True, False, False]
    assert (await dedup.claim(sender, "evt_2", "hash")).status == "claimed"
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"verdict\.sender"):
            await dedup.check_and_record(sender.as_sender_identity(), "evt_3")
    shared = MemoryBackend()
    by_type, by_name = WebhookDedupStore(shared), WebhookDedupStore(shared)
    assert await by_type.check_and_record(sender, "evt_4")
    assert not await by_name.check_and_record("stripe:shop", "evt_4")


def test_the_older_names_are_the_same_classes() -> None:
    """``WebhookDedupStore`` is the async form, ``SyncWebhookDedupStore`` the sync one."""
    import oncekey

    assert oncekey.WebhookDedupStore is oncekey.AsyncWebhookDedup
    assert oncekey.SyncWebhookDedupStore is oncekey.WebhookDedup
