"""Guarded calls on the memory store, and the first import, beside the peer and the floor.

Run by ``run.py``. Speeds are per second of processor time: nothing here waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import targets
from harness import Case, Options, new_keys

from oncekey import AsyncMemoryStore, AsyncOnce, IdempotencyStore, MemoryStore, Once

WRAP = "**oncekey** wrap"
ADCP_WRAP = "adcp wrap"
WRAP_FLOOR = "floor: hash, dict, handler"
ONCE = "**oncekey** Once"
ONCE_FLOOR = "floor: lock, dict, function"
ASYNC_FLOOR = "floor: dict, function"
IMPORT = "**oncekey** import MemoryBackend"
IMPORTS = {
    "floor: python": "pass",
    "floor: import asyncio": "import asyncio",
    IMPORT: "from oncekey import MemoryBackend",
    "idemkit": "import idemkit",
}

WHO = {"caller_identity": "acme"}
SMALL = {"amount": 129.95}
USUAL = {
    "account": {"account_id": "acct-1", "brand": {"domain": "acme.example"}},
    "start_time": "2026-12-01T00:00:00Z",
    "end_time": "2026-12-31T23:59:59Z",
    "packages": [
        {
            "product_id": f"prod_{number}",
            "budget": 5000.0 + number,
            "pricing_option_id": "cpm_fixed",
            "targeting": {"geo": ["DE", "AT", "CH"], "device": "mobile"},
        }
        for number in range(6)
    ],
}
ANSWERS = {
    "small": {"id": "pay_1", "status": "ok"},
    "usual": {
        "media_buy_id": "mb-1",
        "status": "pending_activation",
        "packages": [{"package_id": f"pkg-{at}", "status": "draft"} for at in range(6)],
    },
}
PAYLOADS = {"small": SMALL, "usual": USUAL}

cpu_ns = time.thread_time_ns
Pay = Callable[[dict[str, Any]], Any]


# ------------------------------------------------------------------------------------------- wrap


def our_wrap(answer: dict[str, Any]) -> Pay:
    @IdempotencyStore(AsyncMemoryStore()).wrap
    async def pay(params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        return answer

    return lambda params: pay(params, WHO)


def adcp_wrap(answer: dict[str, Any]) -> Pay:
    module = harness.adcp()

    async def pay(self: None, params: dict[str, Any], context: Any = None) -> dict[str, Any]:
        return answer

    guarded = module.IdempotencyStore(module.MemoryBackend()).wrap(pay)
    return lambda params: guarded(None, params, WHO)  # type: ignore[no-any-return]


def floor_wrap(answer: dict[str, Any]) -> Pay:
    """The least: what was sent is told apart by a hash, what was answered is kept as bytes."""
    kept: dict[str, tuple[bytes, bytes]] = {}

    async def pay(params: dict[str, Any]) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode()).digest()
        found = kept.get(params["idempotency_key"])
        if found is not None:
            if found[0] != digest:
                raise ValueError
            return json.loads(found[1])  # type: ignore[no-any-return]
        kept[params["idempotency_key"]] = digest, json.dumps(answer).encode()
        return answer

    return pay


def wrap_case(make: Callable[[dict[str, Any]], Pay], size: str, count: int, seed: int) -> Case:
    calls = [{**PAYLOADS[size], "idempotency_key": key} for key in new_keys(count, seed)]
    mark = next(iter(ANSWERS[size]))

    async def go() -> dict[str, float]:
        pay = make(ANSWERS[size])
        taken = {}
        for what in ("fresh", "replay"):
            start = cpu_ns()
            found = [await pay(call) for call in calls]
            taken[what] = (cpu_ns() - start) / count / 1e9
            if any(one[mark] != ANSWERS[size][mark] for one in found):
                raise SystemExit("a wrapped call gave another answer")
        return taken

    return lambda: asyncio.run(go())


# ------------------------------------------------------------------------------------------- once


def once_case(count: int, seed: int) -> Case:
    keys = new_keys(count, seed)

    def go() -> dict[str, float]:
        @Once(MemoryStore(), scope="bench")(key="order")
        def charge(order: str, cents: int) -> dict[str, Any]:
            return {"order": order, "charged": cents}

        return _timed(charge, keys)

    return go


def once_floor(count: int, seed: int) -> Case:
    keys = new_keys(count, seed)

    def go() -> dict[str, float]:
        kept: dict[str, bytes] = {}
        lock = threading.Lock()

        def charge(order: str, cents: int) -> dict[str, Any]:
            with lock:
                found = kept.get(order)
            if found is not None:
                return json.loads(found)  # type: ignore[no-any-return]
            answer = {"order": order, "charged": cents}
            with lock:
                kept[order] = json.dumps(answer).encode()
            return answer

        return _timed(charge, keys)

    return go


def _timed(charge: Callable[[str, int], dict[str, Any]], keys: list[str]) -> dict[str, float]:
    taken = {}
    for what in ("fresh", "replay"):
        start = cpu_ns()
        found = [charge(key, 500) for key in keys]
        taken[what] = (cpu_ns() - start) / len(keys) / 1e9
        if any(one["order"] != key for one, key in zip(found, keys, strict=True)):
            raise SystemExit("a guarded call gave another answer")
    return taken


def async_once_case(count: int, seed: int) -> Case:
    keys = new_keys(count, seed)

    async def go() -> dict[str, float]:
        @AsyncOnce(AsyncMemoryStore(), scope="bench")(key="order")
        async def charge(order: str, cents: int) -> dict[str, Any]:
            return {"order": order, "charged": cents}

        return await _atimed(charge, keys)

    return lambda: asyncio.run(go())


def async_once_floor(count: int, seed: int) -> Case:
    keys = new_keys(count, seed)

    async def go() -> dict[str, float]:
        kept: dict[str, bytes] = {}

        async def charge(order: str, cents: int) -> dict[str, Any]:
            found = kept.get(order)
            if found is not None:
                return json.loads(found)  # type: ignore[no-any-return]
            answer = {"order": order, "charged": cents}
            kept[order] = json.dumps(answer).encode()
            return answer

        return await _atimed(charge, keys)

    return lambda: asyncio.run(go())


async def _atimed(charge: Callable[[str, int], Any], keys: list[str]) -> dict[str, float]:
    taken = {}
    for what in ("fresh", "replay"):
        start = cpu_ns()
        found = [await charge(key, 500) for key in keys]
        taken[what] = (cpu_ns() - start) / len(keys) / 1e9
        if any(one["order"] != key for one, key in zip(found, keys, strict=True)):
            raise SystemExit("a guarded call gave another answer")
    return taken


# ----------------------------------------------------------------------------------------- import


def import_case(code: str) -> Case:
    """Processor time of a fresh process: its children's time grows by that when it ends."""

    def go() -> dict[str, float]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)  # os.times() counts in 10 ms
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        return {"cold": user + system}

    return go


