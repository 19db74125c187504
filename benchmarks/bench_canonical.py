"""How fast is the canonical hash? Ours beside the peers, interleaved in one run.

    python benchmarks/bench_canonical.py [--quick]

Prints a Markdown table of medians and of ratios to the ``rfc8785`` package. Only the ratios
carry over to another machine. Peers that are not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import importlib
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from oncekey import canonical
from oncekey._jcs.parser import parse_pure

Case = Callable[[], str]


def payload(lines: int) -> dict[str, Any]:
    """Build an order event: text in several scripts, floats with and without fraction, nulls."""
    rng = random.Random(8785 + lines)
    names = [
        "Zo\u00eb M\u00fcller",
        "\u674e\u5c0f\u9f8d",
        'Bob "Bo" O\'Brien',
        "Anna",
        "sale \U0001f389",
    ]

    def token(bits: int) -> str:
        return f"{rng.getrandbits(bits):0{bits // 4}x}"

    def line() -> dict[str, Any]:
        return {
            "sku": f"SKU-{rng.randrange(10**6):06}",
            "id": token(64),
            "title": rng.choice(names),
            "quantity": rng.randrange(1, 9),
            "price": round(rng.uniform(1, 400), 2),
            "discount": float(rng.randrange(5)),
            "gift": rng.random() < 0.2,
            "note": rng.choice([None, 'At the door\nring "twice"']),
            "geo": [round(rng.uniform(-90, 90), 6), round(rng.uniform(-180, 180), 6)],
        }

    return {
        "idempotency_key": token(128),
        "type": "order.paid",
        "id": f"evt_{token(64)}",
        "created": 1_767_225_600,
        "live": True,
        "total": 129.0,
        "currency": "EUR",
        "customer": {"name": rng.choice(names), "vip": False, "ref": None},
        "lines": [line() for _ in range(lines)],
    }


@functools.cache
def peers() -> dict[str, Callable[[Any], bytes]]:
    """Return the installed peers, each as a function from a value to canonical bytes."""
    found: dict[str, Callable[[Any], bytes]] = {}
    for module, function in (("rfc8785", "dumps"), ("jcs", "canonicalize")):
        try:
            found[module] = getattr(importlib.import_module(module), function)
        except ImportError:
            print(f"(not installed, left out: {module})", file=sys.stderr)
    return found


@functools.cache
def adcp() -> Callable[[Any], str] | None:
    try:
        return importlib.import_module("adcp.server.idempotency").canonical_json_sha256
    except ImportError:
        print("(not installed, left out: adcp)", file=sys.stderr)
        return None


def sha(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def object_cases(value: dict[str, Any]) -> dict[str, Case]:
    cases: dict[str, Case] = {
        name: lambda dumps=dumps: sha(dumps(value)) for name, dumps in peers().items()
    }
    cases["oncekey"] = lambda: canonical.sha256_hex(value)
    if canonical.FAST:
        cases["oncekey, pure Python"] = lambda: sha(canonical._canonicalize_pure(value))
    return cases


def request_cases(value: dict[str, Any]) -> dict[str, Case]:
    peer = peers().get("rfc8785")
    stripped = canonical.strip_excluded_fields
    cases: dict[str, Case] = {}
    if peer:
        cases["rfc8785"] = lambda: sha(peer(stripped(value)))
    theirs = adcp()
    if theirs:
        cases["adcp"] = lambda: theirs(value)
    cases["oncekey"] = lambda: canonical.canonical_json_sha256(value)
    return cases


def text_cases(value: dict[str, Any]) -> dict[str, Case]:
    raw = json.dumps(value, ensure_ascii=False).encode()
    cases: dict[str, Case] = {
        name: lambda dumps=dumps: sha(dumps(json.loads(raw))) for name, dumps in peers().items()
    }
    cases["oncekey"] = lambda: sha(canonical.canonicalize_json(raw))
    if canonical.FAST:
        cases["oncekey, pure Python"] = lambda: sha(canonical._canonicalize_pure(parse_pure(raw)))
    return cases


def measure(cases: dict[str, Case], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Time every case once a round, in a new order each, so that noise hits all alike."""
    repeats: dict[str, int] = {}
    for name, case in cases.items():
        case()
        start = time.perf_counter()
        case()
        repeats[name] = max(1, int(seconds / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(rounds):
        random.Random(number).shuffle(names)
        gc.collect()
        for name in names:
            case, count = cases[name], repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                case()
            times[name].append((time.perf_counter() - start) / count)
    return times


def main() -> dict[str, dict[str, list[float]]]:
    recorded: dict[str, dict[str, list[float]]] = {}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few short rounds, a few seconds")
    quick = parser.parse_args().quick
    rounds, seconds = (3, 0.02) if quick else (9, 0.15)
    print(f"Python {platform.python_version()}, orjson path: {canonical.FAST}, {rounds} rounds\n")
    print("| input | size | implementation | median | times rfc8785 (min..max) |")
    print("|---|---:|---|---:|---:|")
    kinds = {"object": object_cases, "request": request_cases, "JSON text": text_cases}
    for kind, build in kinds.items():
        for lines in (1, 22, 570):
            value = payload(lines)
            cases = build(value)
            if len({case() for case in cases.values()}) != 1:
                raise SystemExit(f"the implementations disagree on the {kind} of {lines} lines")
            size = f"{len(canonical.canonicalize(value)) / 1000:.1f} KB"
            times = measure(cases, rounds, seconds)
            recorded[f"{kind}, {size}"] = {
                name.replace("oncekey", "**oncekey**"): taken for name, taken in times.items()
            }
            for name, taken in times.items():
                ratio = ""
                if "rfc8785" in times:
                    ratios = [a / b for a, b in zip(times["rfc8785"], taken, strict=True)]
                    low, high = min(ratios), max(ratios)
                    ratio = f"{statistics.median(ratios):.1f} ({low:.1f}..{high:.1f})"
                median = statistics.median(taken) * 1e6
                print(f"| {kind} | {size} | {name} | {median:.1f} us | {ratio} |", flush=True)
    return recorded


if __name__ == "__main__":
    main()
