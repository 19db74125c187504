"""HMAC over the body and whatever a provider puts around it: the dress of most webhooks.

A scheme is described by data: which header, how the signature is written in it, and a template of
the signed bytes. ``oncekey.signatures.hmac_provider`` makes one that is not in the table.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from typing import Any, ClassVar, Final

from oncekey.errors import PolicyError
from oncekey.signatures.base import (
    Facts,
    Proof,
    Provider,
    Secrets,
    SignedRequest,
    as_bytes,
    as_secrets,
    object_body,
    put_header,
)
from oncekey.signatures.delivery import Delivery, Headers
from oncekey.signatures.event_fields import value_at
from oncekey.signatures.parsing import (
    ENCODINGS,
    Rejection,
    decode,
    encode,
    json_body,
    one_header,
    seconds_since_1970,
    written_time,
)
from oncekey.signatures.urls import Hosts, SignedUrl, decode_reserved, encoded

__all__ = ["HmacProvider"]

_FIELD = re.compile(r"\{(timestamp|body|method|url|id)\}")
_PAIRS = re.compile(r"([\w-]+)=\{timestamp\}([,;])([\w-]+)=\{signature\}")
_MOST_SIGNATURES: Final = 16


class HmacProvider(Provider):
    """A provider that signs with HMAC.

    ``facts.settings`` describes the dress:

    ======================  ====================================================================
    ``header``              name, or names, of the header with the signature
    ``prefix``              what stands before the signature, such as ``sha256=``
    ``form``                instead: ``t={timestamp},v1={signature}``, several signatures allowed
    ``list``                what stands between several signatures in one header, such as ``,``
    ``every_header``        each of the named headers that is there has a signature
    ``encoding``            ``hex`` (default), ``hex-upper``, ``base64`` or ``base64url``
    ``algorithm``           ``sha256`` (default), ``sha1``, ``sha384`` or ``sha512``
    ``signed``              template of ``{timestamp} {body} {method} {url} {id}``
    ``timestamp_header``    where the timestamp is
    ``timestamp_path``      or where it is in the body
    ``timestamp_fallback``  a header that tells it where the body does not; nobody signs that
    ``timestamp_unit``      ``s`` (default), ``ms`` or ``iso``
    ``key``                 ``text`` (default) or ``hex``: how the secret is written
    ``superseded``          an older header, named in the message if only it is there
    ``decode_url``          also try the URL with reserved characters decoded
    ======================  ====================================================================
    """

    KNOWN: ClassVar[frozenset[str]] = frozenset(
        {
            *("header", "prefix", "form", "encoding", "algorithm", "signed", "timestamp_header"),
            *("list", "every_header"),
            *(
                "timestamp_path",
                "timestamp_fallback",
                "timestamp_unit",
                "key",
                "superseded",
                "decode_url",
            ),
        }
    )

    def __init__(
        self,
        facts: Facts,
        *,
        secret: Secrets | None = None,
        previous: Secrets | None = None,
        public_url: str = "",
        allowed_hosts: Hosts = "",
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        dress = facts.settings
        self._names: tuple[str, ...] = _several(dress["header"])
        self._superseded: str = dress.get("superseded", "")
        self._prefix: str = dress.get("prefix", "")
        self._form: str = dress.get("form", "")
        self._between: str = dress.get("list", "")
        self._every: bool = dress.get("every_header", False)
        self._encoding: str = dress.get("encoding", "hex")
        self._algorithm: str = dress.get("algorithm", "sha256")
        self._template: tuple[str, ...] = tuple(_FIELD.split(dress.get("signed", "{body}")))
        self._fields = frozenset(self._template[1::2])
        self._message = _message_form(self._template)
        self._stamp_header: str = dress.get("timestamp_header", "")
        self._stamp_path: str = dress.get("timestamp_path", "")
        self._stamp_fallback: str = dress.get("timestamp_fallback", "")
        self._unit: str = dress.get("timestamp_unit", "s")
        self._decode_url: bool = dress.get("decode_url", False)
        self._check_dress()
        signs_url = "url" in self._fields
        if not signs_url and (public_url or allowed_hosts):
            raise PolicyError(
                f"{facts.title} does not sign the URL: leave public_url= and allowed_hosts= out"
            )
        self._size = hashlib.new(self._algorithm).digest_size
        self._pairs: tuple[str, str, str] | None = None
        if self._form and (found := _PAIRS.fullmatch(self._form)):
            self._pairs = (found[1], found[2], found[3])
        self._keys = [_key(facts, one) for one in as_secrets(facts, secret, previous)]
        self._url = SignedUrl(facts.title, public_url, allowed_hosts, signed=signs_url)
        self._signs_url = signs_url

    def signed_headers(self) -> frozenset[str]:
        """The id's header, if the template names the id; and the timestamp's."""
        named = {self._stamp_header.lower()} if self._stamp_header else set[str]()
        if "id" in self._fields and self._id_field is not None:
            named.update(self._id_field.headers)
        return frozenset(named)

    # --- verify ----------------------------------------------------------------------------

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        if self._signs_url:
            self._url.check(delivery.url)
        stamp, given = self._read_header(delivery)
        if self._stamp_header:
            stamp = one_header(delivery.headers, self._stamp_header, missing="timestamp_missing")
        timestamp: float | None = None
        if stamp is not None:
            timestamp = seconds_since_1970(stamp, self._unit)
            self._check_clock(timestamp, now)
        signature, message = self._matching(delivery, stamp or "", given)
        if not self._stamp_path:
            return Proof(signature, message, timestamp)
        payload = json_body(delivery.body)
        timestamp = self._signed_in_body(payload, delivery.headers)
        self._check_clock(timestamp, now)
        return Proof(signature, message, timestamp, payload)

    def _read_header(self, delivery: Delivery) -> tuple[str | None, list[bytes]]:
        """The timestamp, if the header holds it, and the signatures, decoded."""
        try:
            value = one_header(delivery.headers, *self._names)
        except Rejection as found:
            if found.code == "header_missing" and self._superseded in delivery.headers:
                raise Rejection(
                    "header_missing",
                    f"only {self._superseded} is there, an older form that is refused; "
                    f"{self._names[0]} is needed",
                ) from None
            raise
        stamp: str | None = None
        if self._pairs is None:
            if self._every or self._between or not value.startswith(self._prefix):
                texts = self._without_prefix(self._several_values(delivery.headers, value))
            else:
                texts = [value[len(self._prefix) :]]
        else:
            stamp, texts = self._split_pairs(value, *self._pairs)
        # Each entry on its own: one that is malformed, or of a scheme to come, voids no other.
        fitting: list[bytes] = []
        for text in texts:
            raw = decode(text, self._encoding)
            if raw is not None and len(raw) == self._size:
                fitting.append(raw)
        if not 1 <= len(fitting) <= _MOST_SIGNATURES:
            raise Rejection(
                "header_malformed",
                f"{self._names[0]} must hold the {self._encoding} of {self._size} bytes, at most "
                f"{_MOST_SIGNATURES} of them",
            )
        return stamp, fitting

    def _several_values(self, headers: Headers, first: str) -> list[str]:
        """Every signature that came: in a list, or in several headers."""
        if self._every:
            return [one_header(headers, name) for name in self._names if name in headers]
        if self._between:
            return [one.strip(" \t") for one in first.split(self._between)]
        return [first]

    def _without_prefix(self, values: list[str]) -> list[str]:
        """What follows the prefix. Others of a list are of a scheme to come: ignored."""
        size = len(self._prefix)
        texts = [value[size:] for value in values if value.startswith(self._prefix)]
        if not texts:
            raise Rejection("header_malformed", f"{self._names[0]} must start with {self._prefix}")
        return texts

    def _split_pairs(
        self, value: str, stamp_name: str, separator: str, signature_name: str
    ) -> tuple[str, list[str]]:
        stamps: list[str] = []
        texts: list[str] = []
        for pair in value.split(separator):
            name, _, content = pair.lstrip(" \t").partition("=")
            # Other names are schemes of the past or of the future: ignored, as documented.
            if name == stamp_name:
                stamps.append(content)
            elif name == signature_name:
                texts.append(content)
        if not stamps and texts:
            raise Rejection("timestamp_missing", f"{self._names[0]} has no {stamp_name}=")
        if len(stamps) != 1 or not texts:
            raise Rejection(
                "header_malformed",
                f"{self._names[0]} must hold one {stamp_name}= and at least one {signature_name}=",
            )
        return stamps[0], texts

    def _matching(self, delivery: Delivery, stamp: str, given: list[bytes]) -> tuple[str, bytes]:
        matching = signed = b""
        for message in self._messages(delivery, stamp):
            for key in self._keys:
                expected = hmac.digest(key, message, self._algorithm)
                for one in given:
                    # No early end: how long this takes tells nothing about which one fits.
                    if hmac.compare_digest(expected, one):
                        matching, signed = one, message
        if not matching:
            raise Rejection("signature_mismatch")
        return encode(matching, self._encoding), signed

    def _messages(self, delivery: Delivery, stamp: str) -> list[bytes]:
        """The bytes that may have been signed; more than one only where the URL has two forms."""
        values = {b"body": delivery.body, b"timestamp": stamp.encode()}
        if "method" in self._fields:
            values[b"method"] = encoded(delivery.method)
        if "id" in self._fields and self._id_field is not None:
            values[b"id"] = self._id_bytes(delivery.headers, self._id_field.parts[0].names)
        if not self._signs_url:
            return [self._message % values]
        url = self._url.form(delivery.url)
        forms = [url, decode_reserved(url)] if self._decode_url else [url]
        return [self._message % {**values, b"url": encoded(one)} for one in dict.fromkeys(forms)]

    def _id_bytes(self, headers: Headers, names: tuple[str, ...]) -> bytes:
        text = one_header(headers, *names)
        if not text.isascii() or not text.isprintable():
            raise Rejection("header_malformed", f"{names[0]} must hold visible ASCII characters")
        return text.encode()

    def _signed_in_body(self, payload: Any, headers: Headers) -> float:
        stamp = value_at(payload, self._stamp_path)
        if stamp is None and self._stamp_fallback in headers:
            stamp = one_header(headers, self._stamp_fallback)
        if stamp is None:
            raise Rejection("timestamp_missing", f"the body has no {self._stamp_path}")
        if isinstance(stamp, int) and not isinstance(stamp, bool) and 0 <= stamp < 10**15:
            stamp = str(stamp)
        return seconds_since_1970(stamp, self._unit)

    def _keyed_hash(self, text: str) -> str:
        return hmac.digest(self._keys[0], text.encode(), self._algorithm).hex()

    # --- sign ------------------------------------------------------------------------------

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        stamp = written_time(now, self._unit)
        fields, body = request.headers, request.body
        if self._stamp_header:
            put_header(fields, self._stamp_header, stamp)
        if self._stamp_path:
            body = self._stamped(body, stamp)
        delivery = Delivery(request.method, request.url, Headers(fields), body)
        message = self._messages(delivery, stamp)[-1]
        text = encode(hmac.digest(self._keys[0], message, self._algorithm), self._encoding)
        value = self._form.format(timestamp=stamp, signature=text) if self._form else ""
        put_header(fields, self._names[0], value or self._prefix + text)
        return SignedRequest(request.method, request.url, fields, body)

    def _stamped(self, body: bytes, stamp: str) -> bytes:
        """The body with the time of sending in it, which is a name at the top of the object."""
        payload = object_body(self.facts, body)
        payload[self._stamp_path] = int(stamp)
        return json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()

    # --- options ---------------------------------------------------------------------------

    def _check_dress(self) -> None:
        dress, name = self.facts.settings, self.facts.name
        if unknown := sorted(set(dress) - self.KNOWN):
            raise PolicyError(f"{name}: no such setting: {', '.join(unknown)}")
        if self._encoding not in ENCODINGS:
            raise PolicyError(f"{name}: encoding must be one of {', '.join(ENCODINGS)}")
        if self._algorithm not in {"sha1", "sha256", "sha384", "sha512"}:
            raise PolicyError(f"{name}: algorithm must be sha256, sha384, sha512 or sha1")
        if self._unit not in {"s", "ms", "iso"}:
            raise PolicyError(f"{name}: timestamp_unit must be s, ms or iso")
        if self._form and not _PAIRS.fullmatch(self._form):
            raise PolicyError(f"{name}: write form like t={{timestamp}},v1={{signature}}")
        fields = self._fields
        if "body" not in fields or any("{" in text for text in self._template[0::2]):
            raise PolicyError(
                f"{name}: signed must hold {{body}}, and of other fields only {{timestamp}}, "
                "{method}, {url} and {id}"
            )
        in_header = bool(self._stamp_header or self._form)
        if ("timestamp" in fields) != in_header or (in_header and self._stamp_path):
            raise PolicyError(
                f"{name}: a timestamp must be signed to be worth checking: name {{timestamp}} in "
                "signed, and say where it is with timestamp_header or form"
            )
        if "id" in fields and (self._id_field is None or len(self._id_field.headers) != 1):
            raise PolicyError(f"{name}: signed names {{id}}; say which: event_id='header:NAME'")


def _message_form(template: tuple[str, ...]) -> bytes:
    """The signed bytes as a format: what stands between the fields, and the fields by name."""
    pieces = [
        f"%({piece})b" if position % 2 else piece.replace("%", "%%")
        for position, piece in enumerate(template)
    ]
    return "".join(pieces).encode()


def _several(names: str | list[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _key(facts: Facts, secret: str | bytes) -> bytes:
    if facts.settings.get("key", "text") == "text" or isinstance(secret, bytes):
        return as_bytes(facts, secret)
    try:
        return bytes.fromhex(secret)
    except ValueError:
        raise PolicyError(
            f"the secret of {facts.title} must be hex digits, as its dashboard shows it"
        ) from None
