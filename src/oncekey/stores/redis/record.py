"""A record as the string that Redis keeps. ``lua/_record.lua`` describes the same layout."""

from __future__ import annotations

import struct
from typing import Final

from oncekey._core.transitions import mark_fence
from oncekey.errors import StoreCorruptError
from oncekey.models import Record, State

__all__ = ["GRACE_MS", "decode"]

GRACE_MS: Final = 60_000
"""How long Redis keeps a record past its time, so that it still raises the fence of the next."""

_HEAD: Final = struct.Struct(">BqqqqIHI")
_MARK: Final = struct.Struct(">q")
_FENCED_MARK: Final = struct.Struct(">qq")
_STATES: Final = {
    b"P"[0]: State.PENDING,
    b"C"[0]: State.COMPLETED,
    b"R"[0]: State.RELEASED,
}


def decode(raw: bytes, ends: int = 0) -> Record:
    """The record that ``raw`` stands for; ``ends`` is when it does, if it does not say so itself.

    Raises:
        StoreCorruptError: No oncekey writes such a string.
    """
    kind = raw[:1]
    try:
        if kind == b"S":
            return Record(State.COMPLETED, b"", mark_fence(ends), b"", 0, ends, ends, 1, None)
        if kind in (b"M", b"N"):
            (expires,) = _MARK.unpack_from(raw, 1)
            fence = mark_fence(expires) if kind == b"M" else _FENCED_MARK.unpack_from(raw, 1)[1]
            return Record(State.COMPLETED, b"", fence, b"", 0, expires, expires, 1, None)
        code, fence, lease, expires, purge, attempts, owner, payload = _HEAD.unpack_from(raw)
        state = _STATES[code]
    except (struct.error, KeyError):
        raise StoreCorruptError(
            "a key under this store's prefix holds no record of oncekey: delete it, or choose "
            "another prefix for what writes there"
        ) from None
    start = _HEAD.size + owner
    rest = start + payload
    answer = raw[rest:] if state is State.COMPLETED else None
    return Record(
        state,
        raw[_HEAD.size : start],
        fence,
        raw[start:rest],
        lease,
        expires,
        purge,
        attempts,
        answer,
    )
