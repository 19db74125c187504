"""Gateways killed with -9 under load, again and again; then everything is counted.

A provider sends signed events, each until a node acknowledges it. Every event goes to an idempotent
app by HTTP, and by ``pull`` to a consumer that writes into its own database, in one transaction
with the end of the delivery. Nodes and consumers are killed at random moments and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.server.process import SECRET, TOKEN, event
from tests.server.traffic import Sink, post

from oncekey.inbox import Filter, open_inbox

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
SENDERS = 6
IN_START = 0.15  # which part of the kills hits a node that is just starting
CONFIG = """
store = "{store}"
[sources.shop]
provider = "stripe"
secret_env = "SHOP_SECRET"
targets = ["web", "app"]
[targets.web]
url = "{url}"
allow_private = true
timeout = 1
first_delay = 0.05
factor = 1.0
tries = 1000
breaker_after = 0
[targets.app]
pull = true
"""


@dataclass(frozen=True)
class Counted:
    """What a storm came to. Nothing was lost or doubled if all of the first five are equal."""

    acknowledged: int
    events: int
    delivered: int
    effects: int
    distinct_effects: int
    requests: int
    kills: int
    consumer_kills: int
    seconds: float
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"kills {self.kills} (and {self.consumer_kills} of consumers), acknowledged "
            f"{self.acknowledged}, events {self.events}, delivered {self.delivered} (in "
            f"{self.requests} requests), effects {self.effects}, in {self.seconds:.0f} s"
        )


class Node:
    """A process that is killed and started again; it is up once it has printed a line."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self.up = asyncio.Event()
        self.kills = 0
        self.said = ""

    async def begin(self) -> None:
        """Start it; it need not be up when this returns."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "SHOP_SECRET": SECRET, "ONCEKEY_TOKEN": TOKEN},
            )

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it says that it is."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
        assert line, f"it did not start: {self._log.read_text()[-2000:]}"
        self.said = line.decode()
        self.up.set()

    async def kill(self) -> None:
        """End it as a power cut would."""
        process = self._process
        assert process is not None
        self.up.clear()
        self.kills += 1
        process.kill()
        await process.wait()

    async def stop(self) -> int:
        """Ask it to end; its exit code."""
        process = self._process
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(process.wait(), PATIENCE)

    async def close(self) -> None:
        """Leave nothing behind."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Gateway(Node):
    """``oncekey serve`` at an address that stays."""

    def __init__(self, config: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        serve = ["serve", "--config", str(config), "--port", str(port)]
        super().__init__([sys.executable, "-m", "oncekey", *serve], log)


class Load:
    """A provider: event after event, each until it is acknowledged; some copies are sent anyway."""

    def __init__(self, nodes: list[Gateway]) -> None:
        self._nodes = nodes
        self._numbers = itertools.count()
        self._ended = False
        self.acknowledged: set[str] = set()
        self._tasks = [asyncio.create_task(self._send()) for _ in range(SENDERS)]

    async def _send(self) -> None:
        for number in self._numbers:
            if self._ended:
                return
            name = f"evt_{number}"
            copies = 2 if random.random() < 0.1 else 1
            for _ in range(copies):
                await self._until_taken(name)
            self.acknowledged.add(name)

    async def _until_taken(self, name: str) -> None:
        while True:
            node = random.choice([one for one in self._nodes if one.up.is_set()] or self._nodes)
            try:
                if await post(event(name, node.address)) == 200:
                    return
            except (OSError, asyncio.IncompleteReadError):
                pass
            await asyncio.sleep(0.03)

    async def end(self) -> set[str]:
        """Begin no more; every event that was begun is acknowledged."""
        self._ended = True
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*self._tasks)
        return self.acknowledged

    def cancel(self) -> None:
        """Leave nothing behind."""
        for task in self._tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def started(nodes: list[Node]) -> AsyncIterator[None]:
    """All of them, until the end of the block."""
    try:
        await asyncio.gather(*(node.begin() for node in nodes))
        await asyncio.gather(*(node.ready() for node in nodes))
        yield
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


