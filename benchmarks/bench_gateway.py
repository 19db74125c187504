"""The gateway: what it costs to take an event in, to deliver one, and to find one in a backlog.

Run by ``run.py``. ``python bench_gateway.py NAME DATABASE SOCKET`` serves one of the ``APPS``;
``python bench_gateway.py sink`` is what deliveries go to.

What counts is processor time, of the server's or the sender's whole process: a rate by the clock
says more about what else the machine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_inbox
import harness
import targets
from bench_receiver import CALLERS, PATH, SECRET, deliveries, running, sent
from bench_sqlite import bare
from harness import Case, Options

INGEST, INGEST_CPU = "ingest", "ingest, processor time"
DELIVERY_CPU = "delivery, processor time"
COST = "{what} on {store}, processor time"
FETCH = "fetch of 100 on {store}, processor time"

NULL = "floor: null ASGI app"
INSERT = "limit: raw ASGI, a durable insert"
SHARED = "raw ASGI, inserts share a commit"
OURS = "**oncekey serve**"
CLIENT = "limit: bare aiohttp"
WORKER = "**oncekey** worker"
LEAST = "limit: the least statements"
INBOX = "**oncekey** inbox"
FEW, MANY = "few waiting", "**oncekey** a long backlog"

AT_A_TIME = 16  # deliveries: what a target gets by default
BODY = os.urandom(512).hex().encode()


# ---------------------------------------------------------------------------------------- servers


def null_app(_: str) -> Any:
    """The least that any app behind this server can do."""
    from bench_http import null_app

    return null_app(_)


async def whole(receive: Any) -> bytes:
    """The body of a request."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def say_yes(send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


TABLE = "CREATE TABLE event (id INTEGER PRIMARY KEY, key TEXT UNIQUE, body BLOB)"
ADD = "INSERT INTO event (key, body) VALUES (?, ?)"


def insert_app(database: str) -> Any:
    """Keeps the body under a unique key, and says yes once it is on disk. Verifies nothing."""
    connection = bare(database)
    connection.execute(TABLE)
    numbers = itertools.count()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body = await whole(receive)
            connection.execute(ADD, (f"evt_{next(numbers)}", body))
            await say_yes(send)

    return app


def shared_app(database: str) -> Any:
    """The same, but requests that wait at the same time are committed together."""
    connection = bare(database)
    connection.execute(TABLE)
    numbers = itertools.count()
    waiting: list[tuple[asyncio.Future[None], bytes]] = []

    def commit() -> None:
        batch, waiting[:] = waiting[:], []
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(ADD, [(f"evt_{next(numbers)}", body) for _, body in batch])
        connection.execute("COMMIT")
        for one, _ in batch:
            one.set_result(None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await whole(receive)
        loop = asyncio.get_running_loop()
        if not waiting:
            loop.call_soon(commit)
        future: asyncio.Future[None] = loop.create_future()
        waiting.append((future, body))
        await future
        await say_yes(send)

    return app


APPS: dict[str, Callable[[str], Any]] = {
    "null": null_app,
    "insert": insert_app,
    "shared": shared_app,
}
GATEWAY = f"""
store = "sqlite:///{{database}}"
[sources.{PATH.rpartition("/")[2]}]
provider = "stripe"
secret_env = "BENCH_SECRET"
targets = ["app"]
[targets.app]
pull = true
"""


def serve(name: str, database: str, path: str) -> None:
    """Be a server, on a unix socket and one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if name == "oncekey":
        import uvloop

        uvloop.run(serve_gateway(database, path))
        return
    import uvicorn

    uvicorn.run(APPS[name](database), uds=path, log_level="error", access_log=False)


async def serve_gateway(database: str, path: str) -> None:
    """What ``oncekey serve`` runs, on a unix socket. Nothing is delivered: that is apart."""
    from oncekey.server.app import make_app
    from oncekey.server.config import settings_from
    from oncekey.server.gateway import Gateway
    from oncekey.server.listening import BACKLOG, run_server, uvicorn_config
    from oncekey.server.tunnel import tunnel_to

    text = GATEWAY.format(database=database)
    gateway = await Gateway.open(settings_from(text, "bench.toml", {"BENCH_SECRET": SECRET}))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(BACKLOG)
        try:
            config = uvicorn_config(make_app(gateway), 1, ws=tunnel_to(gateway.proxies.way))
            await gateway.start()
            await run_server(config, [listener], before_stop=gateway.live.close, bound=10)
        finally:
            await gateway.stop(1)


def process_cpu(process: int) -> float:
    """Seconds of processor time of all threads of a process, to the microsecond."""
    total = 0
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text("ascii").split()[0])
    return total / 1e9


def owner_of(path: str) -> int:
    """The process that serves a socket: its command line ends with the path."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cmdline").read_bytes().rstrip(b"\0").endswith(path.encode()):
                    return int(entry.name)
    raise SystemExit(f"nobody serves {path}")


