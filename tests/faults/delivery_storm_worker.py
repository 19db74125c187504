"""A worker of the delivery storm: a real receiver that answers what comes in on its lanes.

A lane is a pipe that carries one delivery at a time. Beside the delivery comes what is to happen to
it, which the receiver knows nothing of: the handler fails, or the process dies at that point.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sqlite3
import threading
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from oncekey import aconnect, connect
from oncekey.receiver import (
    AsyncWebhookReceiver,
    WebhookEvent,
    WebhookReceiver,
    WebhookResponse,
)
from oncekey.signatures import provider
from oncekey.signatures.base import SignedRequest

PROVIDER = provider("stripe", secret="whsec_storm")

FAIL = "fail"  # the handler raises before its effect
FAIL_LATE = "fail late"  # the handler raises after it; only a transaction can undo that
DIE_EARLY = "die early"  # in the handler, before the effect
DIE_LATE = "die late"  # in the handler, after it
DIE_MUTE = "die mute"  # with the answer ready, and not sent

TURN: ContextVar[tuple[int, str]] = ContextVar("turn")  # number of the sending, and what happens


class Task(NamedTuple):
    """What a worker is told."""

    url: str
    transactional: bool
    lease: float
    log: str
    receiver: str = ""


class Flaky(Exception):
    """What the handler calls was not there just now."""


def sqlite_path(url: str) -> str:
    return url.removeprefix("sqlite:///").partition("?")[0]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _happens(*what: str) -> bool:
    return TURN.get()[1] in what


def _before() -> None:
    if _happens(FAIL):
        raise Flaky
    if _happens(DIE_EARLY):
        die()


def _after() -> None:
    if _happens(FAIL_LATE):
        raise Flaky
    if _happens(DIE_LATE):
        die()


class Effects:
    """Where handlers leave their marks: rows of the same transaction, or lines of a file.

    Neither refuses a second mark for one event. A line is written by one call, so that it is there
    whole, or not at all, whenever its writer is killed.
    """

    def __init__(self, task: Task) -> None:
        self._log = os.open(task.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._sqlite = task.url.startswith("sqlite")

    def _note(self, event: str) -> None:
        os.write(self._log, f"{event} {TURN.get()[0]}\n".encode())

    def handle(self, event: WebhookEvent, tx: Any = None) -> None:
        """The handler of a sync receiver."""
        _before()
        if tx is None:
            self._note(event.id)
        else:
            marks = "?, ?" if self._sqlite else "%s, %s"
            row = (event.id, TURN.get()[0])
            tx.connection.execute(f"INSERT INTO effects VALUES ({marks})", row)
        _after()

    async def ahandle(self, event: WebhookEvent, tx: Any = None) -> None:
        """The handler of an async receiver: aiosqlite or asyncpg."""
        _before()
        if tx is None:
            self._note(event.id)
        elif self._sqlite:
            row = (event.id, TURN.get()[0])
            await tx.connection.execute("INSERT INTO effects VALUES (?, ?)", row)
        else:
            statement = "INSERT INTO effects VALUES ($1, $2)"
            await tx.connection.execute(statement, event.id, TURN.get()[0])
        _after()


@contextlib.contextmanager
def prepared(task: Task) -> Iterator[None]:
    """Tables for effects, and drivers loaded before anybody forks."""
    if task.url.startswith("sqlite"):
        path = sqlite_path(task.url)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as own:
            own.execute("PRAGMA journal_mode = WAL")
            own.execute("CREATE TABLE effects (event TEXT NOT NULL, number INTEGER NOT NULL)")
            own.execute("CREATE TABLE marks (id TEXT NOT NULL)")
        modules = ["oncekey.stores.sqlite", "aiosqlite"]
    elif task.url.startswith("postgresql"):
        import psycopg

        with psycopg.connect(task.url, autocommit=True) as own:
            own.execute("CREATE TABLE effects (event text NOT NULL, number integer NOT NULL)")
        modules = ["oncekey.stores.postgres", "asyncpg", "psycopg_pool"]
    else:
        modules = [f"oncekey.stores.{task.url.partition(':')[0]}"]
    for module in modules:
        importlib.import_module(module)
    # What is in memory is there as long as somebody has it open.
    with connect(task.url) if task.url.startswith("memory") else contextlib.nullcontext():
        yield


def effects_of(task: Task) -> list[tuple[str, int]]:
    """What the handlers left: each with the number of the sending that led to it."""
    query = "SELECT event, number FROM effects"
    if not task.transactional:
        lines = Path(task.log).read_text().splitlines()
        return [(event, int(number)) for event, number in map(str.split, lines)]
    if task.url.startswith("sqlite"):
        path = sqlite_path(task.url)
        with contextlib.closing(sqlite3.connect(path)) as own:
            return own.execute(query).fetchall()
    import psycopg

    with psycopg.connect(task.url) as own:
        return own.execute(query).fetchall()


class ByHand:
    """A receiver as guides write it, for control: it looks, marks and handles, step by step.

    Marked first, an event is lost whose worker dies in the handler. Marked last, it is handled
    twice if its worker dies before the mark. A storm that finds neither proves nothing.
    """

    def __init__(self, task: Task, effects: Effects) -> None:
        self._effects = effects
        self._first = task.receiver == "mark first"
        path = sqlite_path(task.url)
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA busy_timeout = 60000")
        self._lock = threading.Lock()

    def receive(self, *request: Any) -> WebhookResponse:
        """What ``WebhookReceiver.receive`` is."""
        verdict = PROVIDER.verify(*request)
        (item,) = PROVIDER.items(request[2], request[3])
        assert verdict.ok
        assert verdict.sender
        assert item.event_id
        event = WebhookEvent(item.event_id, "", None, verdict.sender, b"", request[2])
        if self._run("SELECT id FROM marks WHERE id = ?", event.id):
            return WebhookResponse(200, {}, b"", "duplicate")
        try:
            if self._first:
                self._run("INSERT INTO marks VALUES (?)", event.id)
            self._effects.handle(event)
            if not self._first:
                self._run("INSERT INTO marks VALUES (?)", event.id)
        except Flaky:
            self._run("DELETE FROM marks WHERE id = ?", event.id)
            return WebhookResponse(500, {}, b"", "failed", "Flaky")
        return WebhookResponse(200, {}, b"", "handled")

    def _run(self, statement: str, name: str) -> list[Any]:
        with self._lock:
            return self._connection.execute(statement, (name,)).fetchall()

    def close(self) -> None:
        self._connection.close()


def sync_receiver(task: Task, effects: Effects) -> Any:
    """The receiver of a worker with threads."""
    if task.receiver:
        return ByHand(task, effects)
    receiver = WebhookReceiver(
        PROVIDER,
        connect(task.url),
        lease=task.lease,
        wait=0.05,
        transactional=task.transactional,
    )
    receiver.on("invoice.paid")(effects.handle)
    return receiver


def _answer(lane: Connection, response: WebhookResponse) -> None:
    if _happens(DIE_MUTE):
        die()
    lane.send((response.status, response.outcome, response.code))


def _next(lane: Connection) -> Any:
    """The next order, or ``None`` at the end of them."""
    try:
        return lane.recv()
    except (EOFError, OSError):
        return None


@contextlib.contextmanager
def _or_end() -> Iterator[None]:
    """An error that a receiver let through ends the storm: no sender would ever get an answer."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(70)


