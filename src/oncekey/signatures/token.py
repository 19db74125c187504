"""A token that comes with every delivery and is compared: GitLab, Telegram.

It says who sends, and signs nothing: whoever saw one delivery can send any other. It is compared in
constant time, and neither it nor a part of it gets into a message or a log.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from oncekey.signatures.base import (
    Facts,
    Proof,
    Provider,
    Secrets,
    SignedRequest,
    as_bytes,
    as_secrets,
    put_header,
)
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.parsing import Rejection, one_header

__all__ = ["TokenProvider"]


class TokenProvider(Provider):
    """``facts.settings`` names the ``header``, and perhaps a ``prefix`` such as ``Bearer``."""

    body_is_signed = False

    def __init__(
        self,
        facts: Facts,
        *,
        secret: Secrets | None = None,
        previous: Secrets | None = None,
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        self._header: str = facts.settings["header"]
        self._prefix: str = facts.settings.get("prefix", "")
        self._tokens = [as_bytes(facts, one) for one in as_secrets(facts, secret, previous)]

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        value = one_header(delivery.headers, self._header)
        if not value.startswith(self._prefix):
            raise Rejection("header_malformed", f"{self._header} must start with {self._prefix}")
        given = value[len(self._prefix) :].encode("utf-8", "replace")
        # Hashes, so that not even the length can be measured; and no early end.
        hashed = hashlib.sha256(given).digest()
        fits = [
            hmac.compare_digest(hashed, hashlib.sha256(token).digest()) for token in self._tokens
        ]
        if not any(fits):
            raise Rejection(
                "signature_mismatch",
                f"the token in {self._header} is not the one that was agreed: check it on both "
                "sides",
            )
        # The body stands for the message; nothing better is there to know a copy by.
        return Proof(hashlib.sha256(delivery.body).hexdigest(), delivery.body)

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        put_header(request.headers, self._header, self._prefix + self._tokens[0].decode())
        return request
