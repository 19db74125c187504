"""The JSON API: as documented, by role, in pages, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.server.kit import bearer, csrf_of, deliver, sign_in

from oncekey.server.endpoints import ENDPOINTS
from oncekey.server.gateway import Gateway
from oncekey.server.openapi import document
from oncekey.testing import SignedDelivery

API = "/_oncekey/api/v1"
Signed = Callable[..., SignedDelivery]


async def kept(http: httpx.AsyncClient, signed: Signed, number: int = 1) -> list[str]:
    """Ids of so many new events, oldest first."""
    answers = [await deliver(http, signed("shop", id=f"evt_{n}")) for n in range(number)]
    return [answer.headers["oncekey-event"] for answer in answers]


async def test_events_come_in_pages(http: httpx.AsyncClient, signed: Signed) -> None:
    """``next`` leads through all events, newest first, each of them once."""
    ids = await kept(http, signed, 7)
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        asked = {"limit": "3", **({"after": after} if after else {})}
        page = (await http.get(f"{API}/events", params=asked, headers=bearer("read"))).json()
        assert len(page["items"]) <= 3
        seen += [one["id"] for one in page["items"]]
        after = page["next"]
    assert seen == ids[::-1]


async def test_a_search_finds_by_type_and_id(http: httpx.AsyncClient, signed: Signed) -> None:
    """The words of the search box work here too, and a wrong one says what can be written."""
    (event,) = await kept(http, signed)
    for query, number in (("source:shop", 1), ("source:code", 0), ("evt_0", 1), (event, 1)):
        found = await http.get(f"{API}/events", params={"q": query}, headers=bearer("read"))
        assert len(found.json()["items"]) == number, query
    wrong = await http.get(f"{API}/events", params={"q": "colour:red"}, headers=bearer("read"))
    assert wrong.status_code == 422
    assert wrong.headers["content-type"] == "application/problem+json"
    assert "source:" in wrong.json()["detail"]


async def test_an_event_has_deliveries_attempts_and_duplicates(
    http: httpx.AsyncClient, signed: Signed
) -> None:
    """One event in full: its body as text, and the arrival of its copy."""
    one = signed("shop", id="evt_1")
    await deliver(http, one)
    event = (await deliver(http, one)).headers["oncekey-event"]
    found = (await http.get(f"{API}/events/{event}", headers=bearer("read"))).json()
    assert found["body"] == one.body.decode()
    assert found["body_encoding"] == "utf-8"
    assert [delivery["target"] for delivery in found["deliveries"]] == ["app"]
    assert found["attempts"] == []
    assert [copy["same"] for copy in found["duplicates"]] == [True]


async def test_a_replay_is_queued_and_audited(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """POST replay queues deliveries, says how many, and is in the audit under the token's name."""
    (event,) = await kept(http, signed)
    answer = await http.post(
        f"{API}/events/{event}/replay", json={"targets": ["other"]}, headers=bearer("operate")
    )
    assert answer.json() == {"queued": 1, "left_out": {}}
    audit = (await http.get(f"{API}/audit", headers=bearer("read"))).json()["items"]
    assert [(one["actor"], one["action"], one["subject"]) for one in audit] == [
        ("operator", "replay", event)
    ]
    wrong = await http.post(
        f"{API}/events/{event}/replay", json={"targets": ["nobody"]}, headers=bearer("operate")
    )
    assert wrong.status_code == 422


async def test_a_replay_says_what_it_left_out(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """What is in hand stays as it is: the API says so, and the dashboard."""
    (event,) = await kept(http, signed)
    await gateway.inbox.fetch({"app": 1}, 60_000)
    path, asked = f"{API}/events/{event}/replay", bearer("operate")
    none = await http.post(path, headers=asked)
    assert none.json() == {"queued": 0, "left_out": {"app": "running"}}
    some = await http.post(path, json={"targets": ["app", "other"]}, headers=asked)
    assert some.json() == {"queued": 1, "left_out": {"app": "running"}}
    await sign_in(http, "olga")
    form = {"csrf": await csrf_of(http), "target": "app"}
    shown = await http.post(f"/_oncekey/events/{event}/replay", data=form, follow_redirects=True)
    assert "Nothing was queued: an attempt is under way" in shown.text


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: f"{one.method} {one.path}")
async def test_every_endpoint_wants_a_token_of_its_role(
    http: httpx.AsyncClient, endpoint: object
) -> None:
    """Nobody is 401, a lesser role 403, before anything of the request is looked at."""
    path = API + endpoint.path.replace("{id}", "msg_" + "0" * 16)  # type: ignore[attr-defined]
    path = path.replace("{number}", "1").replace("{name}", "app")
    method, role = endpoint.method, endpoint.role  # type: ignore[attr-defined]
    assert (await http.request(method, path)).status_code == 401
    wrong = {"Authorization": "Bearer token-of-nobody-at-all"}
    assert (await http.request(method, path, headers=wrong)).status_code == 401
    basic = {"Authorization": "Basic dG9rZW4tb2YtYW4tYWRtaW4="}
    assert (await http.request(method, path, headers=basic)).status_code == 401
    if role != "read":
        assert (await http.request(method, path, headers=bearer("read"))).status_code == 403
    if role == "admin":
        assert (await http.request(method, path, headers=bearer("operate"))).status_code == 403


