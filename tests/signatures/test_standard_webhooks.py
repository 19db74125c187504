"""Standard Webhooks and Svix: v1, v1a, and what is signed."""

from __future__ import annotations

import base64

import pytest
from tests.signatures.cases import NOW, OLD_WHSEC, URL, WHSEC, make, signed

from oncekey.signatures import provider

BODY = b'{"test": 2432232314}'
# The example of the specification's reference libraries.
KNOWN_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
KNOWN_TIME = 1614265330
KNOWN = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def verify(headers: dict[str, str], body: bytes = BODY, now: float = KNOWN_TIME) -> str:
    return make("standard-webhooks").verify("POST", URL, headers, body, now=now).code


def known(**changes: str) -> dict[str, str]:
    fields = {"id": KNOWN_ID, "timestamp": str(KNOWN_TIME), "signature": KNOWN, **changes}
    return {f"webhook-{name}": value for name, value in fields.items()}


def test_the_reference_example_is_verified() -> None:
    """Signed by another implementation, with the prefix of the secret and without."""
    assert verify(known()) == "ok"
    bare = provider("standard-webhooks", secret=WHSEC.removeprefix("whsec_"))
    raw = provider("standard-webhooks", secret=base64.b64decode(WHSEC.removeprefix("whsec_")))
    for one in (bare, raw):
        assert one.verify("POST", URL, known(), BODY, now=KNOWN_TIME).event_id == KNOWN_ID


@pytest.mark.parametrize(
    "signature, code",
    [
        (f"v1,{'A' * 43}= {KNOWN}", "ok"),
        (f"v2,anything {KNOWN}", "ok"),
        (f"v1a,AAAA {KNOWN}", "ok"),
        (f"v1,!!!! {KNOWN}", "ok"),
        (f"{KNOWN} v1,AAAA", "ok"),
        (f"v1 {KNOWN}", "ok"),
        ("v1a,AAAA", "header_malformed"),
        (" ".join([f"v1,{'A' * 43}="] * 31 + [KNOWN]), "ok"),
        (" ".join([f"v1,{'A' * 43}="] * 32 + [KNOWN]), "header_malformed"),
        (f"{KNOWN}  {KNOWN}", "ok"),
        (KNOWN.replace(",", "="), "header_malformed"),
        (KNOWN.removeprefix("v1,"), "header_malformed"),
        ("v2,anything", "header_malformed"),
        (f"v1,{'A' * 43}=", "signature_mismatch"),
        (f"v1a,{'A' * 86}==", "signature_mismatch"),
    ],
)
def test_the_list_of_signatures(signature: str, code: str) -> None:
    """Tokens are judged one by one; the list is bounded; one must be a signature."""
    assert verify(known(signature=signature)) == code


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "\xe9", "a" * 256, "a\x00"])
def test_ids_that_could_be_read_in_two_ways_are_refused(bad: str) -> None:
    """A full stop separates what is signed, so it can't be in an id."""
    assert verify(known(id=bad)) == "header_malformed"
    with pytest.raises(ValueError, match="event id"):
        make("standard-webhooks").sign("POST", URL, {}, BODY, event_id=bad)


def test_the_id_and_the_time_are_signed() -> None:
    """Neither can be changed."""
    assert verify(known(id="msg_other")) == "signature_mismatch"
    assert verify(known(timestamp=str(KNOWN_TIME + 1))) == "signature_mismatch"
    assert make("standard-webhooks").id_is_signed


def test_svix_takes_either_family_but_no_mixture() -> None:
    """Headers of two families could be of two deliveries."""
    svix = make("svix")
    _, _, headers, body = signed("svix")
    renamed = {name.replace("svix-", "webhook-"): value for name, value in headers.items()}

    assert svix.verify("POST", URL, headers, body, now=NOW).event_id == "msg_1"
    assert svix.verify("POST", URL, renamed, body, now=NOW).event_id == "msg_1"
    mixed = {**headers, "webhook-id": headers.pop("svix-id")}
    del mixed["svix-id"]
    assert svix.verify("POST", URL, mixed, body, now=NOW).code == "header_malformed"
    assert make("standard-webhooks").verify("POST", URL, headers, body).code == "header_missing"


@pytest.mark.parametrize("part", ["id", "timestamp", "signature"])
def test_an_unsigned_family_can_not_rename_a_signed_delivery(part: str) -> None:
    """Captured ``svix-*`` headers sent as ``webhook-*``, with any ``svix-id`` beside: refused."""
    svix = make("svix")
    _, _, headers, body = signed("svix")
    renamed = {name.replace("svix-", "webhook-"): value for name, value in headers.items()}
    for fields, added in ((renamed, f"svix-{part}"), (headers, f"Webhook-{part.title()}")):
        verdict = svix.verify("POST", URL, {**fields, added: "msg_fresh"}, body, now=NOW)
        assert (verdict.code, verdict.event_id) == ("header_malformed", None)


def test_key_pairs_sign_v1a() -> None:
    """``whsk_`` signs and verifies; ``whpk_`` verifies; a shared secret does neither."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = bytes(range(1, 33))
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    whsk = "whsk_" + base64.b64encode(seed).decode()
    both = "whsk_" + base64.b64encode(seed + public).decode()
    whpk = "whpk_" + base64.b64encode(public).decode()
    signer = provider("standard-webhooks", secret=whsk)
    request = signer.sign("POST", URL, {}, BODY, now=NOW, event_id="msg_1")

    assert request.headers["webhook-signature"].startswith("v1a,")
    for secret in (whsk, both, whpk, [WHSEC, whpk]):
        assert provider("standard-webhooks", secret=secret).verify(*request, now=NOW).ok
    assert make("standard-webhooks").verify(*request, now=NOW).code == "signature_mismatch"
    changed = request._replace(body=BODY + b" ")
    assert signer.verify(*changed, now=NOW).code == "signature_mismatch"
    with pytest.raises(ValueError, match="whsk_"):
        provider("standard-webhooks", secret=whpk).sign("POST", URL, {}, BODY)
    mismatched = "whsk_" + base64.b64encode(seed + bytes(32)).decode()
    for bad in (mismatched, "whpk_AAAA", "whsk_AAAA"):
        with pytest.raises(ValueError, match=r"bytes|halves"):
            provider("standard-webhooks", secret=bad)


@pytest.mark.parametrize("bad", ["whsec_", "whsec_!!!", "whxx_QUJD", "not base64!", "whsec_a"])
def test_secrets_that_are_none_are_refused_without_being_shown(bad: str) -> None:
    """The message says what a secret looks like, and never repeats the one that was given."""
    with pytest.raises(ValueError, match="whsec_, whpk_ or whsk_") as caught:
        provider("standard-webhooks", secret=bad)
    assert bad not in str(caught.value) or bad == "whsec_"


def test_two_shared_secrets_are_told_apart() -> None:
    """The other one alone does not verify."""
    request = signed("svix")

    assert provider("svix", secret=[OLD_WHSEC, WHSEC]).verify(*request, now=NOW).ok
    assert not provider("svix", secret=OLD_WHSEC).verify(*request, now=NOW).ok
