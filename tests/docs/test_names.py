"""What can be imported is what the page of names says, for type checkers too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import oncekey

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "names.md").read_text("utf-8")
SECTIONS = dict(zip(*[iter(re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))

# What was promised by name before oncekey had names of its own.
PROMISED = """
    CachedResponse EXCLUDED_FIELDS IdempotencyBackend IdempotencyConflictError IdempotencyStore
    MemoryBackend PgBackend RedisBackend SQLiteBackend STANDARD_ERROR_CODES ToolContext
    WebhookDedupClaim WebhookDedupOwnershipError WebhookDedupStore canonical_json_sha256
    capabilities_response strip_excluded_fields IdempotencyScopeError IdempotencyExpiredError
"""


def rows(section: str) -> list[list[list[str]]]:
    """The names in each cell of each row of a table."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return [[re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")] for line in lines]


def found(path: str) -> Any:
    """What a dotted path names: a module, or something in one."""
    home, _, name = path.rpartition(".")
    module = import_module(home)
    return getattr(module, name) if hasattr(module, name) else import_module(path)


ELSEWHERE = [(home[0], name) for home, names in rows("At home elsewhere") for name in names]
OLDER = [(old[0], new[0]) for old, new, *_ in rows("Older names")]


def test_the_page_lists_the_public_names() -> None:
    """``oncekey.__all__`` and the first table are the same, and short."""
    assert {name for row in rows("What `oncekey` gives") for name in row[0]} == set(oncekey.__all__)
    assert len(oncekey.__all__) <= 35


@pytest.mark.parametrize("home, name", ELSEWHERE)
def test_a_name_is_at_home_where_the_page_says(home: str, name: str) -> None:
    """It is public there, and ``oncekey`` gives the same object."""
    module = import_module(home)
    assert getattr(oncekey, name) is getattr(module, name)
    assert name in getattr(module, "__all__", vars(module))


@pytest.mark.parametrize("old, new", OLDER)
def test_an_older_name_is_the_newer_one(old: str, new: str) -> None:
    """An alias is the same class, or a module with the same public names."""
    one, other = found(old), found(new)
    if not hasattr(other, "__path__") and not hasattr(other, "__file__"):
        assert one is other
        return
    for name in other.__all__:
        assert getattr(one, name) is getattr(other, name), name


@pytest.mark.parametrize("old", [old for old, _ in OLDER])
def test_pages_and_examples_use_newer_names(old: str) -> None:
    """Only the page of names, and what is said about packages of others, has older ones."""
    word = re.compile(rf"\b{re.escape(old.rpartition('.')[2] if old.count('.') == 1 else old)}\b")
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    for page in pages:
        if page.name in ("names.md", "migrate.md") or page.parent.name == "adr":
            continue
        lines = [line for line in page.read_text("utf-8").splitlines() if word.search(line)]
        assert [line for line in lines if "`adcp." not in line] == [], page


@pytest.mark.parametrize("name", PROMISED.split())
def test_promised_names_can_be_imported(name: str) -> None:
    """Whoever knows the older names finds them, by the page too."""
    assert getattr(oncekey, name) is not None
    assert f"`{name}`" in PAGE or f"`oncekey.{name}`" in PAGE


def test_every_name_is_on_the_page() -> None:
    """No name can be imported that the page does not have."""
    known = {*oncekey._HOME_OF, *(name for _, name in ELSEWHERE)}
    listed = {name for _, name in ELSEWHERE} | set(oncekey.__all__)
    listed |= {old.removeprefix("oncekey.") for old, _ in OLDER}
    assert known <= listed


def test_type_checkers_see_the_same_names() -> None:
    """What is imported for them is what is found at run time, from the same homes."""
    tree = ast.parse(Path(oncekey.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: str(node.module).removeprefix("oncekey.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen.pop("*") == "errors"
    seen = {name: home for name, home in seen.items() if home != "errors"}
    assert seen == oncekey._HOME_OF
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                exported = alias.asname == alias.name or alias.name in (*oncekey.__all__, "*")
                assert exported, f"{alias.name} must be in __all__ or imported as itself"


def test_type_checkers_are_asked_for_every_other_name() -> None:
    """``tests/typing/other_names.py``, which they read, has what ``__all__`` has not."""
    asked = (ROOT / "tests" / "typing" / "other_names.py").read_text("utf-8")
    listed = set(re.findall(r"^    oncekey\.(\w+),$", asked, flags=re.MULTILINE))
    assert listed == {*oncekey._HOME_OF, *(name for _, name in ELSEWHERE)} - set(oncekey.__all__)


def test_every_error_is_found_without_being_listed() -> None:
    """All of ``oncekey.errors``, and a name that is none says so."""
    errors = import_module("oncekey.errors")
    for name in vars(errors):
        if name.endswith("Error"):
            assert getattr(oncekey, name) is getattr(errors, name)
            assert f"`{name}`" in PAGE
    with pytest.raises(AttributeError, match="NoSuchError"):
        oncekey.NoSuchError  # noqa: B018


def test_an_older_path_comes_first_too() -> None:
    """The alias of a module works in a process that never imported the module itself."""
    code = "from oncekey.signatures.adcp import adcp_provider as a, ADCP_CODES\n"
    code += "import oncekey.signatures.adcp, oncekey.adcp.signatures as new\n"
    code += "assert oncekey.signatures.adcp is new and a is new.adcp_provider"
    subprocess.run([sys.executable, "-c", code], check=True)
