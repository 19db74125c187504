"""Hostile headers and bodies for every signature scheme: verdicts only, never an exception.

Run by ``make fuzz``. The deliveries are genuine ones, damaged by a generator with a fixed seed
(``tests/signatures/hostile.py``); a quarter of them are signed after the damage, as whoever holds
the key could send them. One in eight goes through a receiver, whose answer must be no 5xx.

    python scripts/fuzz.py                       200,000 for each scheme
    python scripts/fuzz.py --number 5000 stripe  fewer, of one scheme
    python scripts/fuzz.py --atheris 60 stripe   60 seconds, guided by coverage; needs atheris
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CHUNK = 10_000


class Job(NamedTuple):
    """A part of one scheme's deliveries."""

    name: str
    part: int
    number: int
    seed: int


class Done(NamedTuple):
    """What came of a job."""

    job: Job
    seconds: float
    codes: Counter[str]
    failure: str


def run(job: Job) -> Done:
    """Try each delivery of a job; the first failure ends it."""
    from tests.signatures.hostile import check, check_answer, hostile, seeded
    from tests.signatures.schemes import scheme

    logging.disable()  # a warning for each malformed body is as it should be
    one, codes = scheme(job.name), Counter[str]()
    choose = seeded(random.Random(f"{job.seed}-{job.name}-{job.part}"))
    begun = time.process_time()
    for number in range(job.number):
        case = hostile(job.name, choose)
        try:
            if number % 8:
                codes[check(one, case).code] += 1
            else:
                answer = check_answer(one, case)
                codes[answer.code or "ok"] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
            failure = f"{job}, number {number}: {type(error).__name__}: {error}\n{case!r}"
            return Done(job, time.process_time() - begun, codes, failure)
    return Done(job, time.process_time() - begun, codes, "")


def fuzz(names: list[str], number: int, seed: int, workers: int) -> int:
    """Run all jobs, with a line for each scheme that is done: seconds are those of a processor."""
    jobs = [
        Job(name, part, min(CHUNK, number - part * CHUNK), seed)
        for name in names
        for part in range(-(-number // CHUNK))
    ]
    print(f"{number:,} deliveries for each of {len(names)} schemes, seed {seed}, {workers} workers")
    left = Counter(job.name for job in jobs)
    seconds: dict[str, float] = Counter()
    codes: dict[str, Counter[str]] = {name: Counter() for name in names}
    begun, failures, total = time.perf_counter(), 0, 0
    with multiprocessing.Pool(workers) as pool:
        for done in pool.imap_unordered(run, jobs):
            name = done.job.name
            left[name] -= 1
            seconds[name] += done.seconds
            codes[name] += done.codes
            if done.failure:
                failures += 1
                print(f"FAILED {done.failure}", flush=True)
            if not left[name]:
                tried = sum(codes[name].values())
                total += tried
                rate = tried / seconds[name] if seconds[name] else 0
                most = ", ".join(f"{code} {times:,}" for code, times in codes[name].most_common(4))
                print(
                    f"{name:18} {tried:>9,}  {seconds[name]:6.1f} s  {rate:>7,.0f}/s  "
                    f"{len(codes[name]):2} codes: {most}",
                    flush=True,
                )
    print(f"{total:,} verdicts in {time.perf_counter() - begun:.0f} s, {failures} failures")
    return 1 if failures else 0


# --- guided by coverage --------------------------------------------------------------------------


def fuzz_guided(names: list[str], seconds: int, seed: int) -> int:
    """A process of atheris for each scheme, one after the other."""
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        print(f"== {name}, {seconds} s", flush=True)
        command = [sys.executable, __file__, "--guided", name, f"-max_total_time={seconds}"]
        command += [f"-seed={seed}", "-max_len=512", "-print_final_stats=1", "-verbosity=0"]
        command += [f"-artifact_prefix={tempfile.gettempdir()}/oncekey-fuzz-{name}-"]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def guided(name: str, arguments: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    logging.disable()
    with atheris.instrument_imports(include=["oncekey.signatures", "oncekey.receiver"]):
        from tests.signatures.hostile import Chooser, check, check_answer, hostile
        from tests.signatures.schemes import scheme

        one = scheme(name)

    def test_one(data: bytes) -> None:
        given = atheris.FuzzedDataProvider(data)
        choose = Chooser(
            given.ConsumeIntInRange,
            lambda: given.ConsumeUnicode(6),
            lambda: given.ConsumeBytes(6),
        )
        case = hostile(name, choose)
        check(one, case)
        check_answer(one, case)

    atheris.Setup([sys.argv[0], *arguments], test_one)
    atheris.Fuzz()


def main() -> int:
    """Read the command line."""
    if sys.argv[1:2] == ["--guided"]:
        guided(sys.argv[2], sys.argv[3:])
    from tests.signatures.schemes import NAMES

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schemes", nargs="*", metavar="SCHEME", help="all of them if none is given")
    parser.add_argument("--number", type=int, default=200_000, help="deliveries for each scheme")
    parser.add_argument("--seed", type=int, default=20261116)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--atheris", type=int, metavar="SECONDS", help="guided, so long a scheme")
    given: Any = parser.parse_args()
    unknown = sorted(set(given.schemes) - set(NAMES))
    if unknown:
        parser.error(f"no scheme {', '.join(unknown)}; there are {', '.join(NAMES)}")
    names = given.schemes or NAMES
    if given.atheris:
        return fuzz_guided(names, given.atheris, given.seed)
    return fuzz(names, given.number, given.seed, given.workers)


if __name__ == "__main__":
    sys.exit(main())
