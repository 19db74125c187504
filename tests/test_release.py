"""What is released: the same bytes wherever they are built, and a list of what is in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", "build", "dist", "node_modules", "__pycache__"),
    *(".hypothesis", ".*_cache", "tests", "benchmarks"),
)


def built(folder: Path, umask: int) -> dict[str, bytes]:
    """A wheel and a source distribution, made from a copy of the tree in ``folder``."""
    tree, out = folder / "tree", folder / "out"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    for number, path in enumerate(sorted(tree.rglob("*"))):
        if path.is_file():
            path.chmod(0o666 & ~umask)
            os.utime(path, (1e9 + number, 1e9 + number))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist"]
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "TZ": f"UTC{umask:+d}"}
    env.pop("PYTHONPATH", None)
    subprocess.run([*command, "-d", str(out)], cwd=tree, env=env, check=True, umask=umask)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """Built in two places, with other modes of files, times and time zones."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("here", "somewhere-else"))
    return [built(first, 0o022), built(second, 0o077)]


def test_the_same_tree_gives_the_same_bytes(twice: list[dict[str, bytes]]) -> None:
    """Neither the directory nor the modes, times or time zone are in a wheel or an sdist."""
    first, second = twice
    assert sorted(name.rpartition(".")[2] for name in first) == ["gz", "whl"]
    assert first.keys() == second.keys()
    for name in first:
        assert first[name] == second[name], name


@pytest.fixture
def bill(twice: list[dict[str, bytes]], tmp_path: Path) -> Any:
    """What ``make sbom`` writes."""
    [(name, wheel)] = [item for item in twice[0].items() if item[0].endswith(".whl")]
    (tmp_path / name).write_bytes(wheel)
    command = [sys.executable, str(ROOT / "scripts/sbom.py"), str(tmp_path / name)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text == again
    assert str(tmp_path) not in text
    assert not re.search(r"/(home|root|tmp|usr)/|localhost|file:", text)
    return json.loads(text)


def test_the_bill_of_materials_lists_every_extra(bill: Any) -> None:
    """Each package of each extra is a component, and nothing is required."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {
        re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;! ]", line)[0]).lower()
        for extra in project["optional-dependencies"].values()
        for line in extra
    } - {"oncekey"}
    assert {one["name"] for one in bill["components"]} == wanted
    assert {one["scope"] for one in bill["components"]} == {"optional"}
    refs = {one["bom-ref"] for one in bill["components"]}
    assert set(bill["dependencies"][0]["dependsOn"]) == refs
    assert {one["ref"] for one in bill["dependencies"][1:]} == refs


def test_the_bill_of_materials_is_cyclonedx(bill: Any) -> None:
    """The fields that its schema asks for, in the forms that it asks for."""
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        bill["serialNumber"],
    )
    own = bill["metadata"]["component"]
    assert (own["name"], own["licenses"]) == ("oncekey", [{"expression": "Apache-2.0"}])
    assert re.fullmatch("[0-9a-f]{64}", own["hashes"][0]["content"])
    for one in bill["components"]:
        assert one["type"] == "library"
        assert one["purl"] == f"pkg:pypi/{one['name']}"


def test_dashboard_alerts_and_policy_are_in_the_source_distribution(
    twice: list[dict[str, bytes]], tmp_path: Path
) -> None:
    """They are for whoever installs from source; the wheel has code only."""
    import tarfile

    [sdist] = [name for name in twice[0] if name.endswith(".gz")]
    (tmp_path / sdist).write_bytes(twice[0][sdist])
    with tarfile.open(tmp_path / sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        *("deploy/grafana/oncekey.json", "deploy/prometheus/oncekey.rules.yml"),
        *("SECURITY.md", "scripts/sbom.py"),
    } <= names
    [wheel] = [name for name in twice[0] if name.endswith(".whl")]
    (tmp_path / wheel).write_bytes(twice[0][wheel])
    with zipfile.ZipFile(tmp_path / wheel) as files:
        tops = {name.partition("/")[0] for name in files.namelist()}
    assert len(tops) == 2, tops


def test_an_index_shows_no_link_that_breaks(twice: list[dict[str, bytes]], tmp_path: Path) -> None:
    """The description in the wheel has the README's words, and links to nothing beside it."""
    [(name, wheel)] = [item for item in twice[0].items() if item[0].endswith(".whl")]
    (tmp_path / name).write_bytes(wheel)
    with zipfile.ZipFile(tmp_path / name) as files:
        [path] = [name for name in files.namelist() if name.endswith("/METADATA")]
        shown = files.read(path).decode()
    assert "Description-Content-Type: text/markdown" in shown
    assert re.findall(r"\]\((?!https:)[^)]*\)", shown) == []
    assert "Receive webhooks (`docs/howto/receive-webhooks.md`)" in shown
    assert "one copy does the work" in shown
    named = re.findall(r"\(`((?:docs|src|examples)/[^`]+|\w+\.md)`\)", shown)
    assert len(named) > 30
    assert [one for one in named if not (ROOT / one).exists()] == []


def test_the_readme_links_to_a_public_address_once_there_is_one() -> None:
    """With a base, links and pictures are addresses below it."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("index_readme", ROOT / "scripts" / "index_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "[a](docs/x.md#y) ![b](docs/z.svg) [c](https://w.example) [d](#e)"
    assert module.for_an_index(text, "https://host.example/oncekey/") == (
        "[a](https://host.example/oncekey/docs/x.md#y) "
        "![b](https://host.example/oncekey/docs/z.svg) [c](https://w.example) [d](#e)"
    )
