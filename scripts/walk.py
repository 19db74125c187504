"""Count the steps that a first call takes through oncekey, on real servers.

    python scripts/walk.py                    # a table; --json and --markdown for other readers
    python scripts/walk.py --trace once       # one walk, step by step
    python scripts/walk.py --way asgi         # one way only
    python scripts/walk.py --write            # put the table into docs/reference/performance.md
    python scripts/size.py                    # lines of source, long files, long functions

Needs what the tests need (``make walk`` sees to it). The package that is walked is the one that
Python imports: with ``PYTHONPATH=src`` that of a working tree.

A walk is the first call of a key in a process that has served others before: from the moment the
caller's code calls oncekey, or the request reaches it, until the answer is out. Counted are frames
of code in the package only, in every thread: how many are entered (a coroutine that goes on after
a wait is not entered again), how many functions and files they are of, and how often the next
frame is in another file than the one before. Newer versions than Python 3.11 run comprehensions
without a frame of their own, so that their figures are lower.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import re
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import size

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "performance.md"
MARKED = re.compile(r"(<!-- walk -->\n).*?(<!-- /walk -->)", re.DOTALL)
# Commit 703fd5b: frames, functions, files, changes of file; lines and files of source.
BEFORE = {
    "fastapi": (252, 163, 34, 124),
    "asgi": (186, 126, 28, 97),
    "once": (101, 76, 19, 53),
    "sqlalchemy": (229, 118, 21, 101),
}
BEFORE_SIZE = (38_159, 206)
WARM_UP = 30
WALKS = 9

Step = tuple[str, str, int]  # file, function, depth


# --------------------------------------------------------------------------------------- counting


class Recorder:
    """Notes the frames of the package that are entered while it is on."""

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package}/"
        self.steps: list[Step] = []
        self.on = False

    def install(self) -> None:
        """Look at this thread, and at all that are started from now on."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def _look(self, frame: FrameType, event: str, arg: object) -> None:
        if not self.on or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(self.prefix) and _is_start(code, frame):
            name = code.co_filename.removeprefix(self.prefix)
            self.steps.append((name, code.co_qualname, self._depth(frame)))

    def _depth(self, frame: FrameType) -> int:
        depth = 0
        above = frame.f_back
        while above is not None:
            depth += above.f_code.co_filename.startswith(self.prefix)
            above = above.f_back
        return depth

    @contextlib.contextmanager
    def walk(self) -> Iterator[list[Step]]:
        """What is entered within the block."""
        self.steps = []
        self.on = True
        try:
            yield self.steps
        finally:
            self.on = False


def _is_start(code: CodeType, frame: FrameType) -> bool:
    """Whether a frame begins: one that goes on has a RESUME whose argument says so."""
    return code.co_code[frame.f_lasti + 1] & 3 == 0


@dataclass(frozen=True)
class Walk:
    """The figures of one way, and the steps that they count."""

    frames: int
    functions: int
    files: int
    changes: int
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, steps: list[Step]) -> Walk:
        """Count steps."""
        files = [file for file, _, _ in steps]
        return cls(
            frames=len(steps),
            functions=len({(file, name) for file, name, _ in steps}),
            files=len(set(files)),
            changes=sum(one != other for one, other in itertools.pairwise(files)),
            steps=tuple(steps),
        )

    @property
    def figures(self) -> dict[str, int]:
        """The counts alone."""
        return {name: value for name, value in asdict(self).items() if name != "steps"}


# ------------------------------------------------------------------------------------------- ways


