"""A provider, a genuine delivery and what to expect of it, for every row of the table."""

from __future__ import annotations

import datetime
import json
from functools import cache
from typing import Any, NamedTuple

from tests.signatures.rsa_for_tests import rsa_key

from oncekey.signatures import CertificateCache, Provider, SignedRequest, provider, providers
from oncekey.signatures.algorithms import SignatureKey
from oncekey.testing import sample
from oncekey.testing._keys import issued, keys_of

NOW = 1_794_800_000.0
URL = "https://example.com/webhooks?tenant=7"
SECRET = "correct-horse-battery-staple-0123456789"
OLD_SECRET = "the-secret-before-this-one-0123456789"
WHSEC = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OLD_WHSEC = "whsec_b2xkZXItc2VjcmV0LW9mLXRoZS1lbmRwb2ludA=="
HEX_KEY = "44782def547aaa06c910c43932b1eb0c71fc68d9d0c057550c48ec2acf6ba056"
OLD_HEX_KEY = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
CERT_URL = "https://api.paypal.com/v1/notifications/certs/CERT-360caa42-fca2a594-1d93a270"
WEBHOOK_ID = "1JE4291016473214C"

OURS = [name for name, facts in providers().items() if not facts.factory]
UNSIGNED_BODIES = tuple(name for name in OURS if providers()[name].unsigned)
TOKENS = tuple(name for name in OURS if providers()[name].scheme == "token")
NO_SECRET = tuple(name for name in OURS if providers()[name].scheme in ("paypal", "jwt", "sns"))
SAMPLE_ID = "sample-1"


class Case(NamedTuple):
    """What to sign, and what a genuine delivery then is."""

    body: bytes
    event_id: str | None
    headers: dict[str, str] = {}
    send_id: str | None = None  # the id to sign with, where it is in a header


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


ADYEN_ITEM = {
    "additionalData": {"paymentMethod": "visa"},
    "amount": {"currency": "EUR", "value": 1130},
    "eventCode": "AUTHORISATION",
    "eventDate": "2026-11-16T03:10:00+01:00",
    "merchantAccountCode": "TestMerchant",
    "merchantReference": "TestPayment-1407325143704",
    "originalReference": "",
    "pspReference": "7914073381342284",
    "success": "true",
}


def adyen_body(*references: str) -> bytes:
    items = [{**ADYEN_ITEM, "pspReference": one} for one in references]
    return _json({"notificationItems": [{"NotificationRequestItem": one} for one in items]})


CASES: dict[str, Case] = {
    "stripe": Case(_json({"id": "evt_1", "type": "invoice.paid"}), "evt_1"),
    "github": Case(_json({"zen": "Keep it logically awesome."}), "guid-1", send_id="guid-1"),
    "shopify": Case(
        _json({"id": 7}),
        "event-1:orders/create",
        {"X-Shopify-Topic": "orders/create"},
        send_id="event-1",
    ),
    "slack": Case(_json({"event_id": "Ev1", "event": {"type": "app_mention"}}), "Ev1"),
    "twilio": Case(
        b"Body=Hello+there&From=%2B15005550006&Body=Hello+there&MediaUrl=",
        "token-1",
        {"Content-Type": "application/x-www-form-urlencoded"},
        send_id="token-1",
    ),
    "paypal": Case(_json({"id": "WH-1", "event_type": "PAYMENT.SALE.COMPLETED"}), "WH-1"),
    "square": Case(_json({"event_id": "sq-1", "type": "payment.updated"}), "sq-1"),
    "standard-webhooks": Case(_json({"type": "user.created"}), "msg_1", send_id="msg_1"),
    "svix": Case(_json({"type": "user.created"}), "msg_1", send_id="msg_1"),
    "zendesk": Case(_json({"type": "ticket.created"}), "inv-1", send_id="inv-1"),
    "discord": Case(
        _json({"type": 1, "event": {"type": "A", "timestamp": "2026-11-16T03", "data": {"n": 1}}}),
        "d7f3aaf2ded056b3f267c654c18aa1b322e48b235ed2cc3739bdbbe76871001b",
    ),
    "paddle": Case(_json({"event_id": "evt_01", "notification_id": "ntf_01"}), "evt_01"),
    "mailgun": Case(_json({"event-data": {"id": "mg-1", "event": "delivered"}}), "mg-1"),
    "hubspot": Case(
        _json([{"eventId": 1, "subscriptionId": 2, "portalId": 3, "occurredAt": 4}]), None
    ),
    "intercom": Case(_json({"id": "notif_1", "topic": "user.created"}), "notif_1"),
    "linear": Case(
        _json({"action": "create", "type": "Issue", "webhookTimestamp": 0}), "d-1", send_id="d-1"
    ),
    "sendgrid": Case(_json([{"sg_event_id": "sg-1", "event": "open"}]) + b"\r\n", None),
    "adyen": Case(adyen_body("psp-1", "psp-2"), None),
    "adyen-platform": Case(_json({"type": "balancePlatform.transfer.created"}), None),
    "sports-stack": Case(_json({"event": {"hash": "a1b2", "type": "score"}}), "a1b2"),
}


