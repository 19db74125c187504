"""The webhook receiver behind a real server, beside bare endpoints and one by hand.

Run by ``run.py``. ``python bench_receiver.py NAME DATABASE SOCKET`` serves one of the ``APPS``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import random
import select
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import targets
from bench_sqlite import Files, bare, file_system, sync_us
from harness import Case, Options

from oncekey import AsyncSQLiteStore
from oncekey.receiver import AsyncWebhookReceiver
from oncekey.signatures import provider

CALLERS = 32
SECRET = "whsec_bench"
PATH = "/hooks/stripe"
FIRST = "first delivery"
DUPLICATE = "duplicate"

NULL = "floor: null ASGI app"
BARE = "limit: bare endpoint"
INSERT = "limit: bare, a durable insert"
SHARED = "bare, inserts share a commit"
HAND = "FastAPI by hand"
OURS = "**oncekey**"
INLINE = '**oncekey**, commit="inline"'


# ------------------------------------------------------------------------------------------- apps


def starlette_app(endpoint: Callable[[Any], Any]) -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Route

    return Starlette(routes=[Route(PATH, endpoint, methods=["POST"])])


def null_app(database: str) -> Any:
    """The least that any app behind this server can do."""
    from bench_http import null_app

    return null_app(database)


def bare_app(database: str) -> Any:
    """Reads the body and says yes."""
    from starlette.responses import Response

    async def hook(request: Any) -> Response:
        await request.body()
        return Response()

    return starlette_app(hook)


def insert_app(database: str) -> Any:
    """Reads the body, inserts a row, and says yes once it is on disk. Verifies nothing."""
    from starlette.responses import Response

    connection = bare(database)
    numbers = iter(range(2**62))

    async def hook(request: Any) -> Response:
        await request.body()
        connection.execute("INSERT INTO seen VALUES (?, 0)", (f"evt_{next(numbers)}",))
        return Response()

    return starlette_app(hook)


def shared_app(database: str) -> Any:
    """The same, but requests that wait at the same time are committed together."""
    import asyncio

    from starlette.responses import Response

    connection = bare(database)
    numbers = iter(range(2**62))
    waiting: list[asyncio.Future[None]] = []

    def commit() -> None:
        batch, waiting[:] = waiting[:], []
        connection.execute("BEGIN IMMEDIATE")
        rows = [(f"evt_{next(numbers)}",) for _ in batch]
        connection.executemany("INSERT INTO seen VALUES (?, 0)", rows)
        connection.execute("COMMIT")
        for one in batch:
            one.set_result(None)

    async def hook(request: Any) -> Response:
        await request.body()
        loop = asyncio.get_running_loop()
        if not waiting:
            loop.call_soon(commit)
        waiting.append(loop.create_future())
        await waiting[-1]
        return Response()

    return starlette_app(hook)


def hand_app(database: str) -> Any:
    """As guides write it: verify, look, insert, handle, commit."""
    from fastapi import FastAPI, HTTPException, Request

    connection = bare(database)
    app = FastAPI()

    async def hook(request: Any) -> dict[str, str]:
        body = await request.body()
        fields = dict(pair.split("=", 1) for pair in request.headers["stripe-signature"].split(","))
        signed = fields["t"].encode() + b"." + body
        expected = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, fields["v1"]):
            raise HTTPException(401)
        if abs(time.time() - int(fields["t"])) > 300:
            raise HTTPException(401)
        event = json.loads(body)
        found = connection.execute("SELECT 1 FROM seen WHERE key = ?", (event["id"],)).fetchone()
        if found:
            return {"status": "duplicate"}
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO seen VALUES (?, 0)", (event["id"],))
        await handle(event)
        connection.execute("COMMIT")
        return {"status": "handled"}

    hook.__annotations__["request"] = Request  # its name is not known outside this function
    app.post(PATH)(hook)
    return app


async def handle(event: Any) -> None:
    """What is to be done for an event: nothing, so that only the rest is measured."""


def oncekey_app(commit: str) -> Callable[[str], Any]:
    def app(database: str) -> Any:
        from starlette.applications import Starlette

        from oncekey.adapters.starlette import webhook_lifespan, webhook_route

        store = AsyncSQLiteStore(database, commit=commit)
        receiver = AsyncWebhookReceiver(provider("stripe", secret=SECRET), store)
        receiver.on("invoice.paid")(handle)
        routes = [webhook_route(PATH, receiver)]
        return Starlette(routes=routes, lifespan=webhook_lifespan(receiver))

    return app


APPS: dict[str, Callable[[str], Any]] = {
    "null": null_app,
    "bare": bare_app,
    "insert": insert_app,
    "shared": shared_app,
    "hand": hand_app,
    "oncekey": oncekey_app("thread"),
    "inline": oncekey_app("inline"),
}


def serve(name: str, database: str, path: str) -> None:
    """Be a server, on a unix socket."""
    import uvicorn

    uvicorn.run(APPS[name](database), uds=path, log_level="error", access_log=False)


# ---------------------------------------------------------------------------------------- sending


def deliveries(numbers: Iterator[int], count: int, seed: int) -> list[bytes]:
    """Requests as they go over the wire, each another event, signed just now."""
    stripe = provider("stripe", secret=SECRET)
    made = []
    for number in (next(numbers) for _ in range(count)):
        rng = random.Random(f"{seed}/{number}")
        event = {
            "id": f"evt_{number}_{rng.randbytes(8).hex()}",
            "object": "event",
            "api_version": "2026-10-28",
            "created": 1_790_000_000 + number,
            "type": "invoice.paid",
            "livemode": True,
            "data": {
                "object": {
                    "id": f"in_{rng.randbytes(12).hex()}",
                    "object": "invoice",
                    "amount_paid": rng.randrange(100, 100_000),
                    "currency": "eur",
                    "customer": f"cus_{rng.randbytes(8).hex()}",
                    "lines": [
                        {"id": f"il_{line}", "amount": rng.randrange(100, 9_999), "quantity": 1}
                        for line in range(6)
                    ],
                    "metadata": {"order": rng.randbytes(16).hex(), "note": "Größe M"},
                }
            },
        }
        body = json.dumps(event, indent=2, ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "Stripe/1.0"}
        request = stripe.sign("POST", f"http://bench.example{PATH}", headers, body)
        fields = {**request.headers, "Host": "bench.example", "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        made.append(f"POST {PATH} HTTP/1.1\r\n{lines}\r\n".encode() + body)
    return made


def is_whole(answer: bytes) -> bool:
    """Whether all of an answer is there, which must be a yes."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    if not head.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"a delivery was answered {answer[:300]!r}")
    _, _, length = head.lower().partition(b"content-length: ")
    if not length:  # in chunks
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(length.partition(b"\r")[0])


