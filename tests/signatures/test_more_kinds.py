"""Tokens, JSON Web Tokens, lists of signatures, several headers; and rows that need no Python."""

from __future__ import annotations

import hashlib
import hmac
import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from tests.signatures.cases import NOW, OLD_SECRET, SECRET, URL, make

from oncekey.errors import PolicyError
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider, providers, table
from oncekey.signatures.facts import Facts
from oncekey.testing import _keys, sample, sample_provider

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec

JSON = {"Content-Type": "application/json"}
BODY = b'{"event":{"id":"01A","event_type":"incident.triggered"}}'


def hexed(secret: str, message: bytes = BODY) -> str:
    return hmac.digest(secret.encode(), message, "sha256").hex()


# --- lists of signatures, and several headers ---------------------------------------------------


def test_one_of_a_list_of_signatures_is_enough() -> None:
    """PagerDuty signs with every active secret: whichever is known here, in any place, fits."""
    pagerduty = make("pagerduty")
    for value, code in {
        f"v1={hexed(SECRET)}": "ok",
        f"v1={hexed('another')},v1={hexed(SECRET)}": "ok",
        f"v1={hexed(SECRET)}, v1={hexed('another')}": "ok",
        f"v2=zz,v1={hexed(SECRET)}": "ok",
        f"v1={hexed('another')},v1={hexed(OLD_SECRET)}": "signature_mismatch",
        f"v2={hexed(SECRET)}": "header_malformed",
        ",".join([f"v1={hexed('another')}"] * 17): "header_malformed",
        "v1=,v1=": "header_malformed",
    }.items():
        headers = {"X-PagerDuty-Signature": value}
        assert pagerduty.verify("POST", URL, headers, BODY, now=NOW).code == code, value


def test_each_of_several_signature_headers_counts() -> None:
    """DocuSign has a header for each key; one that came twice is refused, wherever it stands."""
    body = b'{"event":"envelope-sent","generatedDateTime":"2026-11-16","data":{"envelopeId":"e"}}'
    docusign = make("docusign")
    good = docusign.sign("POST", URL, {}, body, now=NOW).headers["X-DocuSign-Signature-1"]
    bad = make("docusign", secret="another").sign("POST", URL, {}, body, now=NOW)
    other = bad.headers["X-DocuSign-Signature-1"]
    one, two, ten = (f"X-DocuSign-Signature-{number}" for number in (1, 2, 10))
    tries: list[tuple[list[tuple[str, str]], str]] = [
        ([(one, other), (two, good)], "ok"),
        ([(ten, good)], "ok"),
        ([(one, other), (two, other)], "signature_mismatch"),
        ([("X-DocuSign-Signature-11", good)], "header_missing"),
        ([(one, good), (two, other), (two, good)], "header_malformed"),
    ]
    for headers, code in tries:
        assert docusign.verify("POST", URL, headers, body, now=NOW).code == code, headers


# --- tokens --------------------------------------------------------------------------------------


def test_a_token_that_is_not_the_one_is_a_mismatch() -> None:
    """Also a beginning of it, one that is longer, and one that no text is; none is told."""
    gitlab = make("gitlab", previous=OLD_SECRET)
    for token, code in {
        SECRET: "ok",
        OLD_SECRET: "ok",
        SECRET[:-1]: "signature_mismatch",
        SECRET + "x": "signature_mismatch",
        SECRET.upper(): "signature_mismatch",
        "\ud800": "signature_mismatch",
        "": "signature_mismatch",
    }.items():
        headers = {"X-Gitlab-Token": token, "Idempotency-Key": "k-1"}
        verdict = gitlab.verify("POST", URL, headers, b"{}", now=NOW)
        assert verdict.code == code
        assert SECRET not in f"{verdict!r} {verdict.message} {verdict.signature}"
    with pytest.raises(ValueError, match=r"signs nothing.*accept_unsigned='body'"):
        provider("gitlab", secret=SECRET)


# --- JSON Web Tokens -----------------------------------------------------------------------------


def token(claims: Mapping[str, Any] = {}, head: Mapping[str, Any] = {}, **made: Any) -> str:
    """A token of Plaid's with some claims or fields of its head changed; ``None`` takes one out."""
    from oncekey.signatures.algorithms import load_key, sign_bytes
    from oncekey.signatures.parsing import encode

    body = {"iat": int(NOW), "request_body_sha256": hashlib.sha256(b"{}").hexdigest(), **claims}
    top = {"alg": "ES256", "kid": "k", "typ": "JWT", **head}
    kept = [{name: one for name, one in part.items() if one is not None} for part in (top, body)]
    text = ".".join(encode(json.dumps(part).encode(), "base64url") for part in kept)
    key = load_key(made.get("key", PRIVATE))
    return f"{text}.{encode(sign_bytes(key, text.encode()), 'base64url')}"


