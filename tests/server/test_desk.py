"""What people do on pages beside replaying: compare copies, save searches, free stuck claims."""

from __future__ import annotations

import re

import httpx
from tests.server.kit import HOST, csrf_of, deliver, sign_in

from oncekey.models import Key, Scope, State, Terms
from oncekey.operate import astuck
from oncekey.server.gateway import Gateway
from oncekey.server.pages.bodies import MOST_LINES, compared
from oncekey.testing import sample
from oncekey.testing import signed as sign_body


def marked(first: bytes, other: bytes) -> list[str]:
    """The lines of a comparison that are in one only."""
    return [line.mark + line.text for line in compared(first, other) or [] if line.mark in "+-"]


def test_json_is_compared_by_its_lines() -> None:
    """However it was written: only what differs is marked."""
    assert marked(b'{"id":"e","cents":1}', b'{"id": "e", "cents": 2}') == [
        '-  "cents": 1',
        '+  "cents": 2',
    ]
    assert compared(b'{"a":1}', b'{"a": 1}') == []
    assert marked(b"one\ntwo", b"one\nthree") == ["-two", "+three"]
    assert marked(b"\xff\x00", b"\xff\x01") == ["-ff 00", "+ff 01"]


def test_long_bodies_are_not_compared() -> None:
    """Comparing would take too long: it is said instead."""
    assert compared(b"a\n" * (MOST_LINES + 1), b"b") is None


async def test_copies_that_differ_are_compared(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """The first that differs, or the one that is asked for; what they say is text."""
    provider = gateway.settings.sources["shop"].provider
    for note in ("one", "one", "<b>two</b>", "three"):
        body = {"id": "evt_1", "type": "x", "note": note}
        kept = await deliver(http, sign_body(provider, body, url=f"{HOST}/hooks/shop"))
    page = f"/_oncekey/events/{kept.headers['oncekey-event']}"
    await sign_in(http, "rita")
    text = (await http.get(page)).text
    assert "Copy 3 has another body" in text
    assert re.search(r"<del>.*&#34;one&#34;</del>", text)
    assert "&lt;b&gt;two&lt;/b&gt;" in text
    assert "<b>two" not in text
    asked = (await http.get(page, params={"copy": "4"})).text
    assert re.search(r"<ins>.*&#34;three&#34;</ins>", asked)
    for wrong in ("2", "99", "x", "-1"):  # the same as the first, or none at all
        assert "Copy 3 has another body" in (await http.get(page, params={"copy": wrong})).text


async def test_views_are_saved_for_a_person(http: httpx.AsyncClient) -> None:
    """A search gets a name, another search under it takes its place, and it can be forgotten."""
    await sign_in(http, "rita")
    csrf = await csrf_of(http)
    for query in ("state:dead", "source:shop state:dead"):
        form = {"csrf": csrf, "name": "my <dead>", "q": query}
        answer = await http.post("/_oncekey/events/views", data=form)
        assert answer.headers["location"].endswith("&done=saved")
    page = (await http.get("/_oncekey/events")).text
    assert page.count("my &lt;dead&gt;</a>") == 1
    assert 'href="/_oncekey/events?q=source%3Ashop%20state%3Adead"' in page
    await sign_in(http, "olga")
    assert "my &lt;dead&gt;" not in (await http.get("/_oncekey/events")).text
    await sign_in(http, "rita")
    form = {"csrf": await csrf_of(http), "name": "my <dead>"}
    assert (await http.post("/_oncekey/events/views/forget", data=form)).status_code == 303
    assert "my &lt;dead&gt;" not in (await http.get("/_oncekey/events")).text


async def test_what_is_no_view_is_refused(http: httpx.AsyncClient) -> None:
    """A search that can't be read, no search, no name, a long one, and one too many."""
    await sign_in(http, "rita")
    csrf = await csrf_of(http)

    async def save(name: str, query: str) -> int:
        form = {"csrf": csrf, "name": name, "q": query}
        return (await http.post("/_oncekey/events/views", data=form)).status_code

    for name, query in (("a", "colour:red"), ("a", ""), (" ", "x"), ("a" * 41, "x"), ("a\n", "")):
        assert await save(name, query) == 422
    for number in range(20):
        assert await save(f"v{number}", "x") == 303
    assert await save("one more", "x") == 422
    form = {"csrf": "wrong", "name": "a", "q": "x"}
    assert (await http.post("/_oncekey/events/views", data=form)).status_code == 403


async def test_what_a_message_is_bound_to_is_not_stuck(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    """A provider that does not sign its ids: the gateway's claims for it are never finished."""
    provider = gateway.settings.sources["code"].provider
    assert not provider.id_is_signed
    await deliver(http, sample(provider, url=f"{HOST}/hooks/code"))
    assert [one.record.state for one in (await gateway.store.browse("", 9)).entries].count(
        State.PENDING
    )
    assert (await astuck(gateway.store, longer_than=0)).found == []


async def test_stuck_claims_are_found_and_freed(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """A claim whose lease is over is listed; an admin frees it, which is audited."""
    key = Key(Scope("once", "orders"), "o-1")
    terms = Terms(lease_ms=1, ttl_ms=60_000)
    await gateway.store.claim(key, b"w" * 16, b"f" * 32, terms)
    await sign_in(http, "rita")
    assert "Look for them" in (await http.get("/_oncekey/keys")).text
    page = (await http.get("/_oncekey/keys?stuck=1")).text
    assert key.digest.hex()[:12] in page
    assert "once:orders" in page
    assert "Free</button>" not in page
    form = {"csrf": await csrf_of(http), "digest": key.digest.hex()}
    assert (await http.post("/_oncekey/keys/free", data=form)).status_code == 403
    await sign_in(http, "anna")
    form["csrf"] = await csrf_of(http)
    answer = await http.post("/_oncekey/keys/free", data=form)
    assert answer.headers["location"].endswith("&done=freed")
    again = await http.post("/_oncekey/keys/free", data=form)
    assert again.headers["location"].endswith("&done=left")
    assert (await http.post("/_oncekey/keys/free", data={**form, "digest": "x"})).status_code == 422
    assert "No claim is stuck" in (await http.get("/_oncekey/keys?stuck=1")).text
    assert "free claim" in [one.action for one in (await gateway.inbox.audit()).items]
