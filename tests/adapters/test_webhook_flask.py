"""Webhooks in Flask, and as a plain WSGI app, behind servers of their own."""

from __future__ import annotations

import importlib.util
import io
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Response, request
from tests.adapters.webhook_scenarios import JSON, SCENARIOS, send, stripe
from tests.adapters.webhook_sites import Site, made, site_fixture
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix

from oncekey import BackendMismatchError, MemoryStore, OncekeyError, PolicyError
from oncekey.adapters import flask as flask_adapter
from oncekey.adapters.flask import Webhooks, as_response, receive_webhook, webhook_view
from oncekey.adapters.wsgi import WebhookApp, request_url
from oncekey.http.body import wsgi_body
from oncekey.receiver import AsyncWebhookReceiver, WebhookEvent, WebhookReceiver

STRIPE = made("stripe")
FORM = {"Content-Type": "application/x-www-form-urlencoded"}

site = site_fixture({"flask-werkzeug": {}, "flask-gunicorn": {}, "wsgi-gunicorn": {}})


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_site_does_what_every_adapter_must(site: Site, scenario: str) -> None:
    """Each scenario of ``webhook_scenarios`` holds, whatever serves the app."""
    SCENARIOS[scenario](site)


def test_a_store_that_was_open_before_the_fork_works_in_the_workers(site: Site) -> None:
    """What was handled before a server or its workers began is a duplicate in each of them."""
    assert [send(stripe(site, "evt_before")).status_code for _ in range(8)] == [200] * 8
    assert site.notes("effects").count("evt_before") == 1


# The extension


def deliver(app: Flask, event: object, path: str = "/hooks", **more: Any) -> int:
    """Send a genuine event of Stripe's; gives the status."""
    body = json.dumps({"id": event, "type": "paid", **more}).encode()
    signed = STRIPE.sign("POST", f"http://localhost{path}", JSON, body)
    answer = app.test_client().post(path, data=body, headers=signed.headers)
    return answer.status_code


def test_handlers_are_added_one_by_one() -> None:
    """``on`` may come again for a URL, before ``init_app`` and after: each type has its handler."""
    seen: list[str] = []
    webhooks = Webhooks(store=MemoryStore())
    webhooks.on("/hooks", STRIPE, "paid")(lambda event: seen.append(f"paid {event.id}"))
    app, other = Flask("one"), Flask("two")
    webhooks.init_app(app)
    webhooks.init_app(other)
    webhooks.on("/hooks", STRIPE)(lambda event: seen.append(f"other {event.id}"))
    later = webhooks.add("/later.json", STRIPE, namespace="later")
    later.on("paid")(lambda event: seen.append(f"later {event.id} {request.blueprint}"))
    assert deliver(app, "e1") == deliver(other, "e1") == 200
    assert deliver(app, "e2", type="refunded") == 200
    assert deliver(other, "e1", "/later.json") == 200
    assert seen == ["paid e1", "other e2", "later e1 None"]
    assert app.extensions["oncekey_webhooks"] == [webhooks]


def test_options_of_all_urls_are_given_once(tmp_path: Path) -> None:
    """Those of ``Webhooks`` hold at every URL, unless one says otherwise."""
    webhooks = Webhooks(store=f"sqlite:///{tmp_path / 'hooks.db'}", transactional=True)
    seen: list[int] = []
    webhooks.on("/hooks", STRIPE, "paid")(lambda event, tx: seen.append(len(event.id)))
    webhooks.on("/plain", STRIPE, "paid", transactional=False)(lambda event: seen.append(0))
    app = Flask("shop")
    webhooks.init_app(app)
    assert deliver(app, "e1") == deliver(app, "e2", "/plain") == 200
    assert seen == [2, 0]
    webhooks.close()


