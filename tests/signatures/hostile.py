"""Hostile deliveries: genuine ones, damaged on purpose, and what must hold for each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from tests.signatures.cases import NOW
from tests.signatures.schemes import Scheme, scheme

from oncekey import MemoryStore
from oncekey.adcp.webhooks import ADCP_CODES
from oncekey.errors import PolicyError
from oncekey.receiver import WebhookReceiver, WebhookResponse
from oncekey.signatures import CODES, SignedRequest, Verdict
from oncekey.signatures.base import UnreadableError

# What tempts a lenient parser: signs, other digits, padding, separators, line ends, numbers that
# overflow, and text that can't be encoded.
FRAGMENTS = [
    *("", " ", "\t", "\r\n", "\x00", "=", "==", ",", ";", ".", ":", "|", " ,", '"', "'", "%", "%0"),
    *("v1", "v1,", "v1=", "v1a,", "v0=", "t=", "ts=", "h1=", "sha256=", "sha1=", "whsec_"),
    *("-1", "+1", "1e9", "NaN", "Infinity", "0x10", "1_0", "9" * 20, "9" * 4301, "0" * 64),
    *("\u00e9", "\xff", "\u0661", "\uff11", "\u2028", "\ud800", "\udfff", "\U0001f600", "\u017f"),
    *("A" * 43 + "=", "A" * 44, "////", "____", "QQ", "QR==", "a" * 8192, "a" * 8193, "f" * 64),
    *("1794800000", "1794800000000", "2026-11-16T03:33:20Z", "HMAC_SHA256", "SHA256withRSA"),
    *("https://api.paypal.com/v1/notifications/certs/CERT-1", "bodySHA256=", "http://[", "//"),
    *("algorithm=", "sig1=", "sig1=(", "sig2=:AAAA:", "()", ")", "?1", "\\", ";nonce=", ';tag="x"'),
    *(';keyid="k1"', ';alg="ed25519"', ";created=1794800000", ";expires=1794800300", "sha-256=:"),
    *('"@method"', '"@target-uri"', '"@authority"', '"content-digest"', '"@status"', '"a";sf'),
]
BODIES: list[bytes] = [
    *(b"", b"{}", b"[]", b"null", b"0", b'""', b"[[]]", b"[{}]", b"{", b"\xff\xfe"),
    *(b"\xef\xbb\xbf{}", b'{"id":1,"id":2}', b'{"id":NaN}', b'{"id":1e999}', b'{"id":"\\ud800"}'),
    *(b'{"id":null}', b'{"id":{}}', b'{"id":[]}', b'{"id":"\\u0000"}', b'{"id":"a\\nb","type":[]}'),
    *(b'{"id":' + b"9" * 5000 + b"}", b"[" * 20_000, b'{"a":' * 5000, b'{"events":{}}'),
    *(b'{"signature":[]}', b'{"signature":{"timestamp":[],"token":{},"signature":1}}'),
    *(b'{"notificationItems":[[]]}', b'{"notificationItems":[{"NotificationRequestItem":[]}]}'),
    *(b"a=1&" * 2000, b"%", b"%zz=%", b"a=%FF", b"=&=&", b"&&&", b"\x00", b"[1,2", b"[null]"),
    *(b'{"type":"url_verification","challenge":[]}', b'{"type":0}', b'{"topic":"ping"}'),
    *(b'{"idempotency_key":"' + b"a" * 255 + b'"}', b'{"idempotency_key":{}}', b'{"events":[0]}'),
]
METHODS = ["POST", "GET", "", "post", "\ud800", "P" * 9000]
MOMENTS = [NOW, NOW + 1, 0.0, -1.0, 1e18, NOW + 10**6, float("inf"), float("-inf"), float("nan")]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**400, "", " ", [], {}, [[]], {"a": {}}, "\u00e9", "\ud800"),
    *("true", "x" * 300, "9" * 20, "9" * 5000, "0" * 64, "A" * 43 + "=", "A" * 44, float("nan")),
]


class Hostile(NamedTuple):
    """What to verify, when, and the body that was signed before the damage."""

    method: str
    url: str
    headers: Any
    body: bytes
    now: float
    signed: bytes


class Chooser(NamedTuple):
    """A source of chance: ``random``, which is fast, or Hypothesis or atheris, which look."""

    number: Callable[[int, int], int]  # both ends included
    text: Callable[[], str]
    raw: Callable[[], bytes]

    def among(self, options: list[Any]) -> Any:
        """One of them."""
        return options[self.number(0, len(options) - 1)]


def seeded(chance: random.Random) -> Chooser:
    """A chooser that draws by ``random``."""
    draw = chance.random
    return Chooser(
        lambda low, high: low + int(draw() * (high - low + 1)),
        lambda: "".join(chr(int(draw() * 0x110000)) for _ in range(int(draw() * 6))),
        lambda: chance.randbytes(int(draw() * 6)),
    )


@cache
def _genuine(name: str) -> SignedRequest:
    return scheme(name).sign()


def hostile(name: str, choose: Chooser) -> Hostile:
    """A delivery with one to four things changed: anybody's, or now and then a key holder's."""
    one = scheme(name)
    method, url, headers, body = _genuine(name)
    if choose.number(0, 60 if one.slow else 3) == 0:
        # Signed after the damage, so that it gets past the signature.
        body = _damaged_body(one.case.body, choose)
        try:
            method, url, headers, body = one.sign(body)
        except PolicyError:  # signs inside the body, and this is no place for it
            pass
        if choose.number(0, 1):
            return Hostile(method, url, list(headers.items()), body, NOW, body)
    signed = body
    pairs: list[tuple[Any, Any]] = list(headers.items())
    now = NOW
    for _ in range(choose.number(1, 4)):
        what = choose.number(0, 9)
        if what <= 4:
            at = choose.number(0, len(pairs) - 1)
            pairs[at] = (pairs[at][0], _damaged_text(pairs[at][1], choose))
        elif what == 5:
            at = choose.number(0, len(pairs) - 1)
            pair = pairs[at]
            # Gone, twice, or in another letter case; one must stay to be damaged later.
            changes = [[("x", "y")], [pair, pair], [(pair[0].swapcase(), pair[1])]]
            pairs[at : at + 1] = changes[choose.number(0, 2)]
        elif what == 6:
            body = _damaged_body(body, choose)
        elif what == 7:
            url = _damaged_text(url, choose)
        elif what == 8:
            method = choose.among(METHODS)
        else:
            now = choose.among(MOMENTS)
    if choose.number(0, 7) == 0:  # as ASGI servers give them
        pairs = [(_latin(key), _latin(value)) for key, value in pairs]
    return Hostile(method, url, pairs, body, now, signed)


def _latin(text: str) -> bytes:
    return text.encode("latin-1", "replace")


def _damaged_text(text: str, choose: Chooser) -> str:
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


def _damaged_body(body: bytes, choose: Chooser) -> bytes:
    how = choose.number(0, 3)
    if how == 0:
        return choose.among(BODIES)
    return _damaged_bytes(body, choose) if how == 1 else _damaged_json(body, choose)


def _damaged_bytes(body: bytes, choose: Chooser) -> bytes:
    at = choose.number(0, len(body))
    piece = choose.raw()
    return [body[:at] + piece + body[at + 1 :], body[:at], body + piece, piece][choose.number(0, 3)]


def _damaged_json(body: bytes, choose: Chooser) -> bytes:
    """One value somewhere in the tree replaced, taken out, or damaged."""
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


# --- what must hold ----------------------------------------------------------------------------

# Signed, in these, is not the raw body: other bytes can carry the same fields.
FREE_BODY = {"mailgun", "adyen", "twilio", "gitlab", "google-pubsub", "aws-sns"}
KNOWN = {
    *CODES,
    *ADCP_CODES,
    # of the generic RFC 9421
    *("components_incomplete", "algorithm_not_allowed", "tag_mismatch", "digest_mismatch"),
    "rate_abuse",
}


ENVELOPES = ("id_missing", "missing_envelope_fields", "invalid_envelope_status")


def check(one: Scheme, case: Hostile) -> Verdict:
    """What must hold for every delivery that anybody can make up."""
    provider = one.provider
    verdict = provider.verify(*case[:4], now=case.now)
    assert type(verdict) is Verdict
    assert verdict.ok == (verdict.code == "ok")
    assert verdict.code in KNOWN, verdict
    assert not verdict.transient, "nothing here can be away for a while"
    shown = f"{verdict!r} {verdict.message}"
    assert not any(secret in shown for secret in one.secrets)
    if verdict.ok:
        assert verdict.sender is not None
        assert verdict.sender.provider == provider.name
        assert case.body == case.signed or one.name in FREE_BODY
        try:
            items, reason = provider.items(case.headers, case.body), ""
        except UnreadableError as error:
            items, reason = [], error.reason
        if provider.batch is None:
            # Genuine, and yet no JSON although it says so, or no envelope: not the verifier's
            # business.
            assert reason in ("", "body_malformed", "header_malformed", *ENVELOPES)
            assert reason or [one.event_id for one in items] == [verdict.event_id]
        else:
            assert items
    else:
        assert verdict.sender is None
        assert verdict.event_id is None
        assert verdict.signature == ""
        assert len(verdict.message) > 10
    provider.handshake(case.body)
    return verdict


@cache
def _receiver(name: str) -> WebhookReceiver:
    receiver = WebhookReceiver(scheme(name).provider, MemoryStore(), per_key=None)
    receiver.on()(lambda event: None)
    return receiver


def check_answer(one: Scheme, case: Hostile) -> WebhookResponse:
    """What must hold for the answer of a receiver: never a crash, never a 5xx, never a secret."""
    answer = _receiver(one.name).receive(*case[:4], now=case.now)
    assert 200 <= answer.status < 300 or answer.status in (400, 401, 409, 413, 415), answer
    shown = f"{answer.headers} {answer.body!r} {answer.code}"
    assert not any(secret in shown for secret in one.secrets)
    assert all(value.isascii() and value.isprintable() for value in answer.headers.values())
    return answer
