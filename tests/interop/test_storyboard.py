"""The protocol's own idempotency storyboard, run by its npm client against the reference seller.

It needs Node with npm, and once the npm registry: the client is kept in the user's cache folder, or
where ``ONCEKEY_TEST_NPM`` says. ``ONCEKEY_TEST_NPM=0`` leaves it out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.interop.serving import PATIENCE, selling

HERE = Path(__file__).parent
CLIENT = "@adcp/sdk@6.11.0"
PASSED = {
    "get_capabilities",
    "create_media_buy_missing_key",
    "create_media_buy_initial",
    "create_media_buy_replay",
    "create_media_buy_conflict",
    "create_media_buy_fresh_key",
    "create_media_buy_concurrent",
    "get_media_buys_dedup_check",
}


def install(folder: Path) -> None:
    """Put the client into ``folder``, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        (Path(temporary) / "package.json").write_text('{"private": true}')
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
        done = subprocess.run(
            ["npm", "install", *options, CLIENT],
            cwd=temporary,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"npm could not install {CLIENT}: {done.stderr.strip()[-300:]}")
        try:
            Path(temporary).rename(folder)
        except OSError:
            assert (folder / "node_modules").is_dir()  # another process was faster


@pytest.fixture(scope="module")
def client() -> Path:
    """A folder in whose ``node_modules`` the client is."""
    wanted = os.environ.get("ONCEKEY_TEST_NPM", "")
    if wanted == "0":
        pytest.skip("ONCEKEY_TEST_NPM=0")
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node with npm is not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(wanted) if len(wanted) > 1 else cache / "oncekey-tests" / "adcp-sdk-6.11.0"
    if not (folder / "node_modules" / "@adcp" / "sdk").is_dir():
        try:
            install(folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"npm could not install {CLIENT}: {error}")
    return folder


def run(client: Path, url: str) -> dict[str, Any]:
    script, story = HERE / "run_storyboard.cjs", HERE / "adcp-idempotency-3.2.yaml"
    command = ["node", str(script), str(client), url, str(story)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def test_the_storyboard_has_no_failed_step(client: Path, store_url: str) -> None:
    """Every step that the client can run passes, on each database."""
    with selling(store_url) as url:
        outcome = run(client, url)
    assert outcome["failed"] == 0, json.dumps(outcome["steps"], indent=1)
    assert {step["id"] for step in outcome["steps"] if step["outcome"] == "passed"} == PASSED
    assert not [fault for step in outcome["steps"] for fault in step["faults"]]


def test_a_failed_step_is_noticed(client: Path, tmp_path: Path) -> None:
    """The gate can fail: a seller that wants a token which nobody has fails the storyboard."""
    with selling(f"sqlite:///{tmp_path / 'seller.db'}", {"a-token": "nobody"}) as url:
        assert run(client, url)["failed"] > 0