async def _asgi(app: Any, path: str, headers: dict[str, str], body: bytes) -> int:
    """Send one request to an ASGI app, as a server does that has all of it; gives the status."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    status = 0
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(scope, receive, send)
    return status


@contextlib.asynccontextmanager
async def _lifespan(app: Any) -> AsyncIterator[None]:
    """Start an ASGI app and shut it down, as a server does."""
    events: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    answers: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    task = asyncio.ensure_future(app({"type": "lifespan", "state": {}}, events.get, answers.put))
    for event in ("startup", "shutdown"):
        await events.put({"type": f"lifespan.{event}"})
        found = (await answers.get())["type"]
        if found != f"lifespan.{event}.complete":
            raise SystemExit(f"the app's {event} failed: {found}")
        if event == "startup":
            yield
    await task


Call = Callable[[str], Awaitable[None]]


@contextlib.asynccontextmanager
async def delivery(servers: Servers) -> AsyncIterator[Call]:
    """A FastAPI app takes Stripe's deliveries and marks them in PostgreSQL."""
    from fastapi import FastAPI

    from oncekey import AsyncWebhookReceiver
    from oncekey.adapters.fastapi import webhook_router
    from oncekey.signatures import provider

    secret = "whsec_walk"
    receiver = AsyncWebhookReceiver(provider("stripe", secret=secret), servers.postgres())

    @receiver.on("invoice.paid")
    async def paid(event: Any) -> None:
        """Do nothing, so that only the way is counted."""

    app = FastAPI()
    app.include_router(webhook_router(receiver, "/hooks"))

    async def call(key: str) -> None:
        body = json.dumps({"id": key, "type": "invoice.paid", "data": {"object": {}}}).encode()
        now = int(time.time())
        signature = hmac.new(secret.encode(), b"%d." % now + body, hashlib.sha256).hexdigest()
        headers = {
            "Host": "walk.example",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Stripe-Signature": f"t={now},v1={signature}",
        }
        _expect(200, await _asgi(app, "/hooks", headers, body))

    async with _lifespan(app):
        yield call


@contextlib.asynccontextmanager
async def header(servers: Servers) -> AsyncIterator[Call]:
    """A Starlette app answers requests with an Idempotency-Key and keeps the answers in Redis."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from oncekey.adapters.asgi import IdempotencyMiddleware

    async def charge(request: Any) -> JSONResponse:
        return JSONResponse({"charged": (await request.json())["cents"]}, 201)

    shop = Starlette(routes=[Route("/charges", charge, methods=["POST"])])
    app = IdempotencyMiddleware(shop, servers.redis())

    async def call(key: str) -> None:
        body = b'{"cents": 500}'
        headers = {
            "Host": "walk.example",
            "Authorization": "Bearer walker",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Idempotency-Key": key,
        }
        _expect(201, await _asgi(app, "/charges", headers, body))

    async with _lifespan(app):
        yield call


@contextlib.asynccontextmanager
async def once(servers: Servers) -> AsyncIterator[Call]:
    """A plain function is guarded by a SQLite file."""
    from oncekey import Once, connect

    with connect(f"sqlite:///{servers.folder}/once.db") as store:
        guard = Once(store, scope="walk")

        @guard(key="order")
        def charge(order: str, cents: int) -> dict[str, Any]:
            return {"order": order, "charged": cents}

        async def call(key: str) -> None:
            _expect(500, charge(key, 500)["charged"])

        yield call


@contextlib.asynccontextmanager
async def transaction(servers: Servers) -> AsyncIterator[Call]:
    """A SQLAlchemy session on PostgreSQL writes a row together with the mark."""
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    from oncekey import connect

    url = servers.postgres()
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE payments (event text, cents int)"))
    insert = sa.text("INSERT INTO payments VALUES (:event, :cents)")
    with connect(url) as store:

        async def call(key: str) -> None:
            with (
                Session(engine) as session,
                store.transaction(key, {"cents": 500}, on=session) as tx,
            ):
                if not tx.replayed:
                    session.execute(insert, {"event": key, "cents": 500})
                    tx.answer = {"paid": 500}
            _expect({"paid": 500}, tx.answer)

        yield call
    engine.dispose()


def _expect(wanted: object, found: object) -> None:
    if wanted != found:
        raise SystemExit(f"the walk should have given {wanted!r}, but gave {found!r}")


WAYS: dict[str, tuple[str, Callable[[Servers], contextlib.AbstractAsyncContextManager[Call]]]] = {
    "fastapi": ("FastAPI delivery to PostgreSQL", delivery),
    "asgi": ("ASGI `Idempotency-Key` to Redis", header),
    "once": ("`@once` to SQLite", once),
    "sqlalchemy": ("SQLAlchemy transaction on PostgreSQL", transaction),
}


class Servers:
    """The servers of the benchmarks, each started when the first way needs it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        self._stack = stack
        self.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="oncekey-walk-"))
        Path(self.folder).chmod(0o755)
        self._urls: dict[str, str] = {}

    def postgres(self) -> str:
        """The URL of a database with oncekey's tables."""
        if "postgres" not in self._urls:
            import servers
            from oncekey import connect

            url = self._stack.enter_context(servers.postgres(self.folder))
            with connect(url) as store:
                store.create_schema()
            self._urls["postgres"] = url
        return self._urls["postgres"]

    def redis(self) -> str:
        """The URL of an empty server."""
        if "redis" not in self._urls:
            import servers

            # It keeps nothing on disk, and need not.
            warnings.filterwarnings("ignore", ".*appendonly", UserWarning)

            self._urls["redis"] = self._stack.enter_context(servers.redis(self.folder))
        return self._urls["redis"]


