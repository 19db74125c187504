"""Errors that a guard declares as outcomes: recorded, and raised again for later callers."""

from __future__ import annotations

import asyncio
import decimal
import logging
from collections.abc import Callable
from typing import Any

import pytest

from oncekey import (
    AnswerOmittedError,
    AsyncMemoryStore,
    AsyncOnce,
    MemoryStore,
    Once,
    PolicyError,
    SQLiteStore,
    StoreUnavailableError,
    UnsupportedAnswerError,
)
from oncekey._core.failures import FAILED, failure, rebuilt
from oncekey.errors import StoreCorruptError


class Declined(Exception):
    """Its text is not its argument: pickle and ``type(*args)`` would get it wrong."""

    def __init__(self, code: int, amount: decimal.Decimal) -> None:
        super().__init__(f"declined with {code}")
        self.code = code
        self.amount = amount


class Expired(Declined):
    """A special case."""


class Open(Exception):
    """Holds what can't be stored."""

    def __init__(self) -> None:
        super().__init__("open")
        self.socket = object()


Call = Callable[[str], Any]


@pytest.fixture(params=["sync", "async"])
def guarded(request: pytest.FixtureRequest) -> Callable[..., tuple[Call, list[str]]]:
    """A function that raises what it is told, guarded in either form, and its runs."""
    sync, store, astore = request.param == "sync", MemoryStore(), AsyncMemoryStore()

    def make(error: Callable[[], BaseException], **options: Any) -> tuple[Call, list[str]]:
        runs: list[str] = []
        if sync:

            @Once(store)(key="order", name="charge", **options)
            def charge(order: str) -> None:
                runs.append(order)
                raise error()

            return charge, runs

        @AsyncOnce(astore)(key="order", name="charge", **options)
        async def acharge(order: str) -> None:
            runs.append(order)
            raise error()

        return lambda order: asyncio.run(acharge(order)), runs

    return make


def declined() -> Declined:
    return Expired(54, decimal.Decimal("9.90"))


def test_a_declared_error_is_the_outcome(guarded: Any) -> None:
    """Later callers get the same type, text, arguments and attributes, and nothing runs again."""
    charge, runs = guarded(declined, replay_errors=(Declined,))
    found = []
    for _ in range(3):
        with pytest.raises(Declined) as caught:
            charge("o-1")
        found.append(caught.value)
    assert runs == ["o-1"]
    first, again, last = found
    assert type(again) is Expired
    assert (str(again), again.args, again.code, again.amount) == (
        "declined with 54",
        first.args,
        54,
        decimal.Decimal("9.90"),
    )
    assert again is not last
    assert any("Replayed by oncekey" in note for note in again.__notes__)
    assert not hasattr(first, "__notes__")


def test_other_errors_free_the_key(guarded: Any) -> None:
    """What is not declared is raised, and the next call runs."""
    charge, runs = guarded(lambda: RuntimeError("down"), replay_errors=(Declined,))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            charge("o-1")
    assert len(runs) == 2


def test_errors_of_oncekey_are_no_outcomes(guarded: Any) -> None:
    """A store that fails inside of a function is no outcome of it, whatever is declared."""

    class Down(StoreUnavailableError, ValueError): ...

    charge, runs = guarded(lambda: Down("down"), replay_errors=(ValueError,))
    for _ in range(2):
        with pytest.raises(Down):
            charge("o-1")
    assert len(runs) == 2


def test_a_type_that_is_declared_no_more_is_told(guarded: Any) -> None:
    """The recorded error can't be built any more: the caller is told what to write."""
    charge, _ = guarded(declined, replay_errors=(Declined,))
    with pytest.raises(Declined):
        charge("o-1")
    later, runs = guarded(declined, replay_errors=(KeyError,))
    with pytest.raises(UnsupportedAnswerError, match=r"Expired.*replay_errors=\(Expired,\)"):
        later("o-1")
    assert runs == []


