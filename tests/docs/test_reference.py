"""The API page has what can be imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import oncekey.adapters

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
ADAPTERS = sorted(
    path.stem
    for path in Path(oncekey.adapters.__file__).parent.glob("*.py")
    if not path.stem.startswith("_") and "__all__" in path.read_text("utf-8")
)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_has_an_entry(name: str) -> None:
    """Each module of ``oncekey.adapters`` is documented with its members."""
    assert re.search(
        rf"^\.\. automodule:: oncekey\.adapters\.{name}\n   :members:", PAGE, re.MULTILINE
    )


def test_the_page_names_no_adapter_that_is_gone() -> None:
    """What the page documents of ``oncekey.adapters`` is there."""
    named = re.findall(r"^\.\. automodule:: oncekey\.adapters\.(\w+)$", PAGE, re.MULTILINE)
    assert sorted(named) == ADAPTERS
