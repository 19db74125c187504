"""``IdempotencyStore``: scope, fingerprint, replay, conflict, errors, profiles."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import pickle
import threading
import types
from typing import Any

import pydantic
import pytest

from oncekey import (
    BackendMismatchError,
    CachedResponse,
    IdempotencyBackend,
    IdempotencyConflictError,
    IdempotencyExpiredError,
    IdempotencyInFlightError,
    IdempotencyRateLimitedError,
    IdempotencyScopeError,
    IdempotencyStore,
    InvalidKeyError,
    InvalidRequestError,
    MemoryBackend,
    MemoryStore,
    StoreError,
    ToolContext,
    UnsupportedAnswerError,
    WebhookDedupStore,
    canonical_json_sha256,
)
from oncekey.errors import AnswerOmittedError
from oncekey.testing import ManualClock

KEY = "key-0123456789abcdef"
ALICE = ToolContext(caller_identity="alice")


def request(**fields: Any) -> dict[str, Any]:
    return {"idempotency_key": KEY, **fields}


class Seller:
    """A handler with a count of its runs, wrapped by a store."""

    def __init__(self, store: IdempotencyStore) -> None:
        self.runs = 0
        seller = self

        async def create(params: Any, context: Any = None) -> dict[str, Any]:
            seller.runs += 1
            return {"id": f"mb-{seller.runs}", "items": [1, {"deep": 1}]}

        self.create = store.wrap(create)


async def test_a_retry_replays_the_first_answer() -> None:
    """The same key and payload runs once and gives the first answer again."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    first = await seller.create(request(a=1), ALICE)
    again = await seller.create(request(a=1), ALICE)
    assert first == again == {"id": "mb-1", "items": [1, {"deep": 1}]}
    assert seller.runs == 1


async def test_another_payload_conflicts_before_the_handler_runs() -> None:
    """The same key with another payload is a conflict that tells nothing of the first."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    await seller.create(request(secret="s3cret-budget"), ALICE)
    with pytest.raises(IdempotencyConflictError) as caught:
        await seller.create(request(a=2), ALICE)
    assert seller.runs == 1
    shown = str(caught.value) + repr(caught.value.errors) + repr(vars(caught.value))
    assert "s3cret" not in shown
    assert "mb-1" not in shown
    assert caught.value.code == "IDEMPOTENCY_CONFLICT"
    assert caught.value.error_codes == ["IDEMPOTENCY_CONFLICT"]
    assert caught.value.operation == "create"


async def test_callers_do_not_share_keys() -> None:
    """A key of one principal, or of one tenant, means nothing to another."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    contexts = [
        ALICE,
        ToolContext("bob"),
        ToolContext("alice", "t1"),
        ToolContext("alice", "t2"),
        ToolContext("b\x1ec", "a"),
        ToolContext("c", "a\x1eb"),
        ToolContext("a\x1eb\x1ec"),
        ToolContext("a\x1fb"),
        ToolContext("a\x1f1b"),
        ToolContext("a\x1f0b"),
    ]
    answers = [(await seller.create(request(), c))["id"] for c in contexts]
    assert len(set(answers)) == len(contexts)


@pytest.mark.parametrize(
    "context",
    [
        {"caller_identity": "alice"},
        {"principal_id": "alice"},
        {"principal": {"id": "alice"}},
        types.SimpleNamespace(caller_identity="alice"),
        types.SimpleNamespace(principal_id="alice"),
        types.SimpleNamespace(principal=types.SimpleNamespace(id="alice")),
        types.SimpleNamespace(caller_identity="", principal_id="alice"),
    ],
)
async def test_the_principal_is_found_wherever_it_stands(context: Any) -> None:
    """Objects and dicts, under each of the known names, name the same caller."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    await seller.create(request(), ALICE)
    assert (await seller.create(request(), context))["id"] == "mb-1"


async def test_metadata_is_not_part_of_the_payload() -> None:
    """Context and credentials may change between retries; ``ext`` and null may not."""
    seller = Seller(IdempotencyStore(MemoryBackend()))

    def push(credentials: str, url: str = "u") -> dict[str, Any]:
        return {"url": url, "authentication": {"credentials": credentials}}

    await seller.create(request(context={"c": 1}, push_notification_config=push("x")), ALICE)
    retry = request(context={"c": 2}, governance_context="g", push_notification_config=push("y"))
    await seller.create(retry, ALICE)
    assert seller.runs == 1
    for changed in (
        {"ext": {}},
        {"a": None},
        {"push_notification_config": push("x", "other")},
    ):
        with pytest.raises(IdempotencyConflictError):
            await seller.create({**retry, **changed}, ALICE)


async def test_the_input_is_never_changed() -> None:
    """The handler gets the very params that came in, unchanged."""
    seen: list[Any] = []
    store = IdempotencyStore(MemoryBackend())

    @store.wrap
    async def create(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        seen.append(params)
        return {}

    params = request(context={"c": 1})
    copy = {**params, "context": dict(params["context"])}
    await create(params, ALICE)
    assert params == copy
    assert seen[0] is params


async def test_answers_are_independent_objects() -> None:
    """A caller that changes what it got changes nobody else's answer."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    first = await seller.create(request(), ALICE)
    first["items"][1]["deep"] = "poison"
    second = await seller.create(request(), ALICE)
    second["items"].append("poison")
    third = await seller.create(request(), ALICE)
    assert third == {"id": "mb-1", "items": [1, {"deep": 1}]}