PRIVATE = ec.derive_private_key(0xC0FFEE, ec.SECP256R1())
STRANGER = ec.derive_private_key(0xBEEF, ec.SECP256R1())


@pytest.mark.parametrize(
    "text, code",
    [
        (token(), "ok"),
        (token(key=STRANGER), "signature_mismatch"),
        (token({"request_body_sha256": "0" * 64}), "signature_mismatch"),
        (token({"request_body_sha256": None}), "signature_mismatch"),
        (token({"iat": None}), "timestamp_missing"),
        (token({"iat": True}), "timestamp_missing"),
        (token({"iat": int(NOW) - 301}), "timestamp_too_old"),
        (token({"iat": int(NOW) + 301}), "timestamp_in_future"),
        (token({"exp": int(NOW) - 301}), "timestamp_too_old"),
        (token({"exp": "soon"}), "timestamp_malformed"),
        (token({"nbf": int(NOW) + 301}), "timestamp_in_future"),
        (token(head={"alg": "none"}), "header_malformed"),
        (token(head={"alg": "HS256"}, key=b"0" * 32), "header_malformed"),
        (token(head={"kid": None}), "header_malformed"),
        (token(head={"kid": "unknown"}), "key_unknown"),
        (token().rpartition(".")[0] + ".", "header_malformed"),
        (token() + "=", "header_malformed"),
        ("a.b", "header_malformed"),
        ("W10.W10.W10", "header_malformed"),
    ],
)
def test_what_a_token_says_is_checked(text: str, code: str) -> None:
    """Its algorithm, key, signature, times and the hash of the body, each with its code."""
    plaid = provider("plaid", keys={"k": PRIVATE.public_key()})
    verdict = plaid.verify("POST", URL, {"Plaid-Verification": text}, b"{}", now=NOW)

    assert verdict.code == code


def test_a_token_for_somebody_else_is_refused() -> None:
    """Google signs for everybody: without its audience and account a token proves nothing."""
    signs = sample_provider("google-pubsub")
    request = signs.sign("POST", URL, {}, b'{"message": {"messageId": "1"}}', now=NOW)
    for said, code in {
        "audience": "claim_mismatch",
        "email": "claim_mismatch",
        "": "ok",
    }.items():
        keys = _keys.keys_of("google-pubsub")
        keys[said] = "https://other.example/" if said else None
        given = {name: value for name, value in keys.items() if name}
        other = provider("google-pubsub", accept_unsigned="body", **given)
        assert other.verify(*request, now=NOW).code == code
    with pytest.raises(ValueError, match="pass audience=, what the sender"):
        provider("google-pubsub", accept_unsigned="body", email="a@example.com")
    with pytest.raises(ValueError, match="name no audience"):
        provider("plaid", keys={"k": PRIVATE.public_key()}, audience="https://example.com")


def test_keys_that_can_not_be_had_are_no_verdict_on_the_token() -> None:
    """The sender is told to come again; a set that is there and lacks the key is one."""

    def away() -> bytes:
        raise TimeoutError

    for keys, transient in ((away, True), ({"x": PRIVATE.public_key()}, False)):
        plaid = provider("plaid", keys=keys)
        verdict = plaid.verify("POST", URL, {"Plaid-Verification": token()}, b"{}", now=NOW)
        assert (verdict.code, verdict.transient) == ("key_unknown", transient)


# --- a provider's own tests of the endpoint -----------------------------------------------------


@pytest.mark.parametrize(
    "name, body, status, told",
    [
        (
            "zoom",
            {"event": "endpoint.url_validation", "payload": {"plainToken": "qgg8vlvZRS6UYooatFL8"}},
            200,
            {
                "plainToken": "qgg8vlvZRS6UYooatFL8",
                "encryptedToken": hexed(SECRET, b"qgg8vlvZRS6UYooatFL8"),
            },
        ),
        ("xero", {"events": [], "lastEventSequence": 0}, 200, None),
        ("asana", {"events": []}, 200, None),
        ("pagerduty", {"event": {"event_type": "pagey.ping", "id": "1"}}, 200, None),
    ],
)
def test_signed_tests_of_the_endpoint_are_answered(
    name: str, body: Any, status: int, told: Any
) -> None:
    """As each provider wants it; no handler is called, and a wrong signature gets a 401."""
    receiver = WebhookReceiver(make(name), "memory://")
    request = make(name).sign("POST", URL, JSON, json.dumps(body).encode(), now=NOW)
    answer = receiver.receive(*request, now=NOW)

    assert (answer.status, answer.outcome, answer.code) == (status, "ignored", "handshake")
    assert (json.loads(answer.body) if answer.body else None) == told
    stranger = make(name, secret=OLD_SECRET).sign("POST", URL, JSON, request.body, now=NOW)
    assert receiver.receive(*stranger, now=NOW).status == 401
    receiver.close()


