"""Payloads that are models: what Pydantic masks, drops or leaves out still tells them apart."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import ipaddress
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    Secret,
    SecretBytes,
    SecretStr,
    computed_field,
    field_serializer,
    model_serializer,
)

from oncekey import (
    IdempotencyConflictError,
    IdempotencyStore,
    MemoryStore,
    Once,
    ToolContext,
)
from oncekey._core.arguments import as_dict
from oncekey._core.fingerprint import fingerprint, form
from oncekey.errors import CanonicalJSONError


class Method(BaseModel):
    kind: str = "m"


class Card(Method):
    number: str = ""
    pin: SecretStr = SecretStr("")
    tags: frozenset[int] = frozenset()


@dataclasses.dataclass
class Place:
    name: str


@dataclasses.dataclass
class Room(Place):
    number: int = 0


class Order(BaseModel):
    idempotency_key: str = "k"
    method: Method | None = None
    methods: list[Method] = []
    by_name: dict[str, Method] = {}
    place: Place | None = None
    secrets: tuple[SecretStr, ...] = ()
    some: set[SecretStr] = set()
    named: dict[SecretStr, int] = {}
    raw: SecretBytes | None = None
    amount: Secret[decimal.Decimal] | None = None
    note: Any = Field(default=None, exclude=True)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a subclass": ({"method": Card(number="1")}, {"method": Card(number="2")}),
    "a secret of a subclass": (
        {"method": Card(pin=SecretStr("1"))},
        {"method": Card(pin=SecretStr("2"))},
    ),
    "subclasses in a list": ({"methods": [Card(number="1")]}, {"methods": [Card(number="2")]}),
    "subclasses in a dict": (
        {"by_name": {"a": Card(tags=frozenset([1]))}},
        {"by_name": {"a": Card(tags=frozenset([2]))}},
    ),
    "a dataclass of a subclass": ({"place": Room("a", 1)}, {"place": Room("a", 2)}),
    "secrets in a tuple": ({"secrets": ("1",)}, {"secrets": ("2",)}),
    "secrets in a set": ({"some": {"1", "2"}}, {"some": {"1", "3"}}),
    "secrets as names": ({"named": {"a": 1, "b": 2}}, {"named": {"c": 1, "b": 2}}),
    "secret bytes": ({"raw": b"\xff"}, {"raw": b"\xfe"}),
    "a secret of another type": ({"amount": "1.1"}, {"amount": "1.2"}),
    "an excluded field": ({"note": "1"}, {"note": "2"}),
    "an excluded address": (
        {"note": [ipaddress.ip_address("127.0.0.1")]},
        {"note": [ipaddress.ip_address("127.0.0.2")]},
    ),
}


@pytest.mark.parametrize("of", [fingerprint, as_dict])
@pytest.mark.parametrize("kind", PAIRS)
def test_what_a_dump_hides_is_another_payload(kind: str, of: Callable[[Any], Any]) -> None:
    """Two models that differ only in what their dump hides differ; two equal ones don't."""
    one, other = PAIRS[kind]
    assert of(Order(**one)) == of(Order(**one))
    assert of(Order(**one)) != of(Order(**other))


def test_a_function_and_a_request_refuse_it() -> None:
    """The same key with another card is a conflict, where it was the first one's answer."""

    @Once("memory://")(key="order_id")
    def pay(order_id: str, order: Order) -> str:
        return str(order.method)

    pay("o", Order(method=Card(number="1")))
    with pytest.raises(IdempotencyConflictError, match="order differs"):
        pay("o", Order(method=Card(number="2")))

    @IdempotencyStore(MemoryStore()).wrap
    def buy(params: Order, context: Any = None) -> dict[str, Any]:
        return {}

    caller = ToolContext(caller_identity="acme")
    buy(Order(idempotency_key="k", secrets=(SecretStr("1"),)), caller)
    with pytest.raises(IdempotencyConflictError):
        buy(Order(idempotency_key="k", secrets=(SecretStr("2"),)), caller)


def test_secrets_are_not_kept() -> None:
    """What is remembered of a payload has digests of its secrets, wherever they are."""
    for secret in ("hunter-2", b"hunter-2"):
        kind = SecretStr if isinstance(secret, str) else SecretBytes
        for value in ({"a": [kind(secret)]}, Order(note=(kind(secret),)), kind(secret)):  # type: ignore[arg-type]
            assert b"hunter" not in form(value)
            assert b"$secret" in form(value)