def test_what_an_error_holds_and_can_not_be_kept_is_named(guarded: Any) -> None:
    """Attributes without a stored form are left out, and a note says which."""
    charge, _ = guarded(Open, replay_errors=(Open,))
    with pytest.raises(Open):
        charge("o-1")
    with pytest.raises(Open) as caught:
        charge("o-1")
    assert not hasattr(caught.value, "socket")
    assert "Not kept by oncekey: socket." in caught.value.__notes__


def test_an_error_that_can_not_be_kept_still_counts(
    guarded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Arguments without a stored form: the work is done, with a warning, and never runs again."""
    charge, runs = guarded(lambda: KeyError(object()), replay_errors=(KeyError,))
    with caplog.at_level(logging.WARNING, "oncekey"), pytest.raises(KeyError):
        charge("o-1")
    assert "its error can't be kept" in caplog.text
    with pytest.raises(AnswerOmittedError, match="could not be raised again"):
        charge("o-1")
    assert len(runs) == 1


@pytest.mark.parametrize("kinds", [(Exception,), (BaseException,), ("x",), (PolicyError,), (1,)])
def test_types_that_can_not_be_outcomes_are_refused(kinds: Any) -> None:
    """Every failure, what is no exception, and oncekey's own errors are none."""
    with pytest.raises(PolicyError, match="replay_errors"):
        Once("memory://", replay_errors=kinds)


def test_one_type_stands_for_a_list_of_one() -> None:
    """A single type is taken, as ``except`` takes it."""
    kinds: Any = KeyError
    assert Once("memory://", replay_errors=kinds).policy.replay_errors == (KeyError,)


def test_blocks_record_and_raise() -> None:
    """A block that fails with a declared error raises it at the next entry."""
    once = Once("memory://")
    for _ in range(2):
        with pytest.raises(Declined), once.guard("k", replay_errors=(Declined,)):
            raise Declined(1, decimal.Decimal(2))
    with (
        pytest.raises(Declined) as caught,
        once.guard("k", replay_errors=(Declined,)) as claim,
    ):
        pytest.fail(f"ran again: {claim}")
    assert caught.value.code == 1


async def test_async_blocks_record_and_raise() -> None:
    """The same with ``async with``."""
    once = AsyncOnce("memory://", replay_errors=(Declined,))
    with pytest.raises(Declined):
        async with once.guard("k"):
            raise Declined(1, decimal.Decimal(2))
    with pytest.raises(Declined):
        async with once.guard("k"):
            pytest.fail("ran again")


def test_not_for_transactions(tmp_path: Any) -> None:
    """A transaction rolls back, its record too: the option is refused, with what to write."""
    store = SQLiteStore(tmp_path / "a.db")
    once = Once(store, replay_errors=(Declined,))
    with pytest.raises(PolicyError, match=r"not for transactions.*error_answer"):
        once(key="order", transactional=True)
    with pytest.raises(PolicyError, match="not for transactions"):
        once.transaction("k")
    with pytest.raises(PolicyError, match="not for transactions"):
        store.transaction("k", replay_errors=(Declined,))
    store.close()


@pytest.mark.parametrize(
    "raw",
    [b"r", b"r[]", b'r{"type":"builtins:KeyError","args":{"$data":["os:system",{}]},"state":{}}'],
)
def test_what_is_no_stored_error_is_refused(raw: bytes) -> None:
    """Damaged bytes, and ones that name other types inside, build nothing."""
    with pytest.raises((StoreCorruptError, UnsupportedAnswerError)):
        rebuilt(raw, (KeyError,))


def test_a_stored_name_builds_only_what_is_declared() -> None:
    """Whoever writes to the store can't have another type built, nor special attributes set."""
    raw = failure(KeyError("x"))
    with pytest.raises(UnsupportedAnswerError, match="does not name"):
        rebuilt(raw.replace(b"KeyError", b"SystemExit"), (KeyError,))
    planted = raw.replace(b'"state":{}', b'"state":{"__class__":"x","ok":1}')
    again = rebuilt(planted, (KeyError,))
    assert type(again) is KeyError
    assert vars(again)["ok"] == 1
    assert "__class__" not in vars(again)
    assert raw.startswith(FAILED)
