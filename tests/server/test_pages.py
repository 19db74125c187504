"""The pages: what a sender wrote is text, nothing comes from elsewhere, every state is drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.server.kit import CONFIG, ENVIRON, HOST, csrf_of, deliver, sign_in

import oncekey.server
from oncekey.errors import StoreUnavailableError
from oncekey.inbox import Outcome, Result, open_inbox
from oncekey.server.app import make_app
from oncekey.server.config import settings_from
from oncekey.server.gateway import Gateway
from oncekey.testing import SignedDelivery
from oncekey.testing import signed as sign_body

Signed = Callable[..., SignedDelivery]
ROOM = Path(oncekey.server.__file__).parent
ATTACK = "<script>alert(1)</script>'\"><img src=x onerror=alert(1)>"
PAGES = ("", "/events", "/issues", "/rejected", "/targets", "/sources", "/keys", "/audit")


@pytest.mark.parametrize("page", PAGES)
async def test_every_page_has_its_empty_state(http: httpx.AsyncClient, page: str) -> None:
    """A gateway with nothing in it has whole pages, with headers that forbid inline script."""
    await sign_in(http, "anna")
    answer = await http.get(f"/_oncekey{page}")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.count("<h1>") == 1
    assert 'aria-current="page"' in answer.text


@pytest.mark.parametrize("file", sorted(ROOM.glob("templates/*.html")), ids=lambda one: one.name)
def test_templates_have_nothing_inline(file: Path) -> None:
    """No script, style or handler in a template, and no address of another site."""
    text = file.read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"\sstyle=|\son[a-z]+=|<style", text)
    assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", text)
    assert "|safe" not in text


async def test_what_a_sender_wrote_is_text(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """A type, a key, a body and a header with script in them are shown, and run nowhere."""
    provider = gateway.settings.sources["shop"].provider
    body = {"id": ATTACK, "type": ATTACK, "note": ATTACK}
    url = f"{HOST}/hooks/shop"
    kept = await deliver(http, sign_body(provider, body, url=url, headers={"User-Agent": ATTACK}))
    event = kept.headers["oncekey-event"]
    gateway.inbox.reject("shop", ATTACK, ATTACK)
    await sign_in(http, "anna")
    await gateway.inbox.record(ATTACK, ATTACK, ATTACK, actor=ATTACK)
    for page in ("", "/events", f"/events/{event}", "/rejected", "/audit", "/keys"):
        answer = await http.get(
            f"/_oncekey{page}",
            params={"q": ATTACK, "source": "shop", "key": ATTACK} if page == "/keys" else None,
        )
        assert answer.status_code == 200, page
        assert "<script>alert" not in answer.text
        assert "<img src=x" not in answer.text
    searched = await http.get("/_oncekey/events", params={"q": ATTACK})
    assert "<script>alert" not in searched.text
    raw = await http.get(f"/_oncekey/events/{event}/body")
    assert raw.headers["content-type"] == "application/octet-stream"
    assert raw.headers["content-disposition"].startswith("attachment")


async def test_five_copies_become_one_event(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """The button sends five signed copies; the event's lifeline has four that were stopped."""
    await sign_in(http, "olga")
    for source in ("shop", "code", "talk"):
        form = {"csrf": await csrf_of(http), "source": source}
        answer = await http.post("/_oncekey/send-copies", data=form)
        assert answer.status_code == 303
        page = (await http.get(answer.headers["location"])).text
        assert page.count(" stopped</strong>") == 4, source
        assert "Received and verified" in page