def serve_in_threads(task: Task, lanes: list[Connection]) -> None:
    """Answer with a ``WebhookReceiver``, one thread a lane, until the lanes are closed."""
    effects = Effects(task)
    receiver = sync_receiver(task, effects)

    def work(lane: Connection) -> None:
        with _or_end():
            while (order := _next(lane)) is not None:
                *turn, request = order
                TURN.set((turn[0], turn[1]))
                _answer(lane, receiver.receive(*SignedRequest(*request)))

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    receiver.close()


def serve_in_loop(task: Task, lanes: list[Connection]) -> None:
    """Answer with an ``AsyncWebhookReceiver``, one task a delivery, until the lanes are closed."""

    async def main() -> None:
        effects = Effects(task)
        loop = asyncio.get_running_loop()
        receiver = AsyncWebhookReceiver(
            PROVIDER,
            aconnect(task.url),
            lease=task.lease,
            wait=0.05,
            transactional=task.transactional,
        )
        receiver.on("invoice.paid")(effects.ahandle)
        open_lanes = set(lanes)
        at_work: set[asyncio.Task[None]] = set()
        closed = asyncio.Event()

        async def work(lane: Connection, number: int, happens: str, request: Any) -> None:
            TURN.set((number, happens))
            with _or_end():
                _answer(lane, await receiver.receive(*SignedRequest(*request)))

        def readable(lane: Connection) -> None:
            order = _next(lane)
            if order is None:
                loop.remove_reader(lane.fileno())
                open_lanes.discard(lane)
                if not open_lanes:
                    closed.set()
                return
            started = loop.create_task(work(lane, *order))
            at_work.add(started)
            started.add_done_callback(at_work.discard)

        for lane in lanes:
            loop.add_reader(lane.fileno(), readable, lane)
        await closed.wait()
        await asyncio.gather(*at_work)
        await receiver.aclose()

    asyncio.run(main())


def serve(task: Task, in_loop: bool, lanes: list[Connection]) -> None:
    """Be a worker."""
    # Handlers fail by the thousand here; which errors there were, the answers tell.
    logging.getLogger("oncekey").setLevel(logging.ERROR)
    (serve_in_loop if in_loop and not task.receiver else serve_in_threads)(task, lanes)