def test_a_handler_writes_in_the_transaction_of_the_mark(tmp_path: Path) -> None:
    """With ``transactional`` the handler gets ``tx``; a failed one leaves nothing, a retry all."""
    database = tmp_path / "shop.db"
    with closing(sqlite3.connect(database)) as db:
        db.execute("CREATE TABLE payments (event TEXT)")
    app = Flask("shop")
    webhooks = Webhooks(app, store=f"sqlite:///{database}")

    @webhooks.on("/hooks", STRIPE, "paid", transactional=True)
    def paid(event: WebhookEvent, tx: Any) -> None:
        tx.connection.execute("INSERT INTO payments VALUES (?)", (event.id,))
        if not event.takeover and event.payload.get("fails"):
            raise RuntimeError("not now")

    assert [deliver(app, "e1", fails=True), deliver(app, "e1"), deliver(app, "e1")] == [
        500,
        200,
        200,
    ]
    webhooks.close()
    with closing(sqlite3.connect(database)) as db:
        assert db.execute("SELECT * FROM payments").fetchall() == [("e1",)]


def test_only_its_own_store_is_closed(tmp_path: Path) -> None:
    """A store that was passed stays open, one that was opened from a URL does not."""
    app, ours = Flask("ours"), MemoryStore()
    webhooks = Webhooks(app, store=ours)
    webhooks.on("/hooks", STRIPE)(lambda event: None)
    webhooks.close()
    assert deliver(app, "e1") == 200
    app = Flask("opened")
    webhooks = Webhooks(app, store=f"sqlite:///{tmp_path / 'hooks.db'}")
    webhooks.on("/hooks", STRIPE)(lambda event: None)
    assert deliver(app, "e1") == 200
    webhooks.close()
    assert deliver(app, "e2") == 503


def test_what_can_not_work_is_refused_with_the_fix() -> None:
    """A missing store, a URL that is taken, options twice, and receivers that must be awaited."""
    app = Flask("shop")
    receiver = WebhookReceiver(STRIPE, MemoryStore())
    with pytest.raises(PolicyError, match=r"Pass Webhooks\(store="):
        Webhooks(app).add("/hooks", STRIPE)
    webhooks = Webhooks(app, store="memory://")
    webhooks.on("/hooks", STRIPE, "paid", wait=1)(lambda event: None)
    with pytest.raises(PolicyError, match="receiver at /hooks already"):
        webhooks.add("/hooks", STRIPE)
    with pytest.raises(PolicyError, match="another provider at /hooks"):
        webhooks.on("/hooks", made("stripe"), "refunded")
    with pytest.raises(PolicyError, match="with its first handler"):
        webhooks.on("/hooks", STRIPE, "refunded", wait=2)
    with pytest.raises(PolicyError, match="give them to your WebhookReceiver"):
        webhooks.add("/others", receiver, wait=1)
    with pytest.raises(PolicyError, match="pass it once"):
        webhooks.init_app(app)
    waiting: Any = AsyncWebhookReceiver(STRIPE, "memory://")
    for refuse in (lambda: webhooks.add("/x", waiting), lambda: webhook_view(waiting)):
        with pytest.raises(BackendMismatchError, match="Flask needs a WebhookReceiver"):
            refuse()
    with pytest.raises(BackendMismatchError, match="WSGI needs a WebhookReceiver"):
        WebhookApp(waiting)


def test_csrf_protect_can_be_told_the_name_of_the_view() -> None:
    """Flask-WTF exempts a view by its module and name: these are what the docs say."""
    view = webhook_view(WebhookReceiver(STRIPE, MemoryStore()))
    assert f"{view.__module__}.{view.__name__}" == "oncekey.adapters.flask.webhook"
    assert '"oncekey.adapters.flask.webhook"' in (flask_adapter.__doc__ or "")


def test_a_view_of_ones_own_looks_at_the_outcome() -> None:
    """It gets what the receiver says, also of requests that are no delivery, and sends it on."""
    app, outcomes = Flask("shop"), []
    receiver = WebhookReceiver(STRIPE, MemoryStore())
    receiver.on()(lambda event: None)

    @app.route("/hooks", methods=["GET", "POST"])
    def hooks() -> Response:
        received = receive_webhook(receiver)
        outcomes.append(received.outcome)
        return as_response(received)

    assert [deliver(app, "e1"), deliver(app, "e1")] == [200, 200]
    answer = app.test_client().get("/hooks")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    assert app.test_client().post("/hooks", json={}).headers["WWW-Authenticate"]
    assert outcomes == ["handled", "duplicate", "rejected", "rejected"]


# Bodies that others have read


