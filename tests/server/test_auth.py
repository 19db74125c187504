"""Who may look and act: passwords, sessions, roles; and what other sites can't have done."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
from argon2 import PasswordHasher
from tests.server.kit import CONFIG, ENVIRON, HASH, PASSWORD, TOKENS, csrf_of, deliver, sign_in

from oncekey.errors import PolicyError
from oncekey.server.auth import COOKIE, Doorman, TooManyLoginsError, hash_password
from oncekey.server.config import settings_from
from oncekey.server.gateway import Gateway
from oncekey.testing import SignedDelivery

Signed = Callable[..., SignedDelivery]
PAGES = ("", "/events", "/issues", "/rejected", "/targets", "/sources", "/keys", "/audit")


@pytest.mark.parametrize("page", PAGES)
async def test_every_page_wants_a_login(http: httpx.AsyncClient, page: str) -> None:
    """Without a session a page leads to the login, and back to itself from there."""
    answer = await http.get(f"/_oncekey{page}")
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/_oncekey/login?next=%2F_oncekey")


async def test_a_password_opens_a_session(http: httpx.AsyncClient) -> None:
    """The cookie is HttpOnly and SameSite, is no part of the config, and ends with the logout."""
    answer = await sign_in(http, "anna")
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert "path=/_oncekey" in cookie
    assert (await http.get("/_oncekey/events")).status_code == 200
    kept = http.cookies[COOKIE]
    await http.post("/_oncekey/logout", data={"csrf": await csrf_of(http)})
    http.cookies.set(COOKIE, kept)
    assert (await http.get("/_oncekey/events")).status_code == 303


async def test_a_token_opens_a_session_too(http: httpx.AsyncClient) -> None:
    """An empty name and a token sign in with the token's role."""
    assert (await sign_in(http, "", TOKENS["read"])).status_code == 303
    assert "reader · read" in (await http.get("/_oncekey/events")).text


@pytest.mark.parametrize(
    "name, password",
    [
        ("anna", "wrong password"),
        ("nobody", "x" * 12),
        ("", "no-such-token-here"),
        ("anna", ""),
        ("anna", "x" * 3000),
    ],
)
async def test_a_wrong_login_tells_nothing(
    http: httpx.AsyncClient, name: str, password: str
) -> None:
    """A wrong name and a wrong password read alike, and set no cookie."""
    answer = await sign_in(http, name, password)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert "don&#39;t fit" in answer.text


async def test_logins_are_limited(http: httpx.AsyncClient) -> None:
    """After ten failures in a minute the right password is not tried either, for a while."""
    for _ in range(10):
        assert (await sign_in(http, "anna", "wrong password")).status_code == 403
    answer = await sign_in(http, "anna")
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0


async def test_nobody_keeps_tokens_out(gateway: Gateway) -> None:
    """Wrong tokens from many places are held against those places, not against all tokens."""
    doorman = gateway.doorman
    for number in range(12):
        assert await doorman.sign_in("", "no-such-token-here", f"198.51.100.{number}") is None
    assert await doorman.sign_in("", TOKENS["read"], "203.0.113.1") is not None


async def test_strangers_keep_nobody_out(gateway: Gateway) -> None:
    """Wrong passwords from many places are bounded for a name, but not where it signed in before.

    There it has the limit of its address alone; of a name that is not there nobody learns more.
    """
    doorman = gateway.doorman
    home, elsewhere = "203.0.113.1", "203.0.113.2"
    assert await doorman.sign_in("anna", PASSWORD, home) is not None
    for name in ("anna", "nobody"):
        for number in range(50):
            where = f"198.51.{number // 9}.{len(name)}"
            assert await doorman.sign_in(name, "wrong password", where) is None
        with pytest.raises(TooManyLoginsError):
            await doorman.sign_in(name, PASSWORD, elsewhere)
    assert await doorman.sign_in("anna", PASSWORD, home) is not None
    for _ in range(10):
        assert await doorman.sign_in("anna", "wrong password", home) is None
    with pytest.raises(TooManyLoginsError):
        await doorman.sign_in("anna", PASSWORD, home)


