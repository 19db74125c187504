"""What providers document beyond their signature: fallbacks, tests of the endpoint, retries."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from tests.signatures.cases import NOW, SECRET, URL, _public_pem, keys, make, signed
from tests.signatures.sdks import sdk

from oncekey.receiver import WebhookReceiver, WebhookResponse
from oncekey.signatures import SignedRequest, provider
from oncekey.signatures.parsing import Rejection, seconds_since_1970

JSON = {"Content-Type": "application/json"}


def received(receiver: WebhookReceiver, request: SignedRequest) -> WebhookResponse:
    headers = {**JSON, **request.headers}
    return receiver.receive(request.method, request.url, headers, request.body, now=NOW)


def test_shopify_without_an_event_id_has_its_webhook_id() -> None:
    """Deliveries that carry only the id of the delivery are taken, and their retries known."""
    request = signed("shopify")
    del request.headers["X-Shopify-Event-Id"]
    request.headers["X-Shopify-Webhook-Id"] = "b54557e4"
    receiver = WebhookReceiver(make("shopify"), "memory://")
    receiver.on()(lambda event: None)
    assert make("shopify").verify(*request).event_id == "b54557e4:orders/create"
    assert [received(receiver, request).outcome for _ in range(2)] == ["handled", "duplicate"]
    both = {**request.headers, "X-Shopify-Event-Id": "e-1"}
    verdict = make("shopify").verify("POST", URL, both, request.body)
    assert verdict.event_id == "e-1:orders/create"


@pytest.mark.parametrize(
    "body, header, code",
    [
        ({}, int(NOW * 1000), "ok"),
        ({}, int((NOW - 61) * 1000), "timestamp_too_old"),
        ({}, "soon", "timestamp_malformed"),
        ({}, None, "timestamp_missing"),
        ({"webhookTimestamp": int(NOW * 1000)}, 0, "ok"),
        ({"webhookTimestamp": int((NOW - 61) * 1000)}, int(NOW * 1000), "timestamp_too_old"),
    ],
)
def test_linear_tells_the_time_in_a_header_where_the_body_has_none(
    body: dict[str, int], header: object, code: str
) -> None:
    """As its library reads it, but what is signed comes first."""
    raw = json.dumps({"type": "Issue", **body}).encode()
    mac = hmac.new(SECRET.encode(), raw, hashlib.sha256).hexdigest()
    headers = {"Linear-Signature": mac, "Linear-Delivery": "d-1"}
    if header is not None:
        headers["Linear-Timestamp"] = str(header)
    assert make("linear").verify("POST", URL, headers, raw, now=NOW).code == code


EVENT = {
    "type": "zen:event-type:user.active_changed",
    "id": "2b24ef10-19d4-4740-93cf-8f98ec4776c0",
    "zendesk_event_version": "2022-06-20",
}


@pytest.mark.parametrize(
    "body, event_id, is_signed",
    [
        (json.dumps(EVENT).encode(), EVENT["id"], True),
        (b'{"id": 35436, "title": "a ticket, as a trigger sends it"}', "inv-1", False),
        (b'{"zendesk_event_version": "2022-06-20"}', "inv-1", False),
        (b"<ticket>7</ticket>", "inv-1", False),
    ],
)
def test_zendesk_signs_the_id_of_its_event_webhooks(
    body: bytes, event_id: str, is_signed: bool
) -> None:
    """It comes before the header's; a body that a trigger made has no id of an event in it."""
    zendesk = make("zendesk")
    request = zendesk.sign("POST", URL, {}, body, now=NOW, event_id="inv-1")
    verdict = zendesk.verify(*request, now=NOW)
    assert (verdict.event_id, verdict.id_is_signed) == (event_id, is_signed)
    assert [one.event_id for one in zendesk.items(request.headers, body)] == [event_id]
    chosen = make("zendesk", event_id="header:X-Zendesk-Webhook-Invocation-Id")
    assert chosen.verify(*request, now=NOW).event_id == "inv-1"


