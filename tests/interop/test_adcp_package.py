"""The ``adcp`` package as a peer: its store on our backends, our store under its server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import warnings
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
from tests.interop.serving import PATIENCE, serving

from oncekey import (
    AsyncPostgresStore,
    AsyncSQLiteStore,
    AsyncStore,
    IdempotencyConflictError,
    IdempotencyStore,
    MemoryBackend,
    RedisBackend,
    StoreUnavailableError,
)
from oncekey.adcp import STANDARD_ERROR_CODES, capabilities_response, error_envelope
from oncekey.models import ClaimReply, Verdict

if find_spec("adcp") is None:
    if os.environ.get("CI"):
        raise RuntimeError("the adcp package is the peer of this test: install adcp==9.2.0")
    pytest.skip("adcp is not installed: pip install adcp==9.2.0", allow_module_level=True)

KEY = "key-0123456789abcdef"
ALICE = {"caller_identity": "alice", "tenant_id": "t1"}


@pytest.fixture(scope="module")
def peer() -> Any:
    """The package, imported when the first test needs it."""
    return import_module("tests.interop.peer")


# Its store on our backends


Opener = Callable[[], AsyncStore]


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
async def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens a backend of each kind, each time on the same data, except in memory."""
    if request.param == "memory":
        shared = MemoryBackend()
        return lambda: shared
    if request.param == "sqlite":
        return lambda: AsyncSQLiteStore(str(tmp_path / "peer.db"))
    if request.param == "redis":
        redis_url: str = request.getfixturevalue("redis_url")
        return lambda: RedisBackend(redis_url)
    databases: Any = request.getfixturevalue("postgres")
    database: str = databases.database()
    async with AsyncPostgresStore(database) as backend:
        await backend.create_schema()
    return lambda: AsyncPostgresStore(database)


@contextlib.asynccontextmanager
async def two(opener: Opener) -> AsyncIterator[tuple[Any, Any]]:
    """Two backends on the same data."""
    async with opener() as one, opener() as other:
        yield one, other


class Seller:
    """A handler wrapped by the peer's store."""

    def __init__(self, peer: Any, backend: Any, runs: list[int]) -> None:
        store = peer.Store(backend)

        async def create_media_buy(
            self: Any, params: dict[str, Any], context: Any = None
        ) -> dict[str, Any]:
            runs.append(1)
            await asyncio.sleep(0.02)  # long enough that copies come meanwhile
            return {"media_buy_id": f"mb-{len(runs)}", "z": 1, "a": [1, {"b": None}]}

        self._create = store.wrap(create_media_buy)

    async def create(self, **fields: Any) -> dict[str, Any]:
        answer = await self._create(self, {"idempotency_key": KEY, **fields}, ALICE)
        assert isinstance(answer, dict)
        return answer


async def test_the_peers_store_runs_on_our_backends(peer: Any, opener: Opener) -> None:
    """Copies at once, on two connections, run the handler once; replays and conflicts follow."""
    runs: list[int] = []
    async with two(opener) as backends:
        sellers = [Seller(peer, backend, runs) for backend in backends]
        answers = await asyncio.gather(*(sellers[n % 2].create(budget=1) for n in range(16)))
        assert len(runs) == 1
        assert sum("replayed" in answer for answer in answers) == 15
        for answer in answers:
            answer.pop("replayed", None)
            assert answer == {"media_buy_id": "mb-1", "z": 1, "a": [1, {"b": None}]}
        with pytest.raises(peer.IdempotencyConflictError):
            await sellers[1].create(budget=2)
        assert (await sellers[1].create(budget=1))["replayed"] is True
        assert len(runs) == 1


async def test_a_failed_handler_gives_the_lock_back(peer: Any, opener: Opener) -> None:
    """An exception inside the peer's lock frees it: the next call runs at once."""
    async with opener() as backend:
        store = peer.Store(backend)
        runs = []

        async def create(self: Any, params: Any, context: Any = None) -> dict[str, int]:
            runs.append(1)
            if len(runs) == 1:
                raise RuntimeError("down")
            return {"n": len(runs)}

        wrapped = store.wrap(create)
        with pytest.raises(RuntimeError, match="down"):
            await wrapped(None, {"idempotency_key": KEY}, ALICE)
        assert await wrapped(None, {"idempotency_key": KEY}, ALICE) == {"n": 2}


