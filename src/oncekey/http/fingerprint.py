"""What makes two requests the same: method, URL and body, whatever the body's spelling.

JSON is compared by its canonical form, a multipart body by its parts (a client makes up a new
boundary for every attempt), anything else by its bytes. A compressed body is compared by what it
holds, as two runs of gzip need not give the same bytes.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable
from typing import Final, Literal

from oncekey.canonical import canonicalize_json, parse_json
from oncekey.errors import CanonicalJSONError
from oncekey.http.problems import Refusal

__all__ = ["Fingerprint", "fingerprint"]

Fingerprint = Literal["auto", "raw"] | Callable[[bytes, str], str | bytes]
"""How bodies are compared: ``auto``, ``raw``, or a function of body and content type."""

MAX_PARTS: Final = 1000
_BOUNDARY: Final = re.compile(
    r""";\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s";,]{1,70}))""", re.IGNORECASE
)


def fingerprint(
    how: Fingerprint,
    method: str,
    target: bytes,
    content_type: str,
    encoding: str,
    body: bytes,
    most: int,
) -> bytes:
    """The fingerprint of a request, as 64 hex digits.

    Args:
        how: How the body is compared.
        method: Such as ``POST``.
        target: Path and query: the same key for another route is another request.
        content_type: The ``Content-Type`` header.
        encoding: The ``Content-Encoding`` header.
        body: The body as it was sent.
        most: How large the body may be once it is decompressed.

    Raises:
        Refusal: The body can't be read.
    """
    digest = hashlib.sha256(b"%b %d:%b\n" % (method.encode(), len(target), target))
    if callable(how):
        own = how(body, content_type)
        digest.update(b"own\n" + (own.encode() if isinstance(own, str) else own))
    elif how == "raw" or not body:
        digest.update(b"raw\n" + body)
    elif content_type == "application/json" and not encoding:  # as nearly all are
        digest.update(_canonical(body))
    else:
        _add_body(digest, content_type, _decoded(encoding, body, most))
    return digest.hexdigest().encode()


def _add_body(digest: hashlib._Hash, content_type: str, body: bytes) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        digest.update(_canonical(body))
    elif kind.startswith("multipart/"):
        _add_parts(digest, content_type, body)
    else:
        digest.update(b"raw\n" + body)


def _canonical(body: bytes) -> bytes:
    try:
        return b"json\n" + canonicalize_json(body)
    except CanonicalJSONError as error:
        fault = error
    try:
        parse_json(body)
    except CanonicalJSONError:
        raise Refusal("body-malformed", f"The body is not valid JSON: {fault}.") from None
    # Good JSON with an integer that a double can't hold: its spelling stands for itself.
    return b"raw\n" + body


def _decoded(encoding: str, body: bytes, most: int) -> bytes:
    """The body without its compression, never more than ``most`` bytes of it."""
    coding = encoding.strip().lower()
    if coding not in ("gzip", "x-gzip", "deflate"):
        return body
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32 if coding != "deflate" else zlib.MAX_WBITS)
    try:
        plain = reader.decompress(body, most + 1)
    except zlib.error:
        raise Refusal("body-malformed", f"The body is not valid {coding} data.") from None
    if len(plain) > most or reader.unconsumed_tail:
        raise Refusal(
            "body-too-large", f"The body has more than {most} bytes once it is decompressed."
        )
    if reader.unused_data:
        raise Refusal("body-malformed", f"There is something after the {coding} data of the body.")
    if not reader.eof:
        raise Refusal("body-malformed", f"The {coding} data of the body ends too early.")
    return plain


def _add_parts(digest: hashlib._Hash, content_type: str, body: bytes) -> None:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise Refusal("body-malformed", "The Content-Type of a multipart body needs a boundary.")
    mark = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    # A boundary stands at the start of a line; the line end before it belongs to it.
    pieces = (b"\r\n" + body).split(b"\r\n" + mark, MAX_PARTS + 2)
    if len(pieces) > MAX_PARTS + 1:
        raise Refusal("body-malformed", f"A multipart body may have at most {MAX_PARTS} parts.")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise Refusal("body-malformed", "The multipart body doesn't end with its boundary.")
    digest.update(b"parts\n")
    for piece in pieces[1:-1]:
        padding, line_end, part = piece.partition(b"\r\n")
        head, blank, content = part.partition(b"\r\n\r\n")
        if part.startswith(b"\r\n"):  # a part without headers
            head, blank, content = b"", b"\r\n", part[2:]
        if padding.strip() or not line_end or not blank:
            raise Refusal("body-malformed", "A part of the multipart body is cut off.")
        fields = sorted(
            b"%b:%b" % (name.strip().lower(), value.strip())
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n") if line)
        )
        names = b"\n".join(fields)
        digest.update(b"%d:%b%d:" % (len(names), names, len(content)))
        digest.update(content)
