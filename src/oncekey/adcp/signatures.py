"""AdCP webhooks: the RFC 9421 profile with its ordered checks, and the legacy HMAC.

Which of the two a sender uses is agreed beforehand. It is a switch: a delivery signed the other
way is refused, never tried, as whoever could choose would choose the weaker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from oncekey.adcp.checklist import ALLOWED, Publisher, SignedByAdcp
from oncekey.adcp.signing_profiles import WEBHOOKS, strict_payload
from oncekey.adcp.webhooks import (
    ADCP_CODES,
    check_envelope,
    check_signable,
    event_id_in,
    rejection_headers,
)
from oncekey.errors import PolicyError
from oncekey.signatures.base import (
    Facts,
    Item,
    Proof,
    Provider,
    Secrets,
    as_bytes,
    as_secrets,
)
from oncekey.signatures.delivery import Delivery, Headers
from oncekey.signatures.hmac_schemes import HmacProvider
from oncekey.signatures.jwks import FetchedKeys, Revocations, as_keys
from oncekey.signatures.keypairs import need_cryptography
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.rfc9421 import (
    load_signing_key,
)
from oncekey.signatures.table import providers
from oncekey.signatures.urls import Hosts
from oncekey.signatures.verdict import OK, Verdict, VerifiedWebhookSender

__all__ = [
    "ADCP_CODES",
    "AdcpHmacProvider",
    "AdcpProvider",
    "adcp_hmac_provider",
    "adcp_provider",
    "rejection_headers",
]

_SIGNATURE_HEADERS: Final = ("signature-input", "signature")
_HMAC_HEADERS: Final = ("x-adcp-signature", "x-adcp-timestamp")


# --- RFC 9421 --------------------------------------------------------------------------------


class _Envelopes(Provider):
    """What AdCP asks of a delivery's body, however it is signed."""

    on_changed = "reject"
    rejection_headers = staticmethod(rejection_headers)

    def _item(self, headers: Headers, payload: Any, event_id: str | None) -> Item:
        check_envelope(payload)
        return super()._item(headers, payload, event_id_in(payload))

    def _check_signable(self, body: bytes) -> None:
        check_signable(self.name, body)


class AdcpProvider(_Envelopes, SignedByAdcp):
    """AdCP webhooks signed by RFC 9421. Made by ``adcp_provider``."""

    profile = WEBHOOKS

    def _check_mode(self, headers: Headers) -> None:
        _refuse_mode(headers, _HMAC_HEADERS)

    def _event_id(self, payload: Any) -> str | None:
        return event_id_in(payload)


def _refuse_mode(headers: Headers, other: tuple[str, ...]) -> None:
    if any(name in headers for name in other):
        WEBHOOKS.reject("mode_mismatch")


