"""The page of messages has messages that the source has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import oncekey

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "troubleshoot.md"
MESSAGE = re.compile(r"`([^`]* [^`]* [^`]*)`")


def test_every_message_of_the_page_is_one_of_ours() -> None:
    """What stands in the first column between ticks is part of a text in the source."""
    first = [line.split("|")[1] for line in PAGE.read_text("utf-8").splitlines() if "|" in line]
    messages = {found for cell in first for found in MESSAGE.findall(cell)}
    assert len(messages) > 15
    for source in Path(oncekey.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                messages = {one for one in messages if one not in node.value}
    assert messages == set()
