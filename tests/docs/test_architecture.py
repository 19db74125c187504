"""The picture of the house, CONTRIBUTING and the import contracts name all that exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "oncekey"
# Every package and module at the top, but for what only starts or names the whole.
ROOMS = {
    path.stem
    for path in SOURCE.iterdir()
    if path.name not in ("__init__.py", "__main__.py", "_version.py", "__pycache__", "py.typed")
}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]


def exists(name: str) -> bool:
    """Whether a module or package of that dotted name is in the tree."""
    path = ROOT / "src" / name.removesuffix(".*").replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_every_room_has_a_paragraph() -> None:
    """The page describes each package and module at the top, and none that is gone."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    told = {
        name
        for names in re.findall(r"^- ((?:`\w+`(?:, )?)+):", page, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told == ROOMS
    for path in re.findall(r"`((?:adapters|stores)\.\w+)`", page):
        assert exists(f"oncekey.{path}"), path


def test_the_picture_names_rooms() -> None:
    """What is written in bold in the picture is in the tree."""
    picture = (ROOT / "docs" / "explanation" / "architecture.svg").read_text("utf-8")
    bold = picture.split('font-weight="bold">')[1].split("</g>")[0]
    labels = {label for text in re.findall(r">([^<]+)</text>", bold) for label in text.split(", ")}
    for label in labels - {"your code", "transaction", "values"}:
        assert exists(f"oncekey.{label.strip('/').replace('/', '.')}"), label


def test_contributing_says_where_things_live() -> None:
    """Its paths exist, and every package and module at the top is one of them or in one."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = page.split("## Where things live")[1].split("\n## ")[0]
    named: set[str] = set()
    for row in re.findall(r"^\| (`.+?`) \|", table, flags=re.MULTILINE):
        for path in re.findall(r"`([^`]+)`", row):
            assert (ROOT / path).exists(), path
            if path.startswith("src/oncekey/"):
                named.add(Path(path).relative_to("src/oncekey").parts[0].removesuffix(".py"))
    assert named == ROOMS


def test_the_layers_are_the_tree() -> None:
    """Each line of the layers exists, and every package and module at the top has its floor."""
    layers = CONTRACTS["contracts"][0]["layers"]
    names = [name.strip(" ()") for line in layers for name in line.split(":")]
    for name in names:
        assert exists(f"oncekey.{name}"), name
    assert {name.partition(".")[0] for name in names} == ROOMS


@pytest.mark.parametrize("contract", CONTRACTS["contracts"][1:], ids=lambda one: one["name"])
def test_contracts_are_about_what_exists(contract: dict[str, list[str]]) -> None:
    """A contract about a module that is gone keeps nothing."""
    parts = ("source_modules", "protected_modules", "allowed_importers", "forbidden_modules")
    for name in [name for part in parts for name in contract.get(part, [])]:
        assert not name.startswith("oncekey") or exists(name), name
