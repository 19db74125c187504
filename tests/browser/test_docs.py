"""The built documentation in a real browser, as files: ``make docs`` first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUILT = Path(__file__).parents[2] / "build" / "docs"
FOLDERS = ("tutorial", "howto", "reference", "explanation")
PROVIDERS = ("index", "stripe", "google-pubsub", "paypal")
OUTSIDE = """() => {
    const width = document.documentElement.clientWidth;
    const wide = [...document.querySelectorAll(".table-wrapper")];
    const found = wide.filter((one) => one.scrollWidth > one.clientWidth + 1);
    const page = document.documentElement.scrollWidth > width ? ["the page"] : [];
    return page.concat(found.map((one) => one.textContent.trim().slice(0, 40)));
}"""


@pytest.fixture(scope="module")
def pages() -> list[Path]:
    """What people read: every page but for those of decisions and most providers."""
    if not (BUILT / "index.html").exists():
        if os.environ.get("CI"):
            pytest.fail("make docs has not run before")
        pytest.skip("make docs has not run")
    found = [BUILT / "index.html"]
    for folder in FOLDERS:
        found += sorted((BUILT / folder).glob("*.html"))
    return found + [BUILT / "providers" / f"{name}.html" for name in PROVIDERS]


@pytest.fixture(params=[390, 1280])
def page(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A phone's and a laptop's window."""
    context = chromium.new_context(viewport={"width": request.param, "height": 900})
    yield context.new_page()
    context.close()


def test_nothing_is_wider_than_the_window(page: Any, pages: list[Path]) -> None:
    """No page and no table has to be moved sideways to be read."""
    outside = {}
    for path in pages:
        page.goto(path.as_uri())
        if found := page.evaluate(OUTSIDE):
            outside[path.name] = found
    assert outside == {}


def test_code_has_a_button_that_copies_it(page: Any, pages: list[Path]) -> None:
    """Each block of the front page has one."""
    page.goto(pages[0].as_uri())
    blocks = page.locator("div.highlight").count()
    assert blocks > 0
    assert page.locator("button.copybtn").count() == blocks


def test_search_works_on_files(chromium: Any, pages: list[Path]) -> None:
    """Without a server, a word leads to the pages that have it."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(pages[0].as_uri())
    page.fill("input.sidebar-search", "pgbouncer")
    page.press("input.sidebar-search", "Enter")
    found = page.locator("#search-results li a")
    found.first.wait_for()
    links = [found.nth(at).get_attribute("href") for at in range(found.count())]
    assert any("use-postgresql.html" in str(link) for link in links)
    context.close()
