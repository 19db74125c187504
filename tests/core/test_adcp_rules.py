"""``IdempotencyStore`` in the profile ``adcp-3.2``: each rule of the protocol by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    OncekeyError,
    PolicyError,
    StoreError,
    ToolContext,
)
from oncekey.adcp import profile
from oncekey.testing import ManualClock

KEY = "key-0123456789abcdef"
ALICE = ToolContext(caller_identity="alice")
BRAND = {"brand": {"domain": "acme.example"}, "operator": "agency.example"}


def request(**fields: Any) -> dict[str, Any]:
    return {"idempotency_key": KEY, **fields}


class Counted(MemoryBackend):
    """Counts what is asked of the store."""

    calls = 0

    async def claim(self, *args: Any) -> Any:
        self.calls += 1
        return await super().claim(*args)

    async def read(self, *args: Any) -> Any:
        self.calls += 1
        return await super().read(*args)


class Tool:
    """A handler that gives what it is told to, and a count of its runs."""

    def __init__(self, store: IdempotencyStore, name: str = "create_media_buy", **how: Any) -> None:
        self.runs = 0
        self.answer: Any = None

        async def handler(params: Any, context: Any = None) -> Any:
            self.runs += 1
            if isinstance(self.answer, Exception):
                raise self.answer
            return {"id": self.runs} if self.answer is None else self.answer

        self.call: Callable[..., Any] = store.wrap(operation=name, **how)(handler)


def adcp(clock: ManualClock | None = None, **options: Any) -> IdempotencyStore:
    backend = options.pop("backend", None) or MemoryBackend()
    if clock is not None:
        options["clock"] = clock
    return IdempotencyStore(backend, profile="adcp-3.2", **options)


class Package(pydantic.BaseModel):
    budget: float


class Buy(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    brand: str
    packages: list[Package]


# Rule 1: the schema first


async def test_a_malformed_request_never_touches_the_store() -> None:
    """What the schema refuses is refused before anything is looked up, and the handler rests."""
    backend = Counted()
    tool = Tool(adcp(backend=backend), validate=Buy)
    secret = "4111-1111"
    with pytest.raises(InvalidRequestError) as caught:
        await tool.call(request(brand=7, packages=[{"budget": secret}], context={"c": 1}), ALICE)
    assert caught.value.code == "INVALID_REQUEST"
    assert caught.value.field == "brand"
    assert "packages[0].budget" in str(caught.value)
    assert caught.value.context == {"c": 1}
    assert secret not in str(caught.value)
    assert caught.value.__cause__ is None
    assert (tool.runs, backend.calls) == (0, 0)
    await tool.call(request(brand="b", packages=[{"budget": 1}]), ALICE)
    assert (tool.runs, backend.calls) == (1, 1)


async def test_the_key_is_looked_at_before_the_schema() -> None:
    """A bad key and a bad payload: the key is what is named."""
    tool = Tool(adcp(), validate=Buy)
    with pytest.raises(InvalidKeyError) as caught:
        await tool.call({"idempotency_key": "short", "context": {"c": 1}}, ALICE)
    assert caught.value.field == "idempotency_key"
    assert caught.value.context == {"c": 1}


async def test_a_function_can_be_the_schema() -> None:
    """A ValueError or TypeError of the function refuses; an error of ours passes as it is."""

    def check(params: dict[str, Any]) -> None:
        if "brand" not in params:
            raise ValueError("brand is required")
        if params["brand"] == "ours":
            raise InvalidKeyError("a key of ours")

    tool = Tool(adcp(), validate=check)
    with pytest.raises(InvalidRequestError, match="brand is required"):
        await tool.call(request(), ALICE)
    with pytest.raises(InvalidKeyError, match="a key of ours"):
        await tool.call(request(brand="ours"), ALICE)
    await tool.call(request(brand="b"), ALICE)
    assert tool.runs == 1


async def test_requests_without_a_key_are_checked_too() -> None:
    """Classic: what runs unguarded has passed its schema all the same."""
    tool = Tool(IdempotencyStore(MemoryBackend()), validate=Buy)
    with pytest.raises(InvalidRequestError):
        await tool.call({}, ALICE)
    assert tool.runs == 0


async def test_many_faults_are_counted() -> None:
    """Three are named, the rest is a number."""
    tool = Tool(adcp(), validate=Buy)
    packages = [{"budget": "x"}] * 5
    with pytest.raises(InvalidRequestError, match=r"\(and 3 more\)"):
        await tool.call(request(packages=packages), ALICE)


# Rules 2 and 3: only success is stored


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "failed"},
        {"status": "rejected", "reason": "policy"},
        {"status": "canceled"},
        {"status": "input-required"},
        {"errors": [{"code": "BUDGET_TOO_LOW"}]},
        {"adcp_error": {"code": "BUDGET_TOO_LOW"}},
        RuntimeError("down"),
    ],
    ids=repr,
)
async def test_what_failed_runs_again(answer: Any) -> None:
    """An error of any kind is given to its caller and leaves the key free."""
    tool = Tool(adcp())
    tool.answer = answer
    for _ in range(2):
        if isinstance(answer, Exception):
            with pytest.raises(RuntimeError, match="down"):
                await tool.call(request(), ALICE)
        else:
            assert await tool.call(request(context={"c": 1}), ALICE) == {
                **answer,
                "context": {"c": 1},
            }
    tool.answer = None
    assert (await tool.call(request(), ALICE))["id"] == 3
    assert (await tool.call(request(), ALICE))["replayed"] is True


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "completed"},
        {"status": "submitted", "task_id": "t", "errors": [{"code": "SLOW", "message": "m"}]},
        {"status": "completed", "errors": [{"code": "SLOW", "severity": "warning"}]},
    ],
    ids=repr,
)
async def test_success_is_replayed(answer: Any) -> None:
    """What was done, or taken on, is replayed, with its warnings."""
    tool = Tool(adcp())
    tool.answer = answer
    assert await tool.call(request(), ALICE) == answer
    assert await tool.call(request(), ALICE) == {**answer, "replayed": True}
    assert tool.runs == 1


async def test_a_stored_answer_never_says_that_it_is_a_replay() -> None:
    """``replayed`` is added to what goes out, and is not in the store."""
    backend = MemoryBackend()
    tool = Tool(adcp(backend=backend))
    await tool.call(request(), ALICE)
    await tool.call(request(), ALICE)
    stored = await backend.get("alice", KEY)
    assert stored is not None
    assert stored.response == {"id": 1}


# Rule 6: expired, and what can't be told


class GetAndPut(IdempotencyBackend):
    async def get(self, scope_key: str, key: str) -> CachedResponse | None:
        return None

    async def put(self, scope_key: str, key: str, entry: CachedResponse) -> None: ...

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        return 0


def test_a_backend_that_forgets_is_refused() -> None:
    """Where a dropped key looks like a new one, the profile is refused, or the rule left out."""
    with pytest.warns(UserWarning, match="get and put"):
        with pytest.raises(BackendMismatchError, match="reject_expired=False"):
            IdempotencyStore(GetAndPut(), profile="adcp-3.2")
    with pytest.warns(UserWarning, match="get and put"):
        IdempotencyStore(GetAndPut(), profile="adcp-3.2", reject_expired=False)


@pytest.mark.usefixtures("small_limits")
async def test_a_store_that_cant_answer_stops_the_handler(clock: ManualClock) -> None:
    """No answer from the store is never taken for "never seen", also where limits ask it."""

    class Down(MemoryBackend):
        async def read(self, *args: Any) -> Any:
            raise StoreError("unreachable")

    tool = Tool(adcp(clock, backend=Down(clock=clock)))
    await fill(tool, 30)
    with pytest.raises(StoreError, match="unreachable") as caught:
        await tool.call(request(context={"c": 1}), ALICE)
    assert caught.value.context == {"c": 1}
    assert tool.runs == 30


# Rule 7: what is declared


def test_the_longest_run_is_within_the_window() -> None:
    """``in_flight_max_seconds`` is no more than the window, and no less than a lease."""
    assert adcp(ttl_seconds=3600).capability()["in_flight_max_seconds"] == 3600
    assert adcp(in_flight_max_seconds=5).capability()["in_flight_max_seconds"] == 5
    with pytest.raises(PolicyError, match=r"ttl_seconds \(7200\)"):
        adcp(ttl_seconds=7200, in_flight_max_seconds=7201)
    with pytest.raises(PolicyError, match=r"lease_seconds \(30\)"):
        adcp(lease_seconds=30, in_flight_max_seconds=29)


# Rule 8: limits


async def fill(tool: Tool, number: int, name: str = "fill", **fields: Any) -> None:
    for key in range(number):
        await tool.call({"idempotency_key": f"{name}-{key:016d}", **fields}, ALICE)


@pytest.mark.usefixtures("small_limits")
async def test_limits_count_for_each_agent_and_account(clock: ManualClock) -> None:
    """An account over its limit holds up neither another account nor its own known keys."""
    tool = Tool(adcp(clock))
    await fill(tool, 30, account={"account_id": "a"})
    with pytest.raises(IdempotencyRateLimitedError) as caught:
        await tool.call(request(account={"account_id": "a"}, context={"c": 1}), ALICE)
    assert isinstance(caught.value.retry_after, int)
    assert 1 <= caught.value.retry_after <= 3600
    assert caught.value.context == {"c": 1}
    await tool.call(request(account={"account_id": "b"}), ALICE)
    known = {"idempotency_key": f"fill-{0:016d}", "account": {"account_id": "a"}}
    assert (await tool.call(known, ALICE))["replayed"] is True
    clock.advance(caught.value.retry_after)
    answer = await tool.call(request(account={"account_id": "a"}), ALICE)
    assert "replayed" not in answer  # the refusal was not stored


def test_the_limits_are_those_of_the_protocol() -> None:
    """60 a second over a minute and 300 over ten seconds; reads 300 and 1500."""
    assert profile.INSERT_WINDOWS == ((3600, 60), (3000, 10))
    assert profile.READ_WINDOWS == ((18_000, 60), (15_000, 10))


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules with smaller numbers, so that they are reached sooner."""
    monkeypatch.setattr(profile, "INSERT_WINDOWS", ((40, 60), (30, 10)))
    monkeypatch.setattr(profile, "READ_WINDOWS", ((180, 60), (150, 10)))


