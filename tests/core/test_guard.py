"""``Once`` and ``AsyncOnce``: keys, payloads, answers, decorators and blocks."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime
import decimal
import enum
import functools
import uuid
from typing import Any

import pydantic
import pytest

from oncekey import (
    AnswerOmittedError,
    AsyncOnce,
    BackendMismatchError,
    CanonicalJSONError,
    IdempotencyConflictError,
    IdempotencyInFlightError,
    InvalidKeyError,
    MemoryBackend,
    MemoryStore,
    Once,
    Policy,
    UnsupportedAnswerError,
)
from oncekey.guard import current_claim
from oncekey.testing import ManualClock


@dataclasses.dataclass
class Order:
    id: str
    lines: list[int]


class Receipt(pydantic.BaseModel):
    order: str
    total: decimal.Decimal


@pytest.fixture
def once() -> Once:
    return Once(MemoryStore())


def test_an_argument_is_the_key(once: Once) -> None:
    """By name, positionally or as a keyword, with or without the default spelt out."""
    runs = []

    @once(key="order_id")
    def charge(order_id: str, amount: int = 5) -> dict[str, int]:
        runs.append(1)
        return {"n": len(runs)}

    assert charge("a") == charge("a", 5) == charge(amount=5, order_id="a") == {"n": 1}
    assert charge("b") == {"n": 2}
    with pytest.raises(IdempotencyConflictError):
        charge("a", 6)


def test_a_dotted_path_is_the_key(once: Once) -> None:
    """A path into an object, a dict or a model; the object itself is payload."""
    runs = []

    @once(key="order.id")
    def ship(order: Any) -> int:
        runs.append(1)
        return len(runs)

    assert ship(Order("o1", [1])) == ship(Order("o1", [1])) == 1
    with pytest.raises(IdempotencyConflictError):
        ship(Order("o1", [2]))
    assert ship({"id": "o2"}) == 2
    with pytest.raises(InvalidKeyError, match="no 'id'"):
        ship({})


def test_a_callable_gives_the_key(once: Once) -> None:
    """A callable sees the arguments as they were passed."""

    @once(key=lambda a, b: f"{a}-{b}", ignore=["a", "b"])
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, 2) == 3
    assert add(1, b=2) == 3


@pytest.mark.parametrize("good", ["x", 7, uuid.UUID(int=1)])
def test_text_integers_and_uuids_are_keys(once: Once, good: Any) -> None:
    """Values whose text never changes can be keys."""

    @once(key="k")
    def f(k: Any) -> int:
        return 1

    assert f(good) == 1


@pytest.mark.parametrize("bad", [None, True, 1.5, {}, [], "", "\0", "x" * 1025])
def test_other_values_are_not(once: Once, bad: Any) -> None:
    """None, floats and containers are refused before the function runs."""
    runs = []

    @once(key="k")
    def f(k: Any) -> int:
        runs.append(1)
        return 1

    with pytest.raises(InvalidKeyError):
        f(bad)
    assert not runs


def test_a_key_that_is_no_argument_is_an_error_at_decoration(once: Once) -> None:
    """A misspelt argument name is found at once, and the message lists the real ones."""

    def f(order_id: str) -> None: ...

    with pytest.raises(InvalidKeyError, match=r"no argument 'order'.*order_id"):
        once(key="order")(f)
    with pytest.raises(InvalidKeyError, match="no argument 'logger'"):
        once(key="order_id", ignore=["logger"])(f)


def test_functions_have_scopes_of_their_own(once: Once) -> None:
    """Two functions with one key don't collide, also with one scope and one guard."""

    @once(key="k")
    def f(k: str) -> str:
        return "f"

    @once(key="k")
    def g(k: str) -> str:
        return "g"

    assert (f("1"), g("1")) == ("f", "g")
    shared = Once(once.store, scope="shared")

    @shared(key="k")
    def charge(k: str) -> str:
        return "charged"

    @shared(key="k")
    def refund(k: str) -> str:
        return "refunded"

    assert (charge("1"), refund("1")) == ("charged", "refunded")
    with shared.guard("1") as claim:
        assert not claim.replayed  # nor do blocks