def test_the_challenge_of_twitch_is_sent_back_as_it_is() -> None:
    """Plain text, under a signature that covers id and time."""
    twitch = make("twitch")
    pending = {"status": "webhook_callback_verification_pending"}
    body = json.dumps({"challenge": "pogchamp-kappa-360noscope-vohiyo", "subscription": pending})
    request = twitch.sign("POST", URL, JSON, body.encode(), now=NOW, event_id="m-1")
    receiver = WebhookReceiver(twitch, "memory://")
    answer = receiver.receive(*request, now=NOW)
    receiver.close()

    assert (answer.status, answer.body) == (200, b"pogchamp-kappa-360noscope-vohiyo")


# --- rows ----------------------------------------------------------------------------------------

ROWS = """
[hmac]
settings.header = "X-Acme-Signature"
settings.prefix = "sha256="
event_id = "id"

[hmac-of-pairs]
scheme = "hmac"
settings.header = "X-Acme-Signature"
settings.form = "t={timestamp},v1={signature}"
settings.signed = "{timestamp}.{body}"
event_id = "id"
tolerance = 300

[hmac-of-lists]
scheme = "hmac"
settings.header = "X-Acme-Signature"
settings.list = ";"
event_id = "id"

[hmac-of-headers]
scheme = "hmac"
settings.header = ["X-Acme-A", "X-Acme-B"]
settings.every_header = true
event_id = "id"

[token]
settings.header = "Authorization"
settings.prefix = "Bearer "
event_id = "id"
unsigned = { what = "body", why = "a token signs nothing" }

[jwt]
settings.header = "X-Acme-Token"
settings.algorithms = ["ES256"]
settings.audience = true
settings.body_claim = "sha256"
event_id = "id"
tolerance = 300

[key-pair]
settings.kind = "ed25519"
settings.header = "X-Acme-Signature"
settings.timestamp_header = "X-Acme-Time"
event_id = "id"
tolerance = 300

[standard-webhooks]
settings.families = ["acme"]
event_id = "header:acme-id"
tolerance = 300
"""


