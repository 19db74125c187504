"""The API has all that the dashboard shows: copies, proxies, stuck claims, saved views."""

from __future__ import annotations

import base64
import dataclasses
import re
from typing import Any

import httpx
from tests.server.kit import ENVIRON, HOST, bearer, deliver, sign_in

from oncekey.inbox.models import Arrival, Route
from oncekey.models import Key, Scope, Terms
from oncekey.operate import ainspect
from oncekey.server.config import settings_from
from oncekey.server.gateway import Gateway
from oncekey.server.openapi import document
from oncekey.testing import signed as sign_body

API = "/_oncekey/api/v1"


async def asked(
    http: httpx.AsyncClient, method: str, path: str, role: str = "read", **more: Any
) -> Any:
    """What is answered, which has all that the document says."""
    answer = await http.request(method, API + path, headers=bearer(role), **more)
    assert answer.status_code == 200, answer.text
    told, described = answer.json(), document()
    way = described["paths"][API + re.sub("msg_[0-9a-f]{16}", "{id}", path)]
    schema = way[method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]

    def look(schema: Any, value: Any) -> None:
        if "$ref" in schema:
            schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if schema["type"] == "array":
            for one in value:
                look(schema["items"], one)
        elif "properties" in schema:
            assert set(value) == set(schema["required"])
            for name, inner in schema["properties"].items():
                look(inner, value[name])

    look(schema, told)
    return told


async def test_copies_have_the_bodies_that_differ(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    """By their number on the event's page; one that is the same has no body of its own."""
    provider = gateway.settings.sources["shop"].provider
    for note in ("one", "one", "two"):
        body = {"id": "evt_1", "type": "x", "note": note}
        sent = sign_body(provider, body, url=f"{HOST}/hooks/shop")
        kept = await deliver(http, sent)
    event = kept.headers["oncekey-event"]
    same, other = (await asked(http, "GET", f"/events/{event}/copies"))["items"]
    assert (same["number"], same["same"], same["body"], same["size"]) == (2, True, None, None)
    assert (other["number"], other["same"], other["size"]) == (3, False, len(sent.body))
    assert (other["body"], other["body_encoding"]) == (sent.body.decode(), "utf-8")
    none = await http.get(f"{API}/events/msg_0000000000000001/copies", headers=bearer("read"))
    assert none.status_code == 404


async def test_a_copy_that_is_no_text_is_in_base64(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    """As the event's own body would be."""
    for body in (b"\xff\x00", b"\xff\x01"):
        arrival = Arrival("shop", "evt_1", "x", body, (), (Route("app"),))
        kept = await gateway.inbox.ingest(arrival)
    (copy,) = (await asked(http, "GET", f"/events/{kept.id}/copies"))["items"]
    assert copy["body_encoding"] == "base64"
    assert base64.b64decode(copy["body"]) == b"\xff\x01"


async def test_routes_of_proxies_have_their_figures(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    """Each route with where it leads, and how often what was answered."""
    assert (await asked(http, "GET", "/proxies"))["items"] == []
    text = f'store = "{gateway.settings.store}"\n'
    text += '[proxies.orders]\nupstream = "http://127.0.0.1:9/base"\n'
    routes = settings_from(text, "gateway.toml", ENVIRON).proxies
    await gateway.use(dataclasses.replace(gateway.settings, proxies=routes))
    gateway.proxies.answers["orders", "2xx"] = 3
    assert (await asked(http, "GET", "/proxies"))["items"] == [
        {
            "name": "orders",
            "path": "/orders",
            "upstream": "http://127.0.0.1:9/base",
            "answers": {"2xx": 3},
        }
    ]


async def test_a_stuck_claim_is_listed_and_freed(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """Once, by an admin, in the audit; a record with an outcome is not forgotten so."""
    terms = Terms(lease_ms=1, ttl_ms=60_000)
    stuck = Key(Scope("once", "orders"), "o-1")
    await gateway.store.claim(stuck, b"w" * 16, b"f" * 32, terms)
    while (await ainspect(gateway.store, stuck)).situation != "lapsed":
        pass  # a millisecond
    (found,) = (await asked(http, "GET", "/claims"))["items"]
    assert (found["digest"], found["scope"], found["situation"]) == (
        stuck.digest.hex(),
        "once:orders",
        "lapsed",
    )
    which = {"digest": found["digest"]}
    assert await asked(http, "DELETE", "/claims", "admin", params=which) == which
    again = await http.delete(f"{API}/claims", params=which, headers=bearer("admin"))
    assert again.status_code == 404
    assert (await asked(http, "GET", "/claims"))["items"] == []
    audit = (await gateway.inbox.audit()).items
    assert [(one.action, one.subject) for one in audit] == [("free claim", found["digest"])]

    done = Key(Scope("once", "orders"), "o-2")
    ends = await gateway.store.now() + 60_000
    await gateway.store.write(done, b"f" * 32, b"answer", ends)
    which = {"digest": done.digest.hex()}
    kept = await http.delete(f"{API}/claims", params=which, headers=bearer("admin"))
    assert kept.status_code == 404
    record = await gateway.store.read(done)
    assert record is not None
    assert record.answer == b"answer"
    for wrong in ("", "x", "abc", "ab" * 33):
        answer = await http.delete(
            f"{API}/claims", params={"digest": wrong}, headers=bearer("admin")
        )
        assert answer.status_code == 422, wrong


async def test_saved_views_are_those_of_the_page(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """Saved and forgotten here or there, by the same name; nobody has those of another."""
    view = {"name": "mine", "q": "state:dead"}
    assert await asked(http, "POST", "/views", json=view) == view
    assert (await asked(http, "GET", "/views"))["items"] == [view]
    assert (await asked(http, "GET", "/views", "operate"))["items"] == []
    form = {"name": "", "password": "token-of-a-reader", "next": "/_oncekey"}
    assert (await http.post("/_oncekey/login", data=form)).status_code == 303
    assert ">mine<" in (await http.get("/_oncekey/events")).text.replace("\n", "")
    http.cookies.clear()
    await sign_in(http, "rita")
    assert (await http.get(f"{API}/views")).json() == {"items": []}
    assert (await asked(http, "DELETE", "/views", params={"name": "mine"}))["items"] == []
    for method, more, status in (
        ("DELETE", {"params": {"name": "mine"}}, 404),
        ("POST", {"json": {"name": " ", "q": "x"}}, 422),
        ("POST", {"json": {"name": "a", "q": ""}}, 422),
        ("POST", {"json": {"name": "a", "q": "colour:red"}}, 422),
        ("POST", {"json": {"name": "a" * 41, "q": "x"}}, 422),
    ):
        answer = await http.request(method, f"{API}/views", headers=bearer("read"), **more)
        assert answer.status_code == status