def test_a_name_keeps_the_keys_of_a_function(once: Once) -> None:
    """Given a name, a function may be renamed; to share keys is a word that somebody writes."""
    shop = Once(once.store, scope="shop")

    @shop(key="k", name="charge")
    def charge(k: str) -> str:
        return "charged"

    @shop(key="k", name="charge")
    def charge_card(k: str) -> str:
        return "charged again"

    @shop(key="k", name=None)
    def bare(k: str) -> str:
        return "bare"

    assert (charge("1"), charge_card("1"), bare("1")) == ("charged", "charged", "bare")
    with shop.guard("1") as claim:
        assert claim.answer == "bare"
    with pytest.raises(InvalidKeyError, match="give scope="):
        once(key="k", name=None)(charge)


def test_two_functions_of_one_name_never_share(once: Once) -> None:
    """Two definitions with one name, as web handlers have: the older one is refused when called."""

    def first() -> Any:
        @once(key="k")
        def handler(k: str) -> str:
            return "first"

        return handler

    def second() -> Any:
        def handler(k: str) -> str:
            return "second"

        handler.__qualname__ = one.__qualname__
        return once(key="k")(handler)

    one = first()
    assert one("1") == first()("1") == "first"  # made again by the same lines: the same function
    two = second()
    assert two("2") == "second"
    with pytest.raises(InvalidKeyError, match=r"another function.*name="):
        one("2")


class Till:
    """Objects whose guarded methods say what tells them apart, or that nothing does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pay(self, order: str) -> str:
        return f"{self.name} paid {order}"

    @classmethod
    def close(cls, order: str) -> str:
        return f"{cls.__name__} closed {order}"


def test_objects_of_one_class_never_share_silently(once: Once) -> None:
    """A method's key must tell objects apart, unless somebody writes that they may share."""
    for key in ("order", ["order"]):
        with pytest.raises(InvalidKeyError, match=r'key=\["self.id".*ignore=\["self"\]'):
            once(key=key)(Till.pay)
    with pytest.raises(InvalidKeyError, match=r"cls\.id"):
        once(key="order")(Till.close.__func__)
    pay = once(key=["self.name", "order"])(Till.pay)
    assert [pay(Till(name), "1") for name in "abab"] == ["a paid 1", "b paid 1"] * 2
    shared = once(key="order", name="shared", ignore=["self"])(Till.pay)
    assert [shared(Till(name), "1") for name in "ab"] == ["a paid 1"] * 2


def test_bound_methods_partials_and_objects_need_a_name(once: Once) -> None:
    """What was decorated for one object would share its keys with what was for another."""
    for one in (
        Till("a").pay,
        Till.close,
        functools.partial(charge, "gw"),
        functools.partial(Till("a").pay),
        Charge(),
    ):
        with pytest.raises(InvalidKeyError, match="give name="):
            once(key="order")(one)
    a, b = (once(key="order", name=f"pay-{name}")(Till(name).pay) for name in "ab")
    assert (a("1"), b("1")) == ("a paid 1", "b paid 1")


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "pair",
    [
        (1, "1"),
        (1, True),
        (None, "null"),
        (2**60, 2**60 + 1),
        (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
        (b"a", b"b"),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
        (Order("a", []), Order("b", [])),
        (
            Receipt(order="a", total=decimal.Decimal(1)),
            Receipt(order="a", total=decimal.Decimal(2)),
        ),
        (Colour.RED, "blue"),
        ((1, 2), (2, 1)),
        (datetime.timedelta(1), datetime.timedelta(2)),
    ],
)
def test_payloads_of_many_types_are_told_apart(once: Once, pair: tuple[Any, Any]) -> None:
    """Every argument type with a stable form is compared."""

    @once(key="k")
    def f(k: str, value: Any) -> int:
        return 1

    f("k", pair[0])
    f("k", pair[0])
    with pytest.raises(IdempotencyConflictError):
        f("k", pair[1])


