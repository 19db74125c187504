"""Stored answers, compressed: ``z``, the length of the answer, a line end, and the zlib data.

What is read is bounded by the length that is written there, and that by ``MOST``: whoever can write
to the store can't make a reader unpack without end.
"""

from __future__ import annotations

from typing import Final

from oncekey.errors import StoreCorruptError

__all__ = ["MOST", "PACKED", "packed", "unpacked"]

PACKED: Final = b"z"
"""The first byte of a compressed answer."""
MOST: Final = 67_108_864
"""The longest answer that is compressed, in bytes."""

_DAMAGED: Final = (
    "a stored answer is compressed, and its data are damaged: restore the store from a backup, or "
    "delete that record if its work may run once more"
)


def packed(answer: bytes) -> bytes:
    """The answer compressed; or as it is, if that makes it no shorter."""
    import zlib

    if len(answer) > MOST:
        return answer
    small = b"%b%d\n%b" % (PACKED, len(answer), zlib.compress(answer, 6))
    return small if len(small) < len(answer) else answer


def unpacked(raw: bytes) -> bytes:
    """The answer as it was before ``packed``; as it is, if it is not compressed.

    Raises:
        StoreCorruptError: It does not unpack to the length that it says, or is packed twice.
    """
    if raw[:1] != PACKED:
        return raw
    import zlib

    end = raw.find(b"\n", 0, 12)
    digits = raw[1:end] if end > 0 else b""
    if not digits.isdigit() or not 0 < int(digits) <= MOST:
        raise StoreCorruptError(_DAMAGED)
    length, reader = int(digits), zlib.decompressobj()
    try:
        answer = reader.decompress(raw[end + 1 :], length + 1)
    except zlib.error as error:
        raise StoreCorruptError(_DAMAGED) from error
    if len(answer) != length or not reader.eof or reader.unused_data or answer[:1] == PACKED:
        raise StoreCorruptError(_DAMAGED)
    return answer
