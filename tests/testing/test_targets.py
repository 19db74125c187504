"""Whatever a receiver stands behind, the kit reaches it: objects, apps and servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.testing import apps
from tests.testing.litestar_app import litestar_app

from oncekey.signatures import providers
from oncekey.testing import (
    adeliver,
    adeliver_concurrently,
    adeliver_twice,
    assert_handled_once,
    deliver,
    deliver_concurrently,
    deliver_twice,
    sample,
    sample_provider,
)

pytest.importorskip("cryptography")

ROOT = Path(__file__).parents[2]
STRIPE = sample_provider("stripe")
PATH = "/hooks/stripe"

Make = Callable[[Any, list[str]], Any]
TARGETS: dict[str, Make] = {
    "receiver": apps.sync_receiver,
    "async receiver": apps.async_receiver,
    "flask": lambda provider, charged: apps.flask_app(apps.sync_receiver(provider, charged)),
    "starlette": lambda provider, charged: apps.starlette_app(
        apps.async_receiver(provider, charged)
    ),
    "litestar": lambda provider, charged: litestar_app(apps.async_receiver(provider, charged)),
}
each_target = pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)


@each_target
def test_sync_forms_reach_every_target(make: Make) -> None:
    """Once, twice and at once, from a plain test."""
    charged: list[str] = []
    target = make(STRIPE, charged)

    assert deliver(target, sample(STRIPE, url=PATH)).status == 200
    assert_handled_once(deliver_twice(target, sample(STRIPE, url=PATH), effects=charged))
    assert_handled_once(deliver_concurrently(target, sample(STRIPE, url=PATH), effects=charged))
    assert len(charged) == 3


@each_target
async def test_async_forms_reach_every_target(make: Make) -> None:
    """The same from a test in an event loop."""
    charged: list[str] = []
    target = make(STRIPE, charged)

    assert (await adeliver(target, sample(STRIPE, url=PATH))).status == 200
    assert_handled_once(await adeliver_twice(target, sample(STRIPE, url=PATH), effects=charged))
    found = await adeliver_concurrently(target, sample(STRIPE, url=PATH), effects=charged)
    assert_handled_once(found)
    assert len(charged) == 3


# Of others each delivery is handled, as two that are alike may be two events.
TOLD_APART = [name for name, facts in providers().items() if not facts.repeats]


@pytest.mark.parametrize("name", TOLD_APART)
def test_every_provider_is_verified_through_a_wsgi_app(name: str) -> None:
    """Methods, URLs, headers and bodies arrive as they were signed."""
    charged: list[str] = []
    delivery = sample(name, url="/hooks/a%20b?x=1&y=%C3%A9")
    target = TARGETS["flask"](delivery.provider, charged)

    assert_handled_once(deliver_twice(target, delivery, effects=charged))


@pytest.mark.parametrize("name", TOLD_APART)
def test_every_provider_is_verified_through_an_asgi_app(name: str) -> None:
    """The same for ASGI."""
    charged: list[str] = []
    delivery = sample(name, url="/hooks/a%20b?x=1")
    target = TARGETS["starlette"](delivery.provider, charged)

    assert_handled_once(deliver_twice(target, delivery, effects=charged))


def test_a_url_is_reached_over_http() -> None:
    """Threads of a real server; the delivery is signed for the URL that it goes to."""
    charged: list[str] = []
    square = sample_provider("square")  # signs its URL
    with apps.served(TARGETS["flask"](square, charged)) as url:
        to_host = deliver_twice(url, sample(square, url="/hooks/square?a=b"), effects=charged)
        to_path = deliver_concurrently(f"{url}/hooks/square", sample(square), effects=charged)
        nowhere = deliver(f"{url}/nowhere", sample(square))
    assert_handled_once(to_host)
    assert_handled_once(to_path)
    assert nowhere.status == 404
    assert to_host.answers[0].headers["Content-Length"] == "0"


async def test_a_url_is_reached_from_an_event_loop() -> None:
    """uvicorn in a thread of its own."""
    charged: list[str] = []
    with apps.served_asgi(TARGETS["starlette"](STRIPE, charged)) as url:
        found = await adeliver_concurrently(
            url, sample(STRIPE, url="/hooks/stripe"), effects=charged
        )
    assert_handled_once(found)


def test_django_is_reached() -> None:
    """Its WSGI and ASGI handlers; a view with a CSRF check is explained."""
    command = [sys.executable, "-m", "tests.testing.django_app"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    assert "answered 403: something refused it" in done.stdout
    assert "csrf_exempt" in done.stdout


def test_an_app_that_raises_is_answered_for_with_500() -> None:
    """As a server does; the error is shown."""

    def app(environ: Any, start_response: Any) -> Any:
        raise ValueError("no database")

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("no database")

    for target in (app, asgi):
        found = deliver(target, sample(STRIPE))
        assert (found.status, found.error) == (500, "ValueError: no database")
        with pytest.raises(AssertionError, match=r"the handler failed \[ValueError: no database\]"):
            assert_handled_once(found)


def test_apps_that_say_nothing_are_answered_for_with_500() -> None:
    """Neither a status nor an error."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"

    assert deliver(lambda environ, start_response: [], sample(STRIPE)).status == 500
    assert deliver(asgi, sample(STRIPE)).error == "the app sent no answer"


def test_an_asgi_app_sees_its_client_stay_until_the_answer() -> None:
    """A disconnect comes after the last byte; an error after it does not change the answer."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 202, "headers": [(b"x-a", b"1")]})
        await send({"type": "http.response.body", "body": b"do", "more_body": True})
        await send({"type": "http.response.body", "body": b"ne"})
        seen.append((await receive())["type"])
        raise ValueError("in the background")

    found = deliver(app, sample(STRIPE))

    assert seen == ["http.request", "http.disconnect"]
    assert (found.status, found.body, found.headers) == (202, b"done", {"x-a": "1"})
    assert found.error == "ValueError: in the background"


def test_a_wsgi_app_may_write_and_close() -> None:
    """The old ``write`` and the ``close`` of what an app returns are honoured."""
    closed: list[bool] = []

    class Body(list[bytes]):
        def close(self) -> None:
            closed.append(True)

    def app(environ: Any, start_response: Any) -> Any:
        assert environ["wsgi.input"].read() == sample_body
        start_response("201 Created", [("X-A", "1")])(b"do")
        return Body([b"ne"])

    delivery = sample(STRIPE)
    sample_body = delivery.body
    found = deliver(app, delivery)

    assert (found.status, found.body, closed) == (201, b"done", [True])