async def _kill_again_and_again(nodes: list[Node], kills: int) -> None:
    """Kill one after another at random; each is started again while others are killed."""
    left = itertools.count(1)

    async def lives(node: Node) -> None:
        while next(left) <= kills:
            await asyncio.sleep(random.random() * 0.6)
            await node.kill()
            await node.begin()
            if random.random() > IN_START:
                await node.ready()
        if not node.up.is_set():
            await node.ready()

    await asyncio.gather(*(lives(node) for node in nodes))


async def storm(folder: Path, store: str, app: str, nodes: int, kills: int) -> Counted:
    """Run one.

    Args:
        folder: For the config and logs.
        store: The URL of the inbox, whose tables are there.
        app: Where the consumer writes: a file, or the URL of a database; with a table ``effects``.
        nodes: How many gateways.
        kills: How often one of them is killed, in all; consumers are killed half as often.
    """
    began = time.monotonic()
    async with Sink().serving() as sink:
        config = folder / "gateway.toml"
        config.write_text(CONFIG.format(store=store, url=sink.url))
        gateways = [Gateway(config, folder / f"gateway-{n}.log") for n in range(nodes)]
        take = [sys.executable, "-m", "tests.server.taker", store, app]
        takers = [Node(take, folder / f"taker-{n}.log") for n in range((nodes + 1) // 2)]
        async with started([*gateways, *takers]):
            load = Load(gateways)
            try:
                await asyncio.gather(
                    _kill_again_and_again([*gateways], kills),
                    _kill_again_and_again([*takers], kills // 2),
                )
                acknowledged = await load.end()
            finally:
                load.cancel()
            await until_delivered(store)
            codes = [await node.stop() for node in [*gateways, *takers]]
    found = await _events(store)
    effects = _effects(app)
    return Counted(
        acknowledged=len(acknowledged),
        events=len(found),
        delivered=len(sink.effects),
        effects=len(effects),
        distinct_effects=len(set(effects)),
        requests=sink.came,
        kills=sum(node.kills for node in gateways),
        consumer_kills=sum(node.kills for node in takers),
        seconds=time.monotonic() - began,
        faults=[
            *_differences(acknowledged, found, sink, effects),
            *(f"a process ended with {code}" for code in codes if code),
            *_logged(folder),
        ],
    )


async def until_delivered(store: str) -> None:
    """Wait until nothing waits any more."""
    inbox = await open_inbox(store)
    try:
        async with asyncio.timeout(PATIENCE):
            while any(depth.waiting for depth in await inbox.depths()):
                await asyncio.sleep(0.1)
    finally:
        await inbox.aclose()


async def _events(store: str) -> dict[str, str]:
    """The provider's id of each event that was kept, by ours."""
    inbox = await open_inbox(store)
    try:
        found: dict[str, str] = {}
        after = None
        while True:
            page = await inbox.search(Filter(), limit=500, after=after)
            found |= {row.id: row.key for row in page}
            after = page.next
            if after is None:
                return found
    finally:
        await inbox.aclose()


def _effects(app: str) -> list[str]:
    if app.startswith("postgresql"):
        from tests.servers.fixtures_pg import sql

        return [row[0] for row in sql(app, "SELECT name FROM effects")]
    with contextlib.closing(sqlite3.connect(app)) as opened:
        assert opened.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [row[0] for row in opened.execute("SELECT name FROM effects")]


def _differences(
    acknowledged: set[str], found: dict[str, str], sink: Sink, effects: list[str]
) -> list[str]:
    """What is wrong, in words."""
    faults = []
    names = sorted(found.values())
    if len(set(names)) != len(names):
        faults.append("an event was kept twice")
    if set(names) != acknowledged:
        lost = acknowledged - set(names)
        faults.append(f"acknowledged and not kept: {sorted(lost)[:5]} ({len(lost)})")
    if set(sink.effects) != set(found):
        faults.append(f"the app has {len(sink.effects)} events, {len(found)} were kept")
    if any(found.get(ours) != name for ours, name in sink.effects.items()):
        faults.append("the app got an event under the id of another")
    if sorted(effects) != names:
        faults.append(f"{len(effects)} effects by consuming, {len(set(effects))} of them different")
    return faults


def _logged(folder: Path) -> list[str]:
    """Tracebacks are faults, whatever the counts say."""
    logs = [*folder.glob("gateway-*.log"), *folder.glob("taker-*.log")]
    return [f"{log.name} has a traceback" for log in sorted(logs) if "Traceback" in log.read_text()]