def test_the_order_of_a_set_does_not_count() -> None:
    """Secrets in a set have no order: another process gives them in another."""
    names = [str(n) for n in range(40)]
    first, again = ({SecretStr(name) for name in some} for some in (names, names[::-1]))
    assert fingerprint(Order(some=first)) == fingerprint(Order(some=again))
    found = as_dict(Order(some=set(names)))["some"]
    assert found == sorted(found)


def test_large_numbers_in_a_model_count_as_they_do_beside_it() -> None:
    """An integer that JSON readers would round has its own form, in a model too."""

    class Big(BaseModel):
        n: int

    assert form(Big(n=2**60)) == form({"n": 2**60})
    assert fingerprint(Big(n=2**60)) != fingerprint(Big(n=2**60 + 1))


def test_what_has_no_form_is_refused() -> None:
    """An excluded field is part of the payload: one that can't be compared is told."""
    with pytest.raises(CanonicalJSONError, match="has no fingerprint"):
        fingerprint(Order(note=object()))


def test_only_what_was_set_counts_in_a_request() -> None:
    """An excluded field that nobody set is missing; a key that the model made counts."""

    class Made(BaseModel):
        idempotency_key: str = Field(default="made", exclude=True)
        note: str = Field(default="n", exclude=True)

    assert as_dict(Made()) == {"idempotency_key": "made"}
    assert as_dict(Made(note="n")) == {"idempotency_key": "made", "note": "n"}
    assert as_dict(Made(note="n"), ignore_defaults=True) == {"idempotency_key": "made"}
    assert as_dict(Order(place=Room("a"), method=Card(kind="c"))) == {
        "idempotency_key": "k",
        "method": {"kind": "c"},
        "place": {"name": "a", "number": 0},
    }


class Color(enum.Enum):
    RED = "red"


class Aliased(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True, extra="allow")

    a: int = Field(alias="b", default=1)
    c: int = Field(alias="a", default=2)


class Written(BaseModel):
    """One whose author says what it is shown as."""

    tags: list[str] = ["a", "b"]
    card: str = "4111"
    kept: Annotated[dict[str, int], PlainSerializer(lambda found: sorted(found))] = {"z": 1}

    @field_serializer("tags")
    def _tags(self, value: list[str]) -> str:
        return ",".join(value)

    @field_serializer("card")
    def _card(self, value: str) -> str:
        return "*" + value[-1]


class Short(BaseModel):
    x: int = 1
    y: int = 2

    @model_serializer
    def _short(self) -> dict[str, int]:
        return {"x": self.x}


class Rows(RootModel[list[int]]):
    pass


@dataclasses.dataclass
class Counted:
    a: int
    double: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.double = self.a * 2


class Plain(BaseModel):
    text: str = "é"
    number: float = 1.5
    when: dt.datetime = dt.datetime(2024, 1, 2, tzinfo=dt.UTC)
    lasts: dt.timedelta = dt.timedelta(hours=1, seconds=3)
    price: decimal.Decimal = decimal.Decimal("1.10")
    color: Color = Color.RED
    raw: bytes = b"abc"
    rows: tuple[Aliased, ...] = (Aliased(b=3, z=[dt.date(2024, 1, 1)]),)
    by_day: dict[dt.date, Method] = {dt.date(2024, 1, 1): Method()}
    some: set[int] = {3, 1, 2}
    counted: Counted = Counted(2)
    written: Written = Written()
    short: Short = Short()
    root: Rows = Rows([1, 2])
    either: Method | int = Method()
    any: Any = Method(kind="n")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> float:
        return self.number * 2


def test_models_without_any_of_that_have_the_fingerprint_that_they_had() -> None:
    """Records of earlier versions are still matched: the digests were made by them."""
    other = {"order": [Plain(number=2.5, either=3)], "n": 1}
    assert fingerprint(Plain()) == (
        b"b55b31d623e8fa83f82bdd3bb19b444d07a576a2662baecc2056a5ed655fe10b"
    )
    assert fingerprint(other) == (
        b"ce6d29962fc0f8ffa0a564049a14fe9bf32e87b2a2f07829a5be39e5782ded3c"
    )
