"""Runs the Python blocks of a page; by itself in a process of its own: few imports, it is often."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

from oncekey import Store

FENCE = re.compile(r"^```(?:python|\{code-block\} python)$", re.MULTILINE)


def run_page(page: Path) -> None:
    """Run the Python blocks of ``page``, and close the sync stores that they left open."""
    sybil = Sybil([PythonCodeBlockParser(), SkipParser()])
    document = sybil.parse(page)
    document.namespace["__name__"] = "snippet"  # else that of builtins
    examples = list(document.examples())
    assert len(examples) >= len(FENCE.findall(page.read_text("utf-8")))
    for example in examples:
        example.evaluate()
    for value in document.namespace.values():
        if isinstance(value, Store):
            value.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # files that the page saves
    run_page(Path(sys.argv[1]))
