"""The pictures of the performance page: those of the results that are kept."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "performance.md"


def test_every_part_of_the_run_has_a_title() -> None:
    """Found here, not by a run of ten minutes that ends without its pictures."""
    parts = (ROOT / "benchmarks" / "run.py").read_text("utf-8").partition("PARTS:")[2]
    named = re.findall(r'^    "(\w+)": ', parts.partition("\n}")[0], re.MULTILINE)
    titled = (ROOT / "benchmarks" / "plots.py").read_text("utf-8").partition("TITLES = {")[2]
    assert len(named) > 5
    assert set(named) <= set(
        re.findall(r'^    "(\w+)": ', titled.partition("\n}")[0], re.MULTILINE)
    )


def test_pictures_show_the_results_that_are_kept(tmp_path: Path) -> None:
    """Drawn anew they are the same, each is a picture, and the page shows all of them."""
    spec = importlib.util.spec_from_file_location("oncekey_plots", ROOT / "benchmarks" / "plots.py")
    assert spec is not None
    assert spec.loader is not None
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    plots.draw(tmp_path)
    kept = {path.name: path.read_text("utf-8") for path in plots.FOLDER.glob("*.svg")}
    assert {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()} == kept
    assert set(re.findall(r"\(plots/([\w.]+)\)", PAGE.read_text("utf-8"))) == set(kept)
    for picture in kept.values():
        assert ElementTree.fromstring(picture).tag.endswith("svg")
