"""The gateway's reference names every setting, endpoint and metric, and nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from oncekey.cli import main
from oncekey.cli.init import config_for
from oncekey.server.config import settings_from
from oncekey.server.endpoints import ENDPOINTS
from oncekey.server.metrics import METRICS
from oncekey.server.settings import KEYS
from oncekey.server.tools import TOOLS
from oncekey.signatures import providers
from oncekey.testing._keys import keys_of

FILLED = {  # what the user fills in
    '"arn:aws:sns:..."': '"arn:aws:sns:eu-west-1:123456789012:orders"',
    'audience = "https://..."': 'audience = "https://shop.example/hooks"',
    "...@....iam": "push@shop.iam",
    'webhook_id = "..."': 'webhook_id = "1JE4291016473214C"',
}

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "gateway.md").read_text("utf-8")
HOWTO = (DOCS / "howto" / "run-the-gateway.md").read_text("utf-8")


@pytest.mark.parametrize("table", KEYS)
def test_settings_are_documented(table: str) -> None:
    """Each table of the page has the keys of the code, in their order, with what they are for."""
    heading = f"### `[{table}.NAME]`" if table else "### Top level"
    section = PAGE.split(heading + "\n")[1].split("\n### ")[0].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.+) \|$", section, re.MULTILINE)
    assert rows == [(name, rule.help) for name, rule in KEYS[table].items()]


def test_endpoints_are_documented() -> None:
    """The table of the API is the table of the code."""
    rows = re.findall(r"^\| ([A-Z]+) \| `(\S+)` \| (\w+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(one.method, one.path, one.role, one.summary) for one in ENDPOINTS]


def test_tools_are_documented() -> None:
    """And that of the tools for agents."""
    rows = re.findall(r"^\| `(\w+)` \| (read|operate|admin) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(one.name, one.role, one.help) for one in TOOLS]


def test_metrics_are_documented() -> None:
    """So is that of the metrics."""
    rows = re.findall(r"^\| `(oncekey_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (name, one.kind, ", ".join(f"`{label}`" for label in one.labels), one.help)
        for name, one in METRICS.items()
    ]


def test_the_configs_of_the_howto_work() -> None:
    """What the page shows can be pasted."""
    shown = re.findall(r"^```toml\n(.*?)^```", HOWTO, re.MULTILINE | re.DOTALL)
    assert len(shown) == 3
    environ = {"STRIPE_SECRET": "whsec_x"}
    settings = settings_from("\n".join(shown), "howto", environ)
    assert settings.users["olga"].role == "operate"
    assert settings.proxies["orders"].path == "/orders"


@pytest.mark.parametrize("name", providers())
def test_every_provider_has_a_config_that_reads(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``oncekey init`` writes a config whose only faults are what the user has to fill in."""
    if name in ("plaid", "adcp"):
        assert main(["init", name]) != 0
        assert "with a receiver in Python" in capsys.readouterr().err
        return
    text = config_for(providers()[name], name, "oncekey.toml")
    for blank, filled in FILLED.items():
        text = text.replace(blank, filled)
    source = tomllib.loads(text)["sources"][name]
    assert source["provider"] == name
    environ = {}
    if "secret_env" in source:
        secret = keys_of(name)["secret"]
        environ[source["secret_env"]] = secret if isinstance(secret, str) else secret.decode()
    assert settings_from(text, "oncekey.toml", environ).sources[name].provider.name == name
