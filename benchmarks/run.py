"""Run the benchmarks and print them as Markdown.

python benchmarks/run.py                      # everything, about ten minutes
python benchmarks/run.py memory sqlite        # some parts
python benchmarks/run.py --quick              # a first impression, about two minutes
python benchmarks/run.py --full               # more rounds, five million keys: half an hour, 4 GB
python benchmarks/run.py --write docs/reference/performance.md
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import re
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bench_canonical
import bench_http
import bench_memory
import bench_postgres
import bench_receiver
import bench_redis
import bench_sqlite
import harness
from harness import Options

import oncekey

MARKED = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)


def canonical(options: Options) -> str:
    """Run ``bench_canonical.py``, which has a command line of its own."""
    harness.adcp()  # so that it finds the part it needs, without the rest
    harness.progress("canonical hash: under a minute")
    output, arguments = io.StringIO(), sys.argv
    sys.argv = ["bench_canonical.py", *options.pick(["--quick"], [])]
    try:
        with contextlib.redirect_stdout(output):
            bench_canonical.main()
    finally:
        sys.argv = arguments
        harness.progress()
    table = output.getvalue()[output.getvalue().index("|") :]
    return f"""### Canonical hash

{harness.left_out("adcp", "jcs", "rfc8785")}
SHA-256 of the canonical form (RFC 8785) of an object, of a request without the fields that do not \
count, and of JSON text.

{table}"""


PARTS: dict[str, Callable[[Options], str]] = {
    "memory": bench_memory.report,
    "sqlite": bench_sqlite.report,
    "postgres": bench_postgres.report,
    "redis": bench_redis.report,
    "receiver": bench_receiver.report,
    "http": bench_http.report,
    "canonical": canonical,
}


def environment(options: Options) -> str:
    """What the numbers depend on."""
    peers = ", ".join(
        f"{name} {harness.version(name)}" for name in harness.PEERS if harness.version(name)
    )
    cores = os.cpu_count() or 1
    load = ""
    if hasattr(os, "getloadavg"):
        busy = os.getloadavg()[0]
        quiet = "quiet" if busy < cores / 4 else "other work was running"
        load = f", load {busy:.1f} at the start ({quiet})"
    rows = [
        ("oncekey", oncekey.__version__),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("SQLite", sqlite3.sqlite_version),
        ("peers", peers or "none installed"),
        ("machine", f"{platform.system()} {platform.machine()}, {cores} cores{load}"),
        ("effort", f"{options.effort}, seed {options.seed}"),
    ]
    return harness.markdown(("what", "which"), rows)


def write(path: Path, results: str) -> None:
    """Put the results between the markers of a Markdown file."""
    text = path.read_text("utf-8")
    path.write_text(MARKED.sub(lambda found: f"{found[1]}\n{results}\n{found[2]}", text), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks and print them as Markdown.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"out of: {', '.join(PARTS)}")
    effort = parser.add_mutually_exclusive_group()
    for name, meaning in (
        ("quick", "a first impression, about two minutes"),
        ("full", "more rounds and up to five million keys: half an hour, 4 GB of memory"),
    ):
        effort.add_argument(
            f"--{name}", action="store_const", dest="effort", const=name, help=meaning
        )
    parser.add_argument("--seed", type=int, default=1, help="order of the cases, and the keys")
    parser.add_argument("--dir", help="where database files go (default: the temporary directory)")
    parser.add_argument("--write", type=Path, metavar="PATH", help="a Markdown file with markers")
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if given.write and not (
        given.write.is_file() and MARKED.search(given.write.read_text("utf-8"))
    ):
        parser.error(f"{given.write} has no <!-- results --> and <!-- /results --> lines")
    options = Options(effort=given.effort or "normal", seed=given.seed)
    if given.dir:
        options = Options(options.effort, options.seed, given.dir)

    start = time.perf_counter()
    sections = [environment(options)]
    print(sections[0], flush=True)
    failed = False
    for name, part in PARTS.items():
        if given.parts and name not in given.parts:
            continue
        try:
            section = part(options)
        except SystemExit as error:  # a case gave wrong answers: its numbers would mean nothing
            harness.progress()
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        section = re.sub(r"\n{3,}", "\n\n", section).strip() + "\n"
        print(section, flush=True)
        sections.append(section)
    print(f"Took {time.perf_counter() - start:.0f} s.", file=sys.stderr)
    if given.write and not failed:
        write(given.write, "\n".join(sections))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
