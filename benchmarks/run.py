"""Run the benchmarks, print them as Markdown, keep them as JSON and draw them.

python benchmarks/run.py                      # everything, about ten minutes
python benchmarks/run.py memory sqlite        # some parts
python benchmarks/run.py --quick              # a first impression, about two minutes
python benchmarks/run.py --full               # more rounds: half an hour

A whole run that is not quick is kept in ``results.json``, and drawn into docs/reference/plots. With
``--write`` so is any other; of some parts, beside what is there of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import re
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_calls
import bench_canonical
import bench_gateway
import bench_http
import bench_memory
import bench_postgres
import bench_receiver
import bench_redis
import bench_sqlite
import harness
import plots
import targets
from harness import Options

import oncekey

RESULTS = Path(__file__).with_name("results.json")


def canonical(options: Options) -> str:
    """Run ``bench_canonical.py``, which has a command line of its own."""
    harness.adcp()  # so that it finds the part it needs, without the rest
    harness.progress("canonical hash: under a minute")
    output, arguments = io.StringIO(), sys.argv
    sys.argv = ["bench_canonical.py", *options.pick(["--quick"], [])]
    try:
        with contextlib.redirect_stdout(output):
            harness.RECORDED["canonical"] = bench_canonical.main()
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
    "calls": bench_calls.report,
    "memory": bench_memory.report,
    "sqlite": bench_sqlite.report,
    "postgres": bench_postgres.report,
    "redis": bench_redis.report,
    "receiver": bench_receiver.report,
    "http": bench_http.report,
    "canonical": canonical,
    "gateway": bench_gateway.report,
}


def environment(options: Options) -> dict[str, str]:
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
    return {
        "oncekey": oncekey.__version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "SQLite": sqlite3.sqlite_version,
        "peers": peers or "none installed",
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores{load}",
        "effort": f"{options.effort}, seed {options.seed}",
    }


def rounded(value: float) -> float:
    """Four digits that count."""
    return float(f"{value:.4g}")


def percentiles(latencies: dict[str, list[list[float]]], case: str) -> dict[str, float]:
    """What single calls of a case took, where that was looked at."""
    if case not in latencies:
        return {}
    return {
        f"p{percent}_ms": rounded(harness.middle_percentile(latencies[case], percent))
        for percent in (50, 99)
    }


def results() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All that was measured, for programs to read: the parts, and the targets."""
    parts: dict[str, Any] = {}
    for part, operations in harness.RECORDED.items():
        for operation, cases in operations.items():
            latencies = harness.LATENCIES.get(part, {}).get(operation, {})
            parts.setdefault(part, {})[operation] = {
                case: {"seconds": [rounded(one) for one in taken], **percentiles(latencies, case)}
                for case, taken in cases.items()
            }
    verdicts = [
        verdict
        for part, operations in harness.RECORDED.items()
        for verdict in targets.judged(part, operations)
    ]
    wanted = [
        verdict.target._asdict()
        | {
            "ratio": verdict.target.reference not in targets.ABSOLUTE,
            "bound": verdict.bound,
            "measured": round(statistics.median(verdict.measured), 3),
            "reached": round(verdict.reached, 3),
            "met": verdict.met,
        }
        for verdict in verdicts
    ]
    return parts, wanted


def write(where: dict[str, str]) -> None:
    """Keep the results, beside those of parts that did not run now, and draw them."""
    kept: dict[str, Any] = {"environments": {}, "parts": {}, "targets": []}
    if RESULTS.exists():
        kept = json.loads(RESULTS.read_text("utf-8"))
    parts, wanted = results()
    kept["environments"] |= dict.fromkeys(parts, where)
    kept["parts"] |= parts
    kept["targets"] = [one for one in kept["targets"] if one["part"] not in parts] + wanted
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    plots.draw()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks and print them as Markdown.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"out of: {', '.join(PARTS)}")
    effort = parser.add_mutually_exclusive_group()
    for name, meaning in (
        ("quick", "a first impression, about two minutes"),
        ("full", "more rounds: half an hour"),
    ):
        effort.add_argument(
            f"--{name}", action="store_const", dest="effort", const=name, help=meaning
        )
    parser.add_argument("--seed", type=int, default=1, help="order of the cases, and the keys")
    parser.add_argument("--dir", help="where database files go (default: the temporary directory)")
    parser.add_argument("--write", action="store_true", help="keep a quick or partial run too")
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    options = Options(effort=given.effort or "normal", seed=given.seed)
    if given.dir:
        options = Options(options.effort, options.seed, given.dir)

    start = time.perf_counter()
    where = environment(options)
    print(harness.markdown(("what", "which"), where.items()), flush=True)
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
    print(f"Took {time.perf_counter() - start:.0f} s.", file=sys.stderr)
    whole = not given.parts and options.effort != "quick"
    if (whole or given.write) and not failed:
        write(where)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
