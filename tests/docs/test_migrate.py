"""What the page on migrations shows beside Python: a config that the gateway takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oncekey.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "migrate.md").read_text("utf-8")
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


@pytest.mark.parametrize("peer", [*LIBRARIES, *SERVICES])
def test_every_peer_of_the_readme_has_a_section(peer: str) -> None:
    """Whatever the README compares with has a heading that says how to come from it."""
    heads = re.findall(r"^## From (.*)$", PAGE, re.MULTILINE)
    assert any(peer in head for head in heads)
    assert peer in (ROOT / "README.md").read_text("utf-8")
