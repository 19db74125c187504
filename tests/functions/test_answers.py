"""Answers that JSON has no form for: what comes back, on every store, and what is refused."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import sys
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NewType

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey import (
    AnswerOmittedError,
    AsyncOnce,
    MemoryStore,
    Once,
    SQLiteStore,
    StoreCorruptError,
    UnsupportedAnswerError,
)
from oncekey._core.codec import Codec, decode_json
from oncekey._jcs.fast import FAST, attempt_exact
from oncekey.encryption import Keyring, encrypted

Places = tuple[Callable[..., Any], Callable[..., Any]]
OSLO = zoneinfo.ZoneInfo("Europe/Oslo")


class Status(enum.Enum):
    PAID = "paid"
    OPEN = "open"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal


@dataclasses.dataclass
class Invoice:
    id: uuid.UUID
    due: dt.date
    lines: tuple[Line, ...]
    status: Status
    pdf: bytes = b""


class Receipt(pydantic.BaseModel):
    total: Decimal


@dataclasses.dataclass(frozen=True)
class Special(Line):
    """What a function that promises a Line may give."""

    note: str = ""


INVOICE = Invoice(
    uuid.UUID(int=7), dt.date(2026, 1, 2), (Line("a", Decimal("1.10")),), Status.PAID, b"\xff\0"
)
ANSWERS: list[Any] = [
    Decimal("1.10"),
    Decimal("-0"),
    Decimal("1E+5"),
    Decimal("Infinity"),
    dt.datetime(2026, 1, 2, 3, 4, 5, 6),
    dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
    dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=OSLO),
    dt.datetime(2026, 1, 2, fold=1),
    dt.date(2026, 1, 2),
    dt.time(3, 4, 5, 6),
    dt.timedelta(-1, 5, 7),
    uuid.UUID(int=3),
    b"\xff\0",
    b"",
    (),
    (1, (2, [3])),
    Status.PAID,
    Level.LOW,
    Word.YES,
    {"at": dt.date(2026, 1, 2), "status": Status.OPEN, "word": Word.YES, "pair": (1, "x")},
    {1: "a", (1, 2): b"b", Status.PAID: None},
    {"$decimal": "1"},
    {"$decimal": "1", "real": Decimal(1)},
    {"$enum": [b"x"]},
    [{"$tuple": (1,)}],
    INVOICE,
    [INVOICE, {"r": Receipt(total=Decimal("2.50"))}],
]
Declared = Invoice | Receipt | Any


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other) or one != other or repr(one) != repr(other):
        return False
    if isinstance(one, dict):
        return all(same(*pair) for pair in zip(one.items(), other.items(), strict=True))
    if isinstance(one, (list, tuple)):
        return all(same(*pair) for pair in zip(one, other, strict=True))
    return True


# What comes back


def test_values_that_json_lacks_come_back_from_every_store(store: Any) -> None:
    """Decimals, dates, enums, UUIDs, bytes and tuples, alone and inside others: types and all."""
    once = Once(store)
    for number, answer in enumerate(ANSWERS):

        @once(key="k", name="work")
        def work(k: int) -> list[Invoice | Receipt] | Any:
            return answer  # noqa: B023 - called at once

        assert work(number) is answer
        assert same(work(number), answer)


async def test_they_come_back_from_every_async_store(places: Places) -> None:
    """The same for ``AsyncOnce`` and for blocks, from an encrypted store too."""
    async with places[1]() as inner:
        once = AsyncOnce(encrypted(inner, Keyring([Keyring.generate()])))
        for number, answer in enumerate(ANSWERS):
            for turn in (0, 1):
                async with once.guard(f"k{number}", returns=Declared) as claim:
                    assert claim.replayed is bool(turn)
                    if not turn:
                        claim.answer = answer
                assert same(claim.answer, answer)


async def test_they_come_back_from_transactions(tmp_path: Any) -> None:
    """A transaction's answer has the type that is said with ``returns``."""
    with SQLiteStore(tmp_path / "records.db") as store:
        for _ in range(2):
            with store.transaction("k", returns=Invoice) as tx:
                if not tx.replayed:
                    tx.answer = INVOICE
            with Once(store).transaction("j", returns=Invoice) as other:
                if not other.replayed:
                    other.answer = INVOICE
        assert tx.replayed
        assert same(tx.answer, INVOICE)
        assert same(other.answer, INVOICE)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(dt.UTC) | st.just(OSLO))
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.sampled_from([*Status, *Level, *Word]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$tuple", "$", "$data"]), inner, max_size=4)
        | st.dictionaries(st.integers() | st.uuids() | st.sampled_from(Status), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_any_value_of_these_comes_back_and_has_one_form(value: Any) -> None:
    """What goes in comes out with its types, and its bytes are the same each time."""
    raw = Codec().encode(value)
    again = Codec().decode(raw)
    assert same(again, value)
    assert Codec().encode(again) == raw
    decode_json(raw)  # as JSON for readers of any kind


def test_the_form_never_changes() -> None:
    """What was stored by the first release comes back, also in the forms it no longer writes."""
    raw = (
        b'v{"$data":["tests.functions.test_answers:Invoice",{"id":{"$uuid":'
        b'"00000000-0000-0000-0000-000000000007"},"due":{"$date":"2026-01-02"},"lines":{"$tuple":'
        b'[{"$data":["tests.functions.test_answers:Line",{"sku":"a","price":{"$decimal":"1.10"}}]}'
        b']},"status":{"$enum":["tests.functions.test_answers:Status","PAID"]},'
        b'"pdf":{"$bytes":"/wA="}}]}'
    )
    assert Codec(Invoice).encode(INVOICE) == raw
    assert Codec(Invoice).decode(raw) == INVOICE
    assert decode_json(raw)["lines"] == [{"sku": "a", "price": "1.10"}]
    name = Receipt.__module__.encode()
    assert Codec(Receipt).decode(b't%s:Receipt\n{"total":"2.50"}' % name).total == Decimal("2.50")
    assert Codec(list[Receipt]).decode(b'd[{"total":"1"}]') == [Receipt(total=Decimal(1))]
    assert Codec(tuple[int, ...]).decode(b"d[1,2]") == (1, 2)
    assert Codec().decode(b'j{"$uuid":"text"}') == {"$uuid": "text"}


# Which types


@dataclasses.dataclass
class Gadget:
    """What must not be built because a record says so."""

    built = 0
    name: str = ""

    def __post_init__(self) -> None:
        type(self).built += 1


def stored(once: Once, raw: bytes) -> None:
    """Change the answer of the block ``k`` in the store."""
    with once.guard("k") as claim:
        claim.answer = 1
    assert claim.claim is not None
    record = once.store.read(claim.claim.key)
    assert record is not None
    once.store.write(claim.claim.key, record.fingerprint, raw, record.expires_at)


@pytest.mark.parametrize("returns", [Any, dict, Line, list[Line], pydantic.BaseModel])
@pytest.mark.parametrize("form", [b't%s:Gadget\n{"name":"x"}', b'v[{"$data":["%s:Gadget",{}]}]'])
def test_only_types_of_the_annotation_are_built(returns: Any, form: bytes) -> None:
    """A changed record can't have an imported dataclass built that the function does not name."""
    once = Once(MemoryStore())
    stored(once, form % __name__.encode())
    before = Gadget.built
    with pytest.raises(UnsupportedAnswerError, match=r"test_answers:Gadget.*annotation"):
        once.guard("k", returns=returns).__enter__()
    assert Gadget.built == before


def test_nothing_is_imported_and_no_code_runs_for_a_stored_name() -> None:
    """Modules that are not there, functions and other classes are no types of answers."""
    for name in (b"nosuch.module:Line", b"os:system", b"builtins:dict", b"xml:dom", b":"):
        for form in (b't%s\n{"a":1}', b'v{"$data":["%s",{}]}', b'v{"$enum":["%s","x"]}'):
            with pytest.raises(UnsupportedAnswerError, match="rebuilt"):
                Codec(Line).decode(form % name)
    assert "nosuch" not in sys.modules
    for crossed in (b'v{"$data":["%s:Status",{}]}', b'v{"$enum":["%s:Line","sku"]}'):
        with pytest.raises(UnsupportedAnswerError, match="rebuilt"):
            Codec(Line | Status).decode(crossed % __name__.encode())


Price = NewType("Price", Line)


@pytest.mark.parametrize(
    "declared",
    [Line, Line | None, list[Line], dict[str, tuple[Line, ...]], Invoice, Price, Any],
)
def test_types_inside_the_annotation_are_reachable(declared: Any) -> None:
    """Arguments, fields and aliases count; where it says nothing, what the function names does."""
    once = Once(MemoryStore())

    def work(k: str) -> Any:
        return [Line("a", Decimal(1))]

    work.__annotations__["return"] = declared
    guarded = once(key="k")(work)
    assert guarded("k") == guarded("k") == [Line("a", Decimal(1))]


def test_a_subclass_of_the_annotation_is_what_it_was() -> None:
    """A function that promises a Line may give a Special one."""
    special = Special("a", Decimal(1), "sold")
    raw = Codec(Line).encode(special)
    assert same(Codec(Line).decode(raw), special)


# What is refused, and why


@pytest.mark.parametrize(
    "answer, why",
    [
        ({1}, "a set can't be stored"),
        ({"a": [object()]}, "a object can't be stored"),
        (Right.READ | Right.WRITE, "combination of flags"),
        (Decimal("NaN"), "would come back changed"),
        (float("inf"), "a float can't be stored"),
        (Gadget("s3cret"), "test_answers:Gadget is no type .* annotation"),
        (dt.time(1, tzinfo=OSLO), "a time can't be stored"),
    ],
)
def test_a_replay_without_an_answer_says_why(answer: Any, why: str) -> None:
    """The first caller has it; copies learn the reason, which holds no part of the answer."""
    once = Once(MemoryStore())

    @once(key="k")
    def work(k: str):  # type: ignore[no-untyped-def]
        return answer

    assert work("k") is answer
    with pytest.raises(AnswerOmittedError, match=why) as caught:
        work("k")
    assert "s3cret" not in str(caught.value)


def test_an_answer_whose_type_has_changed_says_so() -> None:
    """Fields that are gone or new, members that are gone: no foreign error, and never a guess."""
    name = __name__.encode()
    for raw in (
        b'v{"$data":["%s:Line",{"sku":"a"}]}' % name,
        b'v{"$enum":["%s:Status","LOST"]}' % name,
        b'v{"$datetime":["2026-01-01T00:00:00",0,"Nowhere/Else"]}',
        b'v{"$later":1}',
        b't%s:Receipt\n{"total":"many"}' % name,
    ):
        with pytest.raises(UnsupportedAnswerError, match="can't be rebuilt"):
            Codec(Line | Receipt).decode(raw)
    for raw in (b"v{", b"z1", b"j\xff"):
        with pytest.raises(StoreCorruptError):
            Codec().decode(raw)


class _Text(str):
    __slots__ = ()


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(alphabet=st.characters(), max_size=9)
        | st.binary(max_size=3)
        | st.text(max_size=3).map(_Text)
        | st.sampled_from([Level.LOW, Status.PAID, Word.YES, Decimal(1)]),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner)
            | st.dictionaries(st.text(max_size=4) | st.integers(), inner)
        ),
        max_leaves=8,
    )
)
def test_the_short_way_keeps_types_and_order(value: Any) -> None:
    """What is written without a look at each part reads back as the very same, part by part."""
    raw = attempt_exact(value) if FAST else None
    if raw is not None:
        assert repr(json.loads(raw)) == repr(value)
    try:
        stored = Codec().encode(value)
    except UnsupportedAnswerError:
        return
    assert Codec().decode(stored) == value
