"""Who a keyed request is from, and where in a call the request stands: nothing is passed over."""

from __future__ import annotations

import functools
import types
import uuid
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, MagicMock, create_autospec

import pydantic
import pytest

from oncekey import (
    BackendMismatchError,
    IdempotencyConflictError,
    IdempotencyStore,
    InvalidKeyError,
    MemoryBackend,
    MemoryStore,
    ToolContext,
)
from oncekey.models import Key, Scope

KEY = "key-0123456789abcdef"
ALICE = ToolContext("alice")
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def request(**fields: Any) -> dict[str, Any]:
    return {"idempotency_key": KEY, **fields}


def counting(store: IdempotencyStore) -> Callable[..., Any]:
    """A handler that gives the number of its runs."""
    runs: list[int] = []

    @store.wrap
    async def create(params: Any, context: Any = None) -> Any:
        runs.append(1)
        return len(runs)

    return create


@pytest.mark.parametrize("profile", ["classic", "adcp-3.2"])
async def test_callers_of_any_type_never_share(profile: str) -> None:
    """Numbers, UUIDs and texts that look like them are as many callers and tenants, each found."""
    create = counting(IdempotencyStore(MemoryBackend(), profile=profile))
    ids: list[Any] = [1, 2, 0, -1, "1", "int:1", "\x1fint:1", ID, str(ID), f"uuid:{ID}"]
    callers = [ToolContext(one) for one in ids]
    callers += [ToolContext("alice", one) for one in ids]
    if profile == "adcp-3.2":
        callers += [ToolContext("alice", one, "acct") for one in ids]
    first = [await create(request(), caller) for caller in callers]
    assert first == list(range(1, len(callers) + 1))
    assert [await create(request(), vars(caller)) for caller in callers] == first


@pytest.mark.parametrize(
    "odd", [b"acme", True, False, 1.5, ("a", "b"), object(), 2**1025], ids=lambda odd: repr(odd)[:9]
)
@pytest.mark.parametrize("name", ["caller_identity", "tenant_id", "principal_id"])
async def test_an_identity_of_another_type_is_an_error(name: str, odd: Any) -> None:
    """What can't name a caller is neither dropped nor taken: the handler does not run."""
    create = counting(IdempotencyStore(MemoryBackend()))
    with pytest.raises(InvalidKeyError, match=name):
        await create(request(), {"principal": {"id": "alice"}, name: odd})
    with pytest.raises(InvalidKeyError, match=r"principal\.id"):
        await create(request(), types.SimpleNamespace(principal=types.SimpleNamespace(id=[1])))
    assert await create(request(), ALICE) == 1


async def test_texts_keep_the_records_that_they_had() -> None:
    """The scope of textual callers is made as ever: answers of earlier versions still replay."""
    backend = MemoryBackend()
    create = counting(IdempotencyStore(backend))
    await create(request(), ToolContext("alice", "t1"))
    assert await backend.read(Key(Scope("request", "t1\x1ealice"), KEY)) is not None
    await create(request(), ToolContext("int:7"))
    assert await backend.read(Key(Scope("request", "int:7"), KEY)) is not None


class Made(pydantic.BaseModel):
    idempotency_key: uuid.UUID = pydantic.Field(default_factory=uuid.uuid4)
    budget: int = 5
    note: str | None = None
    tags: list[str] = pydantic.Field(default_factory=list)


@pytest.mark.parametrize("profile", ["classic", "adcp-3.2"])
async def test_a_key_that_the_model_made_is_a_key(profile: str) -> None:
    """A default factory's key guards the request like one that was sent."""
    create = counting(IdempotencyStore(MemoryBackend(), profile=profile))
    one, two = Made(), Made()
    assert [await create(made, ALICE) for made in (one, two, one, two)] == [1, 2, 1, 2]
    with pytest.raises(IdempotencyConflictError):
        await create(Made(idempotency_key=one.idempotency_key, budget=6), ALICE)


async def test_a_default_that_was_set_equals_one_left_out_by_option() -> None:
    """With ``ignore_defaults`` only; a value that is no default differs in either case."""
    key = uuid.uuid4()
    said = Made(idempotency_key=key, budget=5, note=None, tags=[])
    for ignore, again in ((False, None), (True, 1)):
        create = counting(IdempotencyStore(MemoryBackend(), ignore_defaults=ignore))
        assert await create(Made(idempotency_key=key), ALICE) == 1
        if again is None:
            with pytest.raises(IdempotencyConflictError):
                await create(said, ALICE)
        else:
            assert await create(said, ALICE) == again
        with pytest.raises(IdempotencyConflictError):
            await create(Made(idempotency_key=key, budget=6), ALICE)


