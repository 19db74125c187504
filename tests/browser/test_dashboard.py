"""The dashboard in a real browser: ``make test-browser`` installs what this needs.

A Chromium that is not there skips these tests on a laptop and fails them in CI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.process import LEAST, SECRET, TOKEN, App, Served, app, event, until

from oncekey.signatures import provider
from oncekey.testing import signed

playwright = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")

SHOTS = os.environ.get("ONCEKEY_TEST_SHOTS", "")
PAGES = ("", "/events", "/issues", "/rejected", "/targets", "/sources", "/keys", "/audit")
READER = "a-token-that-may-only-read"
OPERATOR = "a-token-of-an-operator"


@pytest.fixture
def target() -> Iterator[App]:
    with app() as one:
        yield one


@pytest.fixture
def gateway(target: App, tmp_path: Path) -> Iterator[Served]:
    """A gateway with a target, a second one that refuses, and tokens of all roles."""
    text = LEAST.format(store=f"sqlite:///{tmp_path}/inbox.db", url=target.url)
    text = text.replace("tries = 1000", "tries = 1")
    file = tmp_path / "gateway.toml"
    text += '[tokens.reader]\ntoken_env = "READER"\n'
    text += '[tokens.operator]\ntoken_env = "OPERATOR"\nrole = "operate"\n'
    file.write_text(text)
    environ = {"READER": READER, "OPERATOR": OPERATOR}
    with Served("--config", str(file), "--port", "0", environ=environ) as one:
        yield one


class Tab:
    """A page of somebody who signed in, and everything that its console said."""

    def __init__(self, browser: Any, gateway: Served, token: str = TOKEN, **look: Any) -> None:
        look = {"viewport": {"width": 1280, "height": 900}, **look}
        self.context = browser.new_context(**look)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.said: list[str] = []
        self.page.on("console", lambda one: self.said.append(f"{one.type}: {one.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.home = f"{gateway.address}/_oncekey"
        self.page.goto(self.home)
        self.page.get_by_label("Password or token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("heading", name="Now", exact=True).wait_for()

    def go(self, path: str) -> Any:
        self.page.goto(self.home + path)
        return self.page

    def close(self) -> None:
        """No error, no report of the content security policy: nothing was said at all."""
        self.context.close()
        assert self.said == []


def test_the_first_minute(chromium: Any, gateway: Served, target: App) -> None:
    """One button: five copies, one effect at the app, four stopped on the event's lifeline."""
    tab = Tab(chromium, gateway)
    page = tab.page
    page.get_by_text("Nothing has come in yet").wait_for()
    page.get_by_role("button", name="Send 5 copies").click()
    page.get_by_role("heading", name="Lifeline").wait_for()
    stopped = page.locator(".lifeline li", has_text="stopped")
    assert stopped.count() == 4
    page.locator(".lifeline li", has_text="app: delivered").wait_for()  # comes by itself
    assert len(target.requests) == 1
    tab.close()


