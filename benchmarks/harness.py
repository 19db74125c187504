"""What the benchmarks share: interleaved rounds, medians, ratios, tables, and the peers.

A case is a function that sets up, times one or more operations, tears down, and returns seconds
per operation by the operation's name. A round runs every case once, in a shuffled order, so that
whatever else the machine does hits all of them alike. A ratio is taken within a round, and the
median of those is what is shown.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import math
import random
import statistics
import sys
import tempfile
import threading
import time
import types
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

Case = Callable[[], dict[str, float]]
Samples = dict[str, dict[str, list[float]]]  # operation, case, seconds per operation of each round

# All that was measured in this run: part, operation, case, seconds per operation of each round.
RECORDED: dict[str, Samples] = {}
# Milliseconds that single calls took, where that is looked at: part, operation, case, each round.
LATENCIES: dict[str, dict[str, dict[str, list[list[float]]]]] = {}

PEERS = ("adcp", "aiosqlite", "cachetools", "idemkit", "jcs", "orjson", "rfc8785")


@dataclasses.dataclass(frozen=True)
class Options:
    """How much to run, and where.

    Attributes:
        effort: ``quick``, ``normal`` or ``full``.
        seed: Decides the order of the cases in each round, and the keys.
        directory: Where the database files go.
    """

    effort: str = "normal"
    seed: int = 1
    directory: str = dataclasses.field(default_factory=tempfile.gettempdir)

    def pick(self, quick: Any, normal: Any, full: Any = None) -> Any:
        """Return the value for this effort; ``full`` is like ``normal`` unless given."""
        if self.effort == "quick":
            return quick
        return full if self.effort == "full" and full is not None else normal


# ------------------------------------------------------------------------------------------ peers


@functools.cache
def version(package: str) -> str | None:
    """The installed version of a package, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def peer(module: str) -> Any:
    """A peer's module, or ``None`` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


@functools.cache
def adcp() -> Any:
    """The idempotency package of adcp 9 or newer, or ``None``.

    Its parents import every model of the protocol, which takes longer than all the measuring:
    they are put in place unexecuted.
    """
    try:
        for name in ("adcp", "adcp.server"):
            spec = importlib.util.find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                return None
            if name not in sys.modules:
                package = types.ModuleType(name)
                package.__path__ = list(spec.submodule_search_locations)
                package.__spec__ = spec
                sys.modules[name] = package
        module = importlib.import_module("adcp.server.idempotency")
    except ImportError:
        return None
    return module if hasattr(module.MemoryBackend, "put_if_absent") else None


def left_out(*packages: str) -> str:
    """A sentence that names the peers which are not installed, or nothing."""
    missing = [name for name in packages if version(name) is None]
    return f"Not installed, left out: {', '.join(missing)}.\n" if missing else ""


# --------------------------------------------------------------------------------------- progress


def progress(text: str = "") -> None:
    """Show what is going on, on a terminal only. Without a text: wipe the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------- measuring


def new_keys(count: int, seed: object) -> list[str]:
    """Make ``count`` different keys in the form of UUIDs; the same ones for the same seed."""
    text = random.Random(repr(seed)).randbytes(16 * count).hex()
    return [
        f"{text[at : at + 8]}-{text[at + 8 : at + 12]}-{text[at + 12 : at + 16]}-"
        f"{text[at + 16 : at + 20]}-{text[at + 20 : at + 32]}"
        for at in range(0, 32 * count, 32)
    ]


