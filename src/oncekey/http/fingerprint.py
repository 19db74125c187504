"""What makes two requests the same: method, URL and body, whatever the body's spelling.

JSON is compared by its canonical form, a multipart body by its parts (a client makes up a new
boundary for every attempt), anything else by its bytes. A compressed body is compared by what it
holds, as two runs of gzip need not give the same bytes.

All this is done before anybody knows who sent the request, mostly in an event loop. So work is
bounded before it is spent: what would take more than a few milliseconds is compared by its bytes.
The bounds are the same whatever is installed, or two workers would not agree.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import IO, Final, Literal

from oncekey._jcs.fast import attempt_json
from oncekey._jcs.parser import parse_pure
from oncekey._jcs.writer import UnfitError, write_json
from oncekey.canonical import FAST
from oncekey.errors import CanonicalJSONError
from oncekey.http.problems import Refusal

__all__ = ["Fingerprint", "fingerprint", "form_digest", "json_head", "json_mark"]

Fingerprint = Literal["auto", "raw"] | Callable[[bytes, str], str | bytes]
"""How bodies are compared: ``auto``, ``raw``, or a function of body and content type."""

MAX_BYTES: Final = 32_768  # of JSON, of what a compressed body holds, of headers of parts
MAX_VALUES: Final = 750  # of JSON: each costs up to 5 microseconds in pure Python
MAX_PARTS: Final = 200  # of a multipart body
MAX_FIELDS: Final = 500  # in the headers of all its parts
# How far a compressed body may grow, beside MAX_BYTES: a few bytes more, or times its size.
FREE_BYTES: Final = 4096
MAX_RATIO: Final = 20
_BOUNDARY: Final = re.compile(
    r""";\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s";,]{1,70}))""", re.IGNORECASE
)


def fingerprint(
    how: Fingerprint, method: str, target: bytes, content_type: str, encoding: str, body: bytes
) -> bytes:
    """The fingerprint of a request, as 64 hex digits.

    Args:
        how: How the body is compared.
        method: Such as ``POST``.
        target: Path and query: the same key for another route is another request.
        content_type: The ``Content-Type`` header.
        encoding: The ``Content-Encoding`` header.
        body: The body as it was sent.

    Raises:
        Refusal: The body can't be read.
    """
    head = b"%b %d:%b\n" % (method.encode(), len(target), target)
    digest = hashlib.sha256(head)
    if callable(how):
        try:
            own = how(body, content_type)
        except ValueError as error:  # what it says of a body that it can't read
            raise Refusal("body-malformed", f"The body can't be read: {error}.") from None
        digest.update(b"own\n" + (own.encode() if isinstance(own, str) else own))
    elif how == "raw" or not body:
        _add_raw(digest, body)
    else:
        plain = _decoded(encoding, body)
        if plain is None:
            digest.update(b"packed\n")
            digest.update(_without_time(body))
        else:
            _add_body(digest, content_type, plain)
    return digest.hexdigest().encode()


def json_head(method: str, target: bytes) -> bytes:
    """How the fingerprint of a request begins whose body is JSON. See ``json_mark``."""
    return b"%b %d:%b\njson\n" % (method.encode(), len(target), target)


def json_mark(head: bytes, body: bytes) -> bytes | None:
    """The fingerprint of a request with a JSON body, of its head; ``None``: ask ``fingerprint``."""
    size = len(body)
    if not size or size > MAX_BYTES or (size > MAX_VALUES and _values(body) > MAX_VALUES):
        return None
    proved = attempt_json(body)
    return None if proved is None else sha256(head + proved).hexdigest().encode()