class Buy(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    idempotency_key: str
    budget: float | None = None


class Bought(pydantic.BaseModel):
    id: str
    at: pydantic.AwareDatetime | None = None


@pytest.mark.parametrize("annotated", [True, False])
async def test_models_come_back_as_models(annotated: bool) -> None:
    """A Pydantic answer is given back as that type, also without an annotation."""
    store = IdempotencyStore(MemoryBackend())

    async def create(params: Buy, context: Any = None) -> Any:
        return Bought(id="mb", at="2026-01-01T00:00:00Z")  # type: ignore[arg-type]

    if annotated:
        create.__annotations__["return"] = Bought
    wrapped = store.wrap(create)
    first = await wrapped(Buy(idempotency_key=KEY), ALICE)
    again = await wrapped(Buy(idempotency_key=KEY), ALICE)
    assert type(again) is Bought
    assert again == first
    assert again is not first


async def test_null_and_missing_differ_in_models() -> None:
    """A field set to null is another payload than a field that was left out."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    await seller.create(Buy(idempotency_key=KEY), ALICE)
    with pytest.raises(IdempotencyConflictError):
        await seller.create(Buy(idempotency_key=KEY, budget=None), ALICE)
    await seller.create({"idempotency_key": KEY}, ALICE)
    assert seller.runs == 1


async def test_methods_functions_and_keywords_work() -> None:
    """Methods, plain functions, extra arguments and keywords all find params and context."""
    store = IdempotencyStore(MemoryBackend())

    class Agent:
        runs = 0

        @store.wrap
        async def create(
            self, params: dict[str, Any], context: Any = None, *args: Any, **kwargs: Any
        ) -> dict[str, Any]:
            """Creates."""
            self.runs += 1
            return {"args": list(args), "kwargs": kwargs}

    agent = Agent()
    first = await agent.create(request(), ALICE, "x", y=1)
    assert first == {"args": ["x"], "kwargs": {"y": 1}}
    assert await agent.create(params=request(), context=ALICE) == first
    assert agent.runs == 1
    assert Agent.create.__doc__ == "Creates."
    assert Agent.create.__name__ == "create"
    assert inspect.iscoroutinefunction(Agent.create)

    @store.wrap
    async def with_ctx(request_: dict[str, Any], ctx: Any) -> int:
        return 1

    assert await with_ctx(request(), ctx=ToolContext("carol")) == 1


async def test_a_partial_handler_works() -> None:
    """A ``functools.partial`` of an async function is an async handler."""
    store = IdempotencyStore(MemoryBackend())

    async def create(extra: int, params: dict[str, Any], context: Any = None) -> dict[str, int]:
        return {"extra": extra}

    wrapped = store.wrap(functools.partial(create, 7))
    assert await wrapped(request(), ALICE) == {"extra": 7}


def test_a_sync_handler_gives_a_sync_function() -> None:
    """Above a sync function, with a sync backend, wrap gives a sync function."""
    store = IdempotencyStore(MemoryStore())
    runs = []

    @store.wrap
    def create(params: dict[str, Any], context: Any = None) -> dict[str, int]:
        runs.append(1)
        return {"n": len(runs)}

    assert create(request(), ALICE) == create(request(), ALICE) == {"n": 1}


def test_a_mismatch_is_an_error_at_decoration() -> None:
    """Sync above async, or the other way round, fails at decoration and says what to pass."""

    async def asynchronous(params: Any, context: Any = None) -> None: ...
    def synchronous(params: Any, context: Any = None) -> None: ...

    with pytest.raises(BackendMismatchError, match=r"AsyncMemoryStore\(\)"):
        IdempotencyStore(MemoryStore()).wrap(asynchronous)
    with pytest.raises(BackendMismatchError, match=r"MemoryStore\(\)"):
        IdempotencyStore(MemoryBackend()).wrap(synchronous)
    with pytest.raises(BackendMismatchError, match="aconnect"):
        IdempotencyStore(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", ["raise", {"errors": [{"code": "X"}]}, {"adcp_error": {}}])
async def test_failures_leave_the_key_free(outcome: Any) -> None:
    """An exception or a returned error envelope is not stored; the next try runs."""
    store = IdempotencyStore(MemoryBackend())
    runs = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> Any:
        runs.append(1)
        if len(runs) == 1:
            if outcome == "raise":
                raise RuntimeError("down")
            return outcome
        return {"ok": True}

    if outcome == "raise":
        with pytest.raises(RuntimeError, match="down"):
            await create(request(), ALICE)
    else:
        assert await create(request(), ALICE) == outcome
    assert await create(request(), ALICE) == {"ok": True}
    assert await create(request(), ALICE) == {"ok": True}
    assert len(runs) == 2


async def test_an_empty_error_list_is_a_success() -> None:
    """``errors: []`` is an answer like any other."""
    store = IdempotencyStore(MemoryBackend())
    runs = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> Any:
        runs.append(1)
        return {"errors": [], "id": len(runs)}

    assert await create(request(), ALICE) == await create(request(), ALICE)
    assert len(runs) == 1


async def test_without_a_principal_the_handler_runs_unguarded_with_one_warning() -> None:
    """Classic: no caller means no dedup, and a warning once for each store."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    with pytest.warns(UserWarning, match="caller_identity") as caught:
        await seller.create(request())
        await seller.create(request())
    assert len(caught) == 1
    assert seller.runs == 2


async def test_without_a_principal_strict_refuses() -> None:
    """``require_principal`` refuses a key that can't be scoped."""
    seller = Seller(IdempotencyStore(MemoryBackend(), require_principal=True))
    with pytest.raises(IdempotencyScopeError) as caught:
        await seller.create(request())
    assert caught.value.code == "INVALID_REQUEST"
    assert seller.runs == 0


@pytest.mark.parametrize("key", ["", 7, b"key-0123456789abcdef"])
async def test_a_key_that_is_no_text_runs_unguarded_with_one_warning(key: object) -> None:
    """Classic: what can't be a key guards nothing, and a warning says so once for each store."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    with pytest.warns(UserWarning, match="strict_keys=True") as caught:
        await seller.create({"idempotency_key": key}, ALICE)
        await seller.create({"idempotency_key": key}, ALICE)
    assert len(caught) == 1
    assert seller.runs == 2


@pytest.mark.parametrize("params", [{}, {"idempotency_key": None}])
async def test_without_a_key_the_handler_runs_unguarded(params: dict[str, Any]) -> None:
    """Classic: requests without a key run each time."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    await seller.create(params, ALICE)
    await seller.create(params, ALICE)
    assert seller.runs == 2


@pytest.mark.parametrize("key", ["x" * 256, "nul\0nul-nul-nul-nul", "\ud800" * 20])
async def test_a_key_that_cant_be_stored_is_an_error(key: str) -> None:
    """Long keys, NUL and half surrogates are refused before the handler runs."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    with pytest.raises(InvalidKeyError) as caught:
        await seller.create({"idempotency_key": key}, ALICE)
    assert isinstance(caught.value, ValueError)
    assert seller.runs == 0
    await seller.create({"idempotency_key": "x" * 255}, ALICE)
    assert seller.runs == 1


@pytest.mark.parametrize("ttl", [3599, 604801, 0, -1])
def test_ttl_bounds_are_named(ttl: int) -> None:
    """A TTL out of bounds is a ValueError that names the bounds and the value."""
    with pytest.raises(ValueError, match=rf"\[3600, 604800\].*{ttl}"):
        IdempotencyStore(MemoryBackend(), ttl_seconds=ttl)


@pytest.mark.parametrize("ttl", [3600, 604800])
def test_ttl_bounds_are_inclusive(ttl: int) -> None:
    """Both ends of the range are allowed, and the capability states the TTL."""
    store = IdempotencyStore(MemoryBackend(), ttl)
    assert store.capability() == {"supported": True, "replay_ttl_seconds": ttl}


def test_capability_states_the_lease_where_it_is_set() -> None:
    """``in_flight_max_seconds`` is declared under adcp-3.2 or when it was set."""
    assert (
        "in_flight_max_seconds"
        in IdempotencyStore(MemoryBackend(), profile="adcp-3.2").capability()
    )
    store = IdempotencyStore(MemoryBackend(), in_flight_max_seconds=120)
    assert store.capability()["in_flight_max_seconds"] == 120


async def test_expiry_is_the_store_clocks(clock: ManualClock) -> None:
    """Classic: after the TTL the key is fresh; the backend's or the store's clock decides."""
    for store in (
        IdempotencyStore(MemoryBackend(clock=clock), 3600),
        IdempotencyStore(MemoryBackend(), 3600, clock=clock),
        IdempotencyStore(MemoryBackend(clock=clock), 3600, clock=clock),
    ):
        seller = Seller(store)
        await seller.create(request(), ALICE)
        clock.advance(3599.9)
        await seller.create(request(), ALICE)
        assert seller.runs == 1
        clock.advance(0.2)
        await seller.create(request(), ALICE)
        assert seller.runs == 2


async def test_the_backend_sees_the_same_records() -> None:
    """The get and put of the backend work on the very records that wrap writes and reads."""
    backend = MemoryBackend()
    seller = Seller(IdempotencyStore(backend))
    answer = await seller.create(request(a=1), ALICE)
    entry = await backend.get("alice", KEY)
    assert entry is not None
    assert entry.response == answer
    assert entry.payload_hash == canonical_json_sha256(request(a=1))
    other = dataclasses.replace(entry, response={"id": "planted"})
    await backend.put("bob", KEY, other)
    assert await seller.create(request(a=1), ToolContext("bob")) == {"id": "planted"}
    assert seller.runs == 1
    assert await backend.get("nobody", KEY) is None
    assert await backend.delete_expired(entry.expires_at_epoch + 1) == 2
    await backend.clear()
    assert await backend.get("bob", KEY) is None


async def test_a_custom_hash_decides_equality() -> None:
    """``hash_fn`` replaces the fingerprint, whatever text it gives."""
    backend = MemoryBackend()
    store = IdempotencyStore(backend, hash_fn=lambda params: "constant")
    seller = Seller(store)
    await seller.create(request(a=1), ALICE)
    await seller.create(request(a=2), ALICE)
    assert seller.runs == 1
    entry = await backend.get("alice", KEY)
    assert entry is not None
    assert entry.payload_hash == "constant"


class Failing(MemoryBackend):
    """Can claim but not record."""

    async def complete(self, *args: Any) -> bool:
        raise StoreError("disk gone")


async def test_a_store_failure_after_success_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The handler's answer is returned and a WARNING says so, without key or principal."""
    seller = Seller(IdempotencyStore(Failing()))
    with caplog.at_level(logging.WARNING, logger="oncekey"):
        answer = await seller.create(request(), ToolContext("principal-name"))
    assert answer["id"] == "mb-1"
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "could not be recorded" in record.getMessage()
    assert KEY[:8] not in caplog.text
    assert "principal-name" not in caplog.text


async def test_a_store_failure_after_success_raises_when_strict() -> None:
    """``raise_on_persist_error`` raises instead."""
    seller = Seller(IdempotencyStore(Failing(), raise_on_persist_error=True))
    with pytest.raises(StoreError, match="disk gone"):
        await seller.create(request(), ALICE)


async def test_a_store_failure_before_the_handler_is_an_error() -> None:
    """If the claim fails, the handler does not run."""

    class Down(MemoryBackend):
        async def claim(self, *args: Any) -> Any:
            raise StoreError("unreachable")

    seller = Seller(IdempotencyStore(Down()))
    with pytest.raises(StoreError, match="unreachable"):
        await seller.create(request(), ALICE)
    assert seller.runs == 0


async def test_concurrent_duplicates_wait_and_replay() -> None:
    """Identical concurrent calls run once and all get the first answer."""
    store = IdempotencyStore(MemoryBackend())
    gate = asyncio.Event()
    runs = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> Any:
        runs.append(1)
        await gate.wait()
        return {"n": len(runs)}

    tasks = [asyncio.create_task(create(request(), ALICE)) for _ in range(50)]
    while not runs:
        await asyncio.sleep(0)
    with pytest.raises(IdempotencyConflictError):
        await create(request(other=1), ALICE)
    gate.set()
    assert await asyncio.gather(*tasks) == [{"n": 1}] * 50


async def test_in_flight_is_refused_with_the_remaining_lease() -> None:
    """``on_in_flight="reject"`` tells the copy when the lease ends."""
    clock = ManualClock()
    store = IdempotencyStore(MemoryBackend(clock=clock), on_in_flight="reject", lease_seconds=30)
    gate, inside = asyncio.Event(), asyncio.Event()

    @store.wrap
    async def create(params: Any, context: Any = None) -> Any:
        inside.set()
        await gate.wait()
        return {}

    task = asyncio.create_task(create(request(), ALICE))
    await inside.wait()
    clock.advance(10.5)
    with pytest.raises(IdempotencyInFlightError) as caught:
        await create(request(), ALICE)
    assert caught.value.retry_after == 20
    assert caught.value.retryable
    gate.set()
    assert await task == {}


def test_sync_duplicates_wait_for_the_first() -> None:
    """Threads that call with one key run the handler once."""
    store = IdempotencyStore(MemoryStore())
    runs = []
    gate = threading.Event()

    @store.wrap
    def create(params: Any, context: Any = None) -> Any:
        runs.append(1)
        gate.wait()
        return {"n": len(runs)}

    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(create(request(), ALICE))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert answers == [{"n": 1}] * 8


async def test_a_declared_answer_that_cant_be_stored_fails_before_the_effect() -> None:
    """A return type that can't be given back is refused at the first call, before the handler."""
    store = IdempotencyStore(MemoryBackend())
    runs = []

    class Odd: ...

    @store.wrap
    async def create(params: Any, context: Any = None) -> Odd:
        runs.append(1)
        return Odd()

    with pytest.raises(UnsupportedAnswerError, match="Odd"):
        await create(request(), ALICE)
    assert not runs


async def test_an_undeclared_answer_that_cant_be_stored_never_runs_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Done is done: the answer reaches the first caller, copies learn that it was not kept."""
    store = IdempotencyStore(MemoryBackend())
    runs = []

    @store.wrap
    async def create(params, context=None):  # type: ignore[no-untyped-def]
        runs.append(1)
        return {"when": {1, 2}}

    assert await create(request(), ALICE) == {"when": {1, 2}}
    assert "can't be replayed" in caplog.text
    with pytest.raises(AnswerOmittedError, match="look the result up"):
        await create(request(), ALICE)
    assert len(runs) == 1


async def test_an_oversized_answer_is_done_but_not_kept() -> None:
    """An answer over the limit completes without its body and is never run again."""
    store = IdempotencyStore(MemoryBackend(), max_answer_bytes=100)
    runs = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, str]:
        runs.append(1)
        return {"big": "x" * 200}

    assert await create(request(), ALICE) == {"big": "x" * 200}
    with pytest.raises(AnswerOmittedError) as caught:
        await create(request(), ALICE)
    assert caught.value.digest is not None
    assert len(runs) == 1


class AdCP:
    """Handlers under the adcp-3.2 profile."""

    def __init__(self, clock: ManualClock, **options: Any) -> None:
        self.backend = MemoryBackend(clock=clock)
        self.store = IdempotencyStore(self.backend, profile="adcp-3.2", clock=clock, **options)
        self.runs = 0

        async def create_media_buy(params: Any, context: Any = None) -> dict[str, Any]:
            self.runs += 1
            return {"media_buy_id": f"mb-{self.runs}", "context": params.get("context")}

        async def update_media_buy(params: Any, context: Any = None) -> dict[str, Any]:
            self.runs += 1
            return {"updated": self.runs}

        self.create = self.store.wrap(create_media_buy)
        self.update = self.store.wrap(update_media_buy)


async def test_adcp_marks_replays_and_echoes_the_current_context(clock: ManualClock) -> None:
    """Replays carry ``replayed`` and the context of the request they answer."""
    adcp = AdCP(clock)
    first = await adcp.create(request(context={"id": 1}), ALICE)
    assert first == {"media_buy_id": "mb-1", "context": {"id": 1}}
    again = await adcp.create(request(context={"id": 2}), ALICE)
    assert again == {"media_buy_id": "mb-1", "context": {"id": 2}, "replayed": True}
    bare = await adcp.create(request(), ALICE)
    assert bare == {"media_buy_id": "mb-1", "replayed": True}


async def test_adcp_marks_models_that_have_the_fields(clock: ManualClock) -> None:
    """A Pydantic answer gets the marks where it has the fields for them."""
    store = IdempotencyStore(MemoryBackend(clock=clock), profile="adcp-3.2")

    class Answer(pydantic.BaseModel):
        id: str
        replayed: bool | None = None
        context: dict[str, Any] | None = None

    async def create(params: Any, context: Any = None) -> Any:
        return Answer(id="a", context=params["context"])

    create.__annotations__["return"] = Answer
    wrapped = store.wrap(create)
    await wrapped(request(context={"c": 1}), ALICE)
    again = await wrapped(request(context={"c": 2}), ALICE)
    assert again == Answer(id="a", replayed=True, context={"c": 2})


async def test_adcp_needs_a_proper_key(clock: ManualClock) -> None:
    """A missing or malformed key is an INVALID_REQUEST before anything is looked up."""
    adcp = AdCP(clock)
    for key in (None, "", "short", "x" * 256, "white space in the key", "key-0123456789abcdef\n"):
        with pytest.raises(InvalidKeyError) as caught:
            await adcp.create({"idempotency_key": key}, ALICE)
        assert caught.value.code == "INVALID_REQUEST"
    assert adcp.runs == 0
    assert await adcp.backend._size() == 0


async def test_adcp_binds_the_key_to_the_tool(clock: ManualClock) -> None:
    """The same key on another tool is another payload."""
    adcp = AdCP(clock)
    await adcp.create(request(), ALICE)
    with pytest.raises(IdempotencyConflictError):
        await adcp.update(request(), ALICE)


async def test_adcp_scopes_by_account(clock: ManualClock) -> None:
    """Accounts of one agent have keys of their own."""
    adcp = AdCP(clock)
    accounts: list[Any] = [
        None,
        {"account_id": "a1"},
        {"account_id": "a2"},
        {"brand": {"domain": "x.example"}, "operator": "op"},
        {"brand": {"domain": "y.example"}, "operator": "op"},
    ]
    ids = []
    for account in accounts:
        params = request() if account is None else request(account=account)
        ids.append((await adcp.create(params, ALICE))["media_buy_id"])
        assert (await adcp.create(params, ALICE))["media_buy_id"] == ids[-1]
    assert len(set(ids)) == len(accounts)


async def test_adcp_refuses_expired_keys_after_the_skew(clock: ManualClock) -> None:
    """Up to 60 s past the window a key replays, then it is expired, then forgotten."""
    adcp = AdCP(clock, ttl_seconds=3600)
    await adcp.create(request(), ALICE)
    clock.advance(3600 + 59)
    assert (await adcp.create(request(), ALICE))["replayed"] is True
    clock.advance(2)
    for _ in range(2):
        with pytest.raises(IdempotencyExpiredError) as caught:
            await adcp.create(request(), ALICE)
    assert caught.value.recovery == "correctable"
    assert adcp.runs == 1
    clock.advance(604_800)
    await adcp.create(request(), ALICE)
    assert adcp.runs == 2


async def test_adcp_limits_new_keys(clock: ManualClock) -> None:
    """Over 3,000 new keys in ten seconds are refused; replays and other callers are not."""
    adcp = AdCP(clock)

    def numbered(number: int) -> dict[str, Any]:
        return {"idempotency_key": f"key-{number:016d}"}

    for number in range(3000):
        await adcp.create(numbered(number), ALICE)
    with pytest.raises(IdempotencyRateLimitedError) as caught:
        await adcp.create(numbered(3000), ALICE)
    assert 1 <= (caught.value.retry_after or 0) <= 10
    assert isinstance(caught.value.retry_after, int)
    assert (await adcp.create(numbered(7), ALICE))["replayed"] is True
    await adcp.create(numbered(3000), ToolContext("bob"))
    clock.advance(caught.value.retry_after or 0)
    for number in range(3000, 3600):
        await adcp.create(numbered(number), ALICE)
    with pytest.raises(IdempotencyRateLimitedError) as caught:
        await adcp.create(numbered(3600), ALICE)
    assert 40 <= (caught.value.retry_after or 0) <= 60
    clock.advance(caught.value.retry_after or 0)
    await adcp.create(numbered(3600), ALICE)


async def test_each_rule_can_be_switched_alone(clock: ManualClock) -> None:
    """Classic with one rule on, and adcp-3.2 with one rule off."""
    classic = Seller(IdempotencyStore(MemoryBackend(clock=clock), mark_replays=True))
    await classic.create(request(), ALICE)
    assert (await classic.create(request(), ALICE))["replayed"] is True
    adcp = AdCP(clock, bind_operation=False)
    await adcp.create(request(), ALICE)
    assert (await adcp.update(request(), ALICE))["media_buy_id"] == "mb-1"


def test_unknown_options_are_named() -> None:
    """A profile or policy that does not exist is an error that lists what does."""
    with pytest.raises(ValueError, match=r"classic, adcp-3\.2"):
        IdempotencyStore(MemoryBackend(), profile="adcp")
    with pytest.raises(ValueError, match="'wait' or 'reject'"):
        IdempotencyStore(MemoryBackend(), on_in_flight="queue")  # type: ignore[arg-type]


class ThirdParty(IdempotencyBackend):
    """A backend with the three methods and no more."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], CachedResponse] = {}

    async def get(self, scope_key: str, key: str) -> CachedResponse | None:
        await asyncio.sleep(0)
        return self.entries.get((scope_key, key))

    async def put(self, scope_key: str, key: str, entry: CachedResponse) -> None:
        await asyncio.sleep(0)
        self.entries[scope_key, key] = entry

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        return 0


async def test_a_third_party_backend_works_with_one_warning() -> None:
    """Three methods are enough; one warning says which guarantee is weaker."""
    backend = ThirdParty()
    with pytest.warns(UserWarning, match="within this process only") as caught:
        store = IdempotencyStore(backend)
    assert len(caught) == 1
    runs = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, int]:
        runs.append(1)
        await asyncio.sleep(0)
        return {"n": len(runs)}

    answers = await asyncio.gather(*(create(request(), ALICE) for _ in range(32)))
    assert answers == [{"n": 1}] * 32
    assert await create(request(), ALICE) == {"n": 1}
    with pytest.raises(IdempotencyConflictError):
        await create(request(x=1), ALICE)
    assert list(backend.entries) == [("alice", KEY)]