def measure(
    title: str, cases: dict[str, Case], *, rounds: int, seconds: float, seed: int
) -> Samples:
    """Time every case once a round.

    Stops after ``rounds``, or with the round in which ``seconds`` ran out; but not before the
    third, unless three times as much ran out. What comes before a comma in ``title`` is the part of
    the run that this is recorded under; what comes behind is said of each operation.
    """
    samples: Samples = {}
    order = list(cases)
    start, number = time.perf_counter(), 0
    for number in range(rounds):
        taken = time.perf_counter() - start
        if taken > (seconds if number >= 3 else 3 * seconds):
            number -= 1
            break
        random.Random(f"{seed}/{number}").shuffle(order)
        for name in order:
            progress(f"{title}: round {number + 1} of {rounds}, {name}")
            gc.collect()
            for operation, taken in cases[name]().items():
                samples.setdefault(operation, {}).setdefault(name, []).append(taken)
    progress()
    print(f"{title}: {number + 1} rounds, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    part, _, kind = title.partition(", ")
    found = {
        operation: {name: by_case[name] for name in cases if name in by_case}
        for operation, by_case in samples.items()
    }
    for operation, by_case in found.items():
        named = f"{kind}: {operation}" if kind else operation
        RECORDED.setdefault(part.split()[0], {}).setdefault(named, {}).update(by_case)
    return found


class Timed(NamedTuple):
    """How long calls took.

    Attributes:
        each: Seconds a call, by the clock, while that many callers were at it.
        done: The keys of those that were made: no more are begun when the time is up.
    """

    each: float
    done: list[str]


def _outcome(start: int, done: list[list[str]], wrong: list[Any]) -> Timed:
    taken = (time.perf_counter_ns() - start) / 1e9
    if wrong:
        raise SystemExit(f"{len(wrong)} wrong answers, such as {wrong[0]!r}")
    keys = [key for part in done for key in part]
    return Timed(taken / len(keys), keys)


def in_threads(
    op: Callable[[str], Any], keys: list[str], callers: int, seconds: float = math.inf
) -> Timed:
    """Call ``op`` for each key, by that many threads that call one after another."""
    started: list[int] = []
    barrier = threading.Barrier(callers, action=lambda: started.append(time.perf_counter_ns()))
    wrong: list[Any] = []
    done: list[list[str]] = [[] for _ in range(callers)]
    now = time.perf_counter

    def work(part: list[str], made: list[str]) -> None:
        barrier.wait()
        end = now() + seconds
        try:
            for key in part:
                if op(key) is not True:
                    wrong.append(key)
                made.append(key)
                if now() > end:
                    break
        except Exception as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=work, args=(keys[at::callers], made))
        for at, made in enumerate(done)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _outcome(started[0], done, wrong)


async def in_tasks(
    op: Callable[[str], Awaitable[Any]], keys: list[str], callers: int, seconds: float = math.inf
) -> Timed:
    """Call ``op`` for each key, by that many tasks that call one after another."""
    wrong: list[str] = []
    done: list[list[str]] = [[] for _ in range(callers)]
    now = time.perf_counter
    end = now() + seconds

    async def work(part: list[str], made: list[str]) -> None:
        for key in part:
            if await op(key) is not True:
                wrong.append(key)
            made.append(key)
            if now() > end:
                break

    start = time.perf_counter_ns()
    if callers == 1:
        await work(keys, done[0])
    else:
        await asyncio.gather(*(work(keys[at::callers], made) for at, made in enumerate(done)))
    return _outcome(start, done, wrong)


def latencies(part: str, operation: str, case: str, taken: Iterable[float]) -> None:
    """Note what the single calls of a round took, in seconds."""
    kept = LATENCIES.setdefault(part, {}).setdefault(operation, {}).setdefault(case, [])
    kept.append([one * 1e3 for one in taken])


def ratios(taken: Sequence[float], reference: Sequence[float]) -> list[float]:
    """How many times faster than the reference each round was."""
    return [b / a for a, b in zip(taken, reference, strict=True)]


def percentile(values: Iterable[float], percent: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(percent / 100 * len(ranked)))]


# ----------------------------------------------------------------------------------------- tables


def rate(per_second: float) -> str:
    """A number of operations a second, with three digits that count."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if per_second >= size:
            value = per_second / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{per_second:.0f}"


def ratio(values: Sequence[float]) -> str:
    """The median of the rounds' ratios, and the range."""
    digits = 2 if statistics.median(values) < 10 else 1 if statistics.median(values) < 100 else 0
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 2) -> str:
    """A Markdown table; the columns after the first ``text_columns`` are numbers."""
    marks = ["---" if at < text_columns else "---:" for at in range(len(header))]
    lines = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    return "".join((lines[0], f"|{'|'.join(marks)}|\n", *lines[1:]))


def speed_table(samples: Samples, references: dict[str, str]) -> str:
    """Rates, and ratios to the named references (heading: case) of the same rounds."""
    rows = []
    known = {
        heading: case
        for heading, case in references.items()
        if any(case in by_case for by_case in samples.values())
    }
    for operation, by_case in samples.items():
        for name, taken in by_case.items():
            row = [operation, name, rate(1 / statistics.median(taken))]
            for case in known.values():
                there = by_case.get(case)
                row.append("" if there is None or case == name else ratio(ratios(taken, there)))
            rows.append(row)
    return markdown(("operation", "implementation", "a second", *known), rows)


def middle_percentile(rounds: Iterable[Iterable[float]], percent: float) -> float:
    """A percentile of each round, and of those the median: one bad round decides nothing."""
    return statistics.median(percentile(taken, percent) for taken in rounds)


def latency_table(part: str) -> str:
    """What single calls took, where that was looked at."""
    rows = [
        (operation, name, *(f"{middle_percentile(rounds, at):.2f} ms" for at in (50, 99)))
        for operation, by_case in LATENCIES.get(part, {}).items()
        for name, rounds in by_case.items()
    ]
    return markdown(("operation", "implementation", "p50", "p99"), rows) if rows else ""
