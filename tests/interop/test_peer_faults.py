"""What a peer is known to get wrong, and what happens here: one test for each fault.

The faults were reproduced on ``adcp`` 9.2.0. The package itself is not needed here.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from tests.servers.fixtures_pg import sql

from oncekey import (
    AsyncPostgresStore,
    AsyncSQLiteStore,
    IdempotencyConflictError,
    IdempotencyStore,
    MemoryBackend,
    MemoryStore,
    OncekeyError,
    ToolContext,
)
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import hmac_provider, provider
from oncekey.testing import ManualClock

KEY = "key-0123456789abcdef"
ALICE = ToolContext("alice")
SECRET = "a shared secret of the tests, of 32 bytes or more"
URL = "https://buyer.example/hooks"
BODY = json.dumps({"idempotency_key": "whk_01HW9D3H8FZP2N6R8T0V4X6Z9B"}).encode()
JSON = {"Content-Type": "application/json"}


def request(**fields: Any) -> dict[str, Any]:
    return {"idempotency_key": KEY, **fields}


@pytest.fixture
def store() -> IdempotencyStore:
    return IdempotencyStore(MemoryBackend(), profile="adcp-3.2")


# Requests


@pytest.mark.parametrize("profile", ["classic", "adcp-3.2"])
async def test_a_returned_error_list_is_not_stored(profile: str) -> None:
    """Peer: ``{"errors": [...]}`` is stored and replayed. Here the next try runs."""
    store = IdempotencyStore(MemoryBackend(), profile=profile)
    runs = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, Any]:
        runs.append(1)
        return {"errors": [{"code": "BUDGET_TOO_LOW"}]} if len(runs) == 1 else {"id": "mb-1"}

    assert "errors" in await create(request(), ALICE)
    assert (await create(request(), ALICE))["id"] == "mb-1"
    assert (await create(request(), ALICE))["id"] == "mb-1"
    assert len(runs) == 2


async def test_the_same_key_on_another_tool_conflicts(store: IdempotencyStore) -> None:
    """Peer: the other tool replays the first tool's answer. Here it is a conflict."""

    @store.wrap
    async def create_media_buy(params: Any, context: Any = None) -> dict[str, Any]:
        return {"id": "mb-1"}

    @store.wrap
    async def sync_creatives(params: Any, context: Any = None) -> dict[str, Any]:
        raise AssertionError("must not run")

    await create_media_buy(request(), ALICE)
    with pytest.raises(IdempotencyConflictError):
        await sync_creatives(request(), ALICE)


async def test_accounts_have_keys_of_their_own(store: IdempotencyStore) -> None:
    """Peer: the account is not in the scope. Here each account of an agent has its own keys."""
    runs = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, Any]:
        runs.append(params["account"])
        return {"n": len(runs)}

    accounts: list[Any] = [{"account_id": "a"}, {"account_id": "b"}, {"brand": {"domain": "c"}}]
    for account in accounts * 2:
        await create(request(account=account), ALICE)
    assert runs == accounts


async def test_a_changed_payload_in_flight_conflicts_at_once(store: IdempotencyStore) -> None:
    """Peer: it waits for the first call. Here it conflicts while the first call runs."""
    inside, gate = asyncio.Event(), asyncio.Event()

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, Any]:
        inside.set()
        await gate.wait()
        return {}

    first = asyncio.create_task(create(request(budget=1), ALICE))
    await inside.wait()
    with pytest.raises(IdempotencyConflictError):
        await create(request(budget=2), ALICE)
    assert not first.done()
    gate.set()
    await first


async def test_a_changed_payload_conflicts_while_a_transaction_runs(tmp_path: Path) -> None:
    """A transactional call tells a changed payload of the same process at once, too."""
    async with AsyncSQLiteStore(str(tmp_path / "tx.db")) as backend:
        store = IdempotencyStore(backend, profile="adcp-3.2")
        inside, gate = asyncio.Event(), asyncio.Event()

        @store.wrap(transactional=True)
        async def create(params: Any, context: Any = None) -> dict[str, Any]:
            inside.set()
            await gate.wait()
            return {}

        first = asyncio.create_task(create(request(budget=1), ALICE))
        await inside.wait()
        with pytest.raises(IdempotencyConflictError):
            await create(request(budget=2), ALICE)
        assert not first.done()
        gate.set()
        await first