def test_a_payload_without_a_form_names_the_fix(once: Once) -> None:
    """An argument that can't be compared is an error that says to ignore it."""

    def f(k: str, client: Any) -> int:
        return 1

    with pytest.raises(CanonicalJSONError, match=r"ignore=.*\$\.client"):
        once(key="k")(f)("1", object())
    assert once(key="k", ignore=["client"])(f)("1", object()) == 1


class Service:
    """A class with a guarded method."""

    once = Once(MemoryStore())

    def __init__(self) -> None:
        self.runs = 0

    @once(key="k", ignore=["self"])
    def work(self, k: str) -> int:
        """Works."""
        self.runs += 1
        return self.runs


def test_methods_leave_self_out() -> None:
    """``self`` is not part of the payload, and the docstring stays."""
    assert Service().work("a") == Service().work("a") == 1
    assert Service.work.__doc__ == "Works."


@dataclasses.dataclass(frozen=True)
class Line:
    sku: str
    price: float


@dataclasses.dataclass
class Invoice:
    lines: list[Line]
    pair: tuple[int, str]
    by_sku: dict[str, Line]
    note: str | None = None
    receipt: Receipt | None = None


INVOICE = Invoice(
    [Line("a", 1.0)],
    (1, "x"),
    {"a": Line("a", 2.5)},
    receipt=Receipt(order="o", total=decimal.Decimal("1.10")),
)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        0,
        1.0,
        -0.0,
        "text",
        "\ud83d",
        True,
        [],
        {},
        {"a": [1, {"b": None}]},
        INVOICE,
        Receipt(order="o", total=decimal.Decimal("1.10")),
    ],
)
def test_answers_come_back_as_they_were(once: Once, answer: Any) -> None:
    """JSON values, models and dataclasses keep their type, with and without an annotation."""

    @once(key="k")
    def bare(k: str):  # type: ignore[no-untyped-def]
        assert isinstance(answer, (Invoice, Receipt)) or answer is answer
        return answer

    def typed(k: str) -> Any:
        return answer

    typed.__annotations__["return"] = type(answer)
    for function in (bare, once(key="k")(typed)):
        first, second = function("1"), function("1")
        assert second == first == answer
        assert type(second) is type(answer)
        if isinstance(answer, (dict, list, Invoice)):
            assert second is not first


def test_containers_of_models_come_back_as_declared(once: Once) -> None:
    """list[Model], dict[str, Dataclass], tuples and optionals are rebuilt from the annotation."""

    @once(key="k")
    def listed(k: str) -> list[Receipt]:
        return [Receipt(order="a", total=decimal.Decimal(1))]

    @once(key="k")
    def mapped(k: str) -> dict[str, Line]:
        return {"a": Line("a", 1.0)}

    @once(key="k")
    def paired(k: str) -> tuple[int, Line]:
        return (1, Line("a", 1.0))

    @once(key="k")
    def many(k: str) -> tuple[int, ...]:
        return (1, 2, 3)

    @once(key="k")
    def maybe(k: str) -> Line | None:
        return Line("a", 1.0)

    for function in (listed, mapped, paired, many, maybe):
        assert function("1") == function("1")
        assert type(function("1")) is type(function("1"))


class Plain: ...


@dataclasses.dataclass
class Holder:
    tags: set[str]


