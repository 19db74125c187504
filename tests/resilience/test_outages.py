"""What each word for outages can lose, row by row, on real servers that are stopped and started.

The rows are those of the table in docs/explanation/outages.md.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.resilience.servers import TIMEOUT, Outage, opened, outage

from oncekey import Once
from oncekey.errors import IdempotencyInFlightError, StoreCircuitOpenError, StoreUnavailableError
from oncekey.resilience import Breaker, BreakerState, Findings, ResilientStore, reconcile, resilient
from oncekey.resilience.journal import pages

__all__ = ["outage"]

PATIENCE = 60.0


class Worker:
    """A guarded function on a resilient store, as one process of an application has it."""

    def __init__(self, server: Outage, journal: Path, on_outage: Any, **policy: Any) -> None:
        self.inner = opened(server)
        self.store: ResilientStore = resilient(
            self.inner,
            journal=journal,
            on_outage=on_outage,
            breaker=Breaker(failures=2, retry_after=0.1, successes=1),
        )
        self.effects: list[str] = []
        self.once = Once(self.store, wait=0, **{"lease": 2, **policy})
        self.during: Callable[[], None] = lambda: None

        @self.once(key="order", name="charge")
        def charge(order: str) -> str:
            self.effects.append(order)
            self.during()
            return order

        self.charge = charge

    def until_back(self, order: str) -> str:
        """Try again and again, as a sender does."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self.charge(order)
            except (StoreUnavailableError, IdempotencyInFlightError):
                # A server that hung carries out what it was sent: that claim ends with its lease.
                assert time.monotonic() < until
                time.sleep(0.05)

    def findings(self) -> list[Any]:
        """What was found, once all is reconciled."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                self.store.reconcile()
                break
            except StoreUnavailableError:
                assert time.monotonic() < until
        assert self.store.findings is not None
        return self.store.findings.list()


@pytest.fixture
def order() -> str:
    """A name that no other test has used."""
    return uuid.uuid4().hex


class Away:
    """One outage of a server, either way."""

    def __init__(self, outage: Outage, hung: bool) -> None:
        self.hung = hung
        self._outage = outage
        self._on = False

    def begin(self) -> None:
        """It does not answer any more."""
        self._outage.hang() if self.hung else self._outage.stop()
        self._on = True

    def end(self) -> None:
        """It does again."""
        if self._on:
            self._outage.wake() if self.hung else self._outage.start()
        self._on = False


@pytest.fixture(params=["stopped", "hung"])
def away(outage: Outage, request: pytest.FixtureRequest) -> Iterator[Away]:
    """An outage, for what differs with the way it comes."""
    made = Away(outage, request.param == "hung")
    yield made
    made.end()


@pytest.fixture
def down(outage: Outage) -> Iterator[Away]:
    """An outage, for what does not."""
    made = Away(outage, hung=False)
    yield made
    made.end()


def test_closed_does_nothing_and_a_retry_does_it(
    outage: Outage, away: Away, tmp_path: Path, order: str
) -> None:
    """Row 1, closed: an error before anything ran, soon at once; the retry runs it, once."""
    worker = Worker(outage, tmp_path, "closed")
    worker.until_back(f"{order} before")
    away.begin()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            worker.charge(order)
    assert worker.store.breaker.state is BreakerState.OPEN
    begun = time.monotonic()
    with pytest.raises(StoreCircuitOpenError):
        worker.charge(order)
    assert time.monotonic() - begun < TIMEOUT
    assert worker.effects == [f"{order} before"]
    away.end()
    assert worker.until_back(order) == order
    assert worker.effects == [f"{order} before", order]
    assert worker.store.breaker.state is BreakerState.CLOSED
    worker.store.close()


def test_open_does_it_and_the_store_has_it_afterwards(
    outage: Outage, away: Away, tmp_path: Path, order: str
) -> None:
    """Rows 1 and 3, open: it runs, its copies replay, and afterwards so they do elsewhere."""
    worker = Worker(outage, tmp_path / "one", "open")
    worker.until_back(f"{order} before")
    away.begin()
    assert worker.charge(order) == worker.charge(order) == order
    away.end()
    assert worker.findings() == []
    other = Worker(outage, tmp_path / "two", "closed")
    assert other.until_back(order) == order
    assert (worker.effects, other.effects) == ([f"{order} before", order], [])
    worker.store.close()
    other.store.close()


def test_a_copy_of_what_was_done_before(
    outage: Outage, down: Away, tmp_path: Path, order: str
) -> None:
    """Row 2: closed refuses it; open does it again, and tells of both sides."""
    first = Worker(outage, tmp_path / "first", "closed")
    first.until_back(order)
    shut = Worker(outage, tmp_path / "shut", "closed")
    wide = Worker(outage, tmp_path / "wide", "open")
    down.begin()
    with pytest.raises(StoreUnavailableError):
        shut.charge(order)
    wide.charge(order)
    down.end()
    (found,) = wide.findings()
    assert found.kind == "duplicate"
    assert found.same_payload is True
    assert [side.state for side in found.sides] == ["completed", "completed"]
    assert found.sides[1].began < found.sides[0].began
    assert (shut.effects, wide.effects) == ([], [order])
    for one in (first, shut, wide):
        one.store.close()


PROCESS = """
import os, sys
from oncekey import Once, connect
once = Once(connect(sys.argv[1], timeout=0.5), wait=0, on_outage=sys.argv[2], journal=sys.argv[3])
with once.guard(sys.argv[4], 1) as claim:
    if not claim.replayed:
        if sys.argv[5] == "die":
            os.kill(os.getpid(), 9)
        claim.answer = "done"