def test_sign_in_and_out(chromium: Any, gateway: Served) -> None:
    """A wrong token is told so and stays outside; the right one gets in, and out again."""
    page = chromium.new_context().new_page()
    page.goto(f"{gateway.address}/_oncekey/issues")
    page.get_by_label("Password or token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    assert "don't fit" in page.get_by_role("alert").inner_text()
    page.get_by_label("Password or token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("button", name="Sign in").wait_for()
    page.goto(f"{gateway.address}/_oncekey/issues")
    page.get_by_role("button", name="Sign in").wait_for()
    page.context.close()


def test_charts_move_by_themselves(chromium: Any, gateway: Served) -> None:
    """An event that comes while somebody looks is drawn without a reload; the table has it too."""
    tab = Tab(chromium, gateway)
    page = tab.page
    page.locator("#live[data-state=live]").wait_for()
    assert page.locator("rect.new").count() == 0
    assert gateway.deliver(event("evt_1", gateway.address)) == 200
    page.locator("rect.new").first.wait_for()
    page.locator("summary", has_text="As a table").first.click()
    page.get_by_role("columnheader", name="received", exact=True).wait_for()
    tab.close()


def test_new_events_wait_behind_a_pill(chromium: Any, gateway: Served) -> None:
    """Rows don't shift under the reader: a pill counts what is new, and leads to it."""
    gateway.deliver(event("evt_1", gateway.address))
    tab = Tab(chromium, gateway)
    page = tab.go("/events")
    page.locator("#live[data-state=live]").wait_for()
    assert page.locator("[data-row]").count() == 1
    gateway.deliver(event("evt_2", gateway.address))
    page.get_by_role("link", name="1 new").wait_for()
    assert page.locator("[data-row]").count() == 1
    page.get_by_role("link", name="1 new").click()
    page.locator("[data-row] >> nth=1").wait_for()
    tab.close()


def test_search_and_keys(chromium: Any, gateway: Served) -> None:
    """``/`` searches, ``j`` and Enter open, ``x`` chooses, ``g t`` goes, ``?`` helps."""
    for number in range(3):
        gateway.deliver(event(f"evt_{number}", gateway.address))
    tab = Tab(chromium, gateway)
    page = tab.go("/events")
    page.keyboard.press("/")
    page.keyboard.type("evt_1")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"q=evt_1"))
    assert page.locator("[data-row]").count() == 1
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.get_by_text("1 chosen").wait_for()
    page.locator("[data-row] a").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Lifeline").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.get_by_role("heading", name="Targets", exact=True).wait_for()
    tab.close()


def test_live_updates_can_be_paused(chromium: Any, gateway: Served) -> None:
    """``L`` holds the page still, over pages too; ``L`` again brings what came meanwhile."""
    tab = Tab(chromium, gateway)
    page = tab.page
    page.locator("#live[data-state=live]").wait_for()
    page.keyboard.press("L")
    page.locator("#live[data-state=paused][aria-pressed=false]").wait_for()
    gateway.deliver(event("evt_1", gateway.address))
    until(lambda: gateway.api("GET", "/stats")["totals"].get("received"), "the arrival")
    page.reload()
    page.locator("#live[data-state=paused]").wait_for()
    before = page.locator("#tiles").inner_text()
    gateway.deliver(event("evt_2", gateway.address))
    page.wait_for_timeout(2500)  # a tick at least: nothing moves
    assert page.locator("#tiles").inner_text() == before
    page.keyboard.press("L")
    page.get_by_role("link", name="2 received").wait_for()
    page.locator("rect.new").first.wait_for()
    tab.close()


def test_an_empty_list_fills_by_itself(chromium: Any, gateway: Served) -> None:
    """Nothing could shift: the first event appears without a click; its line names this gateway."""
    tab = Tab(chromium, gateway)
    page = tab.go("/events")
    page.locator("#live[data-state=live]").wait_for()
    assert f"oncekey send {gateway.address}/hooks/shop" in page.locator("#none-yet").inner_text()
    gateway.deliver(event("evt_1", gateway.address))
    page.locator("[data-row]").wait_for()
    tab.close()


def test_copies_are_compared_and_searches_saved(chromium: Any, gateway: Served) -> None:
    """A copy that differs is on the lifeline and beside the first; a search becomes a view."""
    stripe = provider("stripe", secret=SECRET)
    for cents in (1200, 900):
        body = {"id": "evt_1", "type": "invoice.paid", "cents": cents}
        gateway.deliver(signed(stripe, body, url=f"{gateway.address}/hooks/shop"))
    tab = Tab(chromium, gateway)
    page = tab.go("/events?q=source:shop")
    page.get_by_text("Save this search").click()
    page.get_by_label("Name").fill("My shop")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("The view is saved").wait_for()
    page.goto(f"{tab.home}/events")
    page.get_by_role("link", name="My shop").click()
    page.wait_for_url(re.compile("q=source"))
    page.get_by_role("link", name="invoice.paid").click()
    page.locator(".lifeline li", has_text="with another body").wait_for()
    assert "1200" in page.locator(".diff del").inner_text()
    assert "900" in page.locator(".diff ins").inner_text()
    tab.close()


