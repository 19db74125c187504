"""The house rules on length: what is longer than it should be says why."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

# What was too long when the rule came, for as long as it lasts: a name goes when its fault does.
FILES: set[str] = set()
FUNCTIONS: set[str] = set()


@pytest.fixture(scope="module")
def size() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oncekey_size", SCRIPTS / "size.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def test_long_files_and_functions_say_why(size: ModuleType) -> None:
    """A file over 500 lines or a function over 60 has a comment ``# Long: reason`` at its top."""
    found = size.measured()
    assert set(found.long_files) == FILES
    assert set(found.long_functions) == FUNCTIONS


def test_a_reason_counts_only_at_the_top(size: ModuleType, tmp_path: Path) -> None:
    """Long files and functions are found, and their reasons where they belong."""
    body = "".join(f"    x = {number}\n" for number in range(61))
    (tmp_path / "a.py").write_text(f"def bare():\n{body}")
    (tmp_path / "b.py").write_text(f'def told():\n    """Do."""\n    # Long: it counts.\n{body}')
    method = body.replace("    x", "        x")
    (tmp_path / "c.py").write_text(f"class C:\n    def late(self):\n{method}# Long: no.\n")
    (tmp_path / "d.sql").write_text("-- Long: one table.\n" + "SELECT 1;\n" * 501)
    (tmp_path / "e.lua").write_text("return 1\n" * 501)
    found = size.measured(tmp_path)
    assert found.long_functions == {"a.py::bare": 62, "c.py::C.late": 62}
    assert found.long_files == {"e.lua": 501}
    assert found.reasoned == {"b.py::told": "it counts.", "d.sql": "one table."}
    assert found.lines == 62 + 64 + 64 + 502 + 501


def test_servers_are_started_once_a_process() -> None:
    """Only the root conftest imports fixtures: elsewhere an import starts a server of its own."""
    tests = Path(__file__).parents[1]
    servers = tests / "servers"
    fixture = re.compile(r"^@pytest\.fixture.*\n(?:async )?def (\w+)", re.MULTILINE)
    names = {name for file in servers.glob("*.py") for name in fixture.findall(file.read_text())}
    assert {"_own", "_plain_server"} <= names
    imported = {
        f"{file.relative_to(tests)}: {alias.name}"
        for file in tests.rglob("*.py")
        if file != tests / "conftest.py"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.servers")
        for alias in node.names
        if alias.name in names
    }
    assert imported == set()
