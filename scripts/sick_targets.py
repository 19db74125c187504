"""Healthy targets beside sick ones: ``make sick-targets``.

    python scripts/sick_targets.py                       # three rounds of two runs, four minutes
    python scripts/sick_targets.py --store postgres
    python scripts/sick_targets.py --no-breaker          # the sick ones are never left alone

Runs with and without sick targets take turns, each on a gateway and an inbox of its own. Signed
events for the healthy targets come at the same rate in both. In every second run others come for
five targets that are sick: one hangs, one answers 500, one closes in the middle of its answer, one
redirects to a private address, one sends 10 GB. What is measured is the time from the provider's
request to the arrival at a healthy target. It passes if the 99th percentile with the sick ones is
at most 1.5 times that without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from soak_gateway import opened, sampled  # noqa: E402
from tests.server.process import SECRET  # noqa: E402
from tests.server.storm import Gateway, Node, started  # noqa: E402
from tests.server.traffic import Line, Sink  # noqa: E402

from oncekey.signatures import provider  # noqa: E402
from oncekey.testing import SignedDelivery, sample  # noqa: E402

MOST = 1.5
HEALTHY = ("first", "second")
FLOOD = 10 * 2**30
SOURCE = """
[sources.{name}]
provider = "stripe"
secret_env = "SHOP_SECRET"
targets = {targets}
"""
TARGET = """
[targets.{name}]
url = "{url}"
allow_private = true
timeout = 5
breaker_after = {breaker_after}
"""
LINES = 4
WARM = 2.0  # seconds before it counts

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


# ----------------------------------------------------------------------------------- sick targets


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says nothing until it is hung up on."""
    await reader.read()