@pytest.mark.parametrize("reading", ["get_data", "get_json", "form", "stream"])
def test_a_body_that_was_read_before(reading: str) -> None:
    """A view of one's own works after a whole read; a parsed form is an error that says why."""
    app = Flask("shop")

    @app.before_request
    def read() -> None:
        found: Any = getattr(request, reading)
        if reading in ("get_data", "get_json"):
            found()

    seen: list[str] = []
    twilio = WebhookReceiver(made("twilio"), MemoryStore())
    twilio.on()(lambda event: seen.append(event.id))
    app.add_url_rule("/sms", view_func=webhook_view(twilio), methods=["POST"])
    webhooks = Webhooks(app, store=MemoryStore())
    webhooks.on("/hooks", STRIPE)(lambda event: seen.append(event.id))
    webhooks.add("/kept", twilio)

    def sms(path: str, event: str) -> int:
        url = f"http://localhost{path}"
        signed = made("twilio").sign("POST", url, FORM, b"Body=Hi+there", event_id=event)
        answer = app.test_client().post(path, data=signed.body, headers=signed.headers)
        return answer.status_code

    assert deliver(app, "e1") == 200
    if reading != "get_json":  # a 415 of Flask's own for forms
        assert sms("/kept", "e2") == 200
    if reading == "form":
        app.config["PROPAGATE_EXCEPTIONS"] = True
        with pytest.raises(OncekeyError, match=r"use Webhooks\(app\)\.add"):
            sms("/sms", "e3")
        parts = {"data": {"Body": "Hi"}, "content_type": "multipart/form-data"}
        assert app.test_client().post("/sms", **parts).status_code == 415
    elif reading != "get_json":
        assert sms("/sms", "e3") == 200
    assert seen == {"form": ["e1", "e2"], "get_json": ["e1"]}.get(reading, ["e1", "e2", "e3"])


# URLs


class Answers:
    """Takes what a WSGI app says."""

    def __init__(self) -> None:
        self.urls: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.urls.append(request_url(environ))
        start_response("200 OK", [])
        return []


def environ_of(**changes: Any) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "POST",
        "wsgi.url_scheme": "http",
        "SERVER_NAME": "shop.example",
        "SERVER_PORT": "8000",
        "HTTP_HOST": "shop.example:8000",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/hooks/a b",
        "QUERY_STRING": "x=%7e&&y",
        **changes,
    }


@pytest.mark.parametrize(
    "changes, url",
    [
        ({}, "http://shop.example:8000/hooks/a%20b?x=%7e&&y"),
        ({"QUERY_STRING": ""}, "http://shop.example:8000/hooks/a%20b"),
        ({"RAW_URI": "/hooks/%61%20b?"}, "http://shop.example:8000/hooks/%61%20b?"),
        ({"REQUEST_URI": "//hooks//a+b"}, "http://shop.example:8000//hooks//a+b"),
        ({"REQUEST_URI": "http://other/h?a=/"}, "http://shop.example:8000/h?a=/"),
        ({"REQUEST_URI": "http://other?a=/"}, "http://shop.example:8000/?a=/"),
        ({"REQUEST_URI": "*"}, "http://shop.example:8000/hooks/a%20b?x=%7e&&y"),
        ({"HTTP_HOST": ""}, "http://shop.example:8000/hooks/a%20b?x=%7e&&y"),
        (
            {"HTTP_HOST": "", "wsgi.url_scheme": "https", "SERVER_PORT": "443"},
            "https://shop.example/hooks/a%20b?x=%7e&&y",
        ),
        ({"PATH_INFO": "", "QUERY_STRING": ""}, "http://shop.example:8000/"),
        ({"SCRIPT_NAME": "/m", "PATH_INFO": ""}, "http://shop.example:8000/m?x=%7e&&y"),
        ({"PATH_INFO": "/caf\xc3\xa9 %"}, "http://shop.example:8000/caf%C3%A9%20%25?x=%7e&&y"),
        ({"RAW_URI": "/caf\xc3\xa9 x"}, "http://shop.example:8000/caf%C3%A9%20x"),
        # A middleware inside has changed the path: the sender does not know.
        ({"RAW_URI": "/b", "PATH_INFO": "/a/b"}, "http://shop.example:8000/b"),
        # A proxy has cut a prefix off, and a middleware says which.
        (
            {"RAW_URI": "/m/b?q", "SCRIPT_NAME": "/pre fix/m", "PATH_INFO": "/b"},
            "http://shop.example:8000/pre%20fix/m/b?q",
        ),
    ],
)
def test_the_url_is_the_one_that_was_sent(changes: dict[str, Any], url: str) -> None:
    """Nothing of a URL is decoded or put in order where the server tells it as it came."""
    assert request_url(environ_of(**changes)) == url


