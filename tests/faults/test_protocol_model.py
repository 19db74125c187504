"""The claim protocol as a model, searched by Spin: all of its states, and mistakes it must find."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "models/claim_protocol.pml"
PATIENCE = 300

# Each mistake, the payload of the second worker, and the invariant that breaks.
MUTANTS = {
    "DELETE_ON_RELEASE": (1, "holder_of[my_fence]==0"),
    "FENCE_BEFORE_LOCK": (1, "holder_of[my_fence]==0"),
    "SENTINEL_FINGERPRINT": (2, "(bound==0)||(bound==my_payload)"),
    "CHECK_THEN_PUT": (1, "outcome==0"),
    "MARK_BEFORE_EFFECT": (1, "effects_of[me]>0"),
    "EFFECT_OUTSIDE_TRANSACTION": (1, "committed_effects==1"),
    "UNFENCED_COMPLETE": (1, "holder_of[highest]==me"),
    "ENDLESS_LEASE": (1, "invalid end state"),
}


@pytest.fixture(scope="module")
def tools() -> tuple[str, str]:
    """Spin and a C compiler. CI installs them where it may, and else says that it did not."""
    spin, compiler = shutil.which("spin"), shutil.which("gcc") or shutil.which("cc")
    if spin is None and os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "spin"]
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False)
        subprocess.run(command, capture_output=True, check=False)
        spin = shutil.which("spin")
    if spin is None or compiler is None:
        pytest.skip("needs Spin and a C compiler (Debian: apt-get install spin gcc libc6-dev)")
    return spin, compiler


def search(tools: tuple[str, str], folder: Path, *defines: str) -> tuple[str, int]:
    """Look at all states; gives the first error, or nothing, and how many states there were."""
    spin, compiler = tools
    options = [f"-D{one}" for one in defines]
    run = {"cwd": folder, "check": True, "capture_output": True, "timeout": PATIENCE}
    subprocess.run([spin, "-a", *options, str(MODEL)], **run)  # type: ignore[call-overload]
    level = "-O0" if any(one.startswith("MUTANT") for one in defines) else "-O2"  # short searches
    build = [compiler, level, "-w", "-DSAFETY", "-o", "pan", "pan.c"]
    subprocess.run(build, **run)  # type: ignore[call-overload]
    done = subprocess.run(["./pan", "-m100000", "-w22"], **run)  # type: ignore[call-overload]
    said = done.stdout.decode()
    assert "max search depth too small" not in said
    states = re.search(r"(\d+) states, stored", said)
    assert states is not None, said
    error = re.search(r"^pan:1: (.*) \(at depth", said, re.MULTILINE)
    assert (error is None) == ("errors: 0" in said), said
    return error[1] if error else "", int(states[1])


@pytest.mark.parametrize("payload", [1, 2], ids=["copies", "another payload"])
def test_no_interleaving_breaks_the_protocol(
    tools: tuple[str, str], tmp_path: Path, payload: int
) -> None:
    """Claims, leases, takeovers, crashes, zombies and transactions: every invariant holds."""
    error, states = search(tools, tmp_path, f"OTHER_PAYLOAD={payload}")
    assert error == ""
    assert states > 10_000


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_known_mistake_is_found(tools: tuple[str, str], tmp_path: Path, mutant: str) -> None:
    """The model with one mistake breaks the invariant that the mistake is about."""
    payload, invariant = MUTANTS[mutant]
    error, _ = search(tools, tmp_path, f"OTHER_PAYLOAD={payload}", f"MUTANT_{mutant}")
    assert invariant in error


def test_every_mistake_of_the_model_is_tried() -> None:
    """The list above has all of them."""
    assert set(re.findall(r"MUTANT_([A-Z_]+[A-Z])", MODEL.read_text())) == set(MUTANTS)
