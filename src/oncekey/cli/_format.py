"""Numbers for people."""

from __future__ import annotations

__all__ = ["bytes_text", "duration", "seconds_text"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_text(seconds: float | None) -> str:
    """A time span, short: ``3.2 s``, ``5 min``, ``2.1 d``; a dash for none."""
    if seconds is None:
        return "-"
    size = abs(seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if size >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def bytes_text(number: float) -> str:
    """Bytes, short: ``512 B``, ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def duration(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``15m``, ``24h`` or ``7d``."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    return float(number) * _UNITS[unit]