def test_mounted_and_behind_a_proxy() -> None:
    """What werkzeug's own middlewares do to a request does not change the URL, or sets it right."""
    inner = Answers()
    app = ProxyFix(DispatcherMiddleware(Answers(), {"/m": inner}), x_host=1, x_prefix=1)
    told = {
        "HTTP_X_FORWARDED_PROTO": "https",
        "HTTP_X_FORWARDED_HOST": "public.example",
        "HTTP_X_FORWARDED_PREFIX": "/pre",
    }
    changes: list[dict[str, str]] = [{}, told]
    for change in changes:
        environ = environ_of(RAW_URI="/m/b?q=%7e", PATH_INFO="/m/b", REMOTE_ADDR="::1", **change)
        app(environ, lambda *_: None)  # type: ignore[arg-type]
    assert inner.urls == [
        "http://shop.example:8000/m/b?q=%7e",
        "https://public.example/pre/m/b?q=%7e",
    ]


# The plain app


class Endless(io.RawIOBase):
    """A body without an end, which counts what was read of it."""

    def __init__(self) -> None:
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        assert size > 0, "never all of it"
        self.given += size
        return b"x" * size


@pytest.mark.parametrize("length", ["", "99999999999", "9" * 5000])
def test_no_more_is_read_than_is_taken(length: str) -> None:
    """Of a body that is too long, or has no end, no more than the limit and a byte is read."""
    body = Endless()
    environ = {"wsgi.input": body, "CONTENT_LENGTH": length, "wsgi.input_terminated": True}
    assert len(wsgi_body(environ, 70_000)) == 70_001
    assert body.given <= 70_001


@pytest.mark.parametrize("length", ["", "x", "-1", "\xb2", "1_0"])
def test_a_body_without_a_length_is_read_only_where_the_server_ends_it(length: str) -> None:
    """Without ``wsgi.input_terminated`` a read could wait for ever, so there is none."""
    environ = {"wsgi.input": Endless(), "CONTENT_LENGTH": length}
    assert wsgi_body(environ, 100) == b""
    environ = {
        "wsgi.input": io.BytesIO(b"all of it"),
        "CONTENT_LENGTH": length,
        "wsgi.input_terminated": True,
    }
    assert wsgi_body(environ, 100) == b"all of it"


def test_an_answer_without_content() -> None:
    """A 204 has no body and no length, and an answer to HEAD no body."""
    quiet = WebhookReceiver(made("stripe"), MemoryStore())
    quiet.provider.ack = quiet.provider.ack._replace(status=204)
    quiet.on()(lambda event: None)
    signed = STRIPE.sign("POST", "http://shop.example/", JSON, b'{"id": "e1", "type": "paid"}')
    environ = environ_of(
        CONTENT_TYPE="application/json",
        CONTENT_LENGTH=str(len(signed.body)),
        HTTP_STRIPE_SIGNATURE=signed.headers["Stripe-Signature"],
    )
    environ["wsgi.input"] = io.BytesIO(signed.body)
    said: list[Any] = []
    app = WebhookApp(quiet)
    assert list(app(environ, lambda *given: said.append(given))) == [b""]  # type: ignore[arg-type]
    environ["REQUEST_METHOD"] = "HEAD"
    assert list(app(environ, lambda *given: said.append(given))) == []  # type: ignore[arg-type]
    assert said[0] == ("204 No Content", [])
    assert said[1][0] == "405 Method Not Allowed"


@pytest.mark.parametrize("package", ["flask", "django"])
def test_a_missing_framework_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the framework the adapter says what to install."""
    folder = Path(flask_adapter.__file__).parent
    loaded = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    for name in {package, *loaded}:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("without", folder / f"{package}.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=f"oncekey\\[{package}\\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
