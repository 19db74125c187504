"""Nodes killed with -9 under load: nothing acknowledged is lost, no effect is doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.scale import LONG
from tests.servers.fixtures_pg import Databases, sql

from oncekey.inbox import Filter, open_inbox

NODE = Path(__file__).parent / "node.py"
PATIENCE = 240.0


class Sink:
    """An idempotent receiver: it counts what came, and what came for the first time."""

    def __init__(self) -> None:
        self.came = 0
        self.bodies: dict[str, bytes] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        finally:
            server.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(fields["content-length"]))
                self.came += 1
                self.bodies.setdefault(fields["webhook-id"], body)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
        writer.close()


async def run_node(args: list[str], acked: dict[int, str], kill_after: int | None) -> bool:
    """Run a node; kill it after so many acknowledgements. True: it ended by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(NODE), *args, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    seen = 0
    over = False
    try:
        async with asyncio.timeout(PATIENCE):
            async for line in process.stdout:
                if line == b"over\n":
                    over = True
                    break
                number, _, name = line.decode().strip().partition(" ")
                acked[int(number)] = name
                seen += 1
                if kill_after is not None and seen >= kill_after:
                    # Somewhere after this: while others ingest, deliver and consume.
                    await asyncio.sleep(random.random() * 0.1)
                    break
    finally:
        with contextlib.suppress(ProcessLookupError):
            if not over:
                os.kill(process.pid, signal.SIGKILL)
        await process.stdout.read()
        await process.wait()
    return over


async def storm(url: str, app: str, nodes: int, events: int, kills: int) -> None:
    sink = Sink()
    acked: list[dict[int, str]] = [{} for _ in range(nodes)]
    async with sink.serving() as target:

        async def one(node: int) -> None:
            name = f"n{node}-"
            for _ in range(kills):
                first = max(acked[node], default=-1) + 1
                args = [url, name, target, str(first), str(events), app]
                if first >= events or await run_node(
                    args, acked[node], random.randint(1, max(1, events // kills))
                ):
                    break
            first = max(acked[node], default=-1) + 1
            over = await run_node(
                [url, name, target, str(first), str(events), app], acked[node], None
            )
            assert over

        await asyncio.gather(*(one(node) for node in range(nodes)))
    inbox = await open_inbox(url)
    try:
        found = {}
        after = None
        while True:
            page = await inbox.search(Filter(), limit=500, after=after)
            found.update({row.id: row for row in page})
            after = page.next
            if after is None:
                break
        assert await inbox.depths() == []
    finally:
        await inbox.aclose()
    kept = {name for one in acked for name in one.values()}
    assert kept <= set(found)
    assert {row.key for row in found.values()} >= {
        f"n{node}-{number}" for node in range(nodes) for number in acked[node]
    }
    assert len({row.key for row in found.values()}) == len(found)
    # Each event reached the idempotent target, whole; and had its effect exactly once.
    assert set(sink.bodies) == set(found)
    assert all(sink.bodies[row.id] == row.key.encode() * 50 for row in found.values())
    assert effects(app) == sorted(row.key for row in found.values())


def effects(app: str) -> list[str]:
    if app.startswith("postgresql"):
        return sorted(row[0] for row in sql(app, "SELECT name FROM effects"))
    with contextlib.closing(sqlite3.connect(app)) as opened:
        return sorted(row[0] for row in opened.execute("SELECT name FROM effects"))


async def test_a_node_killed_again_and_again_on_sqlite(tmp_path: Path) -> None:
    """One node on a file, killed under load."""
    app = str(tmp_path / "inbox.db")
    with contextlib.closing(sqlite3.connect(app)) as made:
        made.execute("CREATE TABLE effects (name text NOT NULL)")
    kills = 50 if LONG else 5
    await storm(f"sqlite:///{app}", app, nodes=1, events=kills * 20, kills=kills)


async def test_a_node_killed_whose_app_is_elsewhere(tmp_path: Path) -> None:
    """The inbox in one file and the app in another: effects are still exactly once."""
    app = str(tmp_path / "app.db")
    with contextlib.closing(sqlite3.connect(app)) as made:
        made.execute("CREATE TABLE effects (name text NOT NULL)")
    kills = 50 if LONG else 4
    url = f"sqlite:///{tmp_path / 'inbox.db'}"
    await storm(url, app, nodes=1, events=kills * 20, kills=kills)


async def test_nodes_killed_again_and_again_on_postgres(postgres: Databases) -> None:
    """Three nodes on one server, each killed under load."""
    url = postgres.database()
    sql(url, "CREATE TABLE effects (name text NOT NULL)")
    await (await open_inbox(url, create=True)).aclose()
    kills = 17 if LONG else 2
    await storm(url, url, nodes=3, events=kills * 20, kills=kills)
