"""The memory store beside a plain dict and the peers: speed, growth, memory and pauses.

Run by ``run.py``. What depends on a process's memory runs in a process of its own for each case,
which is this file with ``--child``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import harness
import targets
from harness import Case, Options, Samples, new_keys

from oncekey import AsyncMemoryStore, AsyncWebhookDedup
from oncekey.testing import ManualClock

DAY = 86_400
CHUNK = 20_000
SAMPLE = 10_000  # claims that are timed singly
LIMIT = "limit: dict in an async function"
ADCP_FIRST = "adcp put_if_absent"
ADCP_CLAIM = "adcp claim, complete"
OURS_FIRST = "**oncekey** check_and_record"
OURS_CLAIM = "**oncekey** claim, complete"
CACHETOOLS = "cachetools TTLCache"
IDEMKIT = "idemkit claim, complete"

now_ns, cpu_ns = time.perf_counter_ns, time.thread_time_ns
Clock = Callable[[], float]


class Store(NamedTuple):
    """One implementation, ready to use.

    Attributes:
        claim: Takes a key. Gives something true for a new one.
        finish: Takes the key and what ``claim`` gave. ``None``: claiming is all.
        backend: Has ``delete_expired``, or ``None``.
    """

    claim: Callable[[str], Awaitable[Any]]
    finish: Callable[[str, Any], Awaitable[Any]] | None = None
    backend: Any = None


def dict_store(clock: Clock) -> Store:
    """What nothing in Python can beat: no expiry, no owner, no promise to threads."""
    seen: dict[str, None] = {}

    async def first_seen(key: str) -> bool:
        if key in seen:
            return False
        seen[key] = None
        return True

    return Store(first_seen)


def oncekey_first(clock: Clock) -> Store:
    backend = AsyncMemoryStore(clock=clock)
    mark = AsyncWebhookDedup(backend).check_and_record
    return Store(lambda key: mark("sender-1", key), None, backend)


def oncekey_claim(clock: Clock) -> Store:
    backend = AsyncMemoryStore(clock=clock)
    return dedup_store(AsyncWebhookDedup(backend), backend)


def dedup_store(dedup: Any, backend: Any) -> Store:
    """Ours and adcp's, which have the same methods."""

    async def claim(key: str) -> Any:
        return (await dedup.claim("sender-1", key, "hash")).claim_token

    return Store(claim, lambda key, token: dedup.complete("sender-1", key, "hash", token), backend)


def adcp_first(clock: Clock) -> Store | None:
    module = harness.adcp()
    if module is None:
        return None
    backend = module.MemoryBackend(clock=clock)
    put, entry = backend.put_if_absent, sys.modules[module.MemoryBackend.__module__].CachedResponse
    return Store(lambda key: put("webhook:s", key, entry("h", {}, clock() + DAY)), None, backend)


def adcp_claim(clock: Clock) -> Store | None:
    module = harness.adcp()
    if module is None:
        return None
    backend = module.MemoryBackend(clock=clock)
    return dedup_store(module.WebhookDedupStore(backend), backend)


def cachetools_first(clock: Clock) -> Store | None:
    module = harness.peer("cachetools")
    if module is None:
        return None
    cache = module.TTLCache(maxsize=10**9, ttl=DAY, timer=clock)

    async def first_seen(key: str) -> bool:
        if key in cache:
            return False
        cache[key] = None
        return True

    return Store(first_seen)


def idemkit_claim(clock: Clock) -> Store | None:
    module = harness.peer("idemkit")
    if module is None:
        return None
    backend = module.InMemoryBackend(max_size=10**9, clock=clock)

    async def claim(key: str) -> Any:
        return (await backend.claim(key, "hash", 1, 300.0)).our_claim_token

    return Store(claim, lambda key, token: backend.complete(key, token, 200, {}, b"", float(DAY)))


STORES: dict[str, Callable[[Clock], Store | None]] = {
    LIMIT: dict_store,
    OURS_FIRST: oncekey_first,
    ADCP_FIRST: adcp_first,
    CACHETOOLS: cachetools_first,
    OURS_CLAIM: oncekey_claim,
    ADCP_CLAIM: adcp_claim,
    IDEMKIT: idemkit_claim,
}


def installed(*names: str) -> list[str]:
    return [name for name in names if STORES[name](time.time) is not None]


# ------------------------------------------------------------------------------------------ speed


def speed_case(name: str, count: int, seed: int) -> Case:
    """A fresh store each time: all keys once, then all of them again.

    In processor time: nothing here waits, so that what else runs need not count.
    """
    keys = new_keys(count, seed)

    async def go() -> dict[str, float]:
        store = STORES[name](time.time)
        assert store is not None
        claim, finish = store.claim, store.finish
        start = cpu_ns()
        if finish is None:
            first = [await claim(key) for key in keys]
        else:
            first = []
            for key in keys:
                token = await claim(key)
                await finish(key, token)
                first.append(token)
        middle = cpu_ns()
        again = [await claim(key) for key in keys]
        end = cpu_ns()
        if not all(first) or any(again):
            raise SystemExit(f"{name} did not tell new keys from duplicates")
        fresh, duplicate = (middle - start) / count / 1e9, (end - middle) / count / 1e9
        return {
            "new key": fresh,
            "duplicate": duplicate,
            "one of each": (fresh + duplicate) / 2,
        }

    return lambda: asyncio.run(go())


