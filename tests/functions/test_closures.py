"""Functions that a function makes: of one name, and not always for one thing."""

from __future__ import annotations

import gc
import types
import uuid
import weakref
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest

from oncekey import InvalidKeyError, MemoryStore, Once
from oncekey.guard import SharedKeysWarning


class Client:
    """Of a provider, or of another one."""

    def charge(self) -> str:
        return "charged"


class Settings:
    """Equal to those that say the same."""

    def __init__(self, provider: str) -> None:
        self.provider = provider

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and other.provider == self.provider

    __hash__ = None  # type: ignore[assignment]


class Kind(Enum):
    ONE = 1
    TWO = 2


def stripe() -> str:
    return "stripe"


def paypal() -> str:
    return "paypal"


def made(once: Once, prov: Any) -> Callable[[str], str]:
    """What a factory makes of what it is given."""

    @once(key="order_id")
    def charge(order_id: str) -> str:
        return f"{prov} charged {order_id}"

    return charge


def local(text: str) -> Callable[[], str]:
    return lambda: text


def named(text: str) -> Callable[[], str]:
    def provider() -> str:
        return text

    return provider


@pytest.mark.parametrize(
    "one, other",
    [
        ("stripe", "paypal"),
        (1, 2),
        (1, True),
        (None, "stripe"),
        (Decimal(1), Decimal(2)),
        (("a", 1), ("a", 2)),
        (Kind.ONE, Kind.TWO),
        (stripe, paypal),
        (stripe, "stripe"),
        (named("a"), named("b")),
        (Client, Settings),
        (types, gc),
    ],
)
def test_other_values_around_are_other_functions(one: Any, other: Any) -> None:
    """They would get each other's answers: the second is refused, until each has a name."""
    once = Once("memory://")
    assert made(once, one)("o") == made(once, one)("o")
    with pytest.raises(InvalidKeyError, match=r"another 'prov' around it, .* give name="):
        made(once, other)
    assert made(Once("memory://"), other)("o") != made(once, one)("o")


def test_a_name_of_its_own_settles_it() -> None:
    """With ``name=`` the factory has said what is meant."""
    once = Once("memory://")

    def make(prov: str) -> Callable[[str], str]:
        @once(key="order_id", name=f"charge-{prov}")
        def charge(order_id: str) -> str:
            return f"{prov} charged {order_id}"

        return charge

    assert [make(one)("o") for one in ("a", "b")] == ["a charged o", "b charged o"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: "stripe",
        lambda: ("a", uuid.UUID(int=1)),
        lambda: Kind.ONE,
        lambda: stripe,
        lambda: named("a"),
        lambda: local("a"),
        lambda: type("Local", (), {"__qualname__": "Local"}),
        lambda: {"provider": "a"},
        list,
    ],
)
def test_the_same_made_again_is_the_same(make: Any) -> None:
    """A module that is loaded again, or a fixture that builds its app anew, is no other."""
    once = Once("memory://")
    first, again = made(once, make()), made(once, make())
    assert first("o") == again("o") == first("o")


def test_equal_and_living_objects_are_the_same() -> None:
    """One client for both, or settings that say the same."""
    for one, other in ((client := Client(), client), (Settings("a"), Settings("a"))):
        once = Once("memory://")
        made(once, one)
        made(once, other)
    runs: list[int] = []
    once = Once("memory://")
    made(once, runs)
    runs.append(1)
    made(once, runs)


@pytest.mark.parametrize(
    "one, other",
    [
        (Client(), Client()),
        (Settings("a"), Settings("b")),
        ({"provider": "a"}, {"provider": "b"}),
        (local("a"), local("b")),
        (Client().charge, Client().charge),
        (None, Client()),
    ],
)
def test_what_can_not_be_decided_is_told_once(one: Any, other: Any) -> None:
    """Two clients may be of one provider or of two: they share their keys, with a warning."""
    once = Once("memory://")
    first = made(once, one)
    with pytest.warns(SharedKeysWarning, match=r"another 'prov' .* give name=") as told:
        second = made(once, other)
    assert told[0].filename == __file__
    assert first("o") == second("o")
    made(once, one)


def test_a_decorator_that_hides_its_function_is_found_out() -> None:
    """Two functions below a decorator without ``functools.wraps`` have one name."""
    once = Once("memory://")

    def guarded(function: Callable[[str], str]) -> Callable[[str], str]:
        @once(key="order_id")
        def inner(order_id: str) -> str:
            return function(order_id)

        return inner

    @guarded
    def charge(order_id: str) -> str:
        return "charged"

    def refund(order_id: str) -> str:
        return "refunded"

    with pytest.raises(InvalidKeyError, match="another 'function' around it"):
        guarded(refund)
    assert charge("o") == "charged"


def test_a_function_that_names_itself_is_one() -> None:
    """Its own name is bound after it is decorated."""
    once = Once("memory://")

    def make() -> Callable[[int], int]:
        @once(key="n")
        def count(n: int) -> int:
            return 0 if n == 0 else 1 + count(n - 1)

        return count

    assert make()(2) == make()(3) - 1 == 2


def test_nothing_around_is_kept_alive() -> None:
    """A store or a client goes when its last user does, though its function was guarded."""
    store, client = MemoryStore(), Client()
    gone = [weakref.ref(store), weakref.ref(client)]

    def make(store: Any, client: Any) -> None:
        @Once(store)(key="k")
        def work(k: str) -> Any:
            return store, client

    make(store, client)
    del store, client
    gc.collect()
    assert [one() for one in gone] == [None, None]