@pytest.mark.usefixtures("small_limits")
async def test_reads_have_limits_of_their_own(clock: ManualClock) -> None:
    """Keys of handlers that change nothing are counted apart, and more of them are allowed."""
    store = adcp(clock)
    read, write = Tool(store, "get_products", read_only=True), Tool(store)
    await fill(write, 30)
    await fill(read, 150, "read")
    with pytest.raises(IdempotencyRateLimitedError):
        await read.call(request(), ALICE)
    with pytest.raises(IdempotencyRateLimitedError):
        await write.call(request(), ALICE)


async def test_reads_need_no_key() -> None:
    """A pure read runs without a key; a key that it has must be a proper one."""
    tool = Tool(adcp(), "get_products", read_only=True)
    assert await tool.call({"context": {"c": 1}}, ALICE) == {"id": 1, "context": {"c": 1}}
    assert await tool.call({}, None) == {"id": 2}
    with pytest.raises(InvalidKeyError):
        await tool.call({"idempotency_key": "short"}, ALICE)
    await tool.call(request(), ALICE)
    assert (await tool.call(request(), ALICE))["replayed"] is True


@pytest.mark.usefixtures("small_limits")
async def test_sessions_share_the_limit_of_their_account(clock: ManualClock) -> None:
    """A fresh session is no way around the limit."""
    tool = Tool(adcp(clock), "si_send_message")
    for session in range(30):
        await tool.call(request(session_id=f"s-{session}"), ALICE)
    with pytest.raises(IdempotencyRateLimitedError):
        await tool.call(request(session_id="another"), ALICE)