async def test_a_401_of_an_app_says_where_its_secret_is(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """On the event's page and among issues, once with its status; the app's answer is shown."""
    event = (await deliver(http, signed("shop"))).headers["oncekey-event"]
    (one,) = await gateway.inbox.fetch({"app": 1}, 60_000)
    said = Result(one, Outcome.RETRY, 5, 401, "HTTP 401", "no matching signature", 60)
    await gateway.inbox.finish([said])
    await sign_in(http, "olga")
    for page in (f"/events/{event}", "/issues"):
        text = (await http.get(f"/_oncekey{page}")).text
        assert "POST /_oncekey/api/v1/targets/app/secret" in text, page
        assert "401 HTTP 401" not in text
        assert "status 401" not in text
    assert "no matching signature" in (await http.get(f"/_oncekey/events/{event}")).text


async def test_an_unreachable_inbox_has_a_page(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, said in words, with the time and a way to try again."""
    await sign_in(http, "anna")

    async def gone(*args: object, **options: object) -> None:
        raise StoreUnavailableError("the server is gone: secret details")

    monkeypatch.setattr(gateway.inbox, "search", gone)
    answer = await http.get("/_oncekey/events")
    assert answer.status_code == 503
    assert "can&#39;t be reached" in answer.text
    assert "Try again" in answer.text
    assert "secret details" not in answer.text


async def test_an_error_leads_back(http: httpx.AsyncClient) -> None:
    """Who is signed in keeps the pages around it; the way back has the whole address."""
    await sign_in(http, "anna")
    answer = await http.get("/_oncekey/events/nothing?copy=2")
    assert answer.status_code == 404
    assert 'aria-label="Pages"' in answer.text
    assert 'href="/_oncekey/events/nothing?copy=2">Try again' in answer.text


async def test_an_event_can_be_taken_elsewhere(http: httpx.AsyncClient, signed: Signed) -> None:
    """As curl, as a command of ours, and as a fixture, each with this gateway's address or body."""
    event = (await deliver(http, signed("shop"))).headers["oncekey-event"]
    await sign_in(http, "rita")
    text = (await http.get(f"/_oncekey/events/{event}")).text
    assert f"{HOST}/_oncekey/api/v1/events/{event}/replay" in text
    assert f"oncekey replay {event} --gateway {HOST}<" in text
    assert f"oncekey event {event} --gateway {HOST}<" in text
    assert "def invoice_paid_event() -&gt; bytes:" in text


async def test_an_empty_list_has_the_line_to_run(http: httpx.AsyncClient) -> None:
    """With this gateway's own address, and the variable that has the secret."""
    await sign_in(http, "anna")
    for page in ("", "/events"):
        text = (await http.get(f"/_oncekey{page}")).text
        assert f"oncekey send {HOST}/hooks/shop stripe --secret-env SHOP_SECRET" in text


async def test_a_wrong_search_says_what_can_be_written(http: httpx.AsyncClient) -> None:
    """The page stays, with what was typed and what is wrong with it."""
    await sign_in(http, "anna")
    answer = await http.get("/_oncekey/events", params={"q": "colour:red"})
    assert answer.status_code == 422
    assert 'value="colour:red"' in answer.text
    assert "source:, type:" in answer.text


async def test_chosen_events_are_replayed(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """The rows that were chosen are queued again, and nothing else."""
    ids = [
        (await deliver(http, signed("shop", id=f"evt_{n}"))).headers["oncekey-event"]
        for n in range(3)
    ]
    await sign_in(http, "olga")
    form = {"csrf": await csrf_of(http), "id": ids[:2], "q": "source:shop"}
    answer = await http.post("/_oncekey/events/replay", data=form)
    assert answer.headers["location"] == "/_oncekey/events?q=source%3Ashop&done=replayed&n=2"
    done = [one.subject for one in (await gateway.inbox.audit()).items if one.action == "replay"]
    assert sorted(done) == sorted(ids[:2])


async def test_a_bulk_replay_is_counted_then_begun(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    """What begins is what was counted: another count leads to another look."""
    await sign_in(http, "olga")
    page = await http.get("/_oncekey/issues/replay", params={"q": "target:app"})
    assert "Replay 0 dead deliveries?" in page.text
    form = {"csrf": await csrf_of(http), "q": "target:app", "rate": "20.0", "count": "7"}
    stale = await http.post("/_oncekey/issues/replay", data=form)
    assert stale.headers["location"].startswith("/_oncekey/issues/replay?q=target%3Aapp")
    assert await gateway.inbox.bulk_replays() == []
    begun = await http.post("/_oncekey/issues/replay", data={**form, "count": "0"})
    assert begun.headers["location"] == "/_oncekey/issues?done=bulk"
    (bulk,) = await gateway.inbox.bulk_replays()
    assert (bulk.query, bulk.actor) == ("target:app", "olga")


async def test_an_event_that_is_not_there(http: httpx.AsyncClient) -> None:
    """404 in words, for a made-up id and for a word."""
    await sign_in(http, "anna")
    for event in ("msg_0000000000000001", "nothing"):
        assert (await http.get(f"/_oncekey/events/{event}")).status_code == 404


async def test_static_files_are_three(http: httpx.AsyncClient) -> None:
    """The script, the style and the icon are served to anybody; no other file is."""
    for name in ("oncekey.js", "oncekey.css", "icon.svg"):
        assert (await http.get(f"/_oncekey/static/{name}")).status_code == 200
    for name in ("nothing.js", "..%2Fconfig.py", "__init__.py"):
        assert (await http.get(f"/_oncekey/static/{name}")).status_code == 404


async def test_a_nul_is_no_outage(pg_url: str) -> None:
    """What PostgreSQL takes in no text is left out of searches, keys and names of people."""
    async with await open_inbox(pg_url, create=True):
        pass
    text = CONFIG.format(store=pg_url)
    gateway = await Gateway.open(settings_from(text, "gateway.toml", ENVIRON))
    transport = httpx.ASGITransport(app=make_app(gateway))
    try:
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as http:
            assert (await sign_in(http, "an\0na")).status_code == 303
            for path in ("events?q=a%00b", "events?q=type:%00", "keys?source=shop&key=%00a"):
                assert (await http.get(f"/_oncekey/{path}")).status_code == 200
    finally:
        await gateway.stop(1)