@pytest.mark.parametrize("name", tomllib.loads(ROWS))
def test_a_row_of_each_kind_needs_no_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines of the table make a provider that verifies, signs, and has a sample."""
    row = tomllib.loads(ROWS)[name]
    facts = Facts(name=f"acme-{name}", title="Acme", **{"scheme": name, **row})
    known = {**providers(), facts.name: facts}
    monkeypatch.setattr(table, "providers", lambda: known)
    monkeypatch.setattr(_keys, "providers", lambda: known)

    delivery = sample(facts.name, id="evt_1", now=NOW)
    acme = sample_provider(facts.name)
    verdict = acme.verify(*delivery, now=NOW)
    assert (verdict.code, verdict.event_id) == ("ok", "evt_1")
    assert acme.retention_seconds >= 86_400
    for header in [one for one in delivery.headers if "acme" in one.lower() or one[0] == "A"]:
        bent = {**dict(delivery.headers), header: "x"}
        assert not acme.verify("POST", delivery.url, bent, delivery.body, now=NOW).ok


def test_every_kind_of_the_table_has_such_a_row_or_is_one_provider_s_own() -> None:
    """A kind that is added is shown to work by data alone, or has one provider and a file."""
    own = {"twilio", "paypal", "adyen", "mailgun", "sns"}
    shown = {row.get("scheme", name) for name, row in tomllib.loads(ROWS).items()}

    assert shown | own >= set(table.SCHEMES)
    for scheme in own & set(table.SCHEMES):
        assert len([one for one in providers().values() if one.scheme == scheme]) == 1


def test_two_events_of_one_second_are_two_for_woocommerce() -> None:
    """Its delivery id is the same for both; the object that changed tells them apart."""
    shop = make("woocommerce")
    ids = set()
    for body in (
        b'{"id": 1, "date_modified_gmt": "2026-11-16T03:10:00"}',
        b'{"id": 2, "date_modified_gmt": "2026-11-16T03:10:00"}',
        b'{"id": 2, "date_modified_gmt": "2026-11-16T03:10:01"}',
        b'{"id": 3}',
        b'{"action": "woocommerce_add_to_cart", "arg": "7"}',
    ):
        request = shop.sign("POST", URL, JSON, body, now=NOW, event_id="hash-of-the-second")
        ids.add(shop.verify(*request, now=NOW).event_id)
    assert len(ids) == 5


# --- GET ---------------------------------------------------------------------------------------

CHECKED = "https://example.com/hooks?hub.mode=subscribe&hub.challenge=1158201444&hub.verify_token="


@pytest.mark.parametrize(
    "url, status",
    [
        (CHECKED + "vibecoding", 200),
        (CHECKED + "another", 403),
        (CHECKED, 403),
        (CHECKED + "vibecoding&hub.challenge=2", 403),
        (CHECKED.replace("subscribe", "unsubscribe") + "vibecoding", 403),
        (CHECKED.replace("1158201444", "%3Cscript%3E") + "vibecoding", 403),
        ("https://example.com/hooks", 403),
        ("https://example.com/hooks?" + "a=1&" * 40, 403),
    ],
)
def test_a_get_request_is_answered_only_to_who_knows_the_token(url: str, status: int) -> None:
    """Meta checks an endpoint so; anybody else is told nothing, and nothing is reflected."""
    receiver = WebhookReceiver(make("meta", verify_token="vibecoding"), "memory://")
    answer = receiver.receive("GET", url, {}, b"")

    assert answer.status == status
    assert (answer.body == b"1158201444") == (status == 200)
    assert b"<script>" not in answer.body
    receiver.close()


def test_without_a_token_of_ours_no_get_request_is_answered() -> None:
    """An empty token must fit nothing; a provider that has none needs none, or takes none."""
    meta = WebhookReceiver(make("meta"), "memory://")
    assert meta.receive("GET", CHECKED, {}, b"").status == 403
    dropbox = WebhookReceiver(make("dropbox"), "memory://")
    answer = dropbox.receive("GET", "https://example.com/?challenge=abc", {}, b"")
    assert (answer.status, answer.body) == (200, b"abc")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    with pytest.raises(ValueError, match="sends no token by GET"):
        make("dropbox", verify_token="x")
    meta.close()
    dropbox.close()


# --- SNS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Other", None, {"a": 1}])
def test_sns_signs_messages_of_its_types_only(kind: object) -> None:
    """Whatever stands in place of a type, it is told what types there are."""
    with pytest.raises(PolicyError, match="SubscriptionConfirmation"):
        sample_provider("aws-sns").sign("POST", URL, {}, json.dumps({"Type": kind}).encode())


def test_messages_of_sns_are_believed_for_our_topics_only() -> None:
    """SNS signs for everybody; certificates from elsewhere are never fetched; SHA-1 is refused."""
    from oncekey.signatures.sns import confirm_url

    sns = sample_provider("aws-sns")
    message = sample(sns, id="m-1", now=NOW)
    assert sns.verify(*message, now=NOW).event_id == "m-1"

    def bent(**changes: Any) -> str:
        body = json.dumps({**json.loads(message.body), **changes}).encode()
        return sns.verify("POST", URL, {}, body, now=NOW).code

    assert bent(Message="another") == bent(Subject="") == "signature_mismatch"
    assert bent(TopicArn="arn:aws:sns:eu-west-1:1:theirs") == "claim_mismatch"
    assert bent(SignatureVersion="1") == "header_malformed"
    assert bent(Type="Else") == bent(Message=7) == "body_malformed"
    for host in ("https://evil.example/", "https://sns.eu-west-1.amazonaws.com.evil.example/"):
        assert (
            bent(SigningCertURL=f"{host}SimpleNotificationService-{'0' * 32}.pem") == "key_unknown"
        )
    assert sns.verify(*message, now=NOW + 3901).code == "timestamp_too_old"

    address = "https://sns.eu-west-1.amazonaws.com/?Action=ConfirmSubscription&Token=t"
    asked = {"Type": "SubscriptionConfirmation", "Token": "t", "SubscribeURL": address}
    asked["MessageId"] = "m-2"
    confirmation = sns.sign("POST", URL, {}, json.dumps(asked).encode(), now=NOW)
    verdict = sns.verify(*confirmation, now=NOW)
    assert confirm_url(verdict.payload) == address
    for url in ("https://evil.example/?Action=ConfirmSubscription&Token=t", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="must not be called"):
            confirm_url({**asked, "SubscribeURL": url})
    with pytest.raises(ValueError, match="nothing to confirm"):
        confirm_url(json.loads(message.body))