@pytest.mark.parametrize(
    "declared",
    [Plain, set, frozenset[str], dict[str, Plain], list[complex], dict[Plain, str], Holder],
)
def test_a_declared_answer_that_cant_come_back_fails_before_the_effect(
    once: Once, declared: Any
) -> None:
    """A return type that can't be stored is refused at the first call, before the function."""
    runs = []

    def f(k: str) -> Any:
        runs.append(1)

    f.__annotations__["return"] = declared
    wrapped = once(key="k")(f)
    with pytest.raises(UnsupportedAnswerError, match="return JSON values"):
        wrapped("1")
    assert not runs


@pytest.mark.parametrize(
    "answer", [{1, 2}, [{1, 2}], (1, {2}), float("nan"), [float("nan")], Plain()]
)
def test_an_undeclared_answer_that_cant_come_back_is_done_once(
    once: Once, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The first caller gets it, with a warning; copies learn that it was not kept."""
    runs = []

    @once(key="k")
    def f(k: str):  # type: ignore[no-untyped-def]
        runs.append(1)
        return answer

    assert f("1") is answer
    assert "can't be replayed" in caplog.text
    with pytest.raises(AnswerOmittedError):
        f("1")
    assert len(runs) == 1


class Aliased(pydantic.BaseModel):
    total: int = pydantic.Field(alias="Total", serialization_alias="sum")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return self.total * 2


class Raw(pydantic.BaseModel):
    pdf: bytes


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)
    at: datetime.datetime


@pytest.mark.parametrize(
    "answer",
    [
        Aliased(Total=3),
        Strict(at=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)),
        Raw(pdf=b"\xff"),
    ],
    ids=["aliased", "strict", "bytes"],
)
def test_models_with_aliases_and_strict_ones_come_back(once: Once, answer: Any) -> None:
    """Models that can't be read back from their usual dump are stored in one that can."""

    @once(key="k")
    def f(k: str) -> Aliased | Strict | Raw:
        return answer  # type: ignore[no-any-return]

    assert f("1") == f("1") == answer
    assert type(f("1")) is type(answer)


class Secret(pydantic.BaseModel):
    token: pydantic.SecretStr


class Hidden(pydantic.BaseModel):
    shown: int
    hidden: int = pydantic.Field(default=0, exclude=True)


@pytest.mark.parametrize(
    "answer",
    [Secret(token=pydantic.SecretStr("x")), Hidden(shown=1, hidden=2)],
    ids=["secret", "excluded"],
)
def test_models_that_would_change_are_done_but_not_kept(
    once: Once, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that would come back different, or can't be dumped, is never run again."""
    runs = []

    @once(key="k")
    def f(k: str) -> Secret | Hidden:
        runs.append(1)
        return answer  # type: ignore[no-any-return]

    assert f("1") is answer
    assert "can't be replayed" in caplog.text
    with pytest.raises(AnswerOmittedError, match="would come back changed"):
        f("1")
    assert len(runs) == 1


def test_a_dict_where_a_model_was_declared_stays_a_dict(once: Once) -> None:
    """What the function returned counts, not what it promised to return."""

    @once(key="k")
    def f(k: str) -> Receipt:
        return {"order": "o"}  # type: ignore[return-value]

    assert f("1") == f("1") == {"order": "o"}


def charge(gateway: str, order: str) -> str:
    return f"charged {order}"


def refund(gateway: str, order: str) -> str:
    return f"refunded {order}"


class Charge:
    def __call__(self, order: str) -> str:
        return f"charged {order}"


class Refund:
    def __call__(self, order: str) -> str:
        return f"refunded {order}"


class AsyncCharge:
    async def __call__(self, order: str) -> str:
        return order


def test_partials_and_objects_have_scopes_of_their_own(once: Once) -> None:
    """Two partials, or two callable objects, never replay each other's answers."""
    for first, second in (
        (functools.partial(charge, "gw"), functools.partial(refund, "gw")),
        (Charge(), Refund()),
    ):
        name = type(first).__name__
        assert once(key="order", name=f"{name}.charge")(first)(order="1") == "charged 1"
        assert once(key="order", name=f"{name}.refund")(second)(order="1") == "refunded 1"
    with pytest.raises(InvalidKeyError, match="lambda has no name"):
        once(key="order")(lambda order: order)
    with pytest.raises(BackendMismatchError, match="AsyncOnce"):
        once(key="order")(AsyncCharge())


def test_an_object_is_not_a_key(once: Once) -> None:
    """An object's text may be its address, so only values whose text is stable are keys."""

    @once(key="order")
    def f(order: Any) -> int:
        return 1

    for bad in (Plain(), frozenset({1}), (1,), b"x"):
        with pytest.raises(InvalidKeyError, match="can't be a key") as caught:
            f(bad)
        assert repr(bad) not in str(caught.value)
    assert f(Colour.RED) == 1


def test_a_block_has_its_claim_at_hand(once: Once) -> None:
    """Inside a guarded block ``current_claim`` is the block's."""
    with once.guard("k") as opened:
        assert current_claim() is opened.claim


def test_a_failure_frees_the_key(once: Once) -> None:
    """An exception reaches the caller, and the next call runs."""
    runs = []

    @once(key="k")
    def f(k: str) -> int:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("first")
        return len(runs)

    with pytest.raises(RuntimeError, match="first"):
        f("1")
    assert f("1") == f("1") == 2


def test_the_claim_is_at_hand(once: Once) -> None:
    """A handler can read its fence and attempts; outside there is no claim."""
    fences = []

    @once(key="k")
    def f(k: str) -> int:
        claim = current_claim()
        claim.check()
        fences.append(claim.fence)
        if len(fences) == 1:
            raise RuntimeError
        return claim.attempts

    with pytest.raises(RuntimeError):
        f("1")
    assert f("1") == 2
    assert fences[1] > fences[0]
    with pytest.raises(LookupError):
        contextvars.Context().run(current_claim)


def test_a_block_is_guarded(once: Once) -> None:
    """The block gets a fence and gives an answer; a copy gets that answer."""
    with once.guard("k", payload={"a": 1}) as claim:
        assert not claim.replayed
        assert claim.fence > 0
        assert claim.attempts == 1
        assert not claim.takeover
        assert not claim.lost
        claim.check()
        claim.answer = {"done": True}
    with once.guard("k", payload={"a": 1}) as claim:
        assert claim.replayed
        assert claim.answer == {"done": True}
        assert (claim.fence, claim.attempts) == (0, 0)
    with pytest.raises(IdempotencyConflictError), once.guard("k", payload={"a": 2}):
        pass


def test_a_failing_block_frees_its_key(once: Once) -> None:
    """An exception in the block leaves the key free."""
    with pytest.raises(RuntimeError), once.guard("k"):
        raise RuntimeError
    with once.guard("k") as claim:
        assert not claim.replayed
        assert claim.attempts == 2


def test_a_block_in_flight_is_refused_without_a_wait(once: Once) -> None:
    """With ``wait=0`` a copy is told at once, with the rest of the lease."""
    with once.guard("k", lease=30), pytest.raises(IdempotencyInFlightError) as caught:
        once.guard("k", wait=0).__enter__()
    assert 29 <= (caught.value.retry_after or 0) <= 30


async def test_async_functions_and_blocks() -> None:
    """AsyncOnce does the same for coroutines."""
    once = AsyncOnce(MemoryBackend())
    runs = []

    @once(key="k")
    async def f(k: str, n: int = 0) -> Receipt:
        runs.append(current_claim().attempts)
        await asyncio.sleep(0)
        return Receipt(order=k, total=decimal.Decimal(1))

    answers = await asyncio.gather(*(f("1") for _ in range(20)))
    assert len(runs) == 1
    assert all(answer == answers[0] for answer in answers)
    with pytest.raises(IdempotencyConflictError):
        await f("1", 2)
    async with once.guard("b") as claim:
        claim.answer = [1]
    async with once.guard("b") as claim:
        assert claim.replayed
        assert claim.answer == [1]
    with pytest.raises(RuntimeError):
        async with once.guard("c"):
            raise RuntimeError
    async with once.guard("c") as claim:
        assert claim.attempts == 2
    async with once.guard("d"):
        with pytest.raises(IdempotencyInFlightError):
            async with once.guard("d", wait=0):
                pass


def test_forms_must_match() -> None:
    """Sync and async are never mixed silently; generators can't be replayed."""

    async def asynchronous(k: str) -> None: ...
    def synchronous(k: str) -> None: ...
    def generator(k: str) -> Any:
        yield k

    with pytest.raises(BackendMismatchError, match="AsyncOnce"):
        Once(MemoryStore())(key="k")(asynchronous)
    with pytest.raises(BackendMismatchError, match="use Once"):
        AsyncOnce(MemoryBackend())(key="k")(synchronous)  # type: ignore[arg-type]
    with pytest.raises(BackendMismatchError, match="return a list"):
        Once(MemoryStore())(key="k")(generator)
    with pytest.raises(BackendMismatchError, match="sync store"):
        Once(MemoryBackend())  # type: ignore[arg-type]
    with pytest.raises(BackendMismatchError, match="async store"):
        AsyncOnce(MemoryStore())  # type: ignore[arg-type]


def test_options_override_the_policy(clock: ManualClock) -> None:
    """Options of the guard, then of the function, replace those of the policy."""
    once = Once(MemoryStore(clock=clock), policy=Policy(ttl=100), lease=7)
    assert once.policy == Policy(ttl=100, lease=7)
    runs = []

    @once(key="k", ttl=datetime.timedelta(seconds=10))
    def f(k: str) -> int:
        runs.append(1)
        return len(runs)

    f("1")
    clock.advance(9)
    assert f("1") == 1
    clock.advance(1)
    assert f("1") == 2


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": 0},
        {"ttl": -1},
        {"ttl": float("nan")},
        {"ttl": "1d"},
        {"ttl": True},
        {"lease": 0},
        {"lease": 0.001},
        {"wait": -1},
        {"max_run": 0},
        {"max_answer_bytes": -1},
        {"skew": -1},
    ],
)
def test_options_that_cant_work_are_refused(options: dict[str, Any]) -> None:
    """A wrong duration is a ValueError that names the option."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Policy(**options)


class Account:
    """Objects that share a guarded method."""

    once = Once(MemoryStore())

    def __init__(self, name: str) -> None:
        self.name = name

    @once(key="self.name")
    def open(self) -> str:
        return self.name

    @once(key=lambda self, order: f"{self.name}:{order}")
    def charge(self, order: str) -> str:
        return f"{self.name} {order}"


def test_self_can_be_part_of_the_key() -> None:
    """A path into self, or a callable, tells objects apart."""
    assert [Account(name).open() for name in ("a", "b", "a")] == ["a", "b", "a"]
    assert [Account(name).charge("1") for name in ("a", "b")] == ["a 1", "b 1"]


def test_misuse_names_the_fix(once: Once) -> None:
    """A bare decorator, an unknown option and a claim that is not there say what to write."""

    def f(k: str, db: Any) -> int:
        return 1

    with pytest.raises(InvalidKeyError, match=r"@once\(key="):
        once(f)
    with pytest.raises(InvalidKeyError, match=r"@once\(key="):
        once()
    with pytest.raises(ValueError, match="no option 'ttl_seconds'; did you mean 'ttl'"):
        once(key="k", ttl_seconds=60)(f)
    with pytest.raises(ValueError, match="no option 'lesae'"):
        Once(MemoryStore(), lesae=5)
    with pytest.raises(LookupError, match="no guarded call is running"):
        contextvars.Context().run(current_claim)
    assert once(key="k", ignore="db")(f)("1", object()) == 1