async def test_the_peers_webhook_dedup_runs_on_our_backends(peer: Any, opener: Opener) -> None:
    """One of many claims wins; a handled delivery stays handled, a changed one conflicts."""
    async with two(opener) as backends:
        stores = [peer.WebhookDedupStore(backend) for backend in backends]
        claims = await asyncio.gather(
            *(stores[n % 2].claim("sender", "event", "hash") for n in range(8))
        )
        statuses = sorted(claim.status for claim in claims)
        assert statuses == ["claimed"] + ["in_progress"] * 7
        [won] = [claim for claim in claims if claim.status == "claimed"]
        assert won.claim_token is not None
        assert await stores[1].complete("sender", "event", "hash", won.claim_token)
        assert (await stores[0].claim("sender", "event", "hash")).status == "handled"
        assert (await stores[0].claim("sender", "event", "other")).status == "conflict"


async def test_put_if_absent_has_one_winner(peer: Any, opener: Opener) -> None:
    """The conditional insert that the peer may use is atomic, and gives way to an expired entry."""
    from oncekey import CachedResponse

    async with two(opener) as backends:
        assert await backends[0].supports_atomic_put_if_absent()
        now = await backends[0].current_time()
        entries = [CachedResponse("h", {"n": n}, now + 60) for n in range(8)]
        won = await asyncio.gather(
            *(backends[n % 2].put_if_absent("s", "k", entry) for n, entry in enumerate(entries))
        )
        assert sum(won) == 1
        stored = await backends[0].get("s", "k")
        assert stored.response == {"n": won.index(True)}


async def test_answers_of_either_store_replay_in_the_other(peer: Any) -> None:
    """Both keep answers under the same scope and key, so one can take over from the other."""
    backend = MemoryBackend()
    runs: list[int] = []
    await Seller(peer, backend, runs).create(budget=1)
    ours = IdempotencyStore(backend)

    @ours.wrap
    async def create_media_buy(params: Any, context: Any = None) -> dict[str, Any]:
        runs.append(1)
        return {}

    replay = await create_media_buy({"idempotency_key": KEY, "budget": 1}, ALICE)
    assert replay["media_buy_id"] == "mb-1"
    assert len(runs) == 1
    with pytest.raises(IdempotencyConflictError):
        await create_media_buy({"idempotency_key": KEY, "budget": 2}, ALICE)


async def test_ours_runs_on_the_peers_backend_with_a_warning(peer: Any) -> None:
    """A backend of the peer's has only get and put for us: it works in one process."""
    with pytest.warns(UserWarning, match="within this process only"):
        ours = IdempotencyStore(peer.Memory())
    runs = []

    @ours.wrap
    async def create(params: Any, context: Any = None) -> dict[str, int]:
        runs.append(1)
        await asyncio.sleep(0)
        return {"n": len(runs)}

    answers = await asyncio.gather(*(create({"idempotency_key": KEY}, ALICE) for _ in range(8)))
    assert answers == [{"n": 1}] * 8


# Our store under its server


def buy(**fields: Any) -> dict[str, Any]:
    return {
        "idempotency_key": KEY,
        "adcp_version": "3.2",
        "account": {"account_id": "acct-1"},
        "brand": {"domain": "acme.example"},
        "start_time": "2099-06-01T00:00:00Z",
        "end_time": "2099-07-31T23:59:59Z",
        "packages": [{"product_id": "p", "budget": 5000, "pricing_option_id": "cpm"}],
        **fields,
    }


