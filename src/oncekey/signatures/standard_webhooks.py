"""Standard Webhooks 1.0, and Svix where it began: ``v1`` (HMAC) and ``v1a`` (ed25519)."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from typing import Any, Final

from oncekey.errors import PolicyError
from oncekey.signatures.base import (
    Facts,
    Proof,
    Provider,
    Secrets,
    SignedRequest,
    as_secrets,
    put_header,
)
from oncekey.signatures.delivery import Delivery, Headers
from oncekey.signatures.keypairs import ed25519_private, ed25519_public, signed_by
from oncekey.signatures.parsing import (
    Rejection,
    decode,
    encode,
    one_header,
    seconds_since_1970,
    written_time,
)

__all__ = ["StandardWebhooksProvider"]

# A full stop would let part of the id be read as the timestamp: the specification forbids it.
_ID = re.compile(r"[\x21-\x2d\x2f-\x7e]{1,255}")
_MOST_SIGNATURES: Final = 32
_SIZES: Final = {"v1": 32, "v1a": 64}


class StandardWebhooksProvider(Provider):
    """Signs ``{id}.{timestamp}.{body}``; the header lists signatures with a space between.

    Each secret says by its prefix what it is: ``whsec_`` a shared secret, ``whpk_`` a public key,
    ``whsk_`` a private key, which can sign too.
    """

    def __init__(
        self,
        facts: Facts,
        *,
        secret: Secrets | None = None,
        previous: Secrets | None = None,
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        self._families: tuple[str, ...] = tuple(facts.settings["families"])
        self._shared: list[bytes] = []
        self._public: list[Any] = []
        self._private: list[Any] = []
        for one in as_secrets(facts, secret, previous):
            self._add(one)

    def signed_headers(self) -> frozenset[str]:
        """The id and the timestamp."""
        return frozenset(f"{family}-{part}" for family in self._families for part in _PARTS)

    def _add(self, secret: str | bytes) -> None:
        if isinstance(secret, bytes):
            self._shared.append(secret)
            return
        prefix, _, rest = secret.rpartition("_") if secret.startswith("wh") else ("", "", secret)
        try:
            raw = base64.b64decode(rest + "=" * (-len(rest) % 4), validate=True)
        except (ValueError, binascii.Error):
            raw = b""
        if prefix not in ("", "whsec", "whpk", "whsk") or not raw:
            raise PolicyError(
                f"a secret of {self.facts.title} is whsec_, whpk_ or whsk_ and base64; pass raw "
                "key bytes as bytes"
            )
        if prefix == "whsk":
            private = ed25519_private(raw, "the whsk_ key")
            self._private.append(private)
            self._public.append(private.public_key())
        elif prefix == "whpk":
            self._public.append(ed25519_public(raw, "the whpk_ key"))
        else:
            self._shared.append(raw)

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        family = self._family(delivery.headers)
        given = self._given(one_header(delivery.headers, f"{family}-signature"))
        event_id = one_header(delivery.headers, f"{family}-id")
        if not _ID.fullmatch(event_id):
            raise Rejection(
                "header_malformed",
                f"{family}-id must have 1 to 255 visible ASCII characters and no full stop",
            )
        stamp = one_header(delivery.headers, f"{family}-timestamp", missing="timestamp_missing")
        timestamp = seconds_since_1970(stamp, "s")
        self._check_clock(timestamp, now)
        message = f"{event_id}.{stamp}.".encode() + delivery.body
        return Proof(self._matching(message, given), message, timestamp)

    def _family(self, headers: Headers) -> str:
        """The one family that the headers are of, so that what is read is what was proven."""
        named = [
            family
            for family in self._families
            if any(f"{family}-{part}" in headers for part in (*_PARTS, "signature"))
        ]
        if len(named) > 1:
            both = " and ".join(f"{family}-*" for family in named)
            raise Rejection("header_malformed", f"send headers of one family, not {both}")
        return named[0] if named else self._families[0]

    def _given(self, value: str) -> list[tuple[str, bytes]]:
        """The signatures, each token on its own: one that can't be read voids no other."""
        given: list[tuple[str, bytes]] = []
        for token in value.split(" "):
            version, _, text = token.partition(",")
            raw = decode(text, "base64")
            if raw is not None and len(raw) == _SIZES.get(version):
                given.append((version, raw))
        if not 1 <= len(given) <= _MOST_SIGNATURES:
            raise Rejection(
                "header_malformed",
                "the signature header must hold a v1 or v1a signature, like v1,BASE64 with a space "
                f"between several, at most {_MOST_SIGNATURES}",
            )
        return given

    def _matching(self, message: bytes, given: list[tuple[str, bytes]]) -> str:
        expected = [hmac.digest(key, message, "sha256") for key in self._shared]
        matching = ""
        for version, raw in given:
            if version == "v1":
                # No early end: how long this takes tells nothing about which one fits.
                for one in expected:
                    if hmac.compare_digest(one, raw):
                        matching = encode(raw, "base64")
            elif any(signed_by(key, raw, message) for key in self._public):
                matching = encode(raw, "base64")
        if not matching:
            raise Rejection("signature_mismatch")
        return matching

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        fields, family = request.headers, self._families[0]
        stamp = written_time(now, "s")
        put_header(fields, f"{family}-timestamp", stamp)
        event_id = one_header(Headers(fields), f"{family}-id")
        if not _ID.fullmatch(event_id):
            raise PolicyError("the event id needs 1 to 255 visible ASCII characters, no full stop")
        put_header(fields, f"{family}-signature", self.signature(event_id, stamp, request.body))
        return request

    def signature(self, event_id: str, stamp: str, body: bytes) -> str:
        """What stands in the signature header, for an id and a timestamp that can be sent.

        Raises:
            PolicyError: There is only a public key.
        """
        message = f"{event_id}.{stamp}.".encode() + body
        if self._shared:
            return "v1," + encode(hmac.digest(self._shared[0], message, "sha256"), "base64")
        if self._private:
            return "v1a," + encode(self._private[0].sign(message), "base64")
        raise PolicyError("a public key can't sign: pass the private one, whsk_, as the secret")


_PARTS: Final = ("id", "timestamp")
