"""The demos: what they count, that they can fail, and that they leave nothing behind."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST_LINE = re.compile(
    r"deliveries (\d+), duplicates (\d+), takeovers (\d+), effects (\d+), lost (\d+), doubled (\d+)"
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs process groups and signals")


def start(folder: Path, *options: str, demo: str = "storm_demo.py") -> subprocess.Popen[str]:
    """A demo in a process group of its own, with its temporary files under ``folder``."""
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / demo), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def numbers(output: str) -> tuple[int, ...]:
    found = LAST_LINE.fullmatch(output.splitlines()[-1])
    assert found is not None, output
    return tuple(map(int, found.groups()))


def left_behind(demo: subprocess.Popen[str], folder: Path) -> list[str]:
    """Files in ``folder``, and processes of the demo's group; the demo itself has ended."""
    left = [str(path) for path in folder.rglob("*")]
    try:
        os.killpg(demo.pid, 0)
    except ProcessLookupError:
        return left
    return [*left, f"a process of group {demo.pid}"]


def test_storm_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Duplicates, concurrent copies and killed workers: every event has one effect."""
    demo = start(tmp_path, "--events", "300")
    output, _ = demo.communicate(timeout=100)
    deliveries, duplicates, takeovers, effects, lost, doubled = numbers(output)
    assert demo.returncode == 0, output
    assert (effects, lost, doubled) == (300, 0, 0)
    assert deliveries > effects + duplicates
    assert duplicates >= 90
    assert takeovers >= 1
    assert re.search(r"workers killed with -9 +[1-9]", output), output
    assert re.search(r"401, bad signature +[1-9]", output), output
    assert left_behind(demo, tmp_path) == []


@pytest.mark.parametrize(
    "wrong, lost_some, doubled_some",
    [("unmarked", False, True), ("first-seen", True, False)],
)
def test_demo_finds_what_a_wrong_receiver_does(
    tmp_path: Path, wrong: str, lost_some: bool, doubled_some: bool
) -> None:
    """A receiver without marks doubles, one that marks first loses: the demo says so and fails."""
    demo = start(tmp_path, "--events", "60", "--kills", "1", f"--break={wrong}")
    output, _ = demo.communicate(timeout=100)
    *_, lost, doubled = numbers(output)
    assert demo.returncode == 1, output
    assert (lost > 0, doubled > 0) == (lost_some, doubled_some)
    assert left_behind(demo, tmp_path) == []


@pytest.mark.parametrize("after", ["planned deliveries", "killed with -9"])
def test_interrupt_leaves_nothing_behind(tmp_path: Path, after: str) -> None:
    """Ctrl-C at the start or in mid-storm ends every process and removes the files."""
    demo = start(tmp_path, "--events", "3000", "--kills", "30")
    assert demo.stdout is not None
    for line in demo.stdout:
        if after in line:
            break
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: the whole group gets it
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert left_behind(demo, tmp_path) == []


@pytest.mark.skipif(
    not os.environ.get("ONCEKEY_TEST_LONG"),
    reason="seconds of work: ONCEKEY_TEST_LONG=1, make demo",
)
def test_gateway_demo_compares_with_and_without(tmp_path: Path) -> None:
    """The gateway and its workers are killed, and nothing is lost or doubled; without, it is."""
    options = ("--events", "200", "--kills", "1")
    demo = start(tmp_path, *options, demo="gateway_demo.py")
    output, _ = demo.communicate(timeout=170)
    deliveries, duplicates, takeovers, effects, lost, doubled = numbers(output)
    assert demo.returncode == 0, output
    assert (effects, lost, doubled) == (200, 0, 0)
    assert deliveries >= effects + duplicates
    assert duplicates >= 60
    assert takeovers >= 1
    assert "/_oncekey" in output
    assert "the gateway killed with -9" in output
    assert "PASS: " in output.splitlines()[-2]
    assert re.search(r"twice or more +[1-9]\d* +0\n", output), output
    assert re.search(r"that were lost +[1-9]\d* +0\n", output), output
    assert left_behind(demo, tmp_path) == []


@pytest.mark.skipif(
    not os.environ.get("ONCEKEY_TEST_LONG"), reason="seconds of work: ONCEKEY_TEST_LONG=1"
)
def test_interrupted_gateway_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C in mid-traffic ends the gateway and its workers, and removes the files."""
    demo = start(tmp_path, demo="gateway_demo.py")
    assert demo.stdout is not None
    for line in demo.stdout:
        if "killed with -9" in line:
            break
    os.killpg(demo.pid, signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert left_behind(demo, tmp_path) == []


@pytest.mark.parametrize("fault", ["lost", "doubled", "forged"])
def test_gateway_demo_can_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """One event lost, doubled or forged is a FAIL in words, in the last line and in the code."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = importlib.import_module("gateway_demo")
    names = ("events", "killed", "effects", "doubled", "lost", "forged", "takeovers")
    good = dict.fromkeys(names, 0)
    assert demo.verdict(good, good, 10, 3) == 0
    assert "\nPASS: " in capsys.readouterr().out
    assert demo.verdict({**good, fault: 1}, good, 10, 3) == 1
    said = capsys.readouterr().out
    assert "\nFAIL: " in said
    assert numbers(said)[4:] == (int(fault == "lost"), int(fault == "doubled"))
