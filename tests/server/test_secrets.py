"""No answer has a secret in it: of the API, the pages, the tools for agents, or the metrics."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from argon2 import PasswordHasher
from tests.server.kit import HOST, deliver
from tests.server.test_mcp import agent

from oncekey.inbox.filters import Filter
from oncekey.inbox.models import Outcome, Result
from oncekey.models import Key, Scope, Terms
from oncekey.server.app import make_app
from oncekey.server.auth import COOKIE
from oncekey.server.config import settings_from
from oncekey.server.endpoints import ENDPOINTS
from oncekey.server.gateway import Gateway
from oncekey.testing import sample

MARK = "hush"
"""Part of every secret below, and of nothing else."""
HASH = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(f"password-{MARK}-of-anna")
CONFIG = f"""
store = "{{store}}"
metrics_public = true
[sources.shop]
provider = "stripe"
secret_env = "SHOP"
previous_env = "OLDER"
verify_token_env = "VERIFY"
targets = ["app", "quiet"]
[sources.lab]
provider = "gitlab"
secret_env = "LAB"
options.accept_unsigned = "body"
targets = ["app"]
[targets.app]
url = "https://app.example/events"
secret_env = "APP"
[targets.quiet]
url = "https://quiet.example/events"
[users.anna]
password_hash = "{HASH}"
role = "admin"
[tokens.agent]
token_env = "AGENT"
role = "operate"
[proxies.orders]
upstream = "https://orders.example/"
"""
ENVIRON = {
    "SHOP": f"whsec_{MARK}-of-the-shop",
    "OLDER": f"whsec_{MARK}-of-the-shop-before",
    "VERIFY": f"verify-{MARK}-of-the-shop",
    "LAB": f"token-{MARK}-of-the-lab",
    "APP": "whsec_" + "aHVzaC1odXNoLWh1c2gtaHVzaC1odXNo",  # which says it in base64
    "AGENT": f"token-{MARK}-of-an-agent",
    "ONCEKEY_TOKEN": f"token-{MARK}-of-an-admin",
}
ADMIN = {"Authorization": f"Bearer {ENVIRON['ONCEKEY_TOKEN']}"}
PAGES = ("", "/login", "/events", "/events?q=state:dead", "/issues", "/issues/replay?q=target:app",
         "/rejected", "/targets", "/sources", "/keys", "/keys?source=shop&key=evt_1",
         "/keys?stuck=1", "/audit", "/nothing")  # fmt: skip


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    text = CONFIG.format(store=f"sqlite:///{tmp_path}/inbox.db")
    opened = await Gateway.open(settings_from(text, "gateway.toml", ENVIRON))
    yield opened
    await opened.stop(1)


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=make_app(gateway), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
        yield client


async def lived_in(gateway: Gateway, http: httpx.AsyncClient) -> list[str]:
    """Something of everything that can be listed; gives the ids of its events."""
    shop, lab = (gateway.settings.sources[name].provider for name in ("shop", "lab"))
    one = sample(shop, id="evt_1", type="invoice.paid", url=f"{HOST}/hooks/shop")
    for _ in range(2):
        assert (await deliver(http, one)).status_code == 200
    assert (await deliver(http, sample(lab, url=f"{HOST}/hooks/lab"))).status_code == 200
    forged = {**one.headers, "stripe-signature": f"t=1,v1={'0' * 64}"}
    await http.post("/hooks/shop", headers=forged, content=one.body)
    wrong = {"x-gitlab-token": f"wrong-{MARK}-token", "x-gitlab-event": "Push Hook"}
    await http.post("/hooks/lab", headers=wrong, content=b"{}")
    found = await gateway.inbox.fetch({"app": 9, "quiet": 9}, 60_000)
    results = [Result(one, Outcome.DEAD, 1, 500, "HTTP 500", "no") for one in found]
    await gateway.inbox.finish(results)
    key = Key(Scope("once", "orders"), "o-1")
    await gateway.store.claim(key, b"w" * 16, b"f" * 32, Terms(lease_ms=1, ttl_ms=60_000))
    asked = {"q": "target:app", "dry_run": False, "rate": 0.001}
    await http.post("/_oncekey/api/v1/bulk-replays", json=asked, headers=ADMIN)
    shown = await http.post("/_oncekey/api/v1/targets/quiet/secret", headers=ADMIN)
    assert shown.json()["secret"].startswith("whsec_")  # the one place; it leaves a trace only
    return [one.id for one in (await gateway.inbox.search(Filter())).items]


def signed_in(answer: httpx.Response) -> str:
    assert answer.status_code == 303
    return answer.cookies[COOKIE]


async def test_no_answer_has_a_secret(
    gateway: Gateway, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever can be read is searched for each of them, in every way that it may be written."""
    caplog.set_level(logging.DEBUG)
    ids = await lived_in(gateway, http)
    assert len(ids) == 2
    details = [page for one in ids for page in (f"/events/{one}", f"/events/{one}/body")]
    answers: dict[str, str] = {}

    async def look(path: str, **more: Any) -> None:
        answer = await http.get(path, **more)
        told = {name: value for name, value in answer.headers.items() if name != "set-cookie"}
        answers[f"{path} {sorted(more)}"] = answer.text + str(told)

    query = {"/keys": "?source=shop&key=evt_1"}
    paths = {one.path for one in ENDPOINTS if one.method == "GET"}
    for path, where in {(path, path.replace("{id}", one)) for path in paths for one in ids}:
        assert "{" not in where
        for headers in (ADMIN, {}, {"Authorization": f"Bearer wrong-{MARK}-token"}):
            await look(f"/_oncekey/api/v1{where}{query.get(path, '')}", headers=headers)
    for path in ("/metrics", "/healthz", "/readyz", "/_oncekey/api/openapi.json", "/hooks/shop",
                 "/_oncekey/static/oncekey.js", "/_oncekey/mcp"):  # fmt: skip
        await look(path, headers=ADMIN)
    await look("/hooks/shop", params={"hub.mode": "subscribe", "hub.verify_token": "guess"})
    failed = await http.post("/_oncekey/login", data={"name": "anna", "password": f"not-{MARK}"})
    answers["a failed login"] = failed.text
    for name, password in (("", ENVIRON["ONCEKEY_TOKEN"]), ("anna", f"password-{MARK}-of-anna")):
        http.cookies.clear()
        form = {"name": name, "password": password}
        session = signed_in(await http.post("/_oncekey/login", data=form))
        for path in (*PAGES, *details):
            await look(f"/_oncekey{path}")
            assert session not in answers[f"/_oncekey{path} []"]
    async with agent_of(gateway) as client:
        tools = (await client.list_tools()).tools
        answers["mcp tools"] = json.dumps([one.model_dump(mode="json") for one in tools])
        for tool, given in (
            ("search", {}),
            *(("event", {"id": one}) for one in ids),
            ("issues", {}),
            ("replay", {"q": "target:app"}),
            ("replay", {"id": "nothing"}),
        ):
            result = await client.call_tool(tool, given)
            answers[f"mcp {tool} {given}"] = str(result.model_dump(mode="json"))
    answers["the log"] = caplog.text
    assert all(answers.values())
    derived = [await gateway.deliveries.secret(gateway.settings.targets["quiet"])]
    secrets = {*ENVIRON.values(), *derived, HASH, HASH.rpartition("$")[2], MARK}
    secrets |= {one.removeprefix("whsec_") for one in secrets}
    for where, text in answers.items():
        plain = re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), text)
        assert [one for one in secrets if one in plain] == [], where


def agent_of(gateway: Gateway) -> Any:
    """An agent with the token of this config."""
    return agent(gateway, "operate", headers={"Authorization": f"Bearer {ENVIRON['AGENT']}"})