# Rule 9: in flight


async def test_another_payload_in_flight_conflicts_at_once() -> None:
    """The claim carries the real fingerprint: no waiting for a call that can't be replayed."""
    store = adcp()
    inside, gate = asyncio.Event(), asyncio.Event()

    @store.wrap
    async def create(params: Any, context: Any = None) -> Any:
        inside.set()
        await gate.wait()
        return {}

    first = asyncio.create_task(create(request(budget=1), ALICE))
    await inside.wait()
    with pytest.raises(IdempotencyConflictError) as caught:
        await create(request(budget=2, context={"c": 2}), ALICE)
    assert caught.value.context == {"c": 2}
    gate.set()
    assert await first == {}


async def test_in_flight_says_when_to_come_back() -> None:
    """A copy that is turned away learns the rest of the lease, and gets its own context back."""
    store = adcp(on_in_flight="reject", lease_seconds=20)
    inside, gate = asyncio.Event(), asyncio.Event()

    @store.wrap
    async def create(params: Any, context: Any = None) -> Any:
        inside.set()
        await gate.wait()
        return {}

    first = asyncio.create_task(create(request(), ALICE))
    await inside.wait()
    with pytest.raises(IdempotencyInFlightError) as caught:
        await create(request(context={"c": 2}), ALICE)
    assert caught.value.retry_after == 20
    assert caught.value.context == {"c": 2}
    gate.set()
    await first


