"""An HTTP answer as it is stored: one ``bytes`` object, written once and replayed as it is.

The first byte says whether the body was kept: ``h`` it was, ``x`` it was not (too large, streamed
without an end, or marked ``no-store``), so that only status and headers can be replayed. Then the
status, a line for each header, an empty line, and the body.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from oncekey._core.codec import SEALED, Codec
from oncekey._core.packing import PACKED, unpacked
from oncekey.errors import AnswerOmittedError, StoreConfigError, StoreCorruptError

__all__ = ["Answer", "AnswerCodec", "Fields", "fields_of"]

Fields = tuple[tuple[bytes, bytes], ...]
"""Header fields: names in lower case, in order."""

KEPT: Final = b"h"
UNAVAILABLE: Final = b"x"


class Answer(NamedTuple):
    """An HTTP response.

    Attributes:
        status: The status code.
        headers: Its header fields, names in lower case.
        body: Its body; ``None`` where it was not kept.
    """

    status: int
    headers: Fields
    body: bytes | None


def fields_of(pairs: Iterable[tuple[str, str]]) -> Fields:
    """Header fields of a framework as an answer has them."""
    return tuple(
        (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in pairs
    )


class AnswerCodec(Codec):
    """Writes and reads stored answers."""

    checked = True  # any answer can be stored

    def encode(self, value: Any) -> bytes:
        """The bytes to store."""
        status, headers, body = value
        lines = b"".join(map(b"%b:%b\n".__mod__, headers))
        if body is None:
            return b"x%d\n%b\n" % (status, lines)
        return b"h%d\n%b\n%b" % (status, lines, body)

    def decode(self, raw: bytes) -> Answer:
        """The stored answer.

        Raises:
            StoreCorruptError: The bytes are no HTTP answer.
        """
        tag, end = raw[:1], raw.find(b"\n\n")
        if tag == KEPT and end > 0:  # as nearly all are
            status, *lines = raw[1:end].split(b"\n")
            fields: Any = tuple([tuple(line.split(b":", 1)) for line in lines])
            return tuple.__new__(Answer, (int(status), fields, raw[end + 2 :]))
        if tag == PACKED:
            return self.decode(unpacked(raw))
        if tag == b"o":  # an answer that outgrew the limit after all
            raise AnswerOmittedError("the request was done, but its answer was not kept")
        if tag == SEALED:
            raise StoreConfigError(
                "this answer is encrypted: wrap the store with oncekey.encryption.encrypted(...)"
            )
        if tag != UNAVAILABLE or end < 0:
            raise StoreCorruptError(
                "a stored HTTP answer can't be read: does another program write to this store?"
            )
        status, *lines = raw[1:end].split(b"\n")
        fields = tuple([tuple(line.split(b":", 1)) for line in lines])
        return Answer(int(status), fields, None)