async def test_our_store_serves_the_peers_models(peer: Any) -> None:
    """Its request and response models go through: a replay is that type again, and marked."""
    seller, alice = peer.Seller(), peer.ToolContext(caller_identity="alice", tenant_id="t1")

    def params(**fields: Any) -> Any:
        return peer.types.CreateMediaBuyRequest.model_validate(buy(**fields))

    first = await seller.create_media_buy(params(context={"c": 1}), alice)
    again = await seller.create_media_buy(params(context={"c": 2}), alice)
    assert type(again) is type(first) is peer.types.CreateMediaBuySuccessResponse
    assert first.model_dump(mode="json", exclude_none=True) | {
        "replayed": True,
        "context": {"c": 2},
    } == again.model_dump(mode="json", exclude_none=True)
    with pytest.raises(IdempotencyConflictError):
        await seller.create_media_buy(params(name="other"), alice)
    assert len(seller.runs) == 1
    assert isinstance(seller.runs[0][0], peer.types.CreateMediaBuyRequest)


async def test_our_store_serves_handlers_of_the_peers_server(peer: Any) -> None:
    """Over its MCP server: first, replay, conflict and in either case the current context."""
    from mcp import Client

    seller = peer.Seller()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        app = peer.app_of(seller)
    with serving(app) as base:
        async with Client(f"{base}/mcp") as client:
            first = await client.call_tool("create_media_buy", buy(context={"c": 1}))
            again = await client.call_tool("create_media_buy", buy(context={"c": 2}))
            other = await client.call_tool("create_media_buy", buy(name="other", context={"c": 3}))
            can = await client.call_tool("get_adcp_capabilities", {})
    assert not first.is_error, first
    assert first.structured_content is not None
    assert not first.structured_content.get("replayed")
    assert again.structured_content == {
        **first.structured_content,
        "replayed": True,
        "context": {"c": 2},
    }
    assert other.is_error
    assert other.structured_content is not None
    assert other.structured_content["adcp_error"] == {
        "code": "IDEMPOTENCY_CONFLICT",
        "message": "idempotency_key reused with a different payload",
        "recovery": "correctable",
    }
    assert other.structured_content["context"] == {"c": 3}
    assert len(seller.runs) == 1
    assert can.structured_content is not None
    assert can.structured_content["adcp"]["idempotency"]["supported"] is True


KNOWN = {
    "in_flight": ("IDEMPOTENCY_IN_FLIGHT", "transient"),
    "schema": ("INVALID_REQUEST", "correctable"),
    "other payload": ("IDEMPOTENCY_CONFLICT", "correctable"),
    "store is down": ("SERVICE_UNAVAILABLE", "transient"),
}


class Troubled(MemoryBackend):
    """A backend that can be down, or have a call in flight that never ends."""

    down = held = False

    async def claim(self, *args: Any) -> Any:
        if self.down:
            raise StoreUnavailableError("no route to db-7.internal")
        if self.held:
            return ClaimReply(Verdict.IN_FLIGHT, 1, 7_000, 1, None)
        return await super().claim(*args)


async def refused(case: str, send: Callable[[dict[str, Any]], Any], backend: Troubled) -> Any:
    """What a server answers in one of the cases above."""
    backend.down, backend.held = case == "store is down", case == "in_flight"
    changed: dict[str, Any] = {"context": {"c": 2}}
    if case == "other payload":
        changed["name"] = "other"
    if case == "schema":
        changed["name"] = "a name that is too long"
    return await send(buy(**changed))


def check_refusal(case: str, answer: dict[str, Any]) -> None:
    """The code is there in both places, the context is the current one, and no more is told."""
    error = answer["adcp_error"]
    assert (error["code"], error["recovery"]) == KNOWN[case]
    assert answer["errors"] == [error]
    assert answer["context"] == {"c": 2}
    told = {"code", "message", "recovery"}
    told |= {"in_flight": {"retry_after"}, "schema": {"field"}}.get(case, set())
    assert set(error) == told
    assert error.get("retry_after", 7) == 7
    assert error.get("field", "name") == "name"
    assert "db-7" not in str(answer)