async def _walked(way: str, servers: Servers, recorder: Recorder) -> Walk:
    """The usual walk of one way: that with the median number of frames."""
    walks = []
    async with WAYS[way][1](servers) as call:
        for number in range(WARM_UP):
            await call(f"warm-{number}")
        for number in range(WALKS):
            await asyncio.sleep(0.02)  # what was left to be done in the background is done
            with recorder.walk() as steps:
                await call(f"walk-{number}")
            walks.append(Walk.of(steps))
    usual = statistics.median_low(walk.frames for walk in walks)
    return next(walk for walk in walks if walk.frames == usual)


def _package() -> Path:
    import oncekey

    return Path(oncekey.__file__).resolve().parent


def walked(ways: list[str]) -> dict[str, Walk]:
    """Take the walks."""
    recorder = Recorder(_package())
    recorder.install()
    with contextlib.ExitStack() as stack:
        servers = Servers(stack)
        return {way: asyncio.run(_walked(way, servers, recorder)) for way in ways}


# ----------------------------------------------------------------------------------------- output


def _rows(walks: dict[str, Walk]) -> list[tuple[str, ...]]:
    head = ("way", "frames", "functions", "files", "changes of file")
    return [
        head,
        *((WAYS[way][0], *map(str, walk.figures.values())) for way, walk in walks.items()),
    ]


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _markdown(walks: dict[str, Walk], found: size.Size) -> str:
    """The table of the page: each way as it was, and as it is."""
    lines = [
        "| way | | frames | functions | files | changes of file |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for way, walk in walks.items():
        for when, figures in (("before", BEFORE[way]), ("now", walk.figures.values())):
            lines.append(f"| {WAYS[way][0]} | {when} | {' | '.join(map(str, figures))} |")
    was = f"*Before* is commit 703fd5b, with {BEFORE_SIZE[0]:,} lines in {BEFORE_SIZE[1]} files"
    lines += ["", f"{was}; now there are {found.lines:,} in {found.files}."]
    return "\n".join(lines) + "\n"


def _trace(walk: Walk) -> str:
    shallow = min(depth for _, _, depth in walk.steps)
    lines = []
    before = ""
    for file, name, depth in walk.steps:
        mark = " " if file == before else ">"
        lines.append(f"{file:<36} {mark} {'  ' * (depth - shallow)}{name}")
        before = file
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Take the walks that the command line asks for, and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one; may repeat")
    parser.add_argument("--trace", choices=WAYS, help="print one walk, step by step")
    parser.add_argument("--json", action="store_true", help="print figures for a program")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.name}")
    options = parser.parse_args(arguments)
    if options.write and options.way:
        parser.error("--write needs all ways")
    walks = walked([options.trace] if options.trace else options.way or list(WAYS))
    found = size.measured()
    if options.write:
        table = _markdown(walks, found)
        text = PAGE.read_text("utf-8")
        PAGE.write_text(MARKED.sub(lambda marks: f"{marks[1]}{table}{marks[2]}", text), "utf-8")
    if options.trace:
        print(_trace(walks[options.trace]))
        print(walks[options.trace].figures)
    elif options.json:
        figures = {way: walk.figures for way, walk in walks.items()}
        print(json.dumps({"walks": figures, "size": asdict(found)}, indent=2))
    elif options.markdown:
        print(_markdown(walks, found))
    else:
        print(f"oncekey from {_package()}")
        print(_table(_rows(walks)))
        print(size.text(found))


if __name__ == "__main__":
    main()
