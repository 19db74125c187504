"""Every scheme there is, with a genuine delivery: the table, RFC 9421, AdCP, and custom HMAC."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from tests.signatures.cases import (
    CASES,
    HEX_KEY,
    NOW,
    OURS,
    SECRET,
    WHSEC,
    Case,
    case_of,
    keys,
    make,
    other,
)
from tests.signatures.rsa_for_tests import rsa_key

from oncekey import MemoryStore
from oncekey.signatures import CertificateCache, Provider, SignedRequest, hmac_provider, providers
from oncekey.signatures.nonces import Nonces

ENDPOINT = "https://hooks.example.com/webhooks?tenant=7"
JSON = {"Content-Type": "application/json"}
ADCP_ID = "whk_01HW9D3H8FZP2N6R8T0V4X6Z9B"


class Scheme(NamedTuple):
    """One way to sign."""

    name: str
    provider: Provider
    stranger: Provider  # made with another secret
    case: Case
    secrets: tuple[str, ...]  # what no answer, log or repr may show
    slow: bool = False  # RSA: signing takes a millisecond

    def sign(
        self,
        body: bytes | None = None,
        *,
        now: float = NOW,
        headers: dict[str, str] | None = None,
    ) -> SignedRequest:
        """A genuine delivery: of this body, with these headers besides those of its case."""
        case = self.case
        with pytest.MonkeyPatch.context() as patch:  # a hostile sender signs what none may send
            patch.setattr(self.provider, "_check_signable", lambda body: None)
            return self.provider.sign(
                "POST",
                ENDPOINT,
                {**JSON, **case.headers, **(headers or {})},
                case.body if body is None else body,
                now=now,
                event_id=case.send_id,
            )


def _pair(seed: int) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


def _curve(number: int) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.derive_private_key(number, ec.SECP256R1())


def _adcp(private: Any, wrong: Any) -> tuple[Provider, Provider]:
    from oncekey.adcp.signatures import adcp_provider

    signing = {"signing_key": private, "key_id": "k1"}
    return (
        adcp_provider(allowed_hosts="*", **signing, nonces=Nonces(MemoryStore(), per_key=50_000)),
        adcp_provider(allowed_hosts="*", keys={"k1": wrong.public_key()}),
    )


def _adcp_hmac() -> tuple[Provider, Provider]:
    from oncekey.adcp.signatures import adcp_hmac_provider

    return adcp_hmac_provider(secret=SECRET), adcp_hmac_provider(secret=SECRET[::-1])


def _rfc9421(private: Any, wrong: Any) -> tuple[Provider, Provider]:
    from oncekey.signatures.rfc9421 import rfc9421_provider

    places = {"event_id": "id", "event_type": "type"}
    public = wrong if isinstance(wrong, bytes) else wrong.public_key()
    return (
        rfc9421_provider(allowed_hosts="*", signing_key=private, key_id="k1", **places),
        rfc9421_provider(allowed_hosts="*", keys={"k1": public}, **places),
    )


def _hmac(**options: Any) -> tuple[Provider, Provider]:
    return (
        hmac_provider("acme", secret=SECRET, **options),
        hmac_provider("acme", secret=SECRET[::-1], **options),
    )


_EVENT = Case(json.dumps({"id": "evt_1", "type": "paid"}).encode(), "evt_1")
ENVELOPE = {
    "operation_id": "op_1",
    "task_id": "task_1",
    "task_type": "create_media_buy",
    "status": "completed",
    "timestamp": "2026-11-16T03:10:00Z",
}
_TASK = Case(json.dumps({"idempotency_key": ADCP_ID, **ENVELOPE}).encode(), ADCP_ID)

_OTHERS: dict[str, tuple[Callable[[], tuple[Provider, Provider]], Case]] = {
    "adcp": (lambda: _adcp(_pair(1), _pair(2)), _TASK),
    "adcp-es256": (lambda: _adcp(_curve(7), _curve(8)), _TASK),
    "adcp-hmac": (_adcp_hmac, _TASK),
    "rfc9421": (lambda: _rfc9421(_pair(1), _pair(2)), _EVENT),
    "rfc9421-rsa": (lambda: _rfc9421(rsa_key(0), rsa_key(1)), _EVENT),
    "rfc9421-hmac": (lambda: _rfc9421(SECRET.encode(), SECRET[::-1].encode()), _EVENT),
    "hmac": (lambda: _hmac(header="X-Acme-Signature", event_id="id", event_type="type"), _EVENT),
    "hmac-stamped": (
        lambda: _hmac(
            header=["X-Acme-Signature", "X-Old-Signature"],
            prefix="v1=",
            encoding="base64url",
            algorithm="sha512",
            signed="{id}.{timestamp}.{method}.{url}.{body}",
            timestamp_header="X-Acme-Time",
            timestamp_unit="ms",
            event_id="header:X-Acme-Id",
            allowed_hosts=["hooks.example.com"],
        ),
        Case(b'{"type": "paid"}', "evt_1", send_id="evt_1"),
    ),
    "hmac-batch": (
        lambda: _hmac(
            header="X-Acme-Signature",
            form="t={timestamp},s={signature}",
            signed="{timestamp}.{body}",
            event_id="id",
            batch="events",
        ),
        Case(b'{"events": [{"id": "a"}, {"id": "b"}]}', None),
    ),
}

# One of each dress: what many share is tried on one of them.
_WRITTEN = tuple(CASES)
_DRESSES = ("pagerduty", "docusign", "twitch", "typeform", "vercel", "plaid", "aws-sns")
NAMES = [*(one for one in OURS if one in _WRITTEN or one in _DRESSES), *_OTHERS]
"""A provider of every dress in which something of the event is signed."""

TOKENS = ["gitlab", "google-pubsub"]
"""Of those whose token signs nothing of it: whoever has one can send any event."""


def dress(name: str) -> tuple[str, frozenset[str]]:
    """What tells a provider's verifier from others: its scheme, and which settings it has."""
    return providers()[name].scheme, frozenset(providers()[name].settings)


@cache
def scheme(name: str) -> Scheme:
    """A scheme, made once a run."""
    secrets = (SECRET, SECRET[::-1], WHSEC, WHSEC[6:], HEX_KEY)
    if name in _OTHERS:
        both, case = _OTHERS[name]
        return Scheme(name, *both(), case, secrets, slow=name == "rfc9421-rsa")
    if name == "paypal":
        # Hostile deliveries name many certificates: none must meet the limit on fetches.
        cache_ = CertificateCache(
            lambda _url: keys().certificate, per_minute=10**9, trust=keys().root
        )
        provider = make(name, fetch=cache_)
        return Scheme(name, provider, make(name, **other(name)), case_of(name), secrets, slow=True)
    slow = name in ("google-pubsub", "aws-sns")
    return Scheme(name, make(name), make(name, **other(name)), case_of(name), secrets, slow=slow)