async def test_the_peers_mcp_server_tells_our_codes(peer: Any) -> None:
    """Raised by a wrapped handler, our errors are its own: no middleware is needed."""
    from mcp import Client

    backend = Troubled()
    seller = peer.Seller(backend, on_in_flight="reject")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        app = peer.app_of(seller)
    with serving(app) as base:
        async with Client(f"{base}/mcp") as client:

            async def send(params: dict[str, Any]) -> Any:
                return await client.call_tool("create_media_buy", params)

            assert not (await send(buy(context={"c": 1}))).is_error
            for case in KNOWN:
                result = await refused(case, send, backend)
                assert result.is_error
                assert KNOWN[case][0] in result.content[0].text
                assert "db-7" not in result.content[0].text
                check_refusal(case, result.structured_content)
    assert len(seller.runs) == 1


async def test_the_peers_a2a_server_tells_our_codes(peer: Any) -> None:
    """The same as a failed task with a data part."""
    backend = Troubled()
    seller = peer.Seller(backend, on_in_flight="reject")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        app = peer.a2a_app_of(seller)
    with serving(app) as base:
        async with httpx.AsyncClient(base_url=base, timeout=PATIENCE) as client:

            async def send(params: dict[str, Any]) -> Any:
                data = {"skill": "create_media_buy", "parameters": params}
                parts = [{"kind": "data", "data": data}]
                message = {"role": "user", "messageId": "m", "kind": "message", "parts": parts}
                sent = {"jsonrpc": "2.0", "id": 1, "method": "message/send"}
                reply = await client.post("/", json={**sent, "params": {"message": message}})
                return reply.json()["result"]

            assert (await send(buy(context={"c": 1})))["status"]["state"] == "completed"
            for case in KNOWN:
                task = await refused(case, send, backend)
                assert task["status"]["state"] == "failed"
                parts = task["artifacts"][0]["parts"]
                [data] = [part["data"] for part in parts if part["kind"] == "data"]
                check_refusal(case, data)
    assert len(seller.runs) == 1


async def test_our_errors_are_the_peers_by_name(peer: Any) -> None:
    """Code that catches the package's errors catches ours, which pickle as what they are."""
    seller, alice = peer.Seller(), peer.ToolContext(caller_identity="alice")
    await seller.create_media_buy(peer.types.CreateMediaBuyRequest.model_validate(buy()), alice)
    changed = peer.types.CreateMediaBuyRequest.model_validate(buy(name="other"))
    with pytest.raises(peer.IdempotencyConflictError) as caught:
        await seller.create_media_buy(changed, alice)
    assert isinstance(caught.value, IdempotencyConflictError)
    assert caught.value.error_info[0].recovery == "correctable"
    restored = pickle.loads(pickle.dumps(caught.value))
    assert type(restored) is IdempotencyConflictError
    assert str(restored) == str(caught.value)


# The same words


def test_error_codes_are_those_of_the_protocol(peer: Any) -> None:
    """Our table has every code of AdCP 3.2 and its recovery class, and no other."""
    theirs = {code: info["recovery"] for code, info in peer.STANDARD_ERROR_CODES.items()}
    theirs.pop("NOT_SUPPORTED")  # an extension of the package's own
    assert {code: info["recovery"] for code, info in STANDARD_ERROR_CODES.items()} == theirs


def test_envelopes_and_capabilities_are_valid(peer: Any) -> None:
    """The peer's models take what we send."""
    told = error_envelope(IdempotencyConflictError("op"), {"c": 1})
    error = peer.types.Error.model_validate(told["adcp_error"])
    assert error.code == "IDEMPOTENCY_CONFLICT"
    answer: Any = pydantic.TypeAdapter(peer.types.CreateMediaBuyResponse).validate_python(told)
    assert isinstance(answer, peer.types.CreateMediaBuyErrorResponse)
    store = IdempotencyStore(MemoryBackend(), profile="adcp-3.2")
    ours = capabilities_response(["media_buy"], idempotency=store)
    peer.types.GetAdcpCapabilitiesResponse.model_validate(ours)
    theirs = peer.capabilities(["media_buy"], idempotency=store.capability())
    assert ours["adcp"]["idempotency"] == theirs["adcp"]["idempotency"]