def adcp_provider(
    *,
    keys: Mapping[str, Any] | None = None,
    secret: Mapping[str, Any] | None = None,
    jwks: FetchedKeys | Callable[[], Any] | None = None,
    publisher: Publisher = None,
    nonces: Nonces | None = None,
    revocations: Revocations | Mapping[str, Any] | Callable[[], Any] | None = None,
    signing_key: object = None,
    key_id: str = "",
    account: str = "",
    public_url: str = "",
    allowed_hosts: Hosts = "",
) -> AdcpProvider:
    """AdCP webhooks, signed by RFC 9421 with the profile ``adcp/webhook-signing/v1``.

    Args:
        keys: The sender's JSON Web Key Set, or keys by key id.
        secret: Another name of ``keys``, for ``provider("adcp", ...)``.
        jwks: Instead: a function that fetches the set, or ``FetchedKeys`` of one.
        publisher: The stable name of the sender, for deduplication: it must outlive a change of
            keys. A name for all keys, a mapping from key id, or a function of the key id.
        nonces: Where used nonces are kept. ``None``: a receiver keeps them in its own store;
            without one the verdict carries the nonce, and whoever
            accepts the delivery must see to it that it is used once.
        revocations: The sender's list of revoked keys, or a function that fetches it.
        signing_key: A private key, or a JSON Web Key with ``d``, for ``sign``.
        key_id: Its id.
        account: Which of your endpoints or accounts this is.
        public_url: The URL that the sender knows, where a proxy changes it. ``Host`` is then not
            compared.
        allowed_hosts: Your hosts, in its place: a delivery to another one is refused.

    Raises:
        PolicyError: An option can't work, or ``cryptography`` is not installed.
    """
    # Long: most of it says what the options do.
    need_cryptography()
    signer = load_signing_key(signing_key, key_id)
    if signer is not None and signer.algorithm not in ALLOWED:
        raise PolicyError("signing_key= must be of Ed25519 or P-256")
    given: list[object] = [one for one in (keys, secret, jwks) if one is not None]
    if not given and signer is not None:
        given = [{key_id: signer._replace(jwk={})}]
    if len(given) != 1:
        raise PolicyError("pass keys= or jwks= to verify with, one of them")
    if nonces is not None and not isinstance(nonces, Nonces):
        raise PolicyError("nonces= must be Nonces(store)")
    if revocations is not None and not isinstance(revocations, Revocations):
        revocations = Revocations(revocations)
    return AdcpProvider(
        providers()["adcp"],
        keys=as_keys(given[0]),
        nonces=nonces,
        signing_key=signer,
        key_id=key_id,
        publisher=publisher,
        revocations=revocations,
        public_url=public_url,
        allowed_hosts=allowed_hosts,
        account=account,
    )


# --- legacy HMAC -----------------------------------------------------------------------------


class AdcpHmacProvider(_Envelopes, HmacProvider):
    """AdCP webhooks signed by the legacy HMAC. Made by ``adcp_hmac_provider``."""

    def __init__(self, facts: Facts, *, publisher: str, **options: Any) -> None:
        super().__init__(facts, **options)
        self.sender = VerifiedWebhookSender(
            self.name, account=self.sender.account, publisher=publisher
        )

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        _refuse_mode(delivery.headers, _SIGNATURE_HEADERS)
        return super()._prove(delivery, now)

    def _genuine(self, delivery: Delivery, proof: Proof) -> Verdict:
        payload = strict_payload(WEBHOOKS, delivery, "-", "-")
        return Verdict(
            True,
            OK,
            self.sender,
            event_id=event_id_in(payload),
            id_is_signed=True,
            timestamp=proof.timestamp,
            signature=proof.signature,
            payload=payload,
            signed_message=proof.message,
        )


def adcp_hmac_provider(
    *,
    secret: Secrets,
    previous: Secrets | None = None,
    publisher: str = "",
    account: str = "",
    tolerance: float | None = None,
) -> AdcpHmacProvider:
    """AdCP webhooks, signed by the legacy HMAC-SHA256 that AdCP 4 removes.

    Args:
        secret: The shared secret, at least 32 bytes.
        previous: The one before it, while it is being changed.
        publisher: The stable name of the sender, for deduplication.
        account: Which of your endpoints or accounts this is.
        tolerance: How far the clocks may differ, in seconds; 300 if not given.

    Raises:
        PolicyError: A secret is missing, too short or of one repeated byte.
    """
    dress = {
        "header": "X-ADCP-Signature",
        "prefix": "sha256=",
        "signed": "{timestamp}.{body}",
        "timestamp_header": "X-ADCP-Timestamp",
    }
    facts = replace(providers()["adcp-hmac"], settings=dress)
    for one in as_secrets(facts, secret, previous):
        raw = as_bytes(facts, one)
        if len(raw) < 32 or len(set(raw)) == 1:
            raise PolicyError(
                "a secret of AdCP must have at least 32 random bytes: make one with "
                "secrets.token_hex(32)"
            )
    return AdcpHmacProvider(
        facts,
        secret=secret,
        previous=previous,
        publisher=publisher,
        account=account,
        tolerance=tolerance,
    )
