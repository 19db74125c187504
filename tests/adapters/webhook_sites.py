"""Small sites that receive webhooks, each run by a server of its own in a process of its own.

    python -m tests.adapters.webhook_sites KIND FD

All of them take Stripe's events at ``/hooks/stripe``, and those of providers that sign the URL at
``/signed/NAME/...``. What handlers and stores do is noted in files, since workers share nothing
else. In front of every receiver stands code that parses forms, as much middleware does.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

import pytest

from oncekey import AsyncSQLiteStore, SQLiteStore
from oncekey.receiver import AsyncWebhookReceiver, WebhookEvent, WebhookReceiver
from oncekey.signatures import Provider, provider

ROOT = Path(__file__).parents[2]
SECRET = "correct-horse-battery-staple"
SIGNED = ("hubspot", "square", "twilio")
MOST = 1000
PATIENCE = 60
BODY_TIMEOUT = float(os.environ.get("SITE_BODY_TIMEOUT", "10"))
STORE_CALLS = ("claim", "complete", "release", "renew", "read", "write", "first_seen")


def made(name: str) -> Provider:
    hosts = {"allowed_hosts": "*"} if name in SIGNED else {}
    return provider(name, secret=SECRET, **hosts)


# In the test's process


class Site(NamedTuple):
    """A site that is being served.

    Attributes:
        url: Where, without a slash at its end.
        folder: Where its files are.
        untold: The parts of a URL that the server does not tell as they were sent.
        chunked: Whether the server takes bodies without a length.
    """

    url: str
    folder: Path
    untold: tuple[str, ...] = ()
    chunked: bool = True

    def notes(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def until(self, name: str, line: str) -> None:
        """Wait until something is noted."""
        end = time.monotonic() + PATIENCE
        while line not in self.notes(name):
            assert time.monotonic() < end, f"{line} was never noted in {name}"
            time.sleep(0.005)


def serve(kind: str, folder: Path, **traits: Any) -> Iterator[Site]:
    """Serve a site while a fixture lives."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        # The socket is open already: requests wait in it until the server is there.
        fd = str(listener.fileno())
        command = [sys.executable, "-m", "tests.adapters.webhook_sites", kind, fd]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "SITE_FOLDER": str(folder), "PYTHONWARNINGS": "default"},
                pass_fds=[listener.fileno()],
                stdout=log,
                stderr=log,
            )
        try:
            port = listener.getsockname()[1]
            yield Site(f"http://127.0.0.1:{port}", folder, **traits)
        finally:
            server.terminate()
            server.wait(PATIENCE)


def site_fixture(kinds: dict[str, dict[str, Any]]) -> Any:
    """A fixture that serves each of the sites once for a module."""

    @pytest.fixture(scope="module", params=list(kinds))
    def site(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Site]:
        yield from serve(request.param, tmp_path_factory.mktemp("site"), **kinds[request.param])

    return site


# In the server's process


def folder() -> Path:
    return Path(os.environ["SITE_FOLDER"])


