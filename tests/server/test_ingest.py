"""``/hooks``: verified, kept once, acknowledged after the commit; and what is refused, with why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.kit import ENVIRON, HOST, deliver

from oncekey.errors import StoreUnavailableError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import Arrival, Ingested
from oncekey.server import ingest
from oncekey.server.app import make_app
from oncekey.server.config import settings_from
from oncekey.server.gateway import Gateway
from oncekey.signatures import providers
from oncekey.testing import SignedDelivery

Signed = Callable[..., SignedDelivery]


async def events(gateway: Gateway, query: str = "") -> list[Any]:
    return list((await gateway.inbox.search(Filter.parse(query))).items)


async def causes(gateway: Gateway) -> list[tuple[str, str]]:
    return [(one.source, one.cause) for one in (await gateway.inbox.rejected()).items]


async def test_an_event_is_kept_before_it_is_acknowledged(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """A signed delivery is there, byte for byte, when its sender reads the 2xx."""
    one = signed("shop", id="evt_1", type="invoice.paid")
    answer = await deliver(http, one)
    assert answer.status_code == 200
    assert answer.headers["oncekey-outcome"] == "new"
    found = await gateway.inbox.event(answer.headers["oncekey-event"])
    assert found is not None
    assert found.event.body == one.body
    assert (found.event.source, found.event.type, found.event.key) == (
        "shop",
        "invoice.paid",
        "evt_1",
    )
    assert [delivery.target for delivery in found.deliveries] == ["app"]


async def test_concurrent_copies_are_one_event(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """Of twenty copies at the same time one is new; every one gets the same 2xx."""
    one = signed("shop", id="evt_1")
    answers = await asyncio.gather(*(deliver(http, one.again()) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    outcomes = [answer.headers["oncekey-outcome"] for answer in answers]
    assert sorted(outcomes) == ["duplicate"] * 19 + ["new"]
    assert len({answer.headers["oncekey-event"] for answer in answers}) == 1
    (row,) = await events(gateway)
    assert row.duplicates == 19


async def test_a_wrong_signature_is_refused_and_listed(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """401, nothing kept but the cause, and no secret or body in it."""
    one = signed("shop")
    answer = await http.post("/hooks/shop", headers=dict(one.headers), content=one.body + b" ")
    assert answer.status_code == 401
    assert answer.json()["error"] == "signature_mismatch"
    assert await events(gateway) == []
    assert await causes(gateway) == [("shop", "signature_mismatch")]


async def test_bodies_are_bounded(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """A body over the limit gets 413 and its cause is listed."""
    answer = await http.post("/hooks/shop", content=b"x" * 1_048_577)
    assert answer.status_code == 413
    assert await causes(gateway) == [("shop", "body_too_large")]


async def test_bodies_on_their_way_are_bounded(
    gateway: Gateway,
    http: httpx.AsyncClient,
    signed: Signed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While strangers send large bodies slowly, more of these are told to wait; small ones pass."""
    monkeypatch.setattr(ingest, "MOST_READING", 1_500_000)  # two of unknown length are more
    go, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def slowly() -> AsyncIterator[bytes]:
        yield b"x"
        begun.release()
        await go.wait()
        yield b"y"

    slow = [asyncio.create_task(http.post("/hooks/shop", content=slowly())) for _ in range(2)]
    for _ in slow:
        await begun.acquire()
    refused = await http.post("/hooks/shop", content=b"z" * 100_000)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await deliver(http, signed("shop", id="evt_1"))).status_code == 200
    go.set()
    assert [one.status_code for one in await asyncio.gather(*slow)] == [401, 401]
    assert (await http.post("/hooks/shop", content=b"z" * 100_000)).status_code == 401
    assert ("shop", "too_many_bodies") in await causes(gateway)