def ingesting(options: Options, folder: Path) -> harness.Samples:
    """Signed events of about 1 KB over HTTP, to one process on one core."""
    count = options.pick(500, 2_000)
    numbers = itertools.count()
    names = {NULL: "null", INSERT: "insert", SHARED: "shared", OURS: "oncekey"}
    with running(list(names.values()), folder, __file__) as paths:
        processes = {title: owner_of(paths[name]) for title, name in names.items()}

        def case(title: str, count: int) -> Case:
            def go() -> dict[str, float]:
                requests = deliveries(numbers, count, options.seed)
                used = process_cpu(processes[title])
                taken = sent(paths[names[title]], requests, CALLERS)
                used = process_cpu(processes[title]) - used
                return {INGEST: taken, INGEST_CPU: used / count}

            return go

        for title in names:
            case(title, 200)()  # warm
        return harness.measure(
            "gateway",
            {title: case(title, count) for title in names},
            rounds=options.pick(3, 7, 15),
            seconds=options.pick(20, 60, 300),
            seed=options.seed,
        )


# --------------------------------------------------------------------------------------- delivery


class SinkProtocol(asyncio.Protocol):
    """Answers 200 to every request with a Content-Length."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if not end:
                return
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            if len(rest) < length:
                return
            self._data = rest[length:]
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def sink() -> None:
    """Serve it until the standard input ends."""
    import uvloop

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(SinkProtocol, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)

    uvloop.run(main())


@contextlib.contextmanager
def sinking() -> Iterator[str]:
    """The URL of a sink in a process of its own."""
    command = [sys.executable, __file__, "sink"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield f"http://127.0.0.1:{port}/events"
        finally:
            process.communicate()


async def by_client(url: str, count: int) -> float:
    """Seconds of processor time a request of a bare client."""
    import aiohttp

    headers = {
        "content-type": "application/json",
        "user-agent": "bench",
        "webhook-id": "msg_0123456789abcdef",
        "webhook-timestamp": "1790000000",
        "webhook-signature": "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=",
        "idempotency-key": "msg_0123456789abcdef",
        "oncekey-attempt": "1",
        "oncekey-fence": "1",
    }
    numbers = iter(range(count))
    connector = aiohttp.TCPConnector(limit=AT_A_TIME)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def caller() -> None:
            for _ in numbers:
                async with (
                    asyncio.timeout(30),
                    session.post(url, data=BODY, headers=headers, allow_redirects=False) as answer,
                ):
                    await answer.content.read(16_384)
                    if answer.status != 200:
                        raise SystemExit(f"the sink answered {answer.status}")

        used = bench_inbox.own_cpu()
        await asyncio.gather(*(caller() for _ in range(AT_A_TIME)))
        return (bench_inbox.own_cpu() - used) / count


async def by_worker(url: str, count: int, database: str) -> float:
    """Seconds of processor time a delivery, from the fetch to its end on disk."""
    from oncekey.inbox import Arrival, Route, TargetPolicy
    from oncekey.inbox.delivery import DeliveryWorker, Destination
    from oncekey.inbox.targets import HttpTarget

    kind = (("content-type", "application/json"),)
    target = HttpTarget(url, secret="whsec_" + "c2Vj" * 8, allow_private=True)
    policy = TargetPolicy(concurrency=AT_A_TIME)
    async with bench_inbox.opened(f"sqlite:///{database}") as inbox:
        for start in range(0, count, 100):
            names = (f"evt_{number}" for number in range(start, start + 100))
            await asyncio.gather(
                *(
                    inbox.ingest(Arrival("shop", name, "t", BODY, kind, (Route("app"),)))
                    for name in names
                )
            )
        finish, left, over = inbox.finish, count, asyncio.Event()

        async def finished(results: Any) -> list[bool]:
            nonlocal left
            held = await finish(results)
            left -= sum(held)
            if not left:
                over.set()
            return held

        inbox.finish = finished
        worker = DeliveryWorker(inbox, {"app": Destination(target, policy)}, keep=None)
        used = bench_inbox.own_cpu()
        running = asyncio.create_task(worker.run())
        await over.wait()
        used = bench_inbox.own_cpu() - used
        await worker.stop()
        await running
        await target.aclose()
    return used / count


def delivering(options: Options, folder: Path) -> harness.Samples:
    """1 KB to one target, 16 at a time."""
    import uvloop

    count = options.pick(500, 2_000)
    numbers = itertools.count()
    with sinking() as url:
        cases: dict[str, Case] = {
            CLIENT: lambda: {DELIVERY_CPU: uvloop.run(by_client(url, count))},
            WORKER: lambda: {
                DELIVERY_CPU: uvloop.run(
                    by_worker(url, count, str(folder / f"deliver-{next(numbers)}.db"))
                )
            },
        }
        return harness.measure(
            "gateway",
            cases,
            rounds=options.pick(3, 7, 15),
            seconds=options.pick(20, 60, 300),
            seed=options.seed,
        )


# ------------------------------------------------------------------------------------------ inbox


def costs(options: Options, folder: Path) -> harness.Samples:
    """The inbox beside the least statements, and a fetch with a long backlog: see bench_inbox."""
    backlog = options.pick(100_000, 1_000_000)
    samples: harness.Samples = {}
    for store, run in (("SQLite", bench_inbox.on_sqlite), ("PostgreSQL", bench_inbox.on_postgres)):
        harness.progress(f"gateway: the inbox on {store}")
        place = folder / store
        place.mkdir()
        place.chmod(0o755)
        found = asyncio.run(run(str(place), backlog))
        for what in ("ingest", "fetch and finish"):
            samples[COST.format(what=what, store=store)] = {
                LEAST: [one / 1e6 for one in found[what]["bare_rounds"]],
                INBOX: [one / 1e6 for one in found[what]["inbox_rounds"]],
            }
        waits = found["backlog"]
        samples[FETCH.format(store=store)] = {
            FEW: [waits["short_us"] / 1e6],
            MANY: [waits["long_us"] / 1e6],
        }
    harness.progress()
    harness.RECORDED.setdefault("gateway", {}).update(samples)
    return samples


# ----------------------------------------------------------------------------------------- report


def report(options: Options) -> str:
    """Measure, and give the section in Markdown."""
    needed = ("uvicorn", "uvloop", "httptools", "aiohttp", "starlette", "jinja2", "argon2")
    if missing := [name for name in needed if not harness.peer(name)]:
        return f"### Gateway\n\nLeft out: install {', '.join(missing)}.\n"
    folder = Path(tempfile.mkdtemp(prefix="oncekey-bench-", dir=options.directory))
    folder.chmod(0o755)
    try:
        taken = harness.speed_table(
            ingesting(options, folder), {"of a durable insert": INSERT, "of shared commits": SHARED}
        )
        sent_on = harness.speed_table(delivering(options, folder), {"of the bare client": CLIENT})
        inbox = harness.speed_table(
            costs(options, folder), {"of the statements": LEAST, "of a short backlog": FEW}
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return f"""### Gateway

{CALLERS} connections send signed Stripe events of about 1 KB over a unix socket to one process on \
one core; SQLite with `synchronous=FULL` in `{options.directory}`. The *durable insert* is a raw \
ASGI app that keeps the body under a unique key, one commit a request; it verifies, parses and \
queues nothing.

{taken}
Deliveries of 1 KB, signed, {AT_A_TIME} at a time, from a SQLite inbox to an app that says yes; \
the bare client is aiohttp, which the worker does not use, with the same requests, unsigned, and \
no inbox: what one would write in its place. Processor time of the sender.

{sent_on}
What an event costs the inbox, client and server together, beside the least statements that could \
do it; and a fetch of 100 from a backlog of {options.pick(100_000, 1_000_000):,}, beside 1,000.

{inbox}
{targets.table("gateway")}"""


if __name__ == "__main__":
    if sys.argv[1] == "sink":
        sink()
    else:
        serve(*sys.argv[1:])