def sent(path: str, requests: list[bytes], callers: int) -> float:
    """Seconds a request, with that many connections that wait for each answer."""
    queue = iter(requests)
    left = len(requests)
    poll = select.epoll()
    calls: dict[int, tuple[socket.socket, bytearray]] = {}
    for _ in range(callers):
        one = socket.socket(socket.AF_UNIX)
        one.connect(path)
        calls[one.fileno()] = (one, bytearray())
        poll.register(one.fileno(), select.EPOLLIN)
    try:
        start = time.perf_counter()
        for (one, _), request in zip(calls.values(), queue, strict=False):
            one.sendall(request)
        while left:
            for descriptor, _ in poll.poll():
                one, answer = calls[descriptor]
                answer += one.recv(65_536)
                if not is_whole(answer):
                    continue
                answer.clear()
                left -= 1
                request = next(queue, b"")
                if request:
                    one.sendall(request)
        return (time.perf_counter() - start) / len(requests)
    finally:
        for one, _ in calls.values():
            one.close()
        poll.close()


@contextlib.contextmanager
def running(names: list[str], folder: Path, script: str = __file__) -> Iterator[dict[str, str]]:
    """Servers in processes of their own, all at once: those that nobody calls take no time."""
    started = []
    try:
        for name in names:
            database, path = folder / f"{name}.db", folder / f"{name}.sock"
            command = [sys.executable, script, name, str(database), str(path)]
            started.append((name, path, subprocess.Popen(command)))
        for name, path, process in started:
            end = time.monotonic() + 60
            while not _answers(path):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server {name} did not start")
                time.sleep(0.02)
        yield {name: str(path) for name, path, _ in started}
    finally:
        for _, _, process in started:
            process.terminate()
        for _, _, process in started:
            process.wait()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def speeds(options: Options, folder: Path) -> harness.Samples:
    """Measure first deliveries and duplicates, the same requests for all of a round."""
    count = options.pick(500, 1_500)
    numbers = iter(range(2**62))
    names = {
        NULL: "null",
        BARE: "bare",
        INSERT: "insert",
        SHARED: "shared",
        OURS: "oncekey",
        INLINE: "inline",
    }
    if harness.peer("fastapi"):
        names[HAND] = "hand"

    events = dict.fromkeys(names, 0)

    with running(list(names.values()), folder) as paths:

        def case(title: str, count: int) -> Case:
            path = paths[names[title]]

            def go() -> dict[str, float]:
                requests = deliveries(numbers, count, options.seed)
                events[title] += count
                if title in (NULL, BARE):  # they know no first
                    return {DUPLICATE: sent(path, requests, CALLERS)}
                taken = {FIRST: sent(path, requests, CALLERS)}
                if title not in (INSERT, SHARED):  # they would insert again
                    taken[DUPLICATE] = sent(path, requests, CALLERS)
                return taken

            return go

        for title in names:
            case(title, 200)()  # warm
        samples = harness.measure(
            "receiver",
            {title: case(title, count) for title in names},
            rounds=options.pick(3, 7, 15),
            seconds=options.pick(20, 60, 300),
            seed=options.seed,
        )
    for title in (OURS, INLINE):
        with contextlib.closing(sqlite3.connect(folder / f"{names[title]}.db")) as connection:
            query = "SELECT count(*), sum(attempts) FROM oncekey_records WHERE state = 1"
            found = connection.execute(query).fetchone()
        if found != (events[title], events[title]):
            raise SystemExit(f"{events[title]} events, but handled were {found}")
    return samples


