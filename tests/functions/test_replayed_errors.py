"""Errors that a guard declares as outcomes: recorded, and raised again for later callers."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import decimal
import logging
from collections.abc import Callable
from typing import Any

import pytest

from oncekey import (
    AnswerOmittedError,
    AsyncMemoryStore,
    AsyncOnce,
    ClaimLostError,
    MemoryStore,
    Once,
    PolicyError,
    SQLiteStore,
    StoreUnavailableError,
    UnsupportedAnswerError,
)
from oncekey._core.failures import FAILED, failure, rebuilt
from oncekey.errors import StoreCorruptError
from oncekey.testing import ManualClock


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


@pytest.fixture(params=["sync", "async"])
def overtaken(request: pytest.FixtureRequest, clock: ManualClock) -> Callable[..., Any]:
    """A call that is declined after its lease, while another worker took its key over."""

    def run(other: Callable[[], Any]) -> Any:
        runs: list[str] = []
        options: Any = {"lease": 5, "wait": 0, "replay_errors": [Declined]}

        if request.param == "sync":

            @Once(MemoryStore(clock=clock), **options)(key="key")
            def work(key: str) -> Any:
                runs.append(key)
                if len(runs) > 1:
                    return other()
                clock.advance(60)
                with contextlib.suppress(RuntimeError, Declined):
                    contextvars.Context().run(work, key)
                raise Declined(1, decimal.Decimal(1))

            return work("k")

        @AsyncOnce(AsyncMemoryStore(clock=clock), **options)(key="key")
        async def awork(key: str) -> Any:
            runs.append(key)
            if len(runs) > 1:
                return other()
            clock.advance(60)
            with contextlib.suppress(RuntimeError, Declined):
                again = awork(key)
                await asyncio.create_task(again, context=contextvars.Context())
            raise Declined(1, decimal.Decimal(1))

        return asyncio.run(awork("k"))

    return run


def raising(error: Exception) -> Callable[[], Any]:
    def other() -> Any:
        raise error

    return other


def test_a_worker_that_was_overtaken_gives_the_recorded_outcome(overtaken: Any) -> None:
    """Its own declared error is none: the other's answer or error counts, where there is one."""
    assert overtaken(lambda: "charged") == "charged"
    with pytest.raises(Expired) as caught:
        overtaken(raising(Expired(2, decimal.Decimal(2))))
    assert caught.value.code == 2
    assert isinstance(caught.value.__cause__, Declined)


def test_an_overtaken_worker_does_not_say_what_it_can_not_know(overtaken: Any) -> None:
    """The other worker has failed and may run again: there is no outcome to give."""
    with pytest.raises(ClaimLostError) as caught:
        overtaken(raising(RuntimeError("died")))
    assert isinstance(caught.value.__cause__, Declined)


def test_a_block_that_was_overtaken_says_so(clock: ManualClock) -> None:
    """A block can't give the other's answer: it raises."""
    store = MemoryStore(clock=clock)
    options: Any = {"lease": 5, "replay_errors": [Declined]}

    def other() -> None:
        with Once(store).guard("k", **options) as claim:
            claim.answer = "charged"

    block = Once(store).guard("k", **options)

    def overtaken() -> None:
        with block:
            clock.advance(60)
            contextvars.Context().run(other)
            raise Declined(1, decimal.Decimal(1))

    with pytest.raises(ClaimLostError, match="that one's answer counts") as caught:
        overtaken()
    assert isinstance(caught.value.__cause__, Declined)


async def test_an_async_block_that_was_overtaken_says_so(clock: ManualClock) -> None:
    """The same with ``async with``."""
    store = AsyncMemoryStore(clock=clock)
    options: Any = {"lease": 5, "replay_errors": [Declined]}

    async def other() -> None:
        async with AsyncOnce(store).guard("k", **options) as claim:
            claim.answer = "charged"

    async def overtaken() -> None:
        async with AsyncOnce(store).guard("k", **options):
            clock.advance(60)
            await asyncio.create_task(other(), context=contextvars.Context())
            raise Declined(1, decimal.Decimal(1))

    with pytest.raises(ClaimLostError, match="that one's answer counts"):
        await overtaken()


class Failing(MemoryStore):
    """A store that is gone when an outcome is to be recorded."""

    def complete(self, *args: Any) -> Any:
        raise StoreUnavailableError("gone")


class AsyncFailing(AsyncMemoryStore):
    async def complete(self, *args: Any) -> Any:
        raise StoreUnavailableError("gone")


def test_an_error_that_could_not_be_recorded_is_told_as_an_answer_is() -> None:
    """The outcome is not known to the store, so that it is no outcome: the store's error counts."""
    once = Once(Failing(), replay_errors=[Declined])

    @once(key="key")
    def work(key: str) -> None:
        raise Declined(1, decimal.Decimal(1))

    aonce = AsyncOnce(AsyncFailing(), replay_errors=[Declined])

    @aonce(key="key")
    async def awork(key: str) -> None:
        raise Declined(1, decimal.Decimal(1))

    for call in (lambda: work("k"), lambda: asyncio.run(awork("k"))):
        with pytest.raises(StoreUnavailableError, match="gone") as caught:
            call()
        assert "The work had failed with Declined" in caught.value.__notes__[-1]
