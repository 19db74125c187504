"""Small shops that take the Idempotency-Key header, each behind a real server of its own.

    python -m tests.adapters.keyed_sites KIND FD

Every one has the same URLs: ``/charges`` makes a charge and answers 201, ``/missing`` answers 404
in the framework's own way, ``/broken`` fails, ``/upload`` takes a form with a file, ``/stream``
answers in parts, and ``/paths/`` takes any path below it. What handlers do is noted in a file,
since workers share nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.adapters.webhook_sites import ROOT, Site, run_django, run_gunicorn

from oncekey import AsyncSQLiteStore, SQLiteStore

HEADERS = {"X-Shop": "yes", "Set-Cookie": "session=1", "Location": "/charges/1"}
BELOW = "paths/<path:rest>"  # as Django writes it
PARTS = [b"one,", b"two,", b"three"]
urlpatterns: list[Any] = []


def serve(kind: str, folder: Path) -> Iterator[Site]:
    """Serve a shop while a fixture lives."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        fd = str(listener.fileno())
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.adapters.keyed_sites", kind, fd],
                cwd=ROOT,
                env={**os.environ, "SITE_FOLDER": str(folder), "PYTHONWARNINGS": "default"},
                pass_fds=[listener.fileno()],
                stdout=log,
                stderr=log,
            )
        try:
            yield Site(f"http://127.0.0.1:{listener.getsockname()[1]}", folder)
        finally:
            server.terminate()
            server.wait()


# In the server's process


def folder() -> Path:
    return Path(os.environ["SITE_FOLDER"])


