"""A stored body for a client that may not read the coding it is stored in."""

from __future__ import annotations

import re
import zlib
from typing import Final

from oncekey.http.answer import Answer

__all__ = ["MAX_PLAIN", "accepts", "coding_of", "plain"]

MAX_PLAIN: Final = 16_777_216  # bytes that a stored body may be unpacked to
_NOT_AT_ALL: Final = re.compile(r"\s*q\s*=\s*0(\.0*)?\s*\Z")


def coding_of(answer: Answer) -> str:
    """The content coding of an answer; nothing if it has none."""
    found = [value for name, value in answer.headers if name == b"content-encoding"]
    coding = b",".join(found).decode("latin-1").strip().lower()
    return "" if coding == "identity" else coding.removeprefix("x-")


def accepts(accepted: str, coding: str) -> bool:
    """Whether a client that sent this ``Accept-Encoding`` reads such a body.

    One that sent none is taken at its word less than the specification allows: clients that can
    decompress say so.
    """
    weights: dict[str, bool] = {}
    for item in accepted.lower().split(",")[:50]:
        name, _, rest = item.partition(";")
        refused = _NOT_AT_ALL.match(rest) is not None
        weights[name.strip().removeprefix("x-")] = not refused
    others = weights.get("*", False)
    return all(weights.get(each.strip().removeprefix("x-"), others) for each in coding.split(","))


def plain(answer: Answer, coding: str) -> Answer | None:
    """The same answer without its coding; ``None``: it can't be unpacked here."""
    if coding not in ("gzip", "deflate") or answer.body is None:
        return None
    windows = (zlib.MAX_WBITS | 16,) if coding == "gzip" else (zlib.MAX_WBITS, -zlib.MAX_WBITS)
    for window in windows:  # some servers send deflate without its wrapper
        reader = zlib.decompressobj(window)
        try:
            body = reader.decompress(answer.body, MAX_PLAIN + 1)
        except zlib.error:
            continue
        if len(body) > MAX_PLAIN or not reader.eof or reader.unused_data:
            return None
        headers = tuple(
            (name, b"W/" + value if name == b"etag" and value.startswith(b'"') else value)
            for name, value in answer.headers
            if name != b"content-encoding"
        )
        return Answer(answer.status, headers, body)
    return None
