"""Makes known mistakes in copies of the source, one at a time: a test must notice each.

The mistakes are in ``tests/mutants.toml``: a file, what is replaced by what, and the test that
fails then. First every named test must pass on the source as it is. ``make mutants`` runs it.

    python scripts/mutants.py                  # all
    python scripts/mutants.py --only NAME      # one
    python scripts/mutants.py --docs           # and write docs/explanation/mutants.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/mutants.toml"
PAGE = ROOT / "docs/explanation/mutants.md"
PATIENCE = 600.0  # seconds: only a mutant that never ends takes so long, on a busy machine too


class Mutant(NamedTuple):
    """A mistake, and the test that notices it."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def source(self) -> str:
        """The file with the mistake in it.

        Raises:
            ValueError: What is to be replaced is not there, or not only once.
        """
        text = (ROOT / "src/oncekey" / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: found {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """The table."""
    found = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**one) for one in found]


class Outcome(NamedTuple):
    """What the test said of a mutant."""

    mutant: Mutant
    caught: bool
    seconds: float
    said: str


def _pytest(source: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # The copy comes first, and is not what the tests were installed for.
    kept = {name: value for name, value in os.environ.items() if name != "ONCEKEY_TEST_INSTALLED"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", *tests],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


class Copies:
    """A copy of the source for each thread; a mutant is put in and taken out again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = threading.local()

    def _copy(self) -> Path:
        if not hasattr(self._own, "source"):
            self._own.source = Path(tempfile.mkdtemp(dir=self._folder))
            shutil.copytree(ROOT / "src/oncekey", self._own.source / "oncekey")
        found: Path = self._own.source
        return found

    def tried(self, mutant: Mutant) -> Outcome:
        """Run the test that must fail. One that can't even begin has noticed nothing."""
        source = self._copy()
        file = source / "oncekey" / mutant.file
        before = file.read_text(encoding="utf-8")
        begun = time.monotonic()
        try:
            file.write_text(mutant.source(), encoding="utf-8")
            done = _pytest(source, [mutant.test])
        except subprocess.TimeoutExpired:
            return Outcome(mutant, False, time.monotonic() - begun, "no end")
        finally:
            file.write_text(before, encoding="utf-8")
        caught = done.returncode == 1 and " failed" in done.stdout
        return Outcome(mutant, caught, time.monotonic() - begun, done.stdout[-1500:])


def page(outcomes: Sequence[Outcome]) -> str:
    """The list for the documentation."""
    lines = [
        "# Mutants",
        "",
        "Mistakes that `make mutants` makes in copies of the source, one at a time, and the test",
        "that fails then. They are in `tests/mutants.toml`; the first are the races that receivers",
        "are known for: check then put, mark before the handler, process then mark.",
        "",
        f"{sum(one.caught for one in outcomes)} of {len(outcomes)} are caught, each by one test.",
        "",
        "| mistake | file | caught by |",
        "|---|---|---|",
    ]
    for one in outcomes:
        file, _, test = one.mutant.test.partition("::")
        shown = f"`{file.removeprefix('tests/')}`<br>`{test.partition('[')[0]}`"
        lines.append(f"| {one.mutant.name} | `{one.mutant.file}` | {shown} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Try them, print a line for each, and exit with 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", action="append", metavar="NAME", help="only this mutant")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="at once; default 2")
    parser.add_argument("--docs", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args(argv)
    chosen = [one for one in mutants() if not arguments.only or one.name in arguments.only]
    if not chosen:
        parser.error("there is no such mutant")
    for one in chosen:
        one.source()
    sound = _pytest(ROOT / "src", sorted({one.test for one in chosen}))
    if sound.returncode:
        print(sound.stdout[-3000:], file=sys.stderr)
        print("the tests do not pass on the source as it is", file=sys.stderr)
        return 2
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        for outcome in pool.map(Copies(Path(folder)).tried, chosen):
            outcomes.append(outcome)
            word = "caught" if outcome.caught else "SURVIVED"
            print(f"{word:<9} {outcome.seconds:5.1f} s  {outcome.mutant.name}", flush=True)
            if not outcome.caught:
                print(outcome.said)
    alive = [one for one in outcomes if not one.caught]
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} mutants caught")
    if arguments.docs and not alive:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
