"""Hostile deliveries: genuine ones, damaged on purpose."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from hypothesis import strategies as st
from tests.signatures.cases import NOW, signed

# What tempts a lenient parser: signs, other digits, padding, separators, line ends, numbers that
# overflow, and text that can't be encoded.
FRAGMENTS = [
    *("", " ", "\t", "\r\n", "\x00", "=", "==", ",", ";", ".", ":", "|", " ,", '"', "'", "%", "%0"),
    *(
        "v1",
        "v1,",
        "v1=",
        "v1a,",
        "v0=",
        "t=",
        "ts=",
        "h1=",
        "sha256=",
        "sha1=",
        "whsec_",
        "algorithm=",
    ),
    *(
        "-1",
        "+1",
        "1e9",
        "NaN",
        "Infinity",
        "0x10",
        "1_0",
        "9" * 20,
        "9" * 4301,
        "0" * 64,
        "f" * 64,
    ),
    *("\u00e9", "\xff", "\u0661", "\uff11", "\u2028", "\ud800", "\udfff", "\U0001f600", "\u017f"),
    *("A" * 43 + "=", "A" * 44, "////", "____", "QQ", "QR==", "a" * 8192, "a" * 8193),
    *("1794800000", "1794800000000", "2026-11-16T03:33:20Z", "HMAC_SHA256", "SHA256withRSA"),
    *("https://api.paypal.com/v1/notifications/certs/CERT-1", "bodySHA256=", "http://[", "//"),
]
BODIES: list[bytes] = [
    *(
        b"",
        b"{}",
        b"[]",
        b"null",
        b"0",
        b'""',
        b"[[]]",
        b"[{}]",
        b"{",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
    ),
    *(b'{"id":1,"id":2}', b'{"id":NaN}', b'{"id":1e999}', b'{"id":"\\ud800"}', b'{"id":null}'),
    *(b'{"id":' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 5000, b'{"id":{}}', b'{"id":[]}'),
    *(b'{"signature":[]}', b'{"signature":{"timestamp":[],"token":{},"signature":1}}'),
    *(b'{"notificationItems":[[]]}', b'{"notificationItems":[{"NotificationRequestItem":[]}]}'),
    *(b"a=1&" * 2000, b"%", b"%zz=%", b"a=%FF", b"=&=&", b"&&&", b"\x00", b"[1,2", b"[null]"),
]
METHODS = ["POST", "GET", "", "post", "\ud800", "P" * 9000]
MOMENTS = [NOW, NOW + 1, 0.0, -1.0, 1e18, NOW + 10**6, float("inf"), float("-inf"), float("nan")]


class Hostile(NamedTuple):
    """What to verify, and when."""

    method: str
    url: str
    headers: Any
    body: bytes
    now: float


class _Chooser:
    """What the two sources of chance have in common: Hypothesis shrinks, ``random`` is fast."""

    def __init__(self, number: Any, text: Any, raw: Any) -> None:
        self.number, self.text, self.raw = number, text, raw

    def among(self, options: list[Any]) -> Any:
        return options[self.number(0, len(options) - 1)]


def damaged(name: str, choose: _Chooser) -> Hostile:
    """A genuine delivery with one to four things changed."""
    method, url, headers, body = signed(name)
    pairs: list[tuple[Any, Any]] = list(headers.items())
    now = NOW
    for _ in range(choose.number(1, 4)):
        what = choose.number(0, 9)
        if what <= 5 and not pairs:  # the signature is in the body
            body = _damaged_json(body, choose)
        elif what <= 4:
            at = choose.number(0, len(pairs) - 1)
            pairs[at] = (pairs[at][0], _damaged_text(pairs[at][1], choose))
        elif what == 5:
            at = choose.number(0, len(pairs) - 1)
            other = choose.number(0, 2)
            pair = pairs[at]
            # Gone, twice, or in another letter case; one must stay to be damaged later.
            changes = [[("x", "y")], [pair, pair], [(pair[0].swapcase(), pair[1])]]
            pairs[at : at + 1] = changes[other]
        elif what == 6:
            body = choose.among(BODIES) if choose.number(0, 1) else _damaged_bytes(body, choose)
        elif what == 7:
            url = _damaged_text(url, choose)
        elif what == 8:
            method = choose.among(METHODS)
        else:
            now = choose.among(MOMENTS)
    if choose.number(0, 7) == 0:  # as ASGI servers give them
        pairs = [(_latin(key), _latin(value)) for key, value in pairs]
    return Hostile(method, url, pairs, body, now)


def _latin(text: str) -> bytes:
    return text.encode("latin-1", "replace")


def _damaged_text(text: str, choose: _Chooser) -> str:
    at = choose.number(0, len(text))
    piece = choose.among(FRAGMENTS) if choose.number(0, 2) else choose.text()
    how = choose.number(0, 4)
    if how == 0:
        return piece
    if how == 1:
        return text[:at] + piece + text[at:]
    if how == 2:
        return text[:at] + piece + text[at + 1 :]
    return text[:at] if how == 3 else text[at:] + text[:at]


def _damaged_bytes(body: bytes, choose: _Chooser) -> bytes:
    at = choose.number(0, len(body))
    piece = choose.raw()
    return [body[:at] + piece + body[at + 1 :], body[:at], body + piece, piece][choose.number(0, 3)]


VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**400, "", " ", [], {}, [[]], {"a": {}}, "\u00e9", "\ud800"),
    *("true", "x" * 300, "9" * 20, "9" * 5000, "0" * 64, "A" * 43 + "=", "A" * 44, float("nan")),
]


def _damaged_json(body: bytes, choose: _Chooser) -> bytes:
    """One value somewhere in the tree replaced, taken out, or put there twice."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return _damaged_bytes(body, choose)
    root: list[Any] = [tree]
    holder: Any = root
    place: Any = 0
    while isinstance(holder[place], (dict, list)) and holder[place] and choose.number(0, 5):
        holder = holder[place]
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        place = choose.among(places)
    how = choose.number(0, 3)
    if how == 0 and len(holder) > 1:
        del holder[place]
    elif how == 1 and isinstance(holder[place], str):
        holder[place] = _damaged_text(holder[place], choose)
    else:
        holder[place] = choose.among(VALUES)
    return json.dumps(root[0]).encode()


@st.composite
def hostile(draw: Any, name: str) -> Hostile:
    """Drawn by Hypothesis, which finds the smallest one that fails."""
    return damaged(
        name,
        _Chooser(
            lambda low, high: draw(st.integers(low, high)),
            lambda: draw(st.text(st.characters(), max_size=6)),
            lambda: draw(st.binary(max_size=6)),
        ),
    )


def seeded(name: str, chance: random.Random) -> Hostile:
    """Drawn by ``random``: twenty times as fast, for millions of them."""
    return damaged(
        name,
        _Chooser(
            chance.randint,
            lambda: "".join(chr(chance.randrange(0x110000)) for _ in range(chance.randrange(6))),
            lambda: chance.randbytes(chance.randrange(6)),
        ),
    )
