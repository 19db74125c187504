"""The Idempotency-Key header in every framework, behind its real server, with a real client."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.adapters.keyed_sites import KINDS, Site, serve

from oncekey.http.fingerprint import fingerprint

COPIES = 16
_numbers = itertools.count()


@pytest.fixture(scope="module", params=KINDS)
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running shop of each kind."""
    kind: str = request.param
    for site in serve(kind, tmp_path_factory.mktemp(kind)):
        with connect(site) as client:
            yield kind, site, client


Shop = tuple[str, Site, httpx.Client]


def connect(site: Site) -> httpx.Client:
    # A connection for each request: some servers close theirs after a refusal. Without verify=False
    # every client reads all certificates, which takes longer than the test.
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(
        base_url=site.url,
        headers={"Authorization": "Bearer shop"},
        timeout=60,
        trust_env=False,
        verify=False,
        limits=limits,
    )


def fresh() -> str:
    return f"order-{os.getpid()}-{next(_numbers)}"


def pay(client: httpx.Client, key: str, order: str) -> httpx.Response:
    return client.post("/charges", json={"order": order}, headers={"Idempotency-Key": key})


def test_the_first_answer_is_replayed(shop: Shop) -> None:
    """One charge, and the retry gets the same answer without the first caller's cookie."""
    _, site, client = shop
    order = fresh()
    first, again = pay(client, order, order), pay(client, f'"{order}"', order)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["location"] == "/charges/1"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert "set-cookie" in first.headers
    assert "set-cookie" not in again.headers
    assert site.notes("effects").count(order) == 1


def test_concurrent_copies_make_one_charge(shop: Shop) -> None:
    """Sixteen copies from sixteen connections: one effect, every other is told 409 or replays."""
    _, site, client = shop
    order = fresh()

    def copy(_: int) -> httpx.Response:
        with connect(site) as own:
            return pay(own, order, order)

    with ThreadPoolExecutor(COPIES) as pool:
        replies = list(pool.map(copy, range(COPIES)))
    assert {reply.status_code for reply in replies} <= {201, 409}
    assert len({reply.text for reply in replies if reply.status_code == 201}) == 1
    assert all("retry-after" in r.headers for r in replies if r.status_code == 409)
    assert pay(client, order, order).status_code == 201
    assert site.notes("effects").count(order) == 1


def test_another_request_conflicts(shop: Shop) -> None:
    """The key of another body or of another route is a 422, and nothing runs."""
    _, site, client = shop
    order = fresh()
    pay(client, order, order)
    before = site.notes("effects")
    other = pay(client, order, order + "-other")
    route = client.post("/stream", headers={"Idempotency-Key": order})
    assert (other.status_code, route.status_code) == (422, 422)
    assert other.headers["content-type"] == "application/problem+json"
    assert other.json()["type"] == "urn:oncekey:problem:key-reused"
    assert site.notes("effects") == before


def test_bad_requests_do_not_reach_the_handler(shop: Shop) -> None:
    """Bad keys and bodies get a 4xx, never a 500; in FastAPI what it can't parse gets its own."""
    kind, site, client = shop
    before = site.notes("effects")
    json = {"Content-Type": "application/json"}
    deep = b"[" * 600 + b"]" * 600
    for key, body, status in (
        ("a b", b"{}", 400),
        ("k" * 300, b"{}", 400),
        (fresh(), b"{", 400),
        (fresh(), b'{"order":"a","order":"b"}', 400),
        (fresh(), b'{"order":"\xff"}', 400),
        (fresh(), deep, 400),
        (fresh(), b"x" * 1_048_577, 413),
    ):
        # A server that has not read a body to its end closes the connection.
        with connect(site) as own:
            reply = own.post("/charges", content=body, headers={**json, "Idempotency-Key": key})
        if kind == "fastapi" and reply.headers["content-type"] == "application/json":
            assert reply.status_code in (400, 422)
            assert "detail" in reply.json()
            continue
        assert reply.status_code == status, (key, body[:20], reply.text)
        assert reply.json()["type"].startswith("urn:oncekey:problem:")
    two = [("Idempotency-Key", "one"), ("Idempotency-Key", "two"), *json.items()]
    assert client.post("/charges", content=b"{}", headers=two).status_code == 400
    assert site.notes("effects") == before


def test_nobodys_key_is_refused(shop: Shop) -> None:
    """Without a login, or with another caller's key, nobody gets what was answered to a caller."""
    _, site, client = shop
    order = fresh()
    assert pay(client, order, order).status_code == 201
    with connect(site) as other:
        del other.headers["Authorization"]
        for extra in ({}, {"Cookie": "session=1"}, {"X-API-Key": "k"}):
            other.headers.update(extra)
            reply = pay(other, order, order)
            assert reply.status_code == 401
            assert reply.json()["type"] == "urn:oncekey:problem:caller-unknown"
            assert "scope=" in reply.json()["detail"]
        other.headers["Authorization"] = "Bearer other"
        reply = pay(other, order, order)
        assert (reply.status_code, "idempotent-replayed" in reply.headers) == (201, False)
    assert site.notes("effects").count(order) == 2