# Scope


async def ids(tool: Tool, *requests: dict[str, Any], context: Any = ALICE) -> list[int]:
    return [(await tool.call(params, context))["id"] for params in requests]


async def test_messages_of_two_sessions_are_two_requests() -> None:
    """``si_send_message`` has the session in its scope; other tools compare it as payload."""
    store = adcp()
    message = Tool(store, "si_send_message")
    one, two = request(session_id="s-1"), request(session_id="s-2")
    assert await ids(message, one, two, one, two) == [1, 2, 1, 2]
    with pytest.raises(IdempotencyConflictError):
        await message.call(request(session_id="s-1", text="other"), ALICE)
    other = Tool(adcp(), "create_media_buy")
    await other.call(one, ALICE)
    with pytest.raises(IdempotencyConflictError):
        await other.call(two, ALICE)
    both = request(session_id="s-1", account={"account_id": "a"})
    assert await ids(message, both, one) == [3, 1]


async def test_accounts_named_by_brand_are_hashed_with_the_salt() -> None:
    """One salt finds a key again; another one, or another agent, has keys of its own."""
    backend = MemoryBackend()
    tools = [Tool(adcp(backend=backend, account_salt=salt)) for salt in ("a", b"a", "b", "")]
    named = request(account=BRAND)
    assert await ids(tools[0], named) == [1]
    again = await tools[1].call(named, ALICE)
    assert again == {"id": 1, "replayed": True}
    for tool in tools[2:]:
        assert "replayed" not in await tool.call(named, ALICE)
    assert "replayed" not in await tools[0].call(named, ToolContext("bob"))
    reordered = {"operator": BRAND["operator"], "brand": BRAND["brand"]}
    assert (await tools[0].call(request(account=reordered), ALICE))["replayed"] is True


async def test_a_resolved_account_counts_before_the_one_that_was_named() -> None:
    """Two names of one account are one scope where the seller says so."""
    tool = Tool(adcp())
    contexts: list[Any] = [
        ToolContext("alice", account_id="acct-1"),
        {"caller_identity": "alice", "account_id": "acct-1"},
    ]
    await tool.call(request(account=BRAND), contexts[0])
    with pytest.raises(IdempotencyConflictError):
        await tool.call(request(account={**BRAND, "operator": "other.example"}), contexts[1])
    assert (await tool.call(request(account=BRAND), contexts[1]))["replayed"] is True
    assert "replayed" not in await tool.call(
        request(account=BRAND), ToolContext("alice", account_id="acct-2")
    )


async def test_the_ways_to_name_an_account_are_scopes_apart() -> None:
    """An id, in each of its places, is one scope; whatever it says, it is not that of a brand."""
    accounts: list[dict[str, Any]] = [
        {},
        {"account": BRAND},
        {"account": {"account_id": "natural"}},
        {"account": {"account_id": "natural\x1eb"}},
        {"account_id": "c"},
    ]
    tool = Tool(adcp())
    for _ in range(2):
        assert await ids(tool, *(request(**account) for account in accounts)) == [1, 2, 3, 4, 5]
    for same in ({"account": "natural"}, {"account_id": "natural"}):
        with pytest.raises(IdempotencyConflictError):  # one scope, and so another payload in it
            await tool.call(request(**same), ALICE)