def case_of(name: str) -> Case:
    """The case written above, or else the kit's own sample of the provider."""
    if name in CASES:
        return CASES[name]
    if name not in _SAMPLED:
        stable = make(name)
        made = sample(stable, id=SAMPLE_ID, now=NOW)
        in_header = bool(stable.event_id) and stable.event_id.startswith("header:")
        kept = {one: value for one, value in dict(made.headers).items() if _is_event_s(stable, one)}
        _SAMPLED[name] = Case(
            made.body,
            None if stable.batch else made.event_id,
            kept,
            SAMPLE_ID if in_header else None,
        )
    return _SAMPLED[name]


_SAMPLED: dict[str, Case] = {}


def _is_event_s(stable: Provider, header: str) -> bool:
    """Whether a header of a sample is the event's own, and no part of its signature."""
    return header.lower() in (stable.event_type or "").lower()


class Keys(NamedTuple):
    """Key pairs, made once a run."""

    discord: str
    discord_public: str
    other_discord: str
    sendgrid: bytes
    sendgrid_public: str
    other_sendgrid: bytes
    paypal: bytes
    certificate: bytes
    expired: bytes
    root: bytes


@cache
def keys() -> Keys:
    import base64

    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    def pem(key: Any) -> bytes:
        return key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    seed = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    curve = ec.derive_private_key(0xC0FFEE, ec.SECP256R1())
    other_curve = ec.derive_private_key(0xBEEF, ec.SECP256R1())
    years = [datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 2020, 2100)]
    name = "messageverificationcerts.paypal.com"
    big, certificate, root = issued(name, years[0], years[2])
    _, expired, old_root = issued(name, years[0], years[1])

    spki = curve.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return Keys(
        bytes(range(32)).hex(),
        seed.public_key().public_bytes_raw().hex(),
        ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
        .public_key()
        .public_bytes_raw()
        .hex(),
        pem(curve),
        base64.b64encode(spki).decode(),
        pem(other_curve),
        big,
        certificate,
        expired,
        root + old_root,
    )


def make(name: str, **options: Any) -> Provider:
    """The provider with the right secret; ``options`` replace what it is made with."""
    return _make(name, options) if options else _usual(name)


@cache
def _usual(name: str) -> Provider:
    return _make(name, {})


def _make(name: str, options: dict[str, Any]) -> Provider:
    facts = providers()[name]
    given: dict[str, Any] = {"secret": _secrets(name)[0]}
    if name == "discord":
        given = {"secret": keys().discord_public, "signing_key": keys().discord}
    elif name == "sendgrid":
        given = {"secret": keys().sendgrid_public, "signing_key": keys().sendgrid}
    elif name == "paypal":
        given = {
            "webhook_id": WEBHOOK_ID,
            "fetch": lambda _url: keys().certificate,
            "trust": keys().root,
            "signing_key": keys().paypal,
            "cert_url": CERT_URL,
        }
    elif name in NO_SECRET:
        given = keys_of(name)
    if isinstance(options.get("fetch"), CertificateCache):
        del given["trust"]
    if name in UNSIGNED_BODIES:
        given["accept_unsigned"] = "body"
    if facts.scheme == "twilio" or "{url}" in facts.settings.get("signed", ""):
        given["allowed_hosts"] = "*"  # test_hosts.py has more
    return provider(name, **{**given, **options})


def _secrets(name: str) -> tuple[str, str]:
    """A secret of the provider's form, and another."""
    facts = providers()[name]
    if facts.scheme == "standard-webhooks":
        return WHSEC, OLD_WHSEC
    if facts.scheme == "adyen" or facts.settings.get("key") == "hex":
        return HEX_KEY, OLD_HEX_KEY
    return SECRET, OLD_SECRET


def other(name: str) -> dict[str, Any]:
    """Options for the same provider with another secret."""
    if name == "discord":
        return {"secret": keys().other_discord}
    if name == "sendgrid":
        return {"secret": _public_pem(keys().other_sendgrid)}
    if name == "paypal":
        return {"webhook_id": "ANOTHERWEBHOOK"}
    if providers()[name].scheme == "jwt":
        return {"keys": {"oncekey-testing": _other_jwt_key(name)}}
    if name == "aws-sns":
        return {"signing_key": keys().paypal, **_other_certificate()}
    return {"secret": _secrets(name)[1]}


@cache
def _other_certificate() -> dict[str, Any]:
    years = [datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 2100)]
    _, certificate, root = issued("sns.amazonaws.com", *years)
    return {"fetch": lambda _url: certificate, "trust": root}


def _other_jwt_key(name: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    if providers()[name].settings["algorithms"] == ["ES256"]:
        return ec.derive_private_key(0xBEEF, ec.SECP256R1()).public_key()
    return SignatureKey("rsa-v1_5-sha256", rsa_key(1).public_key(), {})


def secret_of(name: str) -> Any:
    """The secret that ``make`` passes."""
    if name in ("discord", "sendgrid"):
        return getattr(keys(), f"{name}_public")
    return _secrets(name)[0]


def _public_pem(private: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(private, None).public_key()
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def signed(name: str) -> SignedRequest:
    """A genuine delivery; the headers are the caller's to change."""
    request = _signed(name)
    return request._replace(headers=dict(request.headers))


@cache
def _signed(name: str) -> SignedRequest:
    case = case_of(name)
    return make(name).sign("POST", URL, case.headers, case.body, now=NOW, event_id=case.send_id)


def signature_headers(name: str, request: SignedRequest) -> list[str]:
    """The headers that signing added."""
    given = {one.lower() for one in case_of(name).headers}
    return [one for one in request.headers if one.lower() not in given]
