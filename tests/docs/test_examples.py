"""Every example runs, and does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import importlib.util
import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from oncekey import PostgresStore

EXAMPLES = Path(__file__).parents[2] / "examples"
SECRET = "s3cret"
COPIES = 8


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their own types up
    spec.loader.exec_module(module)
    return module


def signed(event: object) -> tuple[bytes, dict[str, str]]:
    body = json.dumps(event).encode()
    signature = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    return body, {"X-Signature": signature, "Content-Type": "application/json"}


def payments(database: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(database)) as db:
        return db.execute("SELECT event, cents FROM payments").fetchall()


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "webhooks.db")


# Flask


def test_flask_gives_concurrent_copies_one_effect(database: str) -> None:
    """Copies at the same time, retried until they get a 200, make one payment."""
    app = load("flask_webhook").create_app(database, SECRET)
    body, headers = signed({"id": "evt_1", "cents": 500})
    start = threading.Barrier(COPIES)
    texts: list[str] = []

    def deliver() -> None:
        client = app.test_client()
        start.wait()
        for _ in range(1000):
            response = client.post("/webhook", data=body, headers=headers)
            if response.status_code == 200:
                texts.append(response.text)
                return
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1

    threads = [threading.Thread(target=deliver) for _ in range(COPIES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == ["duplicate"] * (COPIES - 1) + ["paid"]
    assert payments(database) == [("evt_1", 500)]


def test_flask_answers_what_it_should(database: str) -> None:
    """Bad signatures, bad bodies and changed payloads are refused, and nothing is paid for them."""
    client = load("flask_webhook").create_app(database, SECRET).test_client()

    def post(event: object, **changes: str) -> int:
        body, headers = signed(event)
        return client.post("/webhook", data=body, headers={**headers, **changes}).status_code

    assert post({"id": "evt_1", "cents": 5}, **{"X-Signature": "0" * 64}) == 401
    assert post({"id": "evt_1", "cents": 5}, **{"X-Signature": "\u00e9"}) == 401
    assert post({"cents": 5}) == 400
    assert post(["id"]) == 400
    assert post({"id": "evt_1", "cents": 5}) == 200
    assert post({"id": "evt_1", "cents": 6}) == 409
    assert payments(database) == [("evt_1", 5)]


def test_flask_frees_an_event_whose_handler_failed(database: str) -> None:
    """A failed payment is rolled back and answered 500, and the next delivery of it is handled."""
    client = load("flask_webhook").create_app(database, SECRET).test_client()
    body, headers = signed({"id": "evt_1", "cents": 5})
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("ALTER TABLE payments RENAME TO away")
    assert client.post("/webhook", data=body, headers=headers).status_code == 500
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("ALTER TABLE away RENAME TO payments")
    assert client.post("/webhook", data=body, headers=headers).text == "paid"
    assert payments(database) == [("evt_1", 5)]


# Flask on PostgreSQL


@pytest.fixture
def shop(postgres: Any) -> str:
    """A database with oncekey's tables and the example's."""
    import psycopg

    url: str = postgres.database()
    with PostgresStore(url) as store:
        store.create_schema()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE payments (event text, cents int)")
    return url


def paid(url: str) -> list[Any]:
    import psycopg

    with psycopg.connect(url) as connection:
        return connection.execute("SELECT event, cents FROM payments").fetchall()


def test_postgres_receiver_gives_concurrent_copies_one_effect(shop: str) -> None:
    """Copies at the same time, retried until they get a 200, make one payment."""
    app = load("exactly_once_flask_postgres").create_app(shop, SECRET)
    body, headers = signed({"id": "evt_1", "cents": 500})
    start = threading.Barrier(COPIES)
    texts: list[str] = []

    def deliver() -> None:
        client = app.test_client()
        start.wait()
        for _ in range(100):
            response = client.post("/webhook", data=body, headers=headers)
            if response.status_code == 200:
                texts.append(response.text)
                return
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1

    threads = [threading.Thread(target=deliver) for _ in range(COPIES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    app.extensions["oncekey"].close()
    assert sorted(texts) == ["duplicate"] * (COPIES - 1) + ["paid"]
    assert paid(shop) == [("evt_1", 500)]


def test_postgres_receiver_answers_what_it_should(shop: str) -> None:
    """Refused deliveries pay nothing, a failed one is rolled back, and the next copy is handled."""
    app = load("exactly_once_flask_postgres").create_app(shop, SECRET)
    client = app.test_client()

    def post(event: object, **changes: str) -> int:
        body, headers = signed(event)
        return client.post("/webhook", data=body, headers={**headers, **changes}).status_code

    assert post({"id": "evt_1", "cents": 5}, **{"X-Signature": "0" * 64}) == 401
    assert post({"cents": 5}) == 400
    assert post({"id": "evt_1", "cents": "nothing"}) == 500
    assert post({"id": "evt_1", "cents": 5}) == 200
    assert post({"id": "evt_1", "cents": 6}) == 409
    app.extensions["oncekey"].close()
    assert post({"id": "evt_2", "cents": 5}) == 503
    assert paid(shop) == [("evt_1", 5)]


# FastAPI


async def test_fastapi_gives_concurrent_copies_one_effect(database: str) -> None:
    """While the handler runs, copies are told to retry; afterwards they are duplicates."""
    handled: list[str] = []
    running, finish = asyncio.Event(), asyncio.Event()

    async def handle(event: dict[str, Any]) -> None:
        handled.append(event["id"])
        running.set()
        if len(handled) == 1:
            await finish.wait()

    app = load("fastapi_webhook").create_app(database, SECRET, handle)
    body, headers = signed({"id": "evt_1"})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def post() -> httpx.Response:
            return await client.post("/webhook", content=body, headers=headers)

        first = asyncio.create_task(post())
        await running.wait()
        copies = await asyncio.gather(*(post() for _ in range(COPIES)))
        assert [copy.status_code for copy in copies] == [503] * COPIES
        assert all(int(copy.headers["Retry-After"]) >= 1 for copy in copies)
        finish.set()
        assert (await first).text == "handled"
        copies = await asyncio.gather(*(post() for _ in range(COPIES)))
        assert [copy.text for copy in copies] == ["duplicate"] * COPIES
    assert handled == ["evt_1"]


async def test_fastapi_frees_an_event_whose_handler_failed(database: str) -> None:
    """A failure is answered 500, and the next delivery runs the handler again."""
    calls: list[str] = []

    async def handle(event: dict[str, Any]) -> None:
        calls.append(event["id"])
        if len(calls) == 1:
            raise RuntimeError("not now")

    app = load("fastapi_webhook").create_app(database, SECRET, handle)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def post(event: object, **changes: str) -> int:
            body, headers = signed(event)
            response = await client.post("/webhook", content=body, headers={**headers, **changes})
            return response.status_code

        assert await post({"id": "evt_1"}, **{"X-Signature": "0" * 64}) == 401
        assert await post({"no": "id"}) == 400
        assert calls == []
        assert await post({"id": "evt_1"}) == 500
        assert await post({"id": "evt_1"}) == 200
        assert await post({"id": "evt_1"}) == 200
        assert await post({"id": "evt_1", "changed": True}) == 409
    assert calls == ["evt_1", "evt_1"]


# Scripts


def run(name: str, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "example.db"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_once_function_charges_once_over_two_runs(tmp_path: Path) -> None:
    """The second process replays what the first one recorded."""
    first, second = run("once_function", tmp_path), run("once_function", tmp_path)
    assert first.count("charging o-1") == 1
    assert first.count("charging o-2") == 1
    assert "charging" not in second
    receipts = [line for line in first.splitlines() if line.startswith("Receipt")]
    assert receipts == [line for line in second.splitlines() if line.startswith("Receipt")]
    assert len(receipts) == 3


async def test_adcp_handler_books_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The retry gets the first answer, marked; another package under the key is refused."""
    seller = await load("adcp_handler").main(str(tmp_path / "seller.db"))
    shown = capsys.readouterr().out
    assert seller.bookings == ["summer"]
    assert shown.count("'replayed': True") == 1
    assert "IDEMPOTENCY_CONFLICT" in shown