def test_a_page_that_cannot_be_read_again_says_so(chromium: Any, gateway: Served) -> None:
    """What is shown stays, dimmed, with its time; a button tries again, and all is well."""
    tab = Tab(chromium, gateway)
    page = tab.page
    page.locator("#live[data-state=live]").wait_for()
    broken = re.compile("/_oncekey$")
    page.route(broken, lambda route: route.fulfill(status=503, body="no"))
    gateway.deliver(event("evt_1", gateway.address))
    page.get_by_text("can't be read again just now. Last good:").wait_for()
    assert page.locator("main[data-stale]").count() == 1
    page.unroute(broken)
    page.get_by_role("button", name="Try again").click()
    page.locator("rect.new").first.wait_for()
    page.locator("#lost").wait_for(state="hidden")
    tab.said = [one for one in tab.said if "503" not in one]  # the browser's own word for it
    tab.close()


def test_dead_deliveries_are_replayed_in_bulk(chromium: Any, gateway: Served, target: App) -> None:
    """From the issue to its dry run to its end, and the app has every event."""
    target.answer = lambda headers: 500
    for number in range(3):
        gateway.deliver(event(f"evt_{number}", gateway.address))
    until(lambda: len(gateway.api("GET", "/dead-letters")["items"]) == 3, "three dead letters")
    target.answer = lambda headers: 200
    tab = Tab(chromium, gateway)
    page = tab.go("/issues")
    page.get_by_role("link", name="Replay 3").click()
    page.get_by_role("heading", name="Replay 3 dead deliveries?").wait_for()
    page.get_by_role("button", name="Replay 3 at 20.0 a second").click()
    page.get_by_text("3 of 3, done").wait_for()
    until(lambda: len(target.events()) == 3, "three deliveries")
    tab.close()


def test_a_reader_sees_no_buttons(chromium: Any, gateway: Served) -> None:
    """Who may only look is offered nothing else."""
    gateway.deliver(event("evt_1", gateway.address))
    tab = Tab(chromium, gateway, READER)
    for path in PAGES:
        page = tab.go(path)
        names = page.get_by_role("button").all_inner_texts()
        assert {re.sub(r"\W+$", "", name) for name in names} <= {
            "Keys", "Sign out", "Copy", "Search", "Look up", "live", "connecting",
        }  # fmt: skip
    tab.close()


def test_an_operator_has_all_but_keys(chromium: Any, gateway: Served, target: App) -> None:
    """Replays an event and pauses a target; only an admin is offered to forget a key."""
    gateway.deliver(event("evt_1", gateway.address))
    until(lambda: len(target.requests) == 1, "the delivery")
    tab = Tab(chromium, gateway, OPERATOR)
    assert tab.page.get_by_role("button", name="Send 5 copies").count() == 1
    page = tab.go("/events")
    page.get_by_role("link", name="invoice.paid").click()
    page.get_by_role("button", name="Replay", exact=False).first.click()
    page.get_by_text("Queued again: 1").wait_for()
    until(lambda: len(target.requests) == 2, "the replay")
    page = tab.go("/targets")
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("The target is paused").wait_for()
    assert gateway.api("GET", "/targets")["items"][0]["status"] == "paused"
    assert gateway.api("GET", "/audit")["items"][0]["actor"] == "operator"
    known = "/keys?source=shop&key=evt_1"
    page = tab.go(known)
    page.get_by_role("link", name="invoice.paid").wait_for()
    assert page.get_by_role("button", name="Forget").count() == 0
    tab.close()
    admin = Tab(chromium, gateway)
    assert admin.go(known).get_by_role("button", name="Forget").count() == 1
    admin.close()


