"""SQL in its own files, one statement a name."""

from __future__ import annotations

import re
from importlib.resources import files

__all__ = ["load_migrations", "load_statements"]

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def load_statements(filename: str, package: str) -> dict[str, str]:
    """The statements of a file, by the name in the comment above each."""
    text = files(package).joinpath(filename).read_text("utf-8")
    parts = _NAME.split(text)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def load_migrations(package: str) -> list[tuple[int, str]]:
    """The migrations of a store in order: the number that leads the name, and the script."""
    found = [
        item
        for item in files(package).joinpath("migrations").iterdir()
        if item.name.endswith(".sql")
    ]
    return sorted((int(item.name.partition("_")[0]), item.read_text("utf-8")) for item in found)
