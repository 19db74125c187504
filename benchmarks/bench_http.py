"""The ``Idempotency-Key`` middleware behind a real server, beside bare endpoints and peers.

Run by ``run.py``. ``python bench_http.py NAME - SOCKET`` serves one of the ``APPS``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import targets
from bench_receiver import CALLERS, running, sent
from harness import Case, Options

PATH = "/charges"
FRESH = "fresh key"
REPLAY = "replay"

NULL = "floor: null ASGI app"
STARLETTE = "limit: bare Starlette"
FASTAPI = "limit: bare FastAPI"
OURS = "**oncekey** on Starlette"
OURS_FASTAPI = "**oncekey** on FastAPI"
CACHED = "**oncekey** on Starlette, `cache_entries`"
ASGI_PEER = "asgi-idempotency-header on Starlette"


# ------------------------------------------------------------------------------------------- apps


def null_app(_: str) -> Any:
    """The least that any app behind this server can do: take the body, answer some bytes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    return app


def bare_starlette(_: str) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def charge(request: Any) -> JSONResponse:
        order = await request.json()
        return JSONResponse({"id": "ch_1", "amount": order["amount"]})

    return Starlette(routes=[Route(PATH, charge, methods=["POST"])])


def bare_fastapi(_: str) -> Any:
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Order(BaseModel):
        amount: int
        currency: str
        customer: str
        metadata: dict[str, str]

    app = FastAPI()

    async def charge(order: Any) -> dict[str, Any]:
        return {"id": "ch_1", "amount": order.amount}

    charge.__annotations__["order"] = Order
    app.post(PATH)(charge)
    return app


def guarded(bare: Callable[[str], Any], **options: Any) -> Callable[[str], Any]:
    def app(_: str) -> Any:
        from oncekey import AsyncMemoryStore
        from oncekey.http.asgi import IdempotencyMiddleware

        # One caller sends all of it.
        return IdempotencyMiddleware(bare(_), AsyncMemoryStore(), max_new_keys=None, **options)

    return app


def asgi_peer_app(_: str) -> Any:
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import MemoryBackend

    return IdempotencyHeaderMiddleware(bare_starlette(_), backend=MemoryBackend())


APPS: dict[str, Callable[[str], Any]] = {
    "null": null_app,
    "starlette": bare_starlette,
    "fastapi": bare_fastapi,
    "oncekey": guarded(bare_starlette),
    "oncekey-fastapi": guarded(bare_fastapi),
    "oncekey-cached": guarded(bare_starlette, cache_entries=10_000),
    "asgi-peer": asgi_peer_app,
}


def serve(name: str, _: str, path: str) -> None:
    """Be a server, on a unix socket."""
    import uvicorn

    uvicorn.run(APPS[name](_), uds=path, log_level="error", access_log=False)


# ---------------------------------------------------------------------------------------- sending


def requests(count: int) -> list[bytes]:
    """Requests as they go over the wire, each with a key of its own."""
    order = {"amount": 500, "currency": "eur", "customer": "cus_1", "metadata": {"order": "o-1"}}
    body = json.dumps(order).encode()
    made = []
    for _ in range(count):
        lines = (
            f"POST {PATH} HTTP/1.1\r\nHost: bench.example\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer token\r\nIdempotency-Key: {uuid.uuid4()}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        made.append(lines.encode() + body)
    return made


def speeds(options: Options, folder: Path) -> harness.Samples:
    """Measure fresh keys and replays."""
    count = options.pick(1_000, 3_000)
    names = {
        NULL: "null",
        STARLETTE: "starlette",
        FASTAPI: "fastapi",
        OURS: "oncekey",
        OURS_FASTAPI: "oncekey-fastapi",
        CACHED: "oncekey-cached",
    }
    if harness.peer("idempotency_header_middleware"):
        names[ASGI_PEER] = "asgi-peer"

    with running(list(names.values()), folder, __file__) as paths:

        def case(title: str, count: int) -> Case:
            path = paths[names[title]]

            def go() -> dict[str, float]:
                batch = requests(count)
                taken = {FRESH: sent(path, batch, CALLERS)}
                # A bare endpoint knows no replay: it is what a replay is held against.
                bare = title in (NULL, STARLETTE, FASTAPI)
                taken[REPLAY] = taken[FRESH] if bare else sent(path, batch, CALLERS)
                return taken

            return go

        for title in names:
            case(title, 200)()  # warm
        return harness.measure(
            "http",
            {title: case(title, count) for title in names},
            rounds=options.pick(3, 7, 15),
            seconds=options.pick(20, 60, 300),
            seed=options.seed,
        )


# ----------------------------------------------------------------------------------------- report


def report(options: Options) -> str:
    """Measure, and give the section in Markdown."""
    if not (harness.peer("fastapi") and harness.peer("uvicorn")):
        return "### Idempotency-Key header\n\nLeft out: install `fastapi` and `uvicorn`.\n"
    folder = Path(tempfile.mkdtemp(prefix="oncekey-bench-", dir=options.directory))
    try:
        samples = speeds(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    fast = [name for name in ("uvloop", "httptools") if harness.peer(name)]
    references = {
        "of bare Starlette": STARLETTE,
        "of bare FastAPI": FASTAPI,
    }
    verdicts = targets.table("http")
    return f"""### Idempotency-Key header

{CALLERS} connections that wait for each answer send small JSON orders over HTTP on a unix socket, \
to one process of uvicorn {harness.version("uvicorn")} \
({" and ".join(fast) or "asyncio and h11"}). Stores are in memory, so that the middleware is \
measured. A replay answers what was recorded, without the application. idemkit is left out: with \
some thousand live keys its memory backend answers 503 under this load.

{harness.speed_table(samples, references)}
{verdicts}"""


if __name__ == "__main__":
    serve(*sys.argv[1:])
