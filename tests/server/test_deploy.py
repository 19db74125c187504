"""The files of ``deploy/``: they read, and what they call is there."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path

import pytest

from oncekey.cli._parser import parse
from oncekey.server.config import settings_from

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_unit_calls_commands_that_exist() -> None:
    """Each command of the systemd unit is one of ours, with options that it takes."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "oncekey.service")
    for key in ("ExecStartPre", "ExecStart"):
        words = unit["Service"][key].split()
        assert words[0].endswith("/bin/oncekey")
        assert parse(words[1:]).config == "/etc/oncekey/oncekey.toml"
    assert unit["Service"]["ExecReload"].split()[1] == "-HUP"


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "kubernetes.yaml"])
def test_containers_call_commands_that_exist(name: str) -> None:
    """Each list of words that starts with a command of ours is taken by it."""
    text = (DEPLOY / name).read_text("utf-8")
    calls = [json.loads(one) for one in re.findall(r'\["(?:serve|migrate)".*?\]', text)]
    assert calls
    for words in calls:
        parse(words)


def test_the_config_of_the_containers_reads() -> None:
    """With the secrets that the files name, it has no fault."""
    text = (DEPLOY / "oncekey.toml").read_text("utf-8")
    settings = settings_from(text, "oncekey.toml", {"SHOP_SECRET": "whsec_x"})
    assert list(settings.sources) == ["shop"]


def test_the_manifests_are_yaml() -> None:
    """PyYAML, where it is, reads them; the probes are paths that the gateway has."""
    yaml = pytest.importorskip("yaml")
    (deployment, service, budget) = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert [one["kind"] for one in (deployment, service, budget)] == [
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert set(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]) == {
        "database",
        "tables",
        "gateway",
    }