def test_a_slow_answer_shows_that_it_is_on_its_way(chromium: Any, gateway: Served) -> None:
    """What is shown stays, marked as being read again, until the answer is here."""
    tab = Tab(chromium, gateway)
    page = tab.page
    page.locator("#live[data-state=live]").wait_for()
    held: list[Any] = []
    again = re.compile("/_oncekey$")
    page.route(again, lambda route: held.append(route))
    before = page.locator("#tiles").inner_text()
    gateway.deliver(event("evt_1", gateway.address))
    page.locator("main[data-loading][aria-busy=true]").wait_for()
    assert page.locator("#tiles").inner_text() == before
    page.unroute(again)  # goes on with what was held
    page.get_by_role("link", name="1 received").wait_for()
    page.locator("main:not([data-loading]):not([aria-busy])").wait_for()
    tab.close()


def test_a_page_moves_on_without_its_stream(chromium: Any, gateway: Served) -> None:
    """Where no stream comes through it is said, the page is read again, and its figures move."""
    tab = Tab(chromium, gateway)
    page = tab.page
    page.clock.install()  # the ten seconds between two looks need not be waited for
    page.route("**/_oncekey/live", lambda route: route.abort())
    page.reload()
    page.locator("#live[data-state=lost]").wait_for()
    page.get_by_text("Live updates are lost; this page is read again every 10 seconds").wait_for()
    gateway.deliver(event("evt_1", gateway.address))
    until(lambda: gateway.api("GET", "/stats")["totals"].get("delivered"), "the delivery")
    page.clock.fast_forward(10_000)
    page.get_by_role("link", name="1 received").wait_for()
    page.locator("rect.new").first.wait_for()
    gateway.deliver(event("evt_2", gateway.address))
    until(lambda: gateway.api("GET", "/stats")["totals"].get("delivered") == 2, "the other")
    page.clock.fast_forward(10_000)
    page.get_by_role("link", name="2 received").wait_for()
    assert page.locator("#live[data-state=lost]").count() == 1
    page.unroute("**/_oncekey/live")
    page.locator("#live[data-state=live]").wait_for()
    page.locator("#lost").wait_for(state="hidden")
    tab.said = [one for one in tab.said if "ERR_FAILED" not in one]  # the browser's own word
    tab.close()


def test_a_lost_stream_is_told(chromium: Any, gateway: Served) -> None:
    """When the gateway is gone a banner says so, with the last good time."""
    tab = Tab(chromium, gateway)
    tab.page.locator("#live[data-state=live]").wait_for()
    gateway.process.kill()
    tab.page.get_by_text("Live updates are lost").wait_for()
    tab.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(chromium: Any, gateway: Served, scheme: str) -> None:
    """axe-core has no serious finding on any page, in light and in dark, wide and narrow."""
    folder = os.environ.get("ONCEKEY_TEST_AXE", "")
    if not folder:
        if os.environ.get("CI"):
            pytest.fail("no axe-core in CI: make test-browser installs it with npm")
        pytest.skip("no axe-core here: make test-browser installs it with npm")
    script = (Path(folder) / "node_modules/axe-core/axe.min.js").read_text("utf-8")
    gateway.deliver(event("evt_1", gateway.address))
    gateway.deliver(event("evt_1", gateway.address))
    until(lambda: gateway.api("GET", "/stats")["totals"].get("delivered"), "the delivery")
    found = gateway.api("GET", "/events")["items"][0]["id"]
    for width in (1280, 390):
        look = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
        tab = Tab(chromium, gateway, **look)
        for path in (*PAGES, f"/events/{found}", "/keys?stuck=1", "/issues/replay?q=target:app"):
            page = tab.go(path)
            page.locator("#live[data-state=live]").wait_for()
            page.evaluate(script)
            findings = page.evaluate("async () => (await axe.run()).violations")
            serious = [
                (one["id"], [node["html"] for node in one["nodes"]][:3])
                for one in findings
                if one["impact"] in ("serious", "critical")
            ]
            assert serious == [], f"{path} at {width}"
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{path} is {wide} wide at {width}"
            if SHOTS:
                name = re.sub(r"\W+", "-", path.partition("/msg")[0]).strip("-") or "now"
                name = "event" if "msg" in path else name
                page.screenshot(path=f"{SHOTS}/{name}-{width}-{scheme}.png", full_page=True)
        tab.close()
