"""Runs a gateway at a fixed rate for long and looks whether it grows: ``make soak``.

    python scripts/soak_gateway.py                                # 20 minutes on SQLite
    python scripts/soak_gateway.py --store postgres --rate 100    # on PostgreSQL, faster
    python scripts/soak_gateway.py --minutes 2                    # a first impression

Signed events come at the rate, one in ten twice and one in fifty with a wrong signature; the app
fails one in fifty at first; somebody looks at the API and at /metrics. It passes if the memory and
the descriptors of the process are in the last quarter what they were in the second, and if every
event was delivered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.server.process import TOKEN, event  # noqa: E402
from tests.server.storm import Gateway, started, until_delivered  # noqa: E402
from tests.server.traffic import Line, Sink  # noqa: E402
from tests.servers.postgres import make_database, running  # noqa: E402

from oncekey.inbox import open_inbox  # noqa: E402

CONFIG = """
store = "{store}"
[sources.shop]
provider = "stripe"
secret_env = "SHOP_SECRET"
targets = ["web"]
[targets.web]
url = "{url}"
allow_private = true
first_delay = 0.5
breaker_after = 0
"""
LINES = 8
EVERY = 5.0  # seconds between samples
GROWTH = 1.05
MORE_DESCRIPTORS = 3


@dataclasses.dataclass(frozen=True)
class Sample:
    """The process at a moment."""

    at: float
    rss_kb: int
    descriptors: int
    threads: int
    cpu_seconds: float


def sampled(process: int, began: float = 0.0) -> Sample:
    """What /proc says of a process."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return Sample(
        round(time.monotonic() - began, 1),
        int(status["VmRSS"].split()[0]),
        len(list(Path(f"/proc/{process}/fd").iterdir())),
        int(status["Threads"]),
        sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"),
    )


class Traffic:
    """Events at a rate, by a few connections that stay open."""

    def __init__(self, address: str, rate: float) -> None:
        self._address = address
        self._rate = rate
        self._numbers = itertools.count()
        self.sent: set[str] = set()
        self.answers: dict[int, int] = {}

    async def run(self, seconds: float) -> None:
        """Send until the time is over."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(LINES):
                group.create_task(self._line(began, began + seconds))
            group.create_task(self._look(began + seconds))

    async def _line(self, began: float, ends: float) -> None:
        async with Line(self._address) as line:
            for number in self._numbers:
                due = began + number / self._rate
                if due > ends:
                    return
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._send(line, f"evt_{number}", random.random())

    async def _send(self, line: Line, name: str, chance: float) -> None:
        one = event(name, self._address)
        if chance < 0.02:
            one = dataclasses.replace(one, body=one.body + b" ")
        else:
            self.sent.add(name)
        for _ in range(2 if chance > 0.9 else 1):
            status = await line.post(one)
            self.answers[status] = self.answers.get(status, 0) + 1

    async def _look(self, ends: float) -> None:
        """What a dashboard and a monitor do."""
        while time.monotonic() < ends:
            async with Line(self._address) as line:
                for path in ("/metrics", "/_oncekey/api/v1/events?limit=50", "/healthz"):
                    assert await line.get(path, TOKEN) == 200
            await asyncio.sleep(EVERY)


async def soak(folder: Path, store: str, minutes: float, rate: float) -> tuple[list[Sample], str]:
    """Run it; the samples, and what is wrong with the counts, if anything."""
    async with Sink(fails=0.02).serving() as sink:
        config = folder / "gateway.toml"
        config.write_text(CONFIG.format(store=store, url=sink.url))
        gateway = Gateway(config, folder / "gateway.log")
        async with started([gateway]):
            traffic = Traffic(gateway.address, rate)
            began = time.monotonic()
            task = asyncio.create_task(traffic.run(minutes * 60))
            samples = []
            while not task.done():
                await asyncio.wait([task], timeout=EVERY)
                samples.append(sampled(gateway.pid, began))
            await task
            await until_delivered(store)
            code = await gateway.stop()
        faults = []
        if set(sink.effects.values()) != traffic.sent:
            faults.append(f"{len(traffic.sent)} events, {len(sink.effects)} delivered")
        if code or "Traceback" in (folder / "gateway.log").read_text():
            faults.append(f"it ended with {code}, and said {folder / 'gateway.log'}")
        if unknown := set(traffic.answers) - {200, 401}:
            faults.append(f"answers with {sorted(unknown)}")
        print(f"{len(traffic.sent):,} events, answers {traffic.answers}", flush=True)
    return samples, "; ".join(faults)


def judged(samples: list[Sample]) -> list[str]:
    """What grew."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    before = statistics.median(one.rss_kb for one in early)
    after = statistics.median(one.rss_kb for one in late)
    # What most samples have: a moment at which many were connected says nothing of a leak.
    held = statistics.median(one.descriptors for one in early)
    kept = statistics.median(one.descriptors for one in late)
    print(
        f"RSS {before / 1024:.1f} MB in the second quarter, {after / 1024:.1f} MB in the last "
        f"({after / before:.3f}, at most {GROWTH}); descriptors "
        f"{held:g}, then {kept:g} (at most {max(one.descriptors for one in late)}); "
        f"threads {max(one.threads for one in late)}; "
        f"{late[-1].cpu_seconds / late[-1].at * 100:.1f} % of a core",
        flush=True,
    )
    faults = []
    if after > before * GROWTH:
        faults.append("the memory grows")
    if kept > held + MORE_DESCRIPTORS:
        faults.append("the descriptors grow")
    return faults


@contextlib.contextmanager
def opened(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty inbox."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/inbox.db"
        return

    async def make(url: str) -> None:
        await (await open_inbox(url, create=True)).aclose()

    with contextlib.contextmanager(running)() as server:
        url = server.url(make_database(server.url()))
        asyncio.run(make(url))
        yield url


def main() -> int:
    """Run it, and say what grew."""
    parser = argparse.ArgumentParser(description="Look whether a gateway grows.")
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long; 20")
    parser.add_argument("--rate", type=float, default=50.0, help="events a second; 50")
    parser.add_argument("--json", type=Path, help="where to keep the samples")
    given = parser.parse_args()
    random.seed(1)
    with tempfile.TemporaryDirectory(prefix="oncekey-soak-") as directory:
        folder = Path(directory)
        with opened(given.store, folder) as url:
            samples, wrong = asyncio.run(soak(folder, url, given.minutes, given.rate))
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(one) for one in samples]) + "\n")
    faults = [*judged(samples), *([wrong] if wrong else [])]
    told = "; ".join(faults) or "flat, nothing lost"
    print(f"{'FAIL' if faults else 'PASS'} {given.store}, {given.rate:g} a second: {told}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