@pytest.mark.parametrize(
    "account",
    [
        7,
        ["a"],
        "a\0b",
        "a" * 2000,
        {"account_id": 7},
        {"account_id": ""},
        {"account_id": "\ud800"},
        {"brand": float("nan")},
        {"brand": 2**60},
    ],
    ids=repr,
)
async def test_odd_accounts_are_invalid_requests(account: Any) -> None:
    """An account that can't be part of a scope is named as such, and nothing runs."""
    tool = Tool(adcp())
    with pytest.raises(OncekeyError) as caught:
        await tool.call(request(account=account), ALICE)
    assert caught.value.code == "INVALID_REQUEST"
    assert tool.runs == 0


@pytest.mark.parametrize("session", [7, "", "\ud800"], ids=repr)
async def test_odd_sessions_are_invalid_requests(session: Any) -> None:
    """So is a session."""
    tool = Tool(adcp(), "si_send_message")
    with pytest.raises(InvalidKeyError, match="session_id"):
        await tool.call(request(session_id=session), ALICE)


# Context


async def test_errors_carry_the_current_context(clock: ManualClock) -> None:
    """Every refusal gives back the context of the request that it refuses."""
    tool = Tool(adcp(clock, ttl_seconds=3600))
    await tool.call(request(context={"c": 1}), ALICE)

    async def refused(kind: type[OncekeyError], params: dict[str, Any], who: Any = ALICE) -> None:
        with pytest.raises(kind) as caught:
            await tool.call(params, who)
        assert caught.value.context == params.get("context")

    await refused(IdempotencyConflictError, request(a=1, context={"c": 2}))
    await refused(IdempotencyConflictError, request(a=1))
    await refused(IdempotencyScopeError, request(context={"c": 3}), None)
    await refused(InvalidKeyError, {"context": {"c": 4}})
    clock.advance(3661)
    await refused(IdempotencyExpiredError, request(context={"c": 5}))
    tool.answer = StoreError("in the handler")
    await refused(StoreError, {"idempotency_key": KEY + "2", "context": {"c": 6}})


async def test_classic_errors_carry_no_context() -> None:
    """The classic profile leaves errors as they are."""
    tool = Tool(IdempotencyStore(MemoryBackend()))
    await tool.call(request(), ALICE)
    with pytest.raises(IdempotencyConflictError) as caught:
        await tool.call(request(a=1, context={"c": 2}), ALICE)
    assert caught.value.context is None


@pytest.mark.usefixtures("small_limits")
def test_sync_handlers_keep_the_same_rules() -> None:
    """Schema, context, salt, limits and replays hold for a sync handler on a sync store."""
    clock = ManualClock()
    store = IdempotencyStore(MemoryStore(clock=clock), profile="adcp-3.2", clock=clock)

    @store.wrap(validate=Buy)
    def create(params: Any, context: Any = None) -> dict[str, Any]:
        return {"brand": params["brand"]}

    buy = request(brand="b", packages=[], account=BRAND)
    assert create({**buy, "context": {"c": 1}}, ALICE) == {"brand": "b", "context": {"c": 1}}
    assert create(buy, ALICE) == {"brand": "b", "replayed": True}
    with pytest.raises(InvalidRequestError) as invalid:
        create({**buy, "brand": 7, "context": {"c": 2}}, ALICE)
    assert invalid.value.context == {"c": 2}
    with pytest.raises(IdempotencyConflictError) as conflict:
        create({**buy, "packages": [{"budget": 1}], "context": {"c": 3}}, ALICE)
    assert conflict.value.context == {"c": 3}
    for number in range(29):
        create({**buy, "idempotency_key": f"fill-{number:016d}"}, ALICE)
    with pytest.raises(IdempotencyRateLimitedError):
        create({**buy, "idempotency_key": "one-too-many-keys"}, ALICE)

    @store.wrap(read_only=True)
    def get(params: Any, context: Any = None) -> int:
        return 7

    assert get({}, ALICE) == 7
