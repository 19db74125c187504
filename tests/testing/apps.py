"""One receiver behind every kind of app, and real servers to reach them by."""

from __future__ import annotations

import contextlib
import socket
import threading
import wsgiref.simple_server
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from typing import Any

from oncekey import MemoryBackend, MemoryStore
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.signatures import Provider
from oncekey.testing._recording import _asgi_url, _wsgi_url


def sync_receiver(
    provider: Provider, charged: list[str], store: Any = None, **options: Any
) -> WebhookReceiver:
    receiver = WebhookReceiver(provider, store or MemoryStore(), **options)
    receiver.on()(lambda event: charged.append(event.id))
    return receiver


def async_receiver(
    provider: Provider, charged: list[str], store: Any = None, **options: Any
) -> AsyncWebhookReceiver:
    receiver = AsyncWebhookReceiver(provider, store or MemoryBackend(), **options)

    @receiver.on()
    async def handle(event: Any) -> None:
        charged.append(event.id)

    return receiver


def flask_app(receiver: WebhookReceiver) -> Any:
    import flask

    app = flask.Flask(__name__)

    @app.post("/hooks/<name>")
    def hooks(name: str) -> Any:
        request = flask.request
        url = _wsgi_url(request.environ)  # as it was sent: request.url is decoded
        answer = receiver.receive(request.method, url, list(request.headers), request.get_data())
        return answer.body, answer.status, dict(answer.headers)

    return app


def starlette_app(receiver: AsyncWebhookReceiver) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def hooks(request: Request) -> Response:
        headers, body = request.headers.raw, await request.body()
        url = _asgi_url(dict(request.scope))  # as it was sent: request.url is decoded
        answer = await receiver.receive(request.method, url, headers, body)
        return Response(answer.body, answer.status, dict(answer.headers))

    return Starlette(routes=[Route("/hooks/{name}", hooks, methods=["POST"])])


class _Server(ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class _Quiet(wsgiref.simple_server.WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """A WSGI app behind a server with threads; gives its URL."""
    with wsgiref.simple_server.make_server("127.0.0.1", 0, app, _Server, _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def served_asgi(app: Any) -> Iterator[str]:
    """An ASGI app behind uvicorn, in a thread with a loop of its own; gives its URL."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