def note(name: str, line: str) -> None:
    """Add a line, whole, to a file that several processes write."""
    descriptor = os.open(folder() / name, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


class Watched(SQLiteStore):
    """Notes each call."""

    def __getattribute__(self, name: str) -> Any:
        if name in STORE_CALLS:
            note("calls", name)
        return super().__getattribute__(name)


class AsyncWatched(AsyncSQLiteStore):
    """Notes each call."""

    def __getattribute__(self, name: str) -> Any:
        if name in STORE_CALLS:
            note("calls", name)
        return super().__getattribute__(name)


def effect(event: WebhookEvent) -> None:
    """Note the event; wait if it says so until a file of its name is there, fail if it says so."""
    note("effects", event.id)
    end = time.monotonic() + PATIENCE
    while event.type == "slow" and not (folder() / event.id).exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    if (
        event.type == "fails"
        and event.attempt == 1
        and not (folder() / f"{event.id}.again").exists()
    ):
        raise RuntimeError("not now")


async def async_effect(event: WebhookEvent) -> None:
    await asyncio.to_thread(effect, event)


def receivers(store: Any = None, make: Callable[..., Any] = WebhookReceiver) -> dict[str, Any]:
    """A receiver for each provider, all with one store."""
    store = store or Watched(folder() / "hooks.db")
    found = {}
    for name in ("stripe", *SIGNED):
        limits = {"max_body_bytes": MOST, "body_timeout": BODY_TIMEOUT}
        found[name] = make(made(name), store, wait=0.05, **limits)
        found[name].on()(effect if make is WebhookReceiver else async_effect)
    return found


def use_before_fork(receiver: WebhookReceiver) -> None:
    """Handle an event in the parent, so that its store is open when workers are forked."""
    body, kind = b'{"id": "evt_before", "type": "paid"}', {"Content-Type": "application/json"}
    signed = receiver.provider.sign("POST", "http://site/hooks/stripe", kind, body)
    assert receiver.receive(*signed).outcome == "handled"


def flask_site() -> Any:
    from flask import Flask, request

    from oncekey.adapters.flask import Webhooks, webhook_view

    app = Flask("site")

    @app.before_request
    def parse_forms() -> None:
        note("parsed", str(len(request.form)))

    store = Watched(folder() / "hooks.db")
    by_name = receivers(store)
    use_before_fork(by_name["stripe"])
    webhooks = Webhooks(store=store)
    options = {"wait": 0.05, "max_body_bytes": MOST, "body_timeout": BODY_TIMEOUT}
    webhooks.on("/hooks/stripe", made("stripe"), **options)(effect)
    webhooks.init_app(app)
    for name in SIGNED:
        webhooks.add(f"/signed/{name}/<path:rest>", by_name[name])
    app.add_url_rule("/plain", view_func=webhook_view(by_name["twilio"]), methods=["POST"])
    return app


def wsgi_site() -> Any:
    from oncekey.adapters.wsgi import WebhookApp

    by_name = receivers()
    use_before_fork(by_name["stripe"])
    apps = {name: WebhookApp(receiver) for name, receiver in by_name.items()}

    def site(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        parts = environ["PATH_INFO"].split("/")
        # Mounted as usual: what was looked at moves from one to the other.
        environ["SCRIPT_NAME"] = "/".join(parts[:3])
        environ["PATH_INFO"] = environ["PATH_INFO"][len(environ["SCRIPT_NAME"]) :]
        return apps[parts[2]](environ, start_response)

    return site


def django_site(asynchronous: bool = False) -> None:
    """Set Django up, once for this process, with all that stands in a webhook's way."""
    import django
    from django.conf import settings

    middleware = [
        "django.middleware.security.SecurityMiddleware",
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "tests.adapters.webhook_sites.parse_forms",
    ]
    if django.VERSION >= (5, 1):
        middleware.append("django.contrib.auth.middleware.LoginRequiredMiddleware")
    database = {"ENGINE": "django.db.backends.sqlite3", "ATOMIC_REQUESTS": True}
    settings.configure(
        ALLOWED_HOSTS=["127.0.0.1", "shop.example"],
        DATABASES={
            "default": {**database, "NAME": str(folder() / "shop.db")},
            "other": {**database, "NAME": str(folder() / "other.db")},
        },
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "django.contrib.auth",
            "django.contrib.sessions",
        ],
        LOGGING={
            "version": 1,
            "handlers": {"log": {"class": "logging.StreamHandler"}},
            "loggers": {"django.request": {"handlers": ["log"]}},
        },
        LOGIN_URL="/login",
        MIDDLEWARE=middleware,
        ROOT_URLCONF="tests.adapters.webhook_sites",
        SECRET_KEY=SECRET,
        SECURE_PROXY_SSL_HEADER=("HTTP_X_FORWARDED_PROTO", "https"),
        USE_X_FORWARDED_HOST=True,
        USE_TZ=True,
    )
    django.setup()
    from django.db import connection
    from django.http import HttpRequest, HttpResponse
    from django.urls import path

    from oncekey.adapters.django import webhook_view

    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS payments (event text)")
    connection.close()

    shop = WebhookReceiver(
        made("stripe"), SQLiteStore(folder() / "shop.db"), transactional=True, on=connection
    )

    @shop.on()
    def pay(event: WebhookEvent, tx: Any) -> None:
        assert tx.connection.in_atomic_block
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO payments VALUES (%s)", [event.id])
        effect(event)

    plain = WebhookReceiver(made("stripe"), SQLiteStore(folder() / "plain.db"))

    @plain.on()
    def look(event: WebhookEvent) -> None:
        note("atomic", f"{event.id} {connection.in_atomic_block}")

    def open_door(request: HttpRequest) -> HttpResponse:
        return HttpResponse(str(connection.in_atomic_block))

    open_door.login_required = False  # type: ignore[attr-defined]

    if asynchronous:
        by_name = receivers(AsyncWatched(folder() / "hooks.db"), AsyncWebhookReceiver)
    else:
        by_name = receivers()
    urlpatterns.extend(
        [
            path("hooks/stripe", webhook_view(by_name["stripe"])),
            path("hooks/shop", webhook_view(shop)),
            path("hooks/plain", webhook_view(plain)),
            path("hooks/lost", webhook_view(plain)),
            path("open", open_door),
            path("closed", lambda request: HttpResponse("let in")),
        ]
    )
    urlpatterns.extend(
        path(f"signed/{name}/<path:rest>", webhook_view(by_name[name])) for name in SIGNED
    )


urlpatterns: list[Any] = []


def parse_forms(get_response: Any) -> Any:
    """Middleware that parses forms, in sync and in async sites; at one URL it takes a byte."""
    from asgiref.sync import iscoroutinefunction, markcoroutinefunction

    def look(request: Any) -> None:
        if request.path == "/hooks/lost":
            request.read(1)
        else:
            note("parsed", str(len(request.POST)))

    if iscoroutinefunction(get_response):

        async def middleware(request: Any) -> Any:
            look(request)
            return await get_response(request)

        return markcoroutinefunction(middleware)

    def sync_middleware(request: Any) -> Any:
        look(request)
        return get_response(request)

    return sync_middleware


parse_forms.sync_capable = parse_forms.async_capable = True  # type: ignore[attr-defined]


def lambda_site() -> Any:
    """A function of Lambda, and in front of it something that makes events as AWS does.

    The first part of the path says what is in front. A REST API and a load balancer tell the path
    as it was sent, an HTTP API decodes it; a REST API decodes the query, a load balancer only
    splits it. Forms come in base64, but for a REST API.
    """
    from oncekey.adapters.awslambda import webhook_handler

    handlers = {name: webhook_handler(receiver) for name, receiver in receivers().items()}

    def event_of(kind: str, environ: dict[str, Any], body: bytes) -> dict[str, Any]:
        sent, _, query = environ["RAW_URI"].partition("?")
        headers = {
            name[5:].replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        kind_of_body = environ.get("CONTENT_TYPE", "")
        headers |= {"content-type": kind_of_body, "x-forwarded-proto": "http"}
        method, host = environ["REQUEST_METHOD"], environ["HTTP_HOST"]
        encode = kind != "rest" and not kind_of_body.startswith("application/json")
        event: dict[str, Any] = {
            "body": base64.b64encode(body).decode() if encode else body.decode("latin-1"),
            "isBase64Encoded": encode,
        }
        if kind in ("http-api", "function-url"):
            path = unquote(sent) if kind == "http-api" else sent
            http = {"method": method, "path": path}
            return event | {
                "version": "2.0",
                "rawPath": path,
                "rawQueryString": query,
                "headers": headers,
                "requestContext": {"domainName": host, "http": http, "stage": "$default"},
            }
        event |= {"httpMethod": method, "path": sent}
        if kind == "rest":
            decoded = parse_qs(query, keep_blank_values=True)
            # The stage is cut off from the one and not from the other.
            context = {"domainName": host, "path": sent, "stage": "rest", "httpMethod": method}
            return event | {
                "path": sent.removeprefix("/rest"),
                "headers": headers,
                "multiValueHeaders": {name: [value] for name, value in headers.items()},
                "multiValueQueryStringParameters": decoded or None,
                "queryStringParameters": {name: values[-1] for name, values in decoded.items()},
                "requestContext": context,
            }
        event["requestContext"] = {"elb": {"targetGroupArn": "arn:aws:elasticloadbalancing:1:2:3"}}
        pairs = [part.partition("=")[::2] for part in query.split("&") if part]
        if kind == "alb":
            return event | {"headers": headers, "queryStringParameters": dict(pairs)}
        many: dict[str, list[str]] = {}
        for name, value in pairs:
            many.setdefault(name, []).append(value)
        headers_many = {name: [value] for name, value in headers.items()}
        return event | {"multiValueHeaders": headers_many, "multiValueQueryStringParameters": many}

    def site(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        _, kind, _, name, *_ = environ["PATH_INFO"].split("/")
        answer = handlers[name](event_of(kind, environ, body), None)
        headers = answer.get("headers") or {}
        if kind == "alb-multi":
            headers = {name: values[0] for name, values in answer["multiValueHeaders"].items()}
        sent = base64.b64decode(answer["body"]) if answer["isBase64Encoded"] else None
        content = answer["body"].encode() if sent is None else sent
        status = answer["statusDescription"] if "alb" in kind else f"{answer['statusCode']} -"
        start_response(status, [*headers.items(), ("Content-Length", str(len(content)))])
        return [content]

    return site


def run_gunicorn(app: Any, fd: str, **config: Any) -> None:
    """Two workers that are forked when the app and its store are there."""
    from gunicorn.app.base import BaseApplication

    class Server(BaseApplication):
        def load_config(self) -> None:
            self.cfg.set("bind", f"fd://{fd}")
            self.cfg.set("workers", 2)
            self.cfg.set("preload_app", True)
            for name, value in config.items():
                self.cfg.set(name, value)

        def load(self) -> Any:
            return app

    Server().run()


def run_wsgiref(app: Any, fd: str) -> None:
    """The standard library's server: one thread, and no socket in the environ."""
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    listener = socket.socket(fileno=int(fd))
    server = WSGIServer(listener.getsockname(), WSGIRequestHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = listener.getsockname()
    server.setup_environ()
    server.set_app(app)
    server.serve_forever()


def run_django(fd: str) -> None:
    """Django's own server."""
    from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
    from django.core.wsgi import get_wsgi_application

    listener = socket.socket(fileno=int(fd))
    server = ThreadedWSGIServer(listener.getsockname(), WSGIRequestHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = listener.getsockname()
    server.setup_environ()
    server.daemon_threads = True
    server.set_app(get_wsgi_application())
    server.serve_forever()


def main(kind: str, fd: str) -> None:
    if kind in ("flask-werkzeug", "lambda"):
        from werkzeug.serving import make_server

        app = flask_site() if kind == "flask-werkzeug" else lambda_site()
        make_server("127.0.0.1", 0, app, threaded=True, fd=int(fd)).serve_forever()
    elif kind == "flask-gunicorn":
        run_gunicorn(flask_site(), fd)
    elif kind == "flask-gthread":
        run_gunicorn(flask_site(), fd, worker_class="gthread", workers=1, threads=2)
    elif kind == "wsgi-wsgiref":
        run_wsgiref(wsgi_site(), fd)
    elif kind == "wsgi-gunicorn":
        run_gunicorn(wsgi_site(), fd)
    elif kind == "django-own":
        django_site()
        run_django(fd)
    elif kind == "django-gunicorn":
        from django.core.wsgi import get_wsgi_application

        django_site()
        run_gunicorn(get_wsgi_application(), fd)
    else:
        import uvicorn
        from django.core.asgi import get_asgi_application

        django_site(asynchronous=kind == "django-uvicorn-async")
        uvicorn.run(get_asgi_application(), fd=int(fd), lifespan="off")


if __name__ == "__main__":
    # Django imports this module by its name: there must be one of it.
    from tests.adapters import webhook_sites

    webhook_sites.main(*sys.argv[1:])
