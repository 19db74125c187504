"""Every Python block of the README, the docs and the docstrings runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

import oncekey

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?:python|\{code-block\} python)$", re.MULTILINE)
MAKE_TARGET = re.compile(r"\bmake ([a-z][\w.%-]*)")


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(oncekey.__path__, "oncekey."):
        if found.name != "oncekey.__main__":
            yield found.name


def run_page(page: Path) -> dict[str, Any]:
    """Run the Python blocks of ``page``; gives the names that they defined."""
    sybil = Sybil([PythonCodeBlockParser(), SkipParser()])
    document = sybil.parse(page)
    document.namespace["__name__"] = "snippet"  # else that of builtins
    examples = list(document.examples())
    assert len(examples) >= len(FENCE.findall(page.read_text("utf-8")))
    for example in examples:
        example.evaluate()
    return document.namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page run from top to bottom, as one program."""
    monkeypatch.chdir(tmp_path)
    run_page(page)


async def test_readme_receivers_handle_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two receivers of the README answer both copies of an event, and handle one."""
    monkeypatch.chdir(tmp_path)
    page = run_page(ROOT / "README.md")
    client = page["app"].test_client()
    answers = [client.post("/webhook", json={"id": "evt_1"}) for _ in range(2)]
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, "handled")] * 2
    transport = httpx.ASGITransport(page["api"])
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as aclient:
        copies = [await aclient.post("/webhook", json={"id": "evt_2"}) for _ in range(2)]
    assert [(copy.status_code, copy.text) for copy in copies] == [(200, "handled")] * 2
    shown = capsys.readouterr().out
    assert shown.count("handling") == 2


@pytest.mark.parametrize("name", list(modules()))
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples in a module's docstrings give what they show."""
    monkeypatch.chdir(tmp_path)
    module: ModuleType = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_docstrings_have_examples() -> None:
    """The doctest run above finds the examples: at least the main classes have one."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {
        test.name
        for name in modules()
        for test in finder.find(importlib.import_module(name))
        if test.examples
    }
    assert {
        "oncekey.guard.Once",
        "oncekey.guard.AsyncOnce",
        "oncekey.request.IdempotencyStore",
        "oncekey.webhook.WebhookDedupStore",
        "oncekey.webhook.SyncWebhookDedupStore",
    } <= found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "make " in page.read_text("utf-8")], ids=lambda p: p.name
)
def test_make_targets_exist(page: Path) -> None:
    """Every ``make`` command that a page shows is a target of the Makefile."""
    makefile = ROOT / "Makefile"
    if not makefile.exists():
        pytest.skip("a source distribution has no Makefile")
    targets = set(re.findall(r"^([a-z][\w.%-]*):", makefile.read_text("utf-8"), re.MULTILINE))
    text = page.read_text("utf-8")
    code = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code += re.findall(r"`(make [^`]+)`", text)
    named = {target for block in code for target in MAKE_TARGET.findall(block)}
    assert named <= targets
