"""A shop that serves with several processes, and one set of metrics for all of them.

``gunicorn --config gunicorn_hooks.py metered_shop:app``, with DATABASE and
PROMETHEUS_MULTIPROC_DIR set.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import rough_shop
from prometheus_client import make_wsgi_app

from oncekey import Once, StoreTimeoutError, WebhookDedup, connect
from oncekey.errors import OncekeyError
from oncekey.instrument.prometheus import export_prometheus, scraped_registry
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider

SECRET = "whsec_test"

export_prometheus()
store: Any = connect(os.environ["DATABASE"])
once = Once(store, scope="shop", wait=20)
receiver = WebhookReceiver(provider("stripe", secret=SECRET), store, per_key=None)
metrics = make_wsgi_app(scraped_registry())


@receiver.on("invoice.paid")
def paid(event: Any) -> None:
    time.sleep(0.001)


@once(key="order")
def charge(order: str, cents: int) -> dict[str, Any]:
    if order.startswith("slow"):
        time.sleep(0.05)
    if order.startswith("bad"):
        raise ValueError("declined")
    return {"order": order, "cents": cents, "pid": os.getpid()}


def hurry(order: str) -> None:
    """A worker that is held up for longer than its lease, and wakes up late."""
    slow = Once(store, scope="hurry", lease=0.02, max_run=0.001, wait=20)
    entered, taken = threading.Event(), threading.Event()

    def late() -> None:
        try:
            with slow.guard(order):
                entered.set()
                taken.wait()
        except OncekeyError:
            pass

    thread = threading.Thread(target=late)
    thread.start()
    entered.wait()
    with slow.guard(order) as claim:
        taken.set()
        thread.join()
        claim.answer = claim.takeover


def short(order: str) -> None:
    """A record that is past its time, remembered as expired, and then swept."""
    brief = Once(store, scope="brief", ttl=0.001, remember_expired=0.05)
    with brief.guard(order):
        pass
    time.sleep(0.01)
    try:
        with brief.guard(order):
            pass
    except OncekeyError:
        pass
    time.sleep(0.1)
    if hasattr(store, "sweep"):  # Redis needs none
        store.sweep()


def fail(order: str) -> None:
    """A store that does not answer in time."""

    class Late(type(store)):  # type: ignore[misc]
        def first_seen(self, *args: Any) -> bool:
            raise StoreTimeoutError("too late")

    late = object.__new__(Late)
    late.__dict__.update(store.__dict__)
    WebhookDedup(late).check_and_record("shop", order)


def meet(order: str) -> None:
    """A copy that waits for the first, in another thread."""
    other = threading.Thread(target=charge, args=(f"slow-{order}", 5))
    other.start()
    charge(f"slow-{order}", 5)
    other.join()


def busy(order: str) -> None:
    """A copy that does not wait for the first."""
    with once.guard(order):
        try:
            Once(store, scope="shop", wait=0).guard(order).__enter__()
        except OncekeyError:
            pass


def hang(order: str) -> None:
    """A handler that never ends."""
    with once.guard(order):
        time.sleep(3600)


def rough(order: str) -> None:
    """An outage, and events that are odd."""
    rough_shop.outage()
    rough_shop.odd_events()


ROUTES = {one.__name__: one for one in (hang, rough, hurry, short, fail, meet, busy)}


def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    path = environ["PATH_INFO"].strip("/")
    if path == "metrics":
        answer: list[bytes] = list(metrics(environ, start_response))
        return answer
    body = environ["wsgi.input"].read()
    if path == "hook":
        fields = {"Content-Type": "application/json"}
        fields["Stripe-Signature"] = environ.get("HTTP_STRIPE_SIGNATURE", "")
        found = receiver.receive("POST", "https://x.example/hook", fields, body)
        start_response(f"{found.status} -", [("Content-Type", "application/json")])
        return [found.body]
    asked = json.loads(body)
    said: Any = None
    try:
        if path == "charge":
            said = charge(asked["order"], asked["cents"])
        else:
            ROUTES[path](asked["order"])
    except (OncekeyError, ValueError) as error:
        said = type(error).__name__
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(said).encode()]