def note(line: str) -> None:
    """One write: lines of several workers don't mix."""
    with (folder() / "effects").open("ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


def charge(order: str) -> dict[str, Any]:
    """The effect that must happen once."""
    note(order)
    return {"charge": order, "by": os.getpid()}


def store() -> SQLiteStore:
    return SQLiteStore(folder() / "keys.db")


def backend() -> AsyncSQLiteStore:
    return AsyncSQLiteStore(folder() / "keys.db")


# ASGI


def starlette_routes() -> list[Any]:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def charges(request: Request) -> Response:
        return JSONResponse(charge((await request.json())["order"]), 201, HEADERS)

    async def missing(request: Request) -> Response:
        note("missing")
        raise HTTPException(404)

    async def broken(request: Request) -> Response:
        note("broken")
        raise ZeroDivisionError

    async def upload(request: Request) -> Response:
        async with request.form() as form:
            file: Any = form["file"]
            note("upload")
            return JSONResponse({"size": len(await file.read())}, 201)

    async def stream(request: Request) -> Response:
        note("stream")
        return StreamingResponse(iter(PARTS), media_type="text/plain")

    async def paths(request: Request) -> Response:
        return Response(status_code=204)

    views = (charges, missing, broken, upload, stream)
    return [
        Route("/paths/{rest:path}", paths, methods=["POST"]),
        *(Route(f"/{view.__name__}", view, methods=["POST"]) for view in views),
    ]


def asgi() -> Any:
    """The middleware around a whole app."""
    from starlette.applications import Starlette

    from oncekey.adapters.asgi import IdempotencyMiddleware

    return IdempotencyMiddleware(Starlette(routes=starlette_routes()), backend())


def starlette() -> Any:
    """Each route guarded alone, and a BaseHTTPMiddleware outside of them."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.routing import Route

    from oncekey.adapters.starlette import idempotency

    async def look(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    keys = idempotency(backend())
    routes = [
        Route(route.path, route.endpoint, methods=["POST"], middleware=[keys])
        for route in starlette_routes()
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=look)])


def fastapi() -> Any:
    from tests.adapters.keyed_typed import fastapi_app

    return fastapi_app(backend(), charge, note, PARTS, HEADERS)


def litestar() -> Any:
    from tests.adapters.keyed_typed import litestar_app

    return litestar_app(backend(), charge, note, PARTS, HEADERS)


def aiohttp(decorated: bool) -> Any:
    from aiohttp import web

    from oncekey.adapters.aiohttp import idempotency, idempotent

    keys = backend()

    async def charges(request: web.Request) -> web.StreamResponse:
        answer = charge((await request.json())["order"])
        return web.json_response(answer, status=201, headers=HEADERS)

    async def missing(request: web.Request) -> web.StreamResponse:
        note("missing")
        raise web.HTTPNotFound

    async def broken(request: web.Request) -> web.StreamResponse:
        note("broken")
        raise ZeroDivisionError

    async def upload(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        note("upload")
        file: Any = form["file"]
        return web.json_response({"size": len(file.file.read())}, status=201)

    async def stream(request: web.Request) -> web.StreamResponse:
        note("stream")
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        for part in PARTS:
            await response.write(part)
        return response

    async def paths(request: web.Request) -> web.StreamResponse:
        return web.Response(status=204)

    app = web.Application(middlewares=[] if decorated else [idempotency(keys)])
    for view in (charges, missing, broken, upload, stream, paths):
        handler = idempotent(keys)(view) if decorated else view
        below = "/{rest:.*}" if view is paths else ""
        app.router.add_post(f"/{view.__name__}{below}", handler)
    return app


# WSGI


def flask(decorated: bool) -> Any:
    import flask as library

    from oncekey.adapters.flask import idempotent
    from oncekey.http.wsgi import IdempotencyMiddleware

    app: Any = library.Flask("shop")
    keys = store()
    guard: Callable[[Any], Any] = idempotent(keys) if decorated else lambda view: view

    @app.post("/charges")
    @guard
    def charges() -> Any:
        return charge(library.request.get_json()["order"]), 201, HEADERS

    @app.post("/missing")
    @guard
    def missing() -> Any:
        note("missing")
        library.abort(404)

    @app.post("/broken")
    @guard
    def broken() -> Any:
        note("broken")
        raise ZeroDivisionError

    @app.post("/upload")
    @guard
    def upload() -> Any:
        note("upload")
        return {"size": len(library.request.files["file"].read())}, 201

    @app.post("/stream")
    @guard
    def stream() -> Any:
        note("stream")
        return library.Response(iter(PARTS), mimetype="text/plain")

    @app.post("/paths/<path:rest>")
    @guard
    def paths(rest: str) -> Any:
        return "", 204

    if not decorated:
        app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, keys)
    return app


def django(kind: str) -> None:
    import django as library
    from django.conf import settings

    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(folder() / "shop.db"),
                "ATOMIC_REQUESTS": kind != "django-async",
                "OPTIONS": {"timeout": 60},
            }
        },
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "rest_framework"],
        MIDDLEWARE=["django.middleware.common.CommonMiddleware"],
        LOGGING={"version": 1},
        ROOT_URLCONF="tests.adapters.keyed_sites",
        SECRET_KEY="shop",
        REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
        USE_TZ=True,
    )
    library.setup()
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS charges (order_name text)")
    connection.close()
    made = {"django": django_views, "django-async": async_views, "drf": drf_views}[kind]()
    from django.urls import path

    urlpatterns.extend(path(name, view) for name, view in made.items())


def django_views() -> dict[str, Any]:
    from django.db import connection
    from django.http import (
        Http404,
        HttpRequest,
        HttpResponse,
        JsonResponse,
        StreamingHttpResponse,
    )

    from oncekey.adapters.django import idempotent

    guard = idempotent(store())

    @guard
    def charges(request: HttpRequest) -> Any:
        assert connection.in_atomic_block  # ATOMIC_REQUESTS holds inside, not around the record
        with connection.cursor() as cursor:
            order = json.loads(request.body)["order"]
            cursor.execute("INSERT INTO charges VALUES (%s)", [order])
        return JsonResponse(charge(order), status=201, headers=HEADERS)

    @guard
    def missing(request: HttpRequest) -> Any:
        note("missing")
        raise Http404

    @guard
    def broken(request: HttpRequest) -> Any:
        note("broken")
        raise ZeroDivisionError

    @guard
    def upload(request: HttpRequest) -> Any:
        note("upload")
        file: Any = request.FILES["file"]
        return JsonResponse({"size": len(file.read())}, status=201)

    @guard
    def stream(request: HttpRequest) -> Any:
        note("stream")
        return StreamingHttpResponse(iter(PARTS), content_type="text/plain")

    @guard
    def paths(request: HttpRequest, rest: str) -> Any:
        return HttpResponse(status=204)

    return {BELOW: paths} | {v.__name__: v for v in (charges, missing, broken, upload, stream)}


def async_views() -> dict[str, Any]:
    from django.http import (
        Http404,
        HttpRequest,
        HttpResponse,
        JsonResponse,
        StreamingHttpResponse,
    )

    from oncekey.adapters.django import idempotent

    guard = idempotent(backend())

    @guard
    async def charges(request: HttpRequest) -> Any:
        return JsonResponse(charge(json.loads(request.body)["order"]), status=201, headers=HEADERS)

    @guard
    async def missing(request: HttpRequest) -> Any:
        note("missing")
        raise Http404

    @guard
    async def broken(request: HttpRequest) -> Any:
        note("broken")
        raise ZeroDivisionError

    @guard
    async def upload(request: HttpRequest) -> Any:
        note("upload")
        file: Any = request.FILES["file"]
        return JsonResponse({"size": len(file.read())}, status=201)

    @guard
    async def stream(request: HttpRequest) -> Any:
        note("stream")

        async def parts() -> Any:
            for part in PARTS:
                yield part

        return StreamingHttpResponse(parts(), content_type="text/plain")

    @guard
    async def paths(request: HttpRequest, rest: str) -> Any:
        return HttpResponse(status=204)

    return {BELOW: paths} | {v.__name__: v for v in (charges, missing, broken, upload, stream)}


def drf_views() -> dict[str, Any]:
    from django.http import StreamingHttpResponse
    from django.utils.decorators import method_decorator
    from rest_framework.exceptions import NotFound
    from rest_framework.parsers import JSONParser, MultiPartParser
    from rest_framework.renderers import JSONRenderer
    from rest_framework.response import Response
    from rest_framework.views import APIView

    from oncekey.adapters.django import idempotent

    keys = store()

    @method_decorator(idempotent(keys), name="dispatch")
    class Guarded(APIView):
        parser_classes = [JSONParser, MultiPartParser]
        renderer_classes = [JSONRenderer]

    class Charges(Guarded):
        def post(self, request: Any) -> Any:
            return Response(charge(request.data["order"]), status=201, headers=HEADERS)

    class Missing(Guarded):
        def post(self, request: Any) -> Any:
            note("missing")
            raise NotFound

    class Broken(Guarded):
        def post(self, request: Any) -> Any:
            note("broken")
            raise ZeroDivisionError

    class Upload(Guarded):
        def post(self, request: Any) -> Any:
            note("upload")
            return Response({"size": len(request.data["file"].read())}, status=201)

    class Stream(Guarded):
        def post(self, request: Any) -> Any:
            note("stream")
            return StreamingHttpResponse(iter(PARTS), content_type="text/plain")

    class Paths(Guarded):
        def post(self, request: Any, rest: str) -> Any:
            return Response(status=204)

    views = (Charges, Missing, Broken, Upload, Stream)
    return {BELOW: Paths.as_view()} | {v.__name__.lower(): v.as_view() for v in views}


def main(kind: str, fd: str) -> None:
    if kind in ("asgi", "starlette", "fastapi", "litestar"):
        import uvicorn

        app = {"asgi": asgi, "starlette": starlette, "fastapi": fastapi, "litestar": litestar}[kind]
        uvicorn.run(app(), fd=int(fd), lifespan="off")
    elif kind.startswith("aiohttp"):
        from aiohttp import web

        web.run_app(aiohttp(kind == "aiohttp-decorator"), sock=socket.socket(fileno=int(fd)))
    elif kind.startswith("flask"):
        run_gunicorn(flask(kind == "flask-decorator"), fd)
    elif kind == "django-async":
        import uvicorn
        from django.core.asgi import get_asgi_application

        django(kind)
        uvicorn.run(get_asgi_application(), fd=int(fd), lifespan="off")
    else:
        django(kind)
        run_django(fd)


KINDS = (
    "asgi",
    "starlette",
    "fastapi",
    "litestar",
    "aiohttp",
    "aiohttp-decorator",
    "flask-wsgi",
    "flask-decorator",
    "django",
    "django-async",
    "drf",
)

if __name__ == "__main__":
    from tests.adapters import keyed_sites

    keyed_sites.main(*sys.argv[1:])