class Buy(pydantic.BaseModel):
    idempotency_key: str = KEY
    name: str | None = None


async def test_null_is_not_missing_in_a_model(store: IdempotencyStore) -> None:
    """Peer: a field set to null and one left out are the same. Here they are two payloads."""

    @store.wrap
    async def create(params: Buy, context: Any = None) -> dict[str, Any]:
        return {}

    await create(Buy(idempotency_key=KEY), ALICE)
    await create(Buy(idempotency_key=KEY), ALICE)
    with pytest.raises(IdempotencyConflictError):
        await create(Buy(idempotency_key=KEY, name=None), ALICE)


class Bought(pydantic.BaseModel):
    id: str
    at: dt.datetime
    replayed: bool = False


async def test_a_replay_has_the_type_of_the_first_answer(store: IdempotencyStore) -> None:
    """Peer: a fresh call gives a model and a replay a dict. Here both give the model."""

    @store.wrap
    async def create(params: Any, context: Any = None) -> Bought:
        return Bought(id="mb-1", at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC))

    first, again = await create(request(), ALICE), await create(request(), ALICE)
    assert type(first) is type(again) is Bought
    assert again == first.model_copy(update={"replayed": True})


async def test_large_integers_are_an_invalid_request(store: IdempotencyStore) -> None:
    """Peer: an integer past 2^53 raises a raw error. Here it is an INVALID_REQUEST."""

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, Any]:
        raise AssertionError("must not run")

    for number in (2**53, -(2**53), 2**70):
        with pytest.raises(OncekeyError) as caught:
            await create(request(packages=[{"budget": number}]), ALICE)
        assert caught.value.code == "INVALID_REQUEST"
        assert "$.packages[0].budget" in str(caught.value)


async def test_running_handlers_hold_no_connection(postgres: Any) -> None:
    """Peer: each holds one, idle in transaction; a pool of two fails four keys. Here none does."""
    import asyncpg

    url = postgres.database()
    running, gate = asyncio.Semaphore(0), asyncio.Event()
    async with asyncpg.create_pool(url, min_size=2, max_size=2) as pool:
        async with AsyncPostgresStore(pool) as backend:
            await backend.create_schema()
            store = IdempotencyStore(backend, profile="adcp-3.2")

            @store.wrap
            async def create(params: Any, context: Any = None) -> dict[str, Any]:
                running.release()
                await gate.wait()
                return {"key": params["idempotency_key"]}

            calls = [
                asyncio.create_task(create({"idempotency_key": f"key-{n:016d}"}, ALICE))
                for n in range(8)
            ]
            for _ in calls:
                await running.acquire()  # all eight are inside at once
            idle = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
            assert sql(url, idle) == [(0,)]
            gate.set()
            answers = await asyncio.gather(*calls)
    assert len({answer["key"] for answer in answers}) == 8


