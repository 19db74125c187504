"""A network whose connections break all the time, between workers and their store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from oncekey import Once, connect
from oncekey.errors import ClaimLostError, IdempotencyInFlightError, StoreError
from oncekey.models import Key, Scope, State
from oncekey.testing import Proxy

KEYS = [f"key-{number}" for number in range(12)]
WORKERS = 4


@pytest.fixture(params=["postgresql", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    """A server."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("own_url"))
    return f"{request.getfixturevalue('redis_server').url}?check=off"


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    """The network before it."""
    with Proxy(url) as made:
        yield made


def test_a_flapping_network_makes_no_second_outcome(url: str, proxy: Proxy) -> None:
    """Every connection is reset again and again: callers retry, and all get one answer a key."""
    ran: Counter[str] = Counter()
    answers: dict[str, set[str]] = {name: set() for name in KEYS}
    errors: list[BaseException] = []
    lock = threading.Lock()
    # Short: a claim whose loss nobody could tell the store holds others up for this long.
    once = Once(connect(proxy.url), scope="flaps", lease=1, wait=60)

    @once(key="name", name=None)
    def work(name: str) -> str:
        with lock:
            ran[name] += 1
            return f"{name} by run {ran[name]}"

    def worker() -> None:
        try:
            for name in KEYS:
                while True:
                    try:
                        answer = work(name)
                    except (StoreError, ClaimLostError, IdempotencyInFlightError):
                        continue
                    with lock:
                        answers[name].add(answer)
                    break
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=worker) for _ in range(WORKERS)]
    with proxy.flapping(0.08, seed=7):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert proxy.connections > WORKERS  # it did flap
    with connect(url) as store:
        for name in KEYS:
            record = store.read(Key(Scope("once", "flaps"), name))
            assert record is not None
            assert record.state is State.COMPLETED
            # One outcome, told to all; a run whose outcome could not be recorded may have been
            # followed by another one, never by a second outcome.
            assert len(answers[name]) == 1, answers[name]
    once.store.close()


def test_a_server_that_is_down_and_up_again_is_found(url: str, proxy: Proxy) -> None:
    """While connections are refused calls fail and say so; then the same store works again."""
    with connect(proxy.url) as store:
        once = Once(store, scope="down", wait=0)
        calls: list[str] = []

        @once(key="name", name=None)
        def work(name: str) -> str:
            calls.append(name)
            return name

        assert work("before") == "before"
        with proxy.refuse(), pytest.raises(StoreError) as caught:
            work("during")
        assert caught.value.retryable
        assert work("during") == "during"
        assert work("before") == "before"
        assert calls == ["before", "during"]  # nothing ran while the store was away