# ----------------------------------------------------------------------------------------- report


def report(options: Options) -> str:
    """Measure, and give the section in Markdown."""
    if not (harness.peer("starlette") and harness.peer("uvicorn")):
        return "### Webhook receiver\n\nLeft out: install `starlette` and `uvicorn`.\n"
    folder = Path(tempfile.mkdtemp(prefix="oncekey-bench-", dir=options.directory))
    files = Files(options.directory)
    try:
        disk_us = sync_us(files)
        samples = speeds(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(files.path, ignore_errors=True)
    fast = [name for name in ("uvloop", "httptools") if harness.peer(name)]
    references = {
        "of the bare endpoint": BARE,
        "of an insert": INSERT,
        "of shared commits": SHARED,
        "times by hand": HAND,
    }
    verdicts = targets.table("receiver")
    return f"""### Webhook receiver

{harness.left_out("fastapi")}
{CALLERS} connections that wait for each answer send signed Stripe events of about 1 KB over HTTP \
on a unix socket, to one process of uvicorn {harness.version("uvicorn")} \
({" and ".join(fast) or "asyncio and h11"}) with Starlette {harness.version("starlette")}. SQLite \
with `synchronous=FULL` in `{options.directory}` ({file_system(options.directory)}), where one \
sync takes {disk_us:.0f} us. The *bare endpoint* reads the body and answers. With *a durable \
insert* it also commits one row before it does; where *inserts share a commit*, one commit takes \
those of all requests that wait. None of them verifies or parses anything. *By hand* is a receiver \
as guides write it: HMAC by the standard library, one select, one insert, no lease, no fence. \
Handlers do nothing.

{harness.speed_table(samples, references)}
{verdicts}"""


if __name__ == "__main__":
    serve(*sys.argv[1:])