def _values(body: bytes) -> int:
    """At least as many as there are values: a comma or a bracket for each, in strings too."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def form_digest(
    fields: Iterable[tuple[str, str]], files: Iterable[tuple[str, str | None, IO[bytes]]]
) -> bytes:
    """What to compare of a form that other code has parsed, so that its bytes are gone.

    Args:
        fields: Names and values.
        files: Names, the names that they have at the client, and what they hold.

    Raises:
        Refusal: There is nothing in it: who parsed it has failed to.
    """
    digest = hashlib.sha256(b"form\n")
    empty = True
    for pair in fields:
        empty = False
        for text in pair:
            raw = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d:%b" % (len(raw), raw))
    for name, named, file in files:
        empty = False
        before = file.tell()
        file.seek(0)
        content = hashlib.sha256()
        while piece := file.read(65_536):
            content.update(piece)
        file.seek(before)
        label = f"{name!r}{named!r}".encode("ascii", "backslashreplace")
        digest.update(b"file%d:%b%b" % (len(label), label, content.digest()))
    if empty:
        raise Refusal("body-malformed", "The form of this request could not be read.")
    return digest.digest()


def _add_body(digest: hashlib._Hash, content_type: str, body: bytes) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        canonical = _canonical(body)
        digest.update(b"raw\n" + body if canonical is None else b"json\n" + canonical)
    elif kind.startswith("multipart/"):
        parts = _parts(content_type, body)
        if parts is None:
            _add_raw(digest, body)
        else:
            for part in parts:
                digest.update(part)
    else:
        _add_raw(digest, body)


def _add_raw(digest: hashlib._Hash, body: bytes) -> None:
    digest.update(b"raw\n")
    digest.update(body)


def _canonical(body: bytes) -> bytes | None:
    """The canonical form of JSON; ``None``: it has none, or that would cost too much."""
    if len(body) > MAX_BYTES or _values(body) > MAX_VALUES:
        return None
    proved = attempt_json(body) if FAST else None
    if proved is not None:
        return proved
    try:
        value = parse_pure(body)
    except CanonicalJSONError as fault:
        raise Refusal("body-malformed", f"The body is not valid JSON: {fault}.") from None
    try:
        return write_json(value)
    except (UnfitError, RecursionError):
        # Good JSON with an integer that a double can't hold: its spelling stands for itself.
        return None


def _decoded(encoding: str, body: bytes) -> bytes | None:
    """The body without its compression; ``None``: that is not known, or holds too much to look."""
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        return None
    most = min(MAX_BYTES, FREE_BYTES + MAX_RATIO * len(body))
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32 if coding != "deflate" else zlib.MAX_WBITS)
    try:
        plain = reader.decompress(body, most + 1)
    except zlib.error:
        raise Refusal("body-malformed", f"The body is not valid {coding} data.") from None
    if len(plain) > most:
        return None
    if reader.unused_data or reader.unconsumed_tail:
        raise Refusal("body-malformed", f"There is something after the {coding} data of the body.")
    if not reader.eof:
        raise Refusal("body-malformed", f"The {coding} data of the body ends too early.")
    return plain


def _without_time(body: bytes) -> bytes:
    """A compressed body without the time at which gzip was run."""
    return body[:4] + body[8:] if body.startswith(b"\x1f\x8b") else body


def _parts(content_type: str, body: bytes) -> list[bytes] | None:
    """What to compare of a multipart body; ``None``: it has too many parts to look at."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise Refusal("body-malformed", "The Content-Type of a multipart body needs a boundary.")
    mark = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    # A boundary stands at the start of a line; the line end before it belongs to it.
    pieces = (b"\r\n" + body).split(b"\r\n" + mark, MAX_PARTS + 2)
    if len(pieces) > MAX_PARTS + 2:
        return None
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise Refusal("body-malformed", "The multipart body doesn't end with its boundary.")
    parts = [b"parts\n"]
    room, left = MAX_BYTES, MAX_FIELDS
    for piece in pieces[1:-1]:
        padding, line_end, part = piece.partition(b"\r\n")
        head, blank, content = part.partition(b"\r\n\r\n")
        if part.startswith(b"\r\n"):  # a part without headers
            head, blank, content = b"", b"\r\n", part[2:]
        if padding.strip() or not line_end or not blank:
            raise Refusal("body-malformed", "A part of the multipart body is cut off.")
        room -= len(head)
        left -= head.count(b"\r\n") + 1
        if room < 0 or left < 0:
            return None
        fields = sorted(
            b"%b:%b" % (name.strip().lower(), value.strip())
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n") if line)
        )
        names = b"\n".join(fields)
        parts += (b"%d:%b%d:" % (len(names), names, len(content)), content)
    return parts
