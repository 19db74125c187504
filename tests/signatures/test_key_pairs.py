"""Discord (ed25519) and SendGrid (ECDSA): public keys verify, private ones sign for tests."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.signatures.cases import NOW, URL, _public_pem, keys, make, signed

from oncekey.signatures import provider

pytest.importorskip("cryptography")


def test_discord_derives_a_key_from_what_is_signed() -> None:
    """The envelope has no id: type, time and data make one, the same for every retry."""
    discord = make("discord")

    def key(**event: object) -> str | None:
        import json

        body = json.dumps({"version": 1, "type": 1, "event": event}).encode()
        return discord.verify(*discord.sign("POST", URL, {}, body, now=NOW), now=NOW).event_id

    first = key(type="ENTITLEMENT_CREATE", timestamp="2026-11-16T03:10:00Z", data={"a": 1, "b": 2})
    assert first == key(
        data={"b": 2, "a": 1}, timestamp="2026-11-16T03:10:00Z", type="ENTITLEMENT_CREATE"
    )
    assert first is not None
    assert len(first) == 64
    assert first != key(type="ENTITLEMENT_CREATE", timestamp="2026-11-16T03:10:01Z", data={"a": 1})
    assert key(type="X", timestamp="2026-11-16T03:10:00Z") is not None
    assert key(type="X") is None
    assert discord.id_is_signed


def test_discord_answers_its_ping() -> None:
    """Type 0 carries no event and is answered with 204."""
    discord = make("discord")
    body = b'{"version": 1, "application_id": "1", "type": 0}'
    verdict = discord.verify(*discord.sign("POST", URL, {}, body, now=NOW), now=NOW)

    assert (verdict.ok, verdict.event_id) == (True, None)
    answer = discord.handshake(body)
    assert answer is not None
    assert answer.status == 204
    assert discord.handshake(b'{"type": false}') is None, "false is not 0"
    assert discord.ack.status == 204


def test_sendgrid_signs_the_line_break_at_the_end() -> None:
    """A framework that trims the body breaks the signature."""
    request = signed("sendgrid")

    assert request.body.endswith(b"\r\n")
    trimmed = request._replace(body=request.body.rstrip())
    assert make("sendgrid").verify(*trimmed, now=NOW).code == "signature_mismatch"
    assert [one.event_id for one in make("sendgrid").items({}, request.body)] == ["sg-1"]


def test_sendgrid_takes_the_key_as_shown_or_as_pem() -> None:
    """The dashboard shows base64 without the PEM lines."""
    for secret in (keys().sendgrid_public, _public_pem(keys().sendgrid)):
        assert provider("sendgrid", secret=secret).verify(*signed("sendgrid"), now=NOW).ok


@pytest.mark.parametrize(
    "name, options",
    [
        ("sendgrid", {"secret": "QUJD"}),
        ("sendgrid", {"secret": "\u00e9"}),
        ("sendgrid", {"secret": "-----BEGIN PUBLIC KEY-----\nQUJD\n-----END PUBLIC KEY-----"}),
        ("sendgrid", {"signing_key": "QUJD"}),
        ("discord", {"secret": "zz"}),
        ("discord", {"secret": "ab"}),
        ("discord", {"signing_key": "ab"}),
        ("discord", {"signing_key": "zz"}),
    ],
)
def test_keys_that_are_none_are_refused(name: str, options: dict[str, str]) -> None:
    """When the provider is made, not when the first delivery comes."""
    with pytest.raises(ValueError, match=r"key|hex digits"):
        make(name, **options)


def test_a_key_of_the_wrong_kind_is_refused() -> None:
    """An RSA key can't be SendGrid's."""
    with pytest.raises(ValueError, match="elliptic curve"):
        provider("sendgrid", secret=_public_pem(keys().paypal))
    with pytest.raises(ValueError, match="elliptic curve"):
        make("sendgrid", signing_key=keys().paypal)


@pytest.mark.parametrize("name", ["discord", "sendgrid"])
def test_a_public_key_can_not_sign(name: str) -> None:
    """And the message says what can."""
    public = getattr(keys(), f"{name}_public")
    with pytest.raises(ValueError, match="signing_key"):
        provider(name, secret=public).sign("POST", URL, {}, b"{}")
    own = provider(name, signing_key=getattr(keys(), name))
    assert own.verify(*signed(name), now=NOW).ok


def test_cryptography_is_imported_only_for_key_pairs() -> None:
    """Importing the package and using HMAC needs no third-party package at all."""
    code = """
import sys
import oncekey.signatures
assert "oncekey.signatures.base" not in sys.modules
from oncekey.signatures import hmac_provider, provider, providers
stripe = provider("stripe", secret="s")
assert stripe.verify(*stripe.sign("POST", "https://e.x/", {}, b'{"id": "1"}')).ok
provider("standard-webhooks", secret="whsec_QUJD")
assert "cryptography" not in sys.modules
sys.modules["cryptography"] = None
for name, options in (
    ("discord", {"secret": "00" * 32}),
    ("sendgrid", {"secret": "QUJD"}),
    ("paypal", {"webhook_id": "1", "accept_unsigned": "body"}),
    ("standard-webhooks", {"secret": "whpk_QUJD"}),
):
    try:
        provider(name, **options)
    except ValueError as error:
        assert "pip install 'oncekey[crypto]'" in str(error), error
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