async def test_a_network_is_one_sender(gateway: Gateway) -> None:
    """Whoever has an IPv6 network has all of its addresses: they count as one."""
    doorman = gateway.doorman
    for number in range(10):
        assert await doorman.sign_in(f"name{number}", "", f"2001:db8:1:2::{number:x}") is None
    with pytest.raises(TooManyLoginsError):
        await doorman.sign_in("another", "", "2001:db8:1:2:ffff::1")
    assert await doorman.sign_in("another", "", "2001:db8:1:3::1") is None
    for number in range(10):
        assert await doorman.sign_in(f"name{number}", "", f"::ffff:198.51.100.{number}") is None


async def test_a_sign_out_is_audited(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """The audit has when somebody came and when they left."""
    await sign_in(http, "rita")
    await http.post("/_oncekey/logout", data={"csrf": await csrf_of(http)})
    found = [(one.actor, one.action) for one in (await gateway.inbox.audit()).items]
    assert found == [("rita", "sign out"), ("rita", "sign in")]


async def test_a_replay_goes_to_no_stranger(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """A form with a name that is no target is refused: nobody would ever deliver to it."""
    event = (await deliver(http, signed("shop"))).headers["oncekey-event"]
    await sign_in(http, "olga")
    form = {"csrf": await csrf_of(http), "target": "nobody"}
    assert (await http.post(f"/_oncekey/events/{event}/replay", data=form)).status_code == 422
    found = await gateway.inbox.event(event)
    assert found is not None
    assert [one.target for one in found.deliveries] == ["app"]


async def test_another_site_cant_open_streams(http: httpx.AsyncClient) -> None:
    """A page of a sister site has the cookie with it, and would take the places of its owner."""
    await sign_in(http, "rita")
    answer = await http.get("/_oncekey/live", headers={"Sec-Fetch-Site": "same-site"})
    assert answer.status_code == 403


async def test_another_site_cant_sign_anybody_in(http: httpx.AsyncClient) -> None:
    """A login form on another site is refused: its victim would work in a stranger's session."""
    for header in ({"Origin": "https://evil.test"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = await http.post(
            "/_oncekey/login", data={"name": "anna", "password": "x"}, headers=header
        )
        assert answer.status_code == 403
        assert "another site" in answer.text


@pytest.mark.parametrize(
    "wanted",
    [
        "https://evil.test/",
        "//evil.test",
        "/_oncekey//evil.test",
        "/\\evil.test",
        "/elsewhere",
        "/_oncekey\r\nx: y",
    ],
)
async def test_a_login_leads_nowhere_else(http: httpx.AsyncClient, wanted: str) -> None:
    """``next`` is a page of this dashboard or is not used."""
    form = {"name": "", "password": TOKENS["read"], "next": wanted}
    answer = await http.post("/_oncekey/login", data=form)
    assert answer.headers["location"] == "/_oncekey"


async def test_roles_hold_on_pages(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """A reader sees no buttons and can't post; an operator can replay but not evict."""
    event = (await deliver(http, signed("shop", id="evt_1"))).headers["oncekey-event"]
    await sign_in(http, "rita")
    assert "Replay" not in (await http.get(f"/_oncekey/events/{event}")).text.split("<dialog")[0]
    form = {"csrf": await csrf_of(http)}
    assert (await http.post(f"/_oncekey/events/{event}/replay", data=form)).status_code == 403
    await sign_in(http, "olga")
    form = {"csrf": await csrf_of(http)}
    assert (await http.post(f"/_oncekey/events/{event}/replay", data=form)).status_code == 303
    evict = {**form, "source": "shop", "key": "evt_1"}
    assert (await http.post("/_oncekey/keys/evict", data=evict)).status_code == 403
    await sign_in(http, "anna")
    evict["csrf"] = await csrf_of(http)
    assert (await http.post("/_oncekey/keys/evict", data=evict)).status_code == 303
    done = [(one.actor, one.action) for one in (await gateway.inbox.audit()).items]
    assert ("olga", "replay") in done
    assert ("anna", "evict") in done
    assert ("rita", "sign in") in done


async def test_a_form_needs_its_sessions_own_token(
    gateway: Gateway, http: httpx.AsyncClient, signed: Signed
) -> None:
    """No token, another session's token, or another origin: nothing is done."""
    event = (await deliver(http, signed("shop"))).headers["oncekey-event"]
    await sign_in(http, "olga")
    others = await csrf_of(http)
    await sign_in(http, "olga")
    own = await csrf_of(http)
    path = f"/_oncekey/events/{event}/replay"
    for form, headers in (
        ({}, {}),
        ({"csrf": ""}, {}),
        ({"csrf": others}, {}),
        ({"csrf": own}, {"Origin": "https://evil.test"}),
        ({"csrf": own}, {"Sec-Fetch-Site": "same-site"}),
        ({"csrf": own}, {"Origin": "null"}),
    ):
        assert (await http.post(path, data=form, headers=headers)).status_code == 403
    assert [one.action for one in (await gateway.inbox.audit()).items] == ["sign in"] * 2
    assert (await http.post(path, data={"csrf": own})).status_code == 303


async def test_a_user_who_is_gone_has_no_session(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """After a reload without them, their session ends; a changed role holds at once."""
    await sign_in(http, "anna")
    text = CONFIG.format(store="sqlite:///unused.db")
    fewer = settings_from(text.replace("users.anna", "users.zoe"), "gateway.toml", ENVIRON)
    gateway.doorman.use(fewer)
    assert (await http.get("/_oncekey/events")).status_code == 303


async def test_nobody_configured_is_said(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """With neither users nor tokens the login page says what to set, and has no form."""
    bare = CONFIG.format(store="sqlite:///unused.db").partition("[users.rita]")[0]
    gateway.doorman.use(settings_from(bare, "gateway.toml", {**ENVIRON, "ONCEKEY_TOKEN": ""}))
    page = (await http.get("/_oncekey/login")).text
    assert "ONCEKEY_TOKEN" in page
    assert "<form" not in page


async def test_sessions_are_kept_as_hashes(gateway: Gateway) -> None:
    """Who reads the database finds no cookie in it."""
    doorman: Doorman = gateway.doorman
    session = await doorman.sign_in("", TOKENS["read"], "127.0.0.1")
    assert session is not None
    assert session.token not in repr(session)
    assert await gateway.inbox.get_note(f"session:{session.token}") is None
    assert await doorman.session(session.token) is not None
    assert await doorman.session("x" * 65) is None


def test_passwords_have_a_length() -> None:
    """A password that is too short is refused when its hash is made."""
    with pytest.raises(PolicyError, match="10 to 1024"):
        hash_password("short")


async def test_logins_at_once_are_counted_as_many(http: httpx.AsyncClient) -> None:
    """No more passwords are tried in parallel than one after another."""
    tries = (sign_in(http, "anna", f"wrong password {number}") for number in range(30))
    found = Counter(answer.status_code for answer in await asyncio.gather(*tries))
    assert found == {403: 10, 429: 20}


async def test_logins_that_succeed_do_not_count(http: httpx.AsyncClient) -> None:
    """Only failures are held against an address."""
    for _ in range(12):
        assert (await sign_in(http, "anna")).status_code == 303


@pytest.mark.parametrize(
    "name, password, changed",
    [("anna", PASSWORD, "password_hash"), ("", TOKENS["admin"], "ONCEKEY_TOKEN")],
)
async def test_a_session_ends_with_what_opened_it(
    gateway: Gateway, http: httpx.AsyncClient, name: str, password: str, changed: str
) -> None:
    """Whoever signed in with a password or token that was replaced since is out."""
    assert (await sign_in(http, name, password)).status_code == 303
    assert (await http.get("/_oncekey/events")).status_code == 200
    other = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash("another password")
    text = CONFIG.format(store=gateway.settings.store)
    text = text.replace(HASH, other) if changed == "password_hash" else text
    environ = {**ENVIRON, "ONCEKEY_TOKEN": "another-token-of-an-admin"}
    await gateway.use(settings_from(text, "gateway.toml", environ))
    assert (await http.get("/_oncekey/events")).status_code == 303


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://a:b:c", "null", "\u00e9"])
async def test_an_origin_that_is_no_address_is_from_elsewhere(
    http: httpx.AsyncClient, origin: str
) -> None:
    """It is refused, and is no fault of the gateway."""
    answer = await http.post("/_oncekey/login", headers={"Origin": origin.encode()})
    assert answer.status_code == 403


async def test_forms_have_bounds(http: httpx.AsyncClient) -> None:
    """Too many fields get 413, an id that is none 422: before a login and after it."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    many = await http.post("/_oncekey/login", content="a=1&" * 3000, headers=form)
    assert many.status_code == 413
    await sign_in(http, "olga")
    asked = {"csrf": await csrf_of(http), "id": "no id"}
    assert (await http.post("/_oncekey/events/replay", data=asked)).status_code == 422
