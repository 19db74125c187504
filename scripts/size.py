"""Measure the source: its lines, and the files and functions that are longer than they should be.

    python scripts/size.py

A file over 500 lines, or a function over 60, says why at its top: a comment ``# Long: the reason``
(``-- Long:`` in SQL and Lua) before a function's first statement, or in a file's first 40 lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "oncekey"
KINDS = (".py", ".sql", ".lua", ".toml")
FILE_LINES = 500
FUNCTION_LINES = 60
LONG = ("# Long:", "-- Long:")  # what comes behind it is the reason


@dataclass(frozen=True)
class Size:
    """How much source there is, and what is longer than it should be."""

    lines: int
    files: int
    long_files: dict[str, int]  # without a reason at their top
    long_functions: dict[str, int]  # "file::name", the same
    reasoned: dict[str, str]  # the others of them: why they are long


def measured(source: Path = SOURCE) -> Size:
    """Measure the source tree."""
    lines = files = 0
    long_files: dict[str, int] = {}
    long_functions: dict[str, int] = {}
    reasoned: dict[str, str] = {}
    for path in sorted(path for path in source.rglob("*") if path.suffix in KINDS):
        name = path.relative_to(source).as_posix()
        text = path.read_text("utf-8").splitlines()
        lines += len(text)
        files += 1
        if len(text) > FILE_LINES:
            _sort_in(name, len(text), text[:40], long_files, reasoned)
        if path.suffix == ".py":
            for function, top, length in _functions(text):
                if length > FUNCTION_LINES:
                    _sort_in(f"{name}::{function}", length, top, long_functions, reasoned)
    return Size(lines, files, long_files, long_functions, reasoned)


def _sort_in(
    name: str, length: int, top: list[str], without: dict[str, int], reasoned: dict[str, str]
) -> None:
    """Note something long as what it is: with a reason in its first lines, or without."""
    for line in top:
        for mark in LONG:
            if line.strip().startswith(mark):
                reasoned[name] = line.strip().removeprefix(mark).strip()
                return
    without[name] = length


def _functions(text: list[str]) -> Iterator[tuple[str, list[str], int]]:
    """Every function's name, its lines down to its first statement, and how many it has in all."""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, list[str], int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                full = f"{name}.{child.name}".lstrip(".")
                if not isinstance(child, ast.ClassDef):
                    first = child.body[min(1, len(child.body) - 1)].lineno  # behind a docstring
                    end = child.end_lineno or child.lineno
                    yield full, text[max(child.lineno - 2, 0) : first], end - child.lineno + 1
                yield from inside(child, full)
            else:
                yield from inside(child, name)

    yield from inside(ast.parse("\n".join(text)), "")


def text(found: Size) -> str:
    """What was found, to be read."""
    lines = [f"source: {found.lines} lines in {found.files} files"]
    for what, names in (("files", found.long_files), ("functions", found.long_functions)):
        most = FILE_LINES if what == "files" else FUNCTION_LINES
        lines.append(f"{what} over {most} lines without a reason: {len(names)}")
        lines += [f"  {length:5}  {name}" for name, length in names.items()]
    lines += [f"  long: {name}: {reason}" for name, reason in found.reasoned.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(text(measured()))