async def test_a_third_party_backend_keeps_typed_and_plain_answers() -> None:
    """Models, lists and omitted answers replay through a get/put backend as well."""
    with pytest.warns(UserWarning, match="get and put"):
        store = IdempotencyStore(ThirdParty(), max_answer_bytes=200)

    @store.wrap
    async def model(params: Any, context: Any = None) -> Bought:
        return Bought(id="x")

    @store.wrap
    async def listed(params: Any, context: Any = None) -> list[int]:
        return [1, 2]

    @store.wrap
    async def big(params: Any, context: Any = None) -> str:
        return "x" * 300

    for handler, key, want in ((model, "k1", Bought(id="x")), (listed, "k2", [1, 2])):
        for _ in range(2):
            assert await handler({"idempotency_key": key}, ALICE) == want
    assert await big({"idempotency_key": "k3"}, ALICE) == "x" * 300
    with pytest.raises(AnswerOmittedError):
        await big({"idempotency_key": "k3"}, ALICE)


async def test_a_third_party_put_failure_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A put that fails after the handler succeeded is logged, and the answer returned."""

    class Broken(ThirdParty):
        async def put(self, scope_key: str, key: str, entry: CachedResponse) -> None:
            raise ConnectionError("no route")

    with pytest.warns(UserWarning, match="get and put"):
        seller = Seller(IdempotencyStore(Broken()))
    assert (await seller.create(request(), ALICE))["id"] == "mb-1"
    assert "could not be recorded" in caplog.text


async def test_a_third_party_backend_dedups_webhooks() -> None:
    """check_and_record on three methods: once per sender and key, apart from requests."""
    backend = ThirdParty()
    with pytest.warns(UserWarning, match="get and put"):
        dedup = WebhookDedupStore(backend)
    seen = await asyncio.gather(*(dedup.check_and_record("s", "e") for _ in range(20)))
    assert sum(seen) == 1
    assert await dedup.check_and_record("s2", "e") is True
    with pytest.warns(UserWarning, match="get and put"):
        seller = Seller(IdempotencyStore(backend))
    for scope, key in list(backend.entries):
        await seller.create({"idempotency_key": key}, ToolContext(scope.strip("\x1e")))
    assert seller.runs == 2


async def test_stores_on_one_third_party_backend_share_its_claims() -> None:
    """Two stores over one get/put backend run a key once in this process."""
    backend = ThirdParty()
    with pytest.warns(UserWarning, match="get and put"):
        sellers = [Seller(IdempotencyStore(backend)) for _ in range(2)]
    await asyncio.gather(*(seller.create(request(), ALICE) for seller in sellers for _ in range(8)))
    assert sum(seller.runs for seller in sellers) == 1


async def test_overridden_get_and_put_are_used() -> None:
    """A subclass of a full store with its own get and put is taken at its word, with a warning."""
    calls = []

    class Watched(MemoryBackend):
        async def get(self, scope_key: str, key: str) -> CachedResponse | None:
            calls.append("get")
            return await super().get(scope_key, key)

        async def put(self, scope_key: str, key: str, entry: CachedResponse) -> None:
            calls.append("put")
            await super().put(scope_key, key, entry)

    with pytest.warns(UserWarning, match="within this process only"):
        seller = Seller(IdempotencyStore(Watched()))
    assert await seller.create(request(), ALICE) == await seller.create(request(), ALICE)
    assert seller.runs == 1
    assert "put" in calls


async def test_a_failed_put_frees_the_key(caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing could be kept, a retry runs at once and not after the lease."""

    class Broken(ThirdParty):
        async def put(self, scope_key: str, key: str, entry: CachedResponse) -> None:
            raise ConnectionError("no route")

    with pytest.warns(UserWarning, match="get and put"):
        seller = Seller(IdempotencyStore(Broken(), on_in_flight="reject"))
    await seller.create(request(), ALICE)
    await seller.create(request(), ALICE)
    assert seller.runs == 2