"""


def process(outage: Outage, journal: Path, order: str, end: str = "") -> Any:
    """A process that does one key without the store."""
    command = [sys.executable, "-c", PROCESS, outage.url, "open", str(journal), order, end]
    return subprocess.Popen(command)


def test_copies_in_two_processes(outage: Outage, down: Away, tmp_path: Path, order: str) -> None:
    """Row 4, open: each process does it once, and both are named afterwards."""
    down.begin()
    workers = [process(outage, tmp_path, order) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    down.end()
    store = opened(outage, PATIENCE)
    made = reconcile(tmp_path, store)
    assert (made.inserted, made.duplicates, made.files) == (1, 1, 2)
    (found,) = Findings(str(tmp_path / "findings.db")).list()
    numbers = {int(side.process.rpartition(":")[2]) for side in found.sides}
    assert numbers == {worker.pid for worker in workers}
    assert reconcile(tmp_path, store).files == 0
    store.close()


def test_an_outage_while_the_work_is_done_closed(
    outage: Outage, away: Away, tmp_path: Path, order: str
) -> None:
    """Row 5, closed: done and not recorded, so that a retry after the lease does it again.

    Unless the server only hung, and carries out what it was sent.
    """
    worker = Worker(outage, tmp_path, "closed", lease=3)
    worker.during = away.begin
    with pytest.raises(StoreUnavailableError):
        worker.charge(order)
    worker.during = lambda: None
    away.end()
    assert worker.until_back(order) == order
    assert worker.effects == [order, order] or (away.hung and worker.effects == [order])
    worker.store.close()


def test_an_outage_while_the_work_is_done_open(
    outage: Outage, away: Away, tmp_path: Path, order: str
) -> None:
    """Row 5, open: its outcome goes in afterwards, and nothing is done twice."""
    worker = Worker(outage, tmp_path / "one", "open")
    worker.during = away.begin
    assert worker.charge(order) == order
    worker.during = lambda: None
    assert worker.charge(order) == order
    away.end()
    assert worker.findings() == []
    other = Worker(outage, tmp_path / "two", "closed")
    assert other.until_back(order) == order
    assert (worker.effects, other.effects) == ([order], [])
    worker.store.close()
    other.store.close()


def test_a_worker_that_died_without_the_store(
    outage: Outage, down: Away, tmp_path: Path, order: str
) -> None:
    """Row 6, open: that it had begun is told, and a retry runs it."""
    down.begin()
    assert process(outage, tmp_path, order, "die").wait() == -9
    down.end()
    store = opened(outage, PATIENCE)
    made = reconcile(tmp_path, store)
    assert (made.inserted, made.unfinished) == (0, 1)
    (found,) = Findings(str(tmp_path / "findings.db")).list()
    assert found.kind == "unfinished"
    with Once(store, wait=0).guard(order, 1) as claim:
        assert not claim.replayed
        claim.answer = "done"
    store.close()


def test_a_journal_that_is_lost(outage: Outage, down: Away, tmp_path: Path, order: str) -> None:
    """Row 7, open: with the disk goes all trace of it, and a retry runs it again, untold."""
    worker = Worker(outage, tmp_path / "one", "open")
    down.begin()
    worker.charge(order)
    assert list(pages(tmp_path / "one"))
    shutil.rmtree(tmp_path / "one")
    down.end()
    other = Worker(outage, tmp_path / "two", "open")
    other.until_back(order)
    assert (worker.effects, other.effects) == ([order], [order])
    assert other.findings() == []
    other.store.close()
    worker.inner.close()
