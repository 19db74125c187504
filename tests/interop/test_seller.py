"""The reference seller over HTTP: one buy for each key, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.interop.serving import (
    JSON,
    PATIENCE,
    SELLER,
    call,
    load_seller,
    message,
    sellers,
    selling,
)

COPIES = 32
BRAND = {"domain": "acme.example"}


def buy(key: str | None = "key-0123456789abcdef", **fields: Any) -> dict[str, Any]:
    request = {
        "account": {"brand": BRAND, "operator": "agency.example"},
        "brand": BRAND,
        "start_time": "2099-06-01T00:00:00Z",
        "end_time": "2099-07-31T23:59:59Z",
        "packages": [{"product_id": "test-product", "budget": 5, "pricing_option_id": "cpm"}],
        **fields,
    }
    return request if key is None else {**request, "idempotency_key": key}


def rows(store_url: str) -> int:
    """How many media buys are in the seller's books."""
    count = "SELECT count(*) FROM media_buys"
    if store_url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(store_url.removeprefix("sqlite:///"))) as db:
            return int(db.execute(count).fetchone()[0])
    import psycopg

    with psycopg.connect(store_url) as connection:
        found = connection.execute(count).fetchone()
    assert found is not None
    return int(found[0])


async def burst(urls: list[str], request: dict[str, Any]) -> list[dict[str, Any]]:
    """Send ``COPIES`` of one request at the same time, to each URL in turn."""
    limits = httpx.Limits(max_connections=COPIES)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE, headers=JSON) as client:

        async def send(number: int) -> dict[str, Any]:
            url = urls[number % len(urls)]
            body = {**request, "context": {"number": number}}
            reply = await client.post(url, json=message("create_media_buy", body))
            structured: dict[str, Any] = reply.json()["result"]["structuredContent"]
            return structured

        return await asyncio.gather(*(send(number) for number in range(COPIES)))


def check_burst(answers: list[dict[str, Any]]) -> None:
    assert [answer["context"]["number"] for answer in answers] == list(range(COPIES))
    assert len({answer["media_buy_id"] for answer in answers}) == 1
    assert sum(answer.get("replayed", False) for answer in answers) == COPIES - 1


def test_32_parallel_copies_make_one_buy(store_url: str) -> None:
    """Every copy gets the one buy and its own context; all but one are replays."""
    with selling(store_url) as url:
        check_burst(asyncio.run(burst([url], buy())))
    assert rows(store_url) == 1


def test_parallel_copies_to_two_sellers_make_one_buy(store_url: str) -> None:
    """Two processes on one database keep a key between them."""
    with sellers(store_url, SELLER, SELLER) as (one, two):
        check_burst(asyncio.run(burst([one.url, two.url], buy())))
    assert rows(store_url) == 1