async def test_an_unknown_source_is_404_under_one_name(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    """Whoever makes names up fills no list of names."""
    for name in ("nobody", "../etc", "x" * 5000):
        assert (await http.post(f"/hooks/{name}", content=b"{}")).status_code in (404, 307)
    assert {source for source, _ in await causes(gateway)} <= {"?"}


async def test_other_methods_are_refused(http: httpx.AsyncClient) -> None:
    """PUT is 405; GET and HEAD answer 200, as providers test an endpoint so."""
    assert (await http.put("/hooks/shop", content=b"{}")).status_code == 405
    assert (await http.get("/hooks/shop")).status_code == 200
    assert (await http.head("/hooks/shop")).status_code == 200


async def test_a_get_challenge_needs_the_token(http: httpx.AsyncClient) -> None:
    """``hub.challenge`` is echoed for who knows the token, and never as HTML."""
    asked = {"hub.mode": "subscribe", "hub.verify_token": "a-token-of-talk", "hub.challenge": "42"}
    answer = await http.get("/hooks/talk", params=asked)
    assert (answer.status_code, answer.text) == (200, "42")
    assert answer.headers["content-type"].startswith("text/plain")
    for wrong in ({"hub.verify_token": "other"}, {"hub.challenge": "<script>"}):
        assert (await http.get("/hooks/talk", params={**asked, **wrong})).status_code == 403
    assert (await http.get("/hooks/shop", params=asked)).status_code == 403


GREETED = [name for name, one in providers().items() if one.greeting]
assert {"dropbox", "meta"} <= set(GREETED)


@pytest.mark.parametrize("where", ["source", "option"])
@pytest.mark.parametrize("name", GREETED)
async def test_a_provider_tests_an_endpoint_by_get(name: str, where: str, tmp_path: Path) -> None:
    """Each preset with such a test gets its own answer, and nobody else who asks gets one."""
    rule = providers()[name].greeting
    needs = "token" in rule
    given = {"source": 'verify_token_env = "TALK_TOKEN"', "option": ""}[where] if needs else ""
    option = 'options.verify_token = "a-token-of-talk"' if needs and not given else ""
    text = f"""store = "sqlite:///{tmp_path}/inbox.db"
    [sources.one]
    provider = "{name}"
    secret_env = "SHOP_SECRET"
    targets = ["app"]
    {given}
    {option}
    [targets.app]
    url = "https://app.example/events"
    """
    gateway = await Gateway.open(settings_from(text, "gateway.toml", ENVIRON))
    transport = httpx.ASGITransport(app=make_app(gateway))
    asked = {rule["echo"]: "a-challenge", **rule.get("equals", {})}
    if needs:
        asked[rule["token"]] = "a-token-of-talk"
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as http:
        answer = await http.get("/hooks/one", params=asked)
        assert (answer.status_code, answer.text) == (200, "a-challenge")
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.headers["x-content-type-options"] == "nosniff"
        wrong = [{**asked, rule["echo"]: "<script>"}]
        wrong += [{**asked, name: "other"} for name in rule.get("equals", ())]
        wrong += [{**asked, rule["token"]: "other"}] if needs else []
        for other in wrong:
            assert (await http.get("/hooks/one", params=other)).status_code == 403
        assert (await http.get("/hooks/one")).status_code == 200
    await gateway.stop(1)


async def test_a_signed_challenge_is_no_event(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """Slack's url_verification is answered with its challenge, and nothing is kept."""
    provider = gateway.settings.sources["talk"].provider
    body = b'{"type": "url_verification", "challenge": "abc"}'
    request = provider.sign("POST", "http://gateway.test/hooks/talk", {}, body)
    answer = await http.post("/hooks/talk", headers=request.headers, content=request.body)
    assert (answer.status_code, answer.text) == (200, "abc")
    assert await events(gateway) == []


async def test_a_fresh_id_that_nobody_signed_makes_no_second_event(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """A captured GitHub delivery under another id is a copy of the first."""
    one = signed("code")
    assert (await deliver(http, one)).headers["oncekey-outcome"] == "new"
    other = {**dict(one.headers), "X-GitHub-Delivery": "made-up"}
    other = {name: value for name, value in other.items() if name != "x-github-delivery"}
    answer = await http.post("/hooks/code", headers=other, content=one.body)
    assert answer.headers["oncekey-outcome"] == "duplicate"
    assert len(await events(gateway)) == 1


async def test_only_targets_that_want_it_get_it(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """A target's types decide; credentials among the headers are not kept."""
    one = signed("code", headers={"Authorization": "Bearer of the caller"})
    answer = await deliver(http, one)
    found = await gateway.inbox.event(answer.headers["oncekey-event"])
    assert found is not None
    assert [delivery.target for delivery in found.deliveries] == ["app"]
    names = [name for name, _ in found.event.headers]
    assert "authorization" not in names
    assert not any("signature" in name for name in names)
    assert "x-github-event" in names


async def test_what_cant_be_kept_is_not_acknowledged(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inbox that can't be written gives 503 with Retry-After; the retry is new."""
    real = gateway.inbox.ingest
    one = signed("shop")

    async def full(arrival: Arrival) -> Ingested:
        raise StoreUnavailableError("the disk is full")

    monkeypatch.setattr(gateway.inbox, "ingest", full)
    answer = await deliver(http, one)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    monkeypatch.setattr(gateway.inbox, "ingest", real)
    assert (await deliver(http, one)).headers["oncekey-outcome"] == "new"