# ----------------------------------------------------------------------------------------- report


def speeds(options: Options) -> dict[str, harness.Samples]:
    """Measure every kind of call."""
    count, seed = options.pick(1_000, 3_000), options.seed
    effort: dict[str, Any] = {
        "rounds": options.pick(3, 9, 15),
        "seconds": options.pick(3, 8, 60),
        "seed": seed,
    }
    found = {}
    for size in PAYLOADS:
        makers = {WRAP_FLOOR: floor_wrap, WRAP: our_wrap}
        if harness.adcp():
            makers[ADCP_WRAP] = adcp_wrap
        cases = {name: wrap_case(make, size, count, seed) for name, make in makers.items()}
        found[f"wrap, {size}"] = harness.measure(f"calls, wrap, {size}", cases, **effort)
    found["Once, sync"] = harness.measure(
        "calls, Once, sync",
        {ONCE_FLOOR: once_floor(count, seed), ONCE: once_case(count, seed)},
        **effort,
    )
    found["Once, async"] = harness.measure(
        "calls, Once, async",
        {ASYNC_FLOOR: async_once_floor(count, seed), ONCE: async_once_case(count, seed)},
        **effort,
    )
    imports = {
        name: import_case(code)
        for name, code in IMPORTS.items()
        if name != "idemkit" or harness.version("idemkit")
    }
    found["import"] = harness.measure("calls, import", imports, **effort)
    return found


def report(options: Options) -> str:
    """Measure, and give the section in Markdown."""
    references = {
        "of the floor": WRAP_FLOOR,
        "of the floor, sync": ONCE_FLOOR,
        "of the floor, async": ASYNC_FLOOR,
        "times adcp": ADCP_WRAP,
    }
    found = speeds(options)
    tables = [
        f"**{title}**\n\n{harness.speed_table(samples, references)}"
        for title, samples in found.items()
    ]
    return f"""### Guarded calls

{harness.left_out("adcp", "idemkit")}
On the memory store, per second of processor time; an import is a fresh process's. *Small* is a \
request of one field, *usual* a media buy of six packages. The floor keeps answers in a dict and \
tells requests apart by a hash; it has no lease, no owner and no expiry.

{"".join(tables)}
{targets.table("calls")}"""
