"""What the page on migrations shows beside Python: a config that the gateway takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from oncekey.cli import main
from oncekey.testing import sample

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "migrate.md").read_text("utf-8")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIBRARIES = ["a table", "SETNX", "asgi-idempotency-header", "idemkit", "Powertools"]
SERVICES = ["Hookdeck", "Convoy", "Svix"]


def test_the_config_of_the_page_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``oncekey serve --check`` finds nothing wrong with it."""
    (config,) = TOML.findall(PAGE)
    monkeypatch.setenv("STRIPE_SECRET", "whsec_test")
    monkeypatch.setenv("ONCEKEY_TOKEN", "a-long-token-of-yours")
    file = tmp_path / "oncekey.toml"
    file.write_text(config, "utf-8")
    code = main(["serve", "--config", str(file), "--check"])
    assert code == 0, capsys.readouterr()


def test_a_receiver_knows_what_the_old_table_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's own code is run, and then each event of the table comes once more."""
    monkeypatch.chdir(tmp_path)
    section = PAGE.partition("## From a table of your own")[2].partition("\n## ")[0]
    names: dict[str, Any] = {}
    for block in PYTHON.findall(section):
        exec(compile(block, "migrate.md", "exec"), names)
    receiver, stripe, handled = names["receiver"], names["stripe"], list[str]()
    receiver._decisions.fallback = None
    receiver.on()(lambda event: handled.append(event.id))
    for event_id in ("evt_1", "evt_2", "evt_4"):
        receiver.receive(*sample(stripe, id=event_id))
    receiver.close()
    assert handled == ["evt_4"]


@pytest.mark.parametrize("peer", [*LIBRARIES, *SERVICES])
def test_every_peer_of_the_readme_has_a_section(peer: str) -> None:
    """Whatever the README compares with has a heading that says how to come from it."""
    heads = re.findall(r"^## From (.*)$", PAGE, re.MULTILINE)
    assert any(peer in head for head in heads)
    assert peer in (ROOT / "README.md").read_text("utf-8")