def test_unkeyed_requests_pass(shop: Shop) -> None:
    """Without a key each request runs."""
    _, site, client = shop
    order = fresh()
    for _ in range(2):
        assert client.post("/charges", json={"order": order}).status_code == 201
    assert site.notes("effects").count(order) == 2


def test_a_404_and_an_error_are_not_kept(shop: Shop) -> None:
    """A retry of the framework's own 404, and of a handler that raised, runs again."""
    _, site, client = shop
    key = fresh()
    count = site.notes("effects").count
    before = count("missing"), count("broken")
    replies = [client.post("/missing", headers={"Idempotency-Key": key}) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [404, 404]
    broken = [client.post("/broken", headers={"Idempotency-Key": key + "b"}) for _ in range(2)]
    assert [reply.status_code for reply in broken] == [500, 500]
    count = site.notes("effects").count
    assert count("broken") - before[1] == 2
    assert count("missing") - before[0] == 2


def test_a_form_with_a_fresh_boundary_is_a_retry(shop: Shop) -> None:
    """A multipart retry replays; another file conflicts."""
    _, site, client = shop
    key = {"Idempotency-Key": fresh()}
    before = site.notes("effects").count("upload")
    files = {"file": ("a.bin", b"\x00\r\n--bytes" * 100)}
    first = client.post("/upload", files=files, headers=key)
    again = client.post("/upload", files=files, headers=key)
    assert first.request.headers["content-type"] != again.request.headers["content-type"]
    assert (first.status_code, first.json()) == (201, {"size": 1000})
    assert (again.json(), again.headers["idempotent-replayed"]) == (first.json(), "true")
    other = client.post("/upload", files={"file": ("a.bin", b"other")}, headers=key)
    assert other.status_code == 422
    assert site.notes("effects").count("upload") - before == 1


def test_streamed_answers_are_replayed_or_known_as_done(shop: Shop) -> None:
    """An answer in parts runs once; where a framework hides its body, the retry is told so."""
    kind, site, client = shop
    key = {"Idempotency-Key": fresh()}
    before = site.notes("effects").count("stream")
    first, again = client.post("/stream", headers=key), client.post("/stream", headers=key)
    assert (first.status_code, first.text) == (200, "one,two,three")
    assert again.status_code == 200
    assert again.headers["idempotent-replayed"] == "true"
    if kind.startswith("aiohttp") or kind == "django-async":
        assert again.json()["type"] == "urn:oncekey:problem:body-unavailable"
    else:
        assert again.text == "one,two,three"
    assert site.notes("effects").count("stream") - before == 1


TARGETS = {
    "/paths/caf%C3%A9": b"/paths/caf%C3%A9",
    "/paths/th%c3%a9": b"/paths/th%C3%A9",
    "/paths/a%3Fb": b"/paths/a%3Fb",
    "/paths/a?b": b"/paths/a?b",
    "/paths/%7Euser/a%20b%25c?q=%C3%A9&r=%3F": b"/paths/~user/a%20b%25c?q=%C3%A9&r=%3F",
}


def test_every_way_in_sees_the_same_target(shop: Shop) -> None:
    """A path is told alike by every server and framework, so that a retry may reach another."""
    _, site, client = shop
    for sent in TARGETS:
        url = httpx.URL(site.url).copy_with(raw_path=sent.encode())
        assert client.post(url, headers={"Idempotency-Key": fresh()}).status_code == 204
    with contextlib.closing(sqlite3.connect(site.folder / "keys.db")) as database:
        found = {row[0] for row in database.execute("SELECT fingerprint FROM oncekey_records")}
    for sent, target in TARGETS.items():
        assert fingerprint("auto", "POST", target, "", "", b"") in found, sent


def test_a_broken_body_never_reaches_the_handler(shop: Shop) -> None:
    """A chunk that is none, and a body shorter than its length: a 400 at most, and no effect."""
    kind, site, _ = shop
    where = httpx.URL(site.url)
    before = site.notes("effects")
    for length, body in (
        ("Transfer-Encoding: chunked", b'14\r\n{"order": "broken-1"}\r\nzz\r\n\r\n'),
        ("Content-Length: 100", b'{"order": "broken-2"}'),
    ):
        if kind in ("django", "drf") and "chunked" in length:
            continue  # Django's own server knows no chunks
        head = (
            f"POST /charges HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: {fresh()}\r\n"
            "Authorization: Bearer shop\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\n{length}\r\n\r\n"
        )
        with socket.create_connection((where.host, where.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            connection.shutdown(socket.SHUT_WR)
            reply = connection.makefile("rb").read()
        assert not reply or reply.split()[1] == b"400", reply
        if kind.startswith("flask"):
            assert b"body-malformed" in reply
    assert site.notes("effects") == before