async def test_methods_with_another_name_for_self_are_guarded() -> None:
    """The request is found behind a first argument of any name."""
    store = IdempotencyStore(MemoryBackend())

    class Agent:
        runs = 0

        @store.wrap
        async def create(_self, req: Any, context: Any = None) -> int:
            _self.runs += 1
            return _self.runs

    agent = Agent()
    assert await agent.create(request(), ALICE) == await agent.create(request(), ALICE) == 1


async def test_secrets_are_compared_and_not_their_masks() -> None:
    """Two secrets that look alike when masked are two payloads."""

    class Card(pydantic.BaseModel):
        idempotency_key: str
        cards: list[pydantic.SecretStr]

    seller = Seller(IdempotencyStore(MemoryBackend()))

    def pay(number: str) -> Card:
        return Card(idempotency_key=KEY, cards=[pydantic.SecretStr(number)])

    await seller.create(pay("4111"), ALICE)
    await seller.create(pay("4111"), ALICE)
    assert seller.runs == 1
    with pytest.raises(IdempotencyConflictError):
        await seller.create(pay("5222"), ALICE)


async def test_failing_and_concurrent_calls_count_as_new_keys(clock: ManualClock) -> None:
    """The limit holds for handlers that fail and for calls that are all in flight at once."""
    store = IdempotencyStore(MemoryBackend(clock=clock), profile="adcp-3.2", clock=clock)
    gate = asyncio.Event()

    @store.wrap
    async def create(params: Any, context: Any = None) -> dict[str, int]:
        await gate.wait()
        raise RuntimeError("down")

    calls = [
        asyncio.create_task(create({"idempotency_key": f"key-{n:016d}"}, ALICE))
        for n in range(3100)
    ]
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    failed = [result for result in results if type(result) is RuntimeError]
    limited = [result for result in results if isinstance(result, IdempotencyRateLimitedError)]
    assert (len(failed), len(limited)) == (3000, 100)


@pytest.mark.parametrize("decorator", [staticmethod, classmethod])
def test_the_order_of_decorators_is_named(decorator: Any) -> None:
    """wrap above @staticmethod or @classmethod says which goes where."""

    async def create(params: Any, context: Any = None) -> None: ...

    with pytest.raises(BackendMismatchError, match="closest to the function"):
        IdempotencyStore(MemoryBackend()).wrap(decorator(create))


async def test_odd_principals_and_requests_are_named() -> None:
    """A principal that is no text, or a request that is no object, is a typed error."""
    seller = Seller(IdempotencyStore(MemoryBackend()))
    with pytest.raises(InvalidKeyError, match="caller_identity"):
        await seller.create(request(), ToolContext("\ud800"))
    with pytest.raises(InvalidRequestError, match="a dict or a Pydantic model"):
        await seller.create(7, ALICE)


@pytest.mark.parametrize(
    "error",
    [
        IdempotencyConflictError("op"),
        IdempotencyInFlightError("op", 7),
        IdempotencyScopeError("op"),
        AnswerOmittedError("gone", "abc"),
        InvalidKeyError("bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: Exception) -> None:
    """Errors cross process boundaries as they are."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