async def fails(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers 500."""
    writer.write(b"HTTP/1.1 500 Sick\r\ncontent-length: 4\r\n\r\nsick")


async def cuts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Promises more than it sends."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf an ans")
    await writer.drain()
    raise ConnectionError


async def redirects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Points at what a cloud tells its own machines only."""
    where = b"http://169.254.169.254/latest/meta-data/"
    writer.write(b"HTTP/1.1 302 Found\r\nlocation: " + where + b"\r\ncontent-length: 0\r\n\r\n")


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends 10 GB, as fast as it is read."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % FLOOD)
    piece = b"x" * 65_536
    for _ in range(FLOOD // len(piece)):
        writer.write(piece)
        await writer.drain()


SICK: dict[str, Answer] = {
    "hangs": hangs,
    "fails": fails,
    "cuts": cuts,
    "redirects": redirects,
    "floods": floods,
}


def handler(answer: Answer) -> Callable[..., Awaitable[None]]:
    """Reads requests and answers each in its own way."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                await reader.readexactly(int(length))
                await answer(reader, writer)
        writer.close()

    return handle


async def serve_sick() -> None:
    """Serve them all, in a process of their own; prints their URLs."""
    servers = {
        name: await asyncio.start_server(handler(answer), "127.0.0.1", 0)
        for name, answer in SICK.items()
    }
    ports = {name: one.sockets[0].getsockname()[1] for name, one in servers.items()}
    print(json.dumps({name: f"http://127.0.0.1:{port}/" for name, port in ports.items()}))
    sys.stdout.flush()
    await asyncio.Event().wait()


class SickTargets(Node):
    """That process."""

    def __init__(self, log: Path) -> None:
        super().__init__([sys.executable, __file__, "--serve-sick"], log)


# -------------------------------------------------------------------------------------- measuring


def signed(source: str, name: str, address: str) -> SignedDelivery:
    """A delivery for a source."""
    stripe = provider("stripe", secret=SECRET)
    return sample(stripe, id=name, type="invoice.paid", url=f"{address}/hooks/{source}")


class Sender:
    """Events for one source at a fixed rate."""

    def __init__(self, source: str, address: str, rate: float, prefix: str = "event") -> None:
        self._source = source
        self._prefix = prefix
        self._address = address
        self._rate = rate
        self._numbers = itertools.count()
        self.at: dict[str, float] = {}

    async def run(self, seconds: float) -> None:
        """Send until the time is over."""
        began = time.monotonic()
        await asyncio.gather(*(self._line(began, began + seconds) for _ in range(LINES)))

    async def _line(self, began: float, ends: float) -> None:
        async with Line(self._address) as line:
            for number in self._numbers:
                due = began + number / self._rate
                if due > ends:
                    return
                name = f"{self._source}_{self._prefix}_{number}"
                one = signed(self._source, name, self._address)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.at[name] = time.monotonic()
                assert await line.post(one) == 200


@contextlib.asynccontextmanager
async def sinks() -> AsyncIterator[dict[str, Sink]]:
    """The healthy targets."""
    async with contextlib.AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(Sink().serving()) for name in HEALTHY}


def config_of(store: str, healthy: dict[str, str], sick: dict[str, str], breaker: int) -> str:
    """A config with both kinds of targets, each with a source of its own."""
    text = f'store = "{store}"\n' + SOURCE.format(name="healthy", targets=[*healthy])
    if sick:
        text += SOURCE.format(name="sick", targets=[*sick])
    for name, url in {**healthy, **sick}.items():
        text += TARGET.format(name=name, url=url, breaker_after=breaker)
    return text.replace("'", '"')


async def run(given: argparse.Namespace, sick: dict[str, str]) -> tuple[list[float], float]:
    """One run; milliseconds to each arrival, and the processor time of the gateway in seconds."""
    with tempfile.TemporaryDirectory(prefix="oncekey-sick-") as directory:
        folder = Path(directory)
        opening = opened(given.store, folder)
        store = await asyncio.to_thread(opening.__enter__)
        try:
            async with sinks() as there:
                config = folder / "gateway.toml"
                urls = {name: one.url for name, one in there.items()}
                breaker = 0 if given.no_breaker else 10
                config.write_text(config_of(store, urls, sick, breaker))
                gateway = Gateway(config, folder / "gateway.log")
                async with started([gateway]):
                    warm = Sender("healthy", gateway.address, given.rate, "warm")
                    await warm.run(WARM)
                    senders = [Sender("healthy", gateway.address, given.rate)]
                    if sick:
                        senders.append(Sender("sick", gateway.address, given.rate / 4))
                    await asyncio.gather(*(one.run(given.seconds) for one in senders))
                    sent = senders[0].at
                    async with asyncio.timeout(60):
                        for one in there.values():
                            while not sent.keys() <= one.at.keys():  # noqa: ASYNC110 - a process
                                await asyncio.sleep(0.05)
                    used = sampled(gateway.pid).cpu_seconds
        finally:
            await asyncio.to_thread(opening.__exit__, None, None, None)
    taken = [(one.at[name] - at) * 1000 for one in there.values() for name, at in sent.items()]
    return taken, used


def percentile(values: list[float], percent: float) -> float:
    """Of some values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


async def compare(given: argparse.Namespace) -> int:
    """Runs by turns, and the verdict."""
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="oncekey-sick-") as directory:
        targets = SickTargets(Path(directory) / "sick.log")
        async with started([targets]):
            sick = json.loads(targets.said)
            for number in range(given.rounds):
                for with_sick in (False, True) if number % 2 == 0 else (True, False):
                    taken, used = await run(given, sick if with_sick else {})
                    p50, p99 = percentile(taken, 50), percentile(taken, 99)
                    found[with_sick].append((p50, p99))
                    print(
                        f"round {number + 1}, {'with' if with_sick else 'without'} sick targets: "
                        f"{len(taken)} deliveries, p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
                        f"{used:.1f} s of processor time",
                        flush=True,
                    )
    without, beside = (statistics.median(one[1] for one in found[kind]) for kind in (False, True))
    ratio = beside / without
    verdict = "PASS" if ratio <= MOST else "FAIL"
    print(
        f"{verdict} {given.store}: p99 of the healthy targets {beside:.1f} ms beside five sick "
        f"ones, {without:.1f} ms without: {ratio:.2f} times (at most {MOST})"
    )
    return 0 if ratio <= MOST else 1


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description="Healthy targets beside sick ones.")
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--rate", type=float, default=40.0, help="healthy events a second; 40")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run; 20")
    parser.add_argument("--rounds", type=int, default=3, help="of two runs each; 3")
    parser.add_argument("--no-breaker", action="store_true", help="try the sick ones all the time")
    parser.add_argument("--serve-sick", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_sick:
        asyncio.run(serve_sick())
        return 0
    return asyncio.run(compare(given))


if __name__ == "__main__":
    sys.exit(main())
