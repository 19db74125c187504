"""Every framework has the same two words, with their arguments in the same order."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from flask import Flask
from starlette.routing import Route

from oncekey import MemoryStore
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.signatures import provider

WEB = ["aiohttp", "asgi", "awslambda", "django", "fastapi", "flask", "litestar", "starlette"]
QUEUES = ["celery", "dramatiq", "messages"]  # which have no requests
STRIPE = provider("stripe", secret="whsec_test")
# The names of before, and what they are now.
ALIASES = {
    ("asgi", "WebhookApp"): "webhooks",
    ("awslambda", "webhook_handler"): "webhooks",
    ("celery", "once_task"): "idempotent",
    ("dramatiq", "once_actor"): "idempotent",
    ("fastapi", "idempotent_route"): "idempotent",
    ("fastapi", "webhook_router"): "webhooks",
    ("litestar", "idempotency"): "idempotent",
    ("litestar", "webhook_handler"): "webhooks",
    ("wsgi", "WebhookApp"): "webhooks",
}


def adapter(name: str) -> Any:
    return importlib.import_module(f"oncekey.adapters.{name}")


@pytest.mark.parametrize("name", [*WEB, "wsgi", *QUEUES])
def test_the_two_words(name: str) -> None:
    """``webhooks(receiver, path)`` and ``idempotent(store, settings=, **options)``."""
    module = adapter(name)
    first, *rest = inspect.signature(module.idempotent).parameters.values()
    assert first.name == ("once" if name in QUEUES else "store")
    assert rest[-1].kind is inspect.Parameter.VAR_KEYWORD
    if name in QUEUES:
        return
    assert [rest[0].name, rest[0].kind] == ["settings", inspect.Parameter.KEYWORD_ONLY]
    receiver, *others = inspect.signature(module.webhooks).parameters
    assert receiver == "receiver"
    if name not in ("asgi", "awslambda", "wsgi"):  # which are apps of their own
        assert others[0] == "path"
    assert {"idempotent", "webhooks"} <= set(module.__all__)


@pytest.mark.parametrize("name, old", ALIASES)
def test_names_of_before(name: str, old: str) -> None:
    """An old name is the new thing."""
    module = adapter(name)
    assert getattr(module, old) is getattr(module, ALIASES[name, old])
    assert old in module.__all__


def test_the_route_of_before_has_its_arguments_the_other_way_round() -> None:
    """Starlette's ``webhook_route(path, receiver)``."""
    receiver = AsyncWebhookReceiver(STRIPE, "memory://")
    made: Route = adapter("starlette").webhook_route("/hooks", receiver, name="hooks")
    assert (made.path, made.name, made.methods) == ("/hooks", "hooks", {"POST"})


def test_a_blueprint_keeps_the_bytes_of_a_form() -> None:
    """Flask's ``webhooks`` reads a delivery before other code parses it, under any prefix."""
    app, seen = Flask("shop"), []
    twilio = provider("twilio", secret="token", allowed_hosts="*")
    receiver = WebhookReceiver(twilio, MemoryStore())
    receiver.on()(lambda event: seen.append(event.id))
    app.register_blueprint(adapter("flask").webhooks(receiver, "/sms"), url_prefix="/hooks")

    @app.before_request
    def parse() -> None:
        from flask import request

        assert request.form["Body"] == "Hi"

    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    signed = twilio.sign("POST", "http://localhost/hooks/sms", kind, b"Body=Hi", event_id="e1")
    for _ in range(2):
        answer = app.test_client().post("/hooks/sms", data=signed.body, headers=signed.headers)
        assert answer.status_code == 200
    assert len(seen) == 1


def test_a_pattern_of_django() -> None:
    """With or without the slash in front, which Django's own have not."""
    django = pytest.importorskip("django")
    from django.conf import settings

    if not settings.configured:
        settings.configure(DATABASES={}, ALLOWED_HOSTS=["*"])
        django.setup()
    receiver = WebhookReceiver(STRIPE, MemoryStore())
    for path in ("hooks", "/hooks"):
        pattern = adapter("django").webhooks(receiver, path, name="stripe")
        assert (str(pattern.pattern), pattern.name) == ("hooks", "stripe")
        assert pattern.callback.csrf_exempt


@pytest.mark.parametrize("name", ["asgi", "wsgi"])
def test_an_app_is_guarded(name: str) -> None:
    """``idempotent(store)`` of a server's own protocol takes an app."""
    module = adapter(name)
    guarded = module.idempotent("memory://", required=True)(lambda *_: None)
    assert isinstance(guarded, module.IdempotencyMiddleware)
    assert guarded.rules.settings.required