async def test_a_datetime_in_the_answer_never_runs_the_handler_twice(
    store: IdempotencyStore,
) -> None:
    """Peer: the answer is silently not stored, so the handler ran twice. Here it is replayed."""
    runs = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, Any]:
        runs.append(1)
        return {"at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)}

    first = await create(request(), ALICE)
    assert await create(request(), ALICE) == {**first, "replayed": True}
    assert len(runs) == 1


@pytest.fixture(params=["sqlite", "postgres"])
async def durable(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[AsyncSQLiteStore | AsyncPostgresStore]:
    if request.param == "sqlite":
        async with AsyncSQLiteStore(str(tmp_path / "order.db")) as sqlite:
            yield sqlite
        return
    async with AsyncPostgresStore(request.getfixturevalue("postgres").database()) as backend:
        await backend.create_schema()
        yield backend


async def test_answers_keep_the_order_of_their_keys(durable: Any) -> None:
    """Peer: JSONB reorders keys. Here a replay has the bytes of the first answer."""
    store = IdempotencyStore(durable)
    first = {"zebra": 1, "a": {"media_buy_id": 2, "b": 3}, "1": 1.0, "big": 2**60, "é": [None]}

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, Any]:
        return first

    await create(request(), ALICE)
    again = await create(request(), ALICE)
    assert json.dumps(again) == json.dumps(first)


# Webhooks


def signed(scheme: Any, **changes: str) -> dict[str, str]:
    """The headers of a delivery that ``scheme`` signed."""
    return {**dict(scheme.sign("POST", URL, JSON, BODY).headers), **changes}


@pytest.mark.parametrize("alone", ["Signature", "Signature-Input"])
def test_one_signature_header_alone_is_refused(alone: str) -> None:
    """Peer: one RFC 9421 header alone falls back to HMAC. Here the mode is a switch."""
    legacy = provider("adcp-hmac", SECRET, publisher="seller.example")
    headers = signed(legacy)
    assert legacy.verify("POST", URL, headers, BODY).ok
    forged = {**headers, alone: "sig1=:AAAA:"}
    assert legacy.verify("POST", URL, forged, BODY).code == "webhook_mode_mismatch"


def test_a_body_of_two_megabytes_is_refused() -> None:
    """Peer: 2 MB bodies pass. Here a body over the limit is a 413 before it is verified."""
    legacy = provider("adcp-hmac", SECRET, publisher="seller.example")
    receiver = WebhookReceiver(legacy, MemoryStore())
    large = b'{"pad": "' + b"x" * 2_000_000 + b'"}'
    delivery = legacy.sign("POST", URL, JSON, large)
    assert receiver.receive(*delivery).status == 413


def test_a_padded_timestamp_is_refused() -> None:
    """Peer: ``" +17..."`` passes as a timestamp. Here it is digits and nothing else."""
    legacy = provider("adcp-hmac", SECRET, publisher="seller.example")
    headers = signed(legacy)
    [(name, stamp)] = [
        (name, value) for name, value in headers.items() if name.lower() == "x-adcp-timestamp"
    ]
    for padded in (
        f" +{stamp}",
        f"+{stamp}",
        f" {stamp}",
        f"{stamp}.0",
        f"{stamp[:2]}_{stamp[2:]}",
    ):
        verdict = legacy.verify("POST", URL, {**headers, name: padded}, BODY)
        assert not verdict.ok, padded


@pytest.mark.parametrize("secret", ["", "short", b""])
def test_an_empty_secret_is_refused(secret: str | bytes) -> None:
    """Peer: empty secrets pass. Here one that is no secret is an error where it is given."""
    with pytest.raises(ValueError, match="secret"):
        provider("adcp-hmac", secret, publisher="seller.example")


class Renewed(MemoryStore):
    """Its clock moves on by most of a lease after each renewal, and at no other time."""

    LEASE = 2.0

    def __init__(self) -> None:
        self.renewals = 0
        self.thrice = threading.Event()
        self.manual = ManualClock()
        super().__init__(clock=self.manual)

    def renew(self, *args: Any) -> bool:
        held = super().renew(*args)
        self.manual.advance(self.LEASE * 0.9)
        self.renewals += 1
        if self.renewals == 3:
            self.thrice.set()
        return held


def test_a_long_handler_keeps_its_event() -> None:
    """Peer: no lease renewal, so two owners overlap after 300 s. Here the first one keeps it."""
    acme = hmac_provider("acme", secret=SECRET, header="X-Signature", event_id="id")
    delivery = acme.sign("POST", URL, JSON, b'{"id": "evt_1"}')
    store = Renewed()
    receiver = WebhookReceiver(acme, store, lease=store.LEASE, wait=0)
    gate = threading.Event()
    handled: list[str] = []
    outcomes: list[str] = []

    @receiver.on()
    def handle(event: Any) -> None:
        handled.append(event.id)
        assert gate.wait(60)

    first = threading.Thread(target=lambda: outcomes.append(receiver.receive(*delivery).outcome))
    first.start()
    assert store.thrice.wait(60)  # by the store's clock more than two leases have passed
    copy = receiver.receive(*delivery)
    gate.set()
    first.join(60)
    assert (copy.status, copy.outcome) == (503, "in_flight")
    assert outcomes == ["handled"]
    assert receiver.receive(*delivery).outcome == "duplicate"
    assert handled == ["evt_1"]
