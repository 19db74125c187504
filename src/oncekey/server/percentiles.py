"""How long things took: percentiles of the inbox's histograms, in milliseconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from oncekey.inbox.models import Count, bucket_ms

__all__ = ["ATTEMPTS", "LATE", "PERCENTS", "by_minute", "percentile", "said"]

ATTEMPTS: Final = ("delivered", "failed", "dead")
"""Counts of attempts: their buckets say how long an attempt took, whatever its end."""

LATE: Final = ("late",)
"""Counts of deliveries: their buckets say how long after its arrival an event was delivered."""

PERCENTS: Final = (50, 95, 99)


def percentile(counts: Iterable[Count], percent: int) -> int | None:
    """The duration that so many percent did not exceed, about; ``None``: there were none."""
    buckets: Counter[int] = Counter()
    for one in counts:
        buckets[one.bucket] += one.n
    rank = math.ceil(buckets.total() * percent / 100)
    for bucket in sorted(buckets):
        rank -= buckets[bucket]
        if rank <= 0:
            return bucket_ms(bucket)
    return None


def by_minute(
    counts: Iterable[Count], kinds: Collection[str], since: int, minutes: int
) -> dict[int, list[float]]:
    """For each of ``PERCENTS`` a value a minute; a minute without any is ``nan``, not zero."""
    first = since - since % 60_000
    parts: list[list[Count]] = [[] for _ in range(minutes)]
    for one in counts:
        place = (one.minute - first) // 60_000
        if one.kind in kinds and 0 <= place < minutes:
            parts[place].append(one)
    found = {percent: [percentile(part, percent) for part in parts] for percent in PERCENTS}
    return {
        percent: [math.nan if one is None else float(one) for one in values]
        for percent, values in found.items()
    }


def said(ms: float | None) -> str:
    """A duration as people say it."""
    if ms is None or math.isnan(ms):
        return "-"
    for size, unit in ((3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms:.0f} ms"