def test_zendesk_is_answered_with_what_it_retries() -> None:
    """A failed handler is a 503 with a wait of less than a minute; a 500 would end it."""

    def fail(event: Any) -> None:
        raise RuntimeError("not now")

    zendesk = make("zendesk")
    body = json.dumps(EVENT).encode()
    receiver = WebhookReceiver(zendesk, "memory://", per_key=(1, 3600))
    receiver.on()(fail)
    request = zendesk.sign("POST", URL, {}, body, now=NOW)
    failed, limited = [received(receiver, request) for _ in range(2)]
    assert (failed.status, failed.outcome) == (503, "failed")
    assert 1 <= int(failed.headers["Retry-After"]) < 60
    assert (limited.status, limited.outcome) == (429, "limited")
    assert 1 <= int(limited.headers["Retry-After"]) < 60


def test_discord_answers_both_of_its_pings() -> None:
    """Webhook events want a 204, interactions a PONG; neither reaches a handler."""
    pytest.importorskip("cryptography")
    library = sdk("discord_interactions", "discord-interactions")
    discord = make("discord", event_id="id")
    for source in (make("discord"), discord):
        receiver = WebhookReceiver(source, "memory://")
        receiver.on()(lambda event: pytest.fail("handled"))

        def ping(body: dict[str, Any], to: WebhookReceiver = receiver) -> WebhookResponse:
            raw = json.dumps(body).encode()
            return received(to, to.provider.sign("POST", URL, {}, raw, now=NOW))

        kind = int(library.InteractionType.PING)
        answer = ping({"id": "7", "application_id": "1", "type": kind, "token": "t", "version": 1})
        assert (answer.status, answer.code) == (200, "handshake")
        assert answer.headers["Content-Type"] == "application/json"
        assert json.loads(answer.body) == {"type": int(library.InteractionResponseType.PONG)}
        assert ping({"application_id": "1", "type": 0, "version": 1}).status == 204
    event = b'{"type": 1, "event": {"type": "A", "timestamp": "2026-11-16T03"}}'
    assert make("discord").handshake(event) is None


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("2026-11-16T03:33:20.123456789Z", 1_794_800_000.123456),
        ("2026-11-16T03:33:20.9999999Z", 1_794_800_000.999999),
        ("2026-11-16T04:33:20.5+01:00", 1_794_800_000.5),
    ],
)
def test_times_may_have_nanoseconds(text: str, seconds: float) -> None:
    """As programs in Go write them; ten digits are no time of anybody's."""
    assert seconds_since_1970(text, "iso") == pytest.approx(seconds, abs=1e-6)
    with pytest.raises(Rejection):
        seconds_since_1970("2026-11-16T03:33:20.1234567890Z", "iso")


@pytest.mark.parametrize("around", ["{}", "{}\n", "\n{}\r\n\r\n", "  {}\t"])
def test_pem_may_have_line_ends_of_any_kind(around: str) -> None:
    """A key is read as it stands in a file or a variable, in each scheme of key pairs."""
    pytest.importorskip("cryptography")
    from oncekey.signatures.rfc9421 import rfc9421_provider

    pem = _public_pem(keys().sendgrid).decode().strip()
    for text in (around.format(pem), around.format(pem.replace("\n", "\r\n"))):
        for secret in (text, text.encode()):
            assert provider("sendgrid", secret=secret).verify(*signed("sendgrid"), now=NOW).ok
            signer = rfc9421_provider(
                allowed_hosts="*", signing_key=keys().sendgrid, key_id="k1", event_id="id"
            )
            request = signer.sign("POST", URL, JSON, b'{"id": "e-1"}')
            assert (
                rfc9421_provider(allowed_hosts="*", keys={"k1": secret}, event_id="id")
                .verify(*request)
                .ok
            )


def test_a_public_key_in_pem_is_never_a_shared_secret() -> None:
    """Else whoever has the public key could sign with it."""
    pytest.importorskip("cryptography")
    from oncekey.signatures.algorithms import SignatureKey
    from oncekey.signatures.rfc9421 import rfc9421_provider

    pem = _public_pem(keys().sendgrid)
    forger = rfc9421_provider(
        allowed_hosts="*",
        signing_key=SignatureKey("hmac-sha256", pem, {}),
        key_id="k1",
        event_id="id",
    )
    forged = forger.sign("POST", URL, JSON, b'{"id": "e-1"}')
    assert (
        not rfc9421_provider(allowed_hosts="*", keys={"k1": pem}, event_id="id").verify(*forged).ok
    )
