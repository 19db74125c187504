"""Webhooks in Django, behind its own server and behind an ASGI server, with all its guards on.

Django can be set up once a process and in one way, so every site is a process of its own.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import django
import httpx
import pytest
from tests.adapters.webhook_scenarios import COPIES, JSON, SCENARIOS, fresh, send
from tests.adapters.webhook_sites import Site, made, site_fixture

from oncekey import BackendMismatchError
from oncekey.adapters.django import webhook_view

site = site_fixture(
    {
        "django-own": {"untold": ("odd path",), "chunked": False},
        "django-gunicorn": {},
        "django-uvicorn": {},
        "django-uvicorn-async": {},
    }
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_site_does_what_every_adapter_must(site: Site, scenario: str) -> None:
    """Each scenario of ``webhook_scenarios`` holds, whatever serves the view."""
    SCENARIOS[scenario](site)


def delivery(site: Site, path: str, event: str, kind: str = "paid", **headers: str) -> Any:
    body = json.dumps({"id": event, "type": kind}).encode()
    signed = made("stripe").sign("POST", site.url + path, {**JSON, **headers}, body)
    return httpx.Request("POST", signed.url, headers=signed.headers, content=body)


def payments(site: Site, *events: str) -> list[int]:
    """How many rows each event has."""
    with closing(sqlite3.connect(site.folder / "shop.db")) as db:
        rows = [row[0] for row in db.execute("SELECT event FROM payments")]
    return [rows.count(event) for event in events]


def test_djangos_guards_are_on_and_let_a_webhook_pass(site: Site) -> None:
    """No token, no login, no transaction around a webhook; all of it around other views."""
    others = f"{site.url}/open", f"{site.url}/closed"
    assert send(httpx.Request("POST", others[0])).status_code == 403
    assert send(httpx.Request("GET", others[0])).text == "True"
    logins = django.VERSION >= (5, 1)  # older ones have no middleware that asks for them
    assert send(httpx.Request("GET", others[1])).status_code == (302 if logins else 200)
    event = fresh()
    assert send(delivery(site, "/hooks/plain", event)).status_code == 200
    assert f"{event} False" in site.notes("atomic")


def test_a_handler_writes_in_the_transaction_of_the_mark(site: Site) -> None:
    """A failed handler leaves no row and no mark; its retry leaves both, and a copy nothing."""
    event = fresh()
    found = []
    for _ in range(3):
        status = send(delivery(site, "/hooks/shop", event, "fails")).status_code
        found.append((status, payments(site, event)))
        if status == 500:
            (site.folder / f"{event}.again").touch()
    assert found == [(500, [0]), (200, [1]), (200, [1])]


def test_concurrent_copies_write_once(site: Site) -> None:
    """Three copies each of several events, all at once: as many rows as events."""
    events = [fresh() for _ in range(COPIES // 4)]
    start = threading.Barrier(3 * len(events))

    def deliver(event: str) -> int:
        request = delivery(site, "/hooks/shop", event)
        start.wait()
        return send(request).status_code

    with ThreadPoolExecutor(3 * len(events)) as pool:
        statuses = set(pool.map(deliver, events * 3))
    assert statuses <= {200, 503}
    for event in events:
        assert send(delivery(site, "/hooks/shop", event)).status_code == 200
    assert payments(site, *events) == [1] * len(events)


def test_settings_for_proxies_and_hosts_hold(site: Site) -> None:
    """A URL is verified as the proxy's caller wrote it, and an unknown host is a 400."""
    event, square = fresh(), made("square")
    body = json.dumps({"event_id": event, "type": "paid"}).encode()
    public = square.sign("POST", "https://shop.example/signed/square/x?y=%7e", JSON, body)
    told = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "shop.example"}
    url = f"{site.url}/signed/square/x?y=%7e"
    for headers, status in (
        ({}, 401),
        (told, 200),
        ({**told, "X-Forwarded-Host": "evil.example"}, 400),
    ):
        request = httpx.Request("POST", url, headers={**public.headers, **headers}, content=body)
        assert send(request).status_code == status
    assert site.notes("effects").count(event) == 1


def test_a_body_that_was_read_before_is_an_error_that_says_why(site: Site) -> None:
    """A middleware that reads from the request takes bytes away; one that parses forms does not."""
    event = fresh()
    assert send(delivery(site, "/hooks/lost", event)).status_code == 500
    log = (site.folder / "log").read_text()
    assert "other code read the webhook's body before its view could: let that read request" in log
    assert not [line for line in site.notes("atomic") if line.startswith(f"{event} ")]
    parts = {"files": {"file": ("name", b"content")}}
    form = httpx.Request("POST", f"{site.url}/hooks/stripe", **parts)
    assert send(form).status_code == 415


def test_only_receivers_have_a_view() -> None:
    """Anything else is refused before Django is asked for its settings."""
    not_one: Any = made("stripe")
    with pytest.raises(BackendMismatchError, match="needs a WebhookReceiver"):
        webhook_view(not_one)