def speed(options: Options, title: str, counts: dict[str, int], references: dict[str, str]) -> str:
    names = installed(*counts)
    samples: Samples = harness.measure(
        title,
        {name: speed_case(name, counts[name], options.seed) for name in names},
        rounds=options.pick(3, 9, 15),
        seconds=options.pick(3, 12, 60),
        seed=options.seed,
    )
    return harness.speed_table(samples, references)


# ---------------------------------------------------------------------------------------- pauses


async def longest(store: Store, label: str, count: int) -> tuple[float, float]:
    """The longest single claim among ``count`` new keys: by the clock, and of processor time."""
    claim = store.claim
    wall = cpu = 0
    for at in range(0, count, CHUNK):
        for key in new_keys(min(CHUNK, count - at), (label, at)):
            wall_start, cpu_start = now_ns(), cpu_ns()
            await claim(key)
            cpu = max(cpu, cpu_ns() - cpu_start)
            wall = max(wall, now_ns() - wall_start)
    return wall / 1e6, cpu / 1e6


async def pause_child(name: str, count: int) -> dict[str, Any]:
    """Fill a store, let all of it expire at once, and go on claiming new keys."""
    clock = ManualClock()
    store = STORES[name](clock)
    gc.collect()
    gc.freeze()  # the store's own garbage collections count, those of the modules don't
    assert store is not None
    found: dict[str, Any] = {"fill": await longest(store, "fill", count)}
    if name == LIMIT:
        return found
    clock.advance(DAY + 120)
    if name == ADCP_FIRST:  # expires nothing by itself
        wall_start, cpu_start = now_ns(), cpu_ns()
        removed = await store.backend.delete_expired()
        cpu = cpu_ns() - cpu_start
        found["expire"] = ((now_ns() - wall_start) / 1e6, cpu / 1e6)
        found["left"] = count - removed
    else:
        more = count if name == OURS_FIRST else CHUNK  # cachetools removes all at the first one
        found["expire"] = await longest(store, "expire", more)
        found["left"] = 0 if store.backend is None else await store.backend.delete_expired()
    return found


def in_child(kind: str, name: str, argument: Any) -> Any:
    command = [sys.executable, __file__, "--child", kind, name, json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} of {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def pauses(options: Options) -> str:
    count = options.pick(100_000, 1_000_000)
    rows = []
    for name in installed(LIMIT, OURS_FIRST, ADCP_FIRST, CACHETOOLS):
        harness.progress(f"pauses: {name}, {count:,} keys")
        found = in_child("pause", name, count)
        cells = []
        for phase in ("fill", "expire"):
            wall, cpu = found.get(phase, (None, None))
            cells += ["never"] * 2 if wall is None else [f"{wall:.2f} ms", f"{cpu:.2f} ms"]
        rows.append((name, *cells, f"{found['left']:,}" if "left" in found else f"{count:,}"))
    harness.progress()
    header = ("implementation", "filling", "processor time", "expiring", "processor time")
    return harness.markdown((*header, "expired, still held"), rows, text_columns=1)


# ----------------------------------------------------------------------------------------- report


def report(options: Options) -> str:
    """Measure, and give the section in Markdown."""
    count = options.pick(20_000, 50_000)
    few = options.pick(300, 1_000)
    claims = options.pick(5_000, 10_000)
    first = speed(
        options,
        "memory, first seen",
        {LIMIT: count, OURS_FIRST: count, ADCP_FIRST: count, CACHETOOLS: count},
        {"of the limit": LIMIT, "times adcp": ADCP_FIRST},
    )
    claim = speed(
        options,
        "memory, claim and complete",
        {OURS_CLAIM: claims, ADCP_CLAIM: claims, IDEMKIT: few},
        {"times adcp": ADCP_CLAIM, "times idemkit": IDEMKIT},
    )
    most = options.pick(100_000, 1_000_000)
    return f"""### Memory

{harness.left_out("adcp", "cachetools", "idemkit")}
Speeds are per second of processor time, one call after another.

**First seen**: {count:,} new keys, then the same ones again.

{first}
**Claim and complete**: {claims:,} keys claimed and completed, then claimed again. For idemkit \
{few:,}: each of its claims looks at every live key.

{claim}
**Pauses**: the longest claim while {most:,} keys are added, and while new ones are added after \
all of those expired at once. By the clock, which counts what else the machine does, and in \
processor time, which does not. adcp expires nothing by itself: shown is one `delete_expired()`.

{pauses(options)}
{targets.table("memory")}"""


def child(kind: str, name: str, argument: str) -> None:
    run: Any = {"pause": pause_child}[kind]
    print(json.dumps(asyncio.run(run(name, json.loads(argument)))))


if __name__ == "__main__":
    if sys.argv[1:2] != ["--child"]:
        raise SystemExit("run it as: python benchmarks/run.py memory")
    child(*sys.argv[2:])