@pytest.mark.parametrize("where", ["written", "committed"])
def test_a_killed_seller_leaves_one_buy(
    store_url: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 after the row was written, or after its commit; a retry elsewhere makes it one."""
    inside = tmp_path / "inside"
    monkeypatch.setenv("STUCK_SELLER_INSIDE", str(inside))
    monkeypatch.setenv("STUCK_SELLER_WHERE", where)
    errors: list[Exception] = []

    def attempt(url: str) -> None:
        try:
            call(url, "create_media_buy", buy())
        except httpx.TransportError as error:
            errors.append(error)

    script = Path(__file__).with_name("stuck_seller.py")
    with sellers(store_url, script, SELLER) as (seller, other):
        first = threading.Thread(target=attempt, args=(seller.url,))
        first.start()
        deadline = time.monotonic() + PATIENCE
        while not inside.exists():
            assert time.monotonic() < deadline, "the handler never got there"
            time.sleep(0.01)
        seller.kill()
        first.join(PATIENCE)
        assert len(errors) == 1
        assert rows(store_url) == (1 if where == "committed" else 0)
        retry = call(other.url, "create_media_buy", buy())["structuredContent"]
        assert retry.get("replayed", False) is (where == "committed")
        again = call(other.url, "create_media_buy", buy())["structuredContent"]
        assert again["media_buy_id"] == retry["media_buy_id"]
        assert again["replayed"] is True
    assert rows(store_url) == 1


def test_the_wire_is_that_of_adcp(tmp_path: Path) -> None:
    """Capabilities, a missing key, a replay, a conflict and an error, without a session."""
    store_url = f"sqlite:///{tmp_path / 'seller.db'}"
    context = {"correlation_id": "c-1"}
    with selling(store_url) as url:
        can = call(url, "get_adcp_capabilities", {"context": context})["structuredContent"]
        assert can["adcp"]["idempotency"] == {
            "supported": True,
            "replay_ttl_seconds": 86_400,
            "in_flight_max_seconds": 3600,
        }
        assert can["context"] == context

        missing = call(url, "create_media_buy", buy(None, context=context))
        assert missing["isError"] is True
        assert missing["structuredContent"]["adcp_error"]["code"] == "INVALID_REQUEST"
        assert missing["structuredContent"]["adcp_error"]["field"] == "idempotency_key"
        assert missing["structuredContent"]["context"] == context

        malformed = call(url, "create_media_buy", buy(packages=[], context=context))
        assert malformed["structuredContent"]["adcp_error"]["field"] == "packages"

        unknown = buy(packages=[{"product_id": "?", "budget": 5, "pricing_option_id": "cpm"}])
        refused = call(url, "create_media_buy", unknown)
        assert refused["isError"] is True
        assert refused["structuredContent"]["adcp_error"]["code"] == "PRODUCT_NOT_FOUND"

        first = call(url, "create_media_buy", buy())  # the key of the refused one is free
        assert first["isError"] is False
        again = call(url, "create_media_buy", buy(context=context))["structuredContent"]
        assert again == {**first["structuredContent"], "replayed": True, "context": context}

        conflict = call(url, "create_media_buy", buy(name="other", context=context))
        assert conflict["isError"] is True
        structured = conflict["structuredContent"]
        assert structured["adcp_error"]["code"] == "IDEMPOTENCY_CONFLICT"
        assert set(structured["adcp_error"]) == {"code", "message"}
        assert structured["errors"][0]["recovery"] == "correctable"
        assert structured["context"] == context
        assert first["structuredContent"]["media_buy_id"] not in json.dumps(conflict)
        told = json.loads(conflict["content"][0]["text"])
        assert told["adcp_error"] == structured["errors"][0]

        [found] = call(url, "get_media_buys", {})["structuredContent"]["media_buys"]
        assert found["media_buy_id"] == first["structuredContent"]["media_buy_id"]
    assert rows(store_url) == 1


def test_buyers_are_told_apart_by_their_tokens(tmp_path: Path) -> None:
    """A key, and a buy, of one buyer means nothing to another; without a token nothing goes."""
    tokens = {"token-of-alice": "alice", "token-of-bob": "bob"}
    with selling(f"sqlite:///{tmp_path / 'seller.db'}", tokens) as url:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "token-of-bob"}):
            reply = httpx.post(url, json=message("get_products", {}), headers={**JSON, **headers})
            assert reply.status_code == 401
        made = [
            call(url, "create_media_buy", buy(), authorization=f"Bearer token-of-{who}")
            for who in ("alice", "bob")
        ]
        assert all("replayed" not in answer["structuredContent"] for answer in made)
        mine = call(url, "get_media_buys", {}, authorization="Bearer token-of-bob")
        [found] = mine["structuredContent"]["media_buys"]
        assert found["media_buy_id"] == made[1]["structuredContent"]["media_buy_id"]


@pytest.mark.parametrize(
    "options, told",
    [
        (["--store", "redis://localhost"], "sqlite:///file.db or postgresql://"),
        (["--host", "0.0.0.0"], "--tokens"),
    ],
)
def test_options_that_cant_work_are_refused(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store without transactions, and an open host without tokens, are refused at the start."""
    with pytest.raises(SystemExit):
        load_seller().arguments(options)
    assert told in capsys.readouterr().err