async def test_a_target_is_paused_and_resumed(http: httpx.AsyncClient) -> None:
    """The status of a target is changed by name, and listed without its secret."""
    for status in ("paused", "disabled", "active"):
        answer = await http.post(
            f"{API}/targets/app/status", json={"status": status}, headers=bearer("operate")
        )
        assert answer.json()["status"] == status
    listed = (await http.get(f"{API}/targets", headers=bearer("read"))).json()["items"]
    assert [one["name"] for one in listed] == ["app", "other"]
    assert "secret" not in listed[0]
    missing = await http.post(
        f"{API}/targets/nobody/status", json={"status": "paused"}, headers=bearer("operate")
    )
    assert missing.status_code == 404


async def test_a_key_is_evicted_by_an_admin(http: httpx.AsyncClient, signed: Signed) -> None:
    """A forgotten key lets the next copy in as new; the eviction is in the audit."""
    one = signed("shop", id="evt_1")
    await deliver(http, one)
    asked = {"source": "shop", "key": "evt_1"}
    known = await http.get(f"{API}/keys", params=asked, headers=bearer("read"))
    assert known.json()["known"] is True
    gone = await http.delete(f"{API}/keys", params=asked, headers=bearer("admin"))
    assert gone.json()["known"] is False
    assert (await deliver(http, one)).headers["oncekey-outcome"] == "new"
    again = await http.delete(
        f"{API}/keys", params={**asked, "key": "evt_2"}, headers=bearer("admin")
    )
    assert again.status_code == 404
    audit = (await http.get(f"{API}/audit", headers=bearer("read"))).json()["items"]
    assert [one["action"] for one in audit] == ["evict"]


async def test_a_bulk_replay_counts_first(http: httpx.AsyncClient) -> None:
    """Without ``dry_run: false`` nothing is replayed; then it begins and can be listed."""
    counted = await http.post(f"{API}/bulk-replays", json={"q": ""}, headers=bearer("operate"))
    assert counted.json()["state"] == "dry run"
    body = {"q": "target:app", "rate": 5, "dry_run": False}
    begun = await http.post(f"{API}/bulk-replays", json=body, headers=bearer("operate"))
    assert begun.json()["query"] == "target:app"
    listed = await http.get(f"{API}/bulk-replays", headers=bearer("read"))
    assert [one["id"] for one in listed.json()["items"]] == [begun.json()["id"]]


@pytest.mark.parametrize(
    "method, path, body, status",
    [
        ("GET", "/events?limit=0", None, 422),
        ("GET", "/events?limit=many", None, 422),
        ("GET", "/events?limit=1&limit=2", None, 422),
        ("GET", "/events?colour=red", None, 422),
        ("GET", "/events?after=%00", None, 422),
        ("GET", "/events/none", None, 422),
        ("GET", "/events/msg_0000000000000001", None, 404),
        ("POST", "/bulk-replays", b"{", 400),
        ("POST", "/bulk-replays", b"[]", 422),
        ("POST", "/bulk-replays", b'{"rate": -1}', 422),
        ("POST", "/bulk-replays", b'{"rate": 1e999}', 422),
        ("POST", "/bulk-replays", b'{"colour": 1}', 422),
        ("POST", "/bulk-replays", b"[" * 20_000, 400),
        ("POST", "/bulk-replays", b" " * 70_000, 413),
        ("POST", "/bulk-replays/no/cancel", b"", 422),
    ],
)
async def test_what_cant_be_meant_is_said(
    http: httpx.AsyncClient, method: str, path: str, body: bytes | None, status: int
) -> None:
    """Every wrong request is a problem document with a 4xx."""
    answer = await http.request(method, API + path, content=body, headers=bearer("operate"))
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status


@pytest.mark.parametrize("body", [b"\n", b" ", b"{", b"\xff"])
async def test_a_body_is_json_or_none_at_all(
    http: httpx.AsyncClient, signed: Signed, body: bytes
) -> None:
    """An empty body asks for what is usual; one of blanks is no JSON, and does nothing."""
    event = (await deliver(http, signed("shop"))).headers["oncekey-event"]
    path = f"/_oncekey/api/v1/events/{event}/replay"
    assert (await http.post(path, content=body, headers=bearer("operate"))).status_code == 400
    assert (await http.post(path, content=b"", headers=bearer("operate"))).status_code == 200


async def test_a_session_needs_the_csrf_token(http: httpx.AsyncClient, signed: Signed) -> None:
    """A page of the dashboard may call the API; another site with the same cookie may not."""
    (event,) = await kept(http, signed)
    await sign_in(http, "olga")
    path = f"{API}/events/{event}/replay"
    assert (await http.get(f"{API}/events")).status_code == 200
    assert (await http.post(path)).status_code == 403
    token = {"X-Oncekey-CSRF": await csrf_of(http)}
    assert (await http.post(path, headers=token)).status_code == 200
    for header in ({"Origin": "https://evil.test"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await http.post(path, headers={**token, **header})).status_code == 403


def test_the_document_is_made_of_the_table() -> None:
    """Every endpoint is in the OpenAPI document, and every schema it names is there."""
    described = document()
    listed = {
        (method.upper(), path) for path, ways in described["paths"].items() for method in ways
    }
    assert listed == {(one.method, API + one.path) for one in ENDPOINTS}
    named = set(str(described).split("#/components/schemas/")[1:])
    for name in named:
        assert name.split("'")[0] in described["components"]["schemas"]


async def test_probes_and_metrics(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """Health and readiness need nobody; metrics need a token, and count what came."""
    assert (await http.get("/healthz")).text == "ok\n"
    assert (await http.get("/readyz")).status_code == 200
    assert (await http.get("/metrics")).status_code == 401
    await kept(http, signed)
    text = (await http.get("/metrics", headers=bearer("read"))).text
    assert 'oncekey_gateway_requests_total{source="shop",outcome="new"} 1' in text
    assert 'oncekey_gateway_waiting{target="app"} 1' in text