class Plain:
    """A request that is neither a dict nor a model."""

    def __init__(self, key: str | None, budget: int) -> None:
        if key is not None:
            self.idempotency_key = key
        self.budget = budget


async def test_a_dict_context_is_not_taken_for_a_plain_request() -> None:
    """An object is the request where it stands, though the context looks more like one."""
    store = IdempotencyStore(MemoryBackend())
    seen: list[Any] = []

    @store.wrap
    async def named(params: Any, context: Any = None) -> int:
        return seen.append(params) or len(seen)

    @store.wrap
    async def unnamed(order: Any, who: Any) -> int:
        return seen.append(order) or len(seen)

    @store.wrap
    async def anything(*args: Any) -> int:
        return seen.append(args[0]) or len(seen)

    caller = {"caller_identity": "alice", "idempotency_key": "of the session"}
    for n, handler in enumerate((named, unnamed, anything)):
        order = Plain(f"k-{n}", 1)
        assert await handler(order, caller) == await handler(order, caller) == n + 1
        with pytest.raises(IdempotencyConflictError):
            await handler(Plain(f"k-{n}", 2), caller)
    before = len(seen)
    await named(Plain(None, 1), caller)
    await named(Plain(None, 1), caller)
    assert len(seen) == before + 2, "without a key of its own it is unguarded"


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def counted_handler() -> Any:
    runs: list[int] = []

    async def create(params: Any, context: Any = None) -> dict[str, int]:
        runs.append(1)
        return {"n": len(runs)}

    return create


HANDLERS: dict[str, Callable[[], Any]] = {
    "mock": lambda: AsyncMock(side_effect=[{"n": 1}, {"n": 2}]),
    "mock of a function": lambda: AsyncMock(
        spec=counted_handler(), side_effect=[{"n": 1}, {"n": 2}]
    ),
    "autospec": lambda: create_autospec(counted_handler(), side_effect=[{"n": 1}, {"n": 2}]),
    "sync mock of an async function": lambda: MagicMock(side_effect=counted_handler()),
    "decorated": lambda: wrapping(counted_handler()),
    "decorated twice": lambda: functools.partial(wrapping(wrapping(counted_handler()))),
    "decorated without wraps": lambda: opaque(counted_handler()),
}


@pytest.mark.parametrize("kind", HANDLERS)
async def test_mocks_and_sync_decorators_of_async_handlers_work(kind: str) -> None:
    """What gives something to await is an async handler, however it is made."""
    wrapped = IdempotencyStore(MemoryBackend()).wrap(HANDLERS[kind]())
    first = await wrapped(request(), ALICE)
    assert first == await wrapped(request(), ALICE) == {"n": 1}
    assert await wrapped({**request(), "idempotency_key": "another"}, ALICE) == {"n": 2}


@pytest.mark.parametrize("owner", [None, object(), MagicMock(), Plain(None, 1)])
async def test_mocks_are_called_as_methods_too(owner: Any) -> None:
    """Whatever stands before the request in the call is not taken for it."""
    for order in (request(), Made(), Plain(KEY, 1)):
        mock = AsyncMock(side_effect=[1, 2])
        for wrapped in map(IdempotencyStore(MemoryBackend()).wrap, (mock, opaque(mock))):
            assert await wrapped(owner, order, {"caller_identity": "alice"}) == 1
        assert mock.await_count == 1


@pytest.mark.parametrize("decorate", [wrapping, opaque])
def test_a_coroutine_over_a_sync_backend_is_an_error_before_it_runs(decorate: Any) -> None:
    """The mismatch that shows only in the call is told there; sync handlers work as they did."""
    runs: list[int] = []

    async def create(params: Any, context: Any = None) -> None:
        runs.append(1)

    wrapped = IdempotencyStore(MemoryStore()).wrap(decorate(create))
    for _ in range(2):  # and the key is free again
        with pytest.raises(BackendMismatchError, match="a sync one"):
            wrapped(request(), ALICE)
    assert runs == []

    def plain(params: Any, context: Any = None) -> int:
        runs.append(1)
        return len(runs)

    guarded = IdempotencyStore(MemoryStore()).wrap(decorate(plain))
    assert guarded(request(), ALICE) == guarded(request(), ALICE) == 1
