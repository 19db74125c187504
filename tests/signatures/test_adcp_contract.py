"""AdCP webhooks as specified: what is signed, what is refused or retried, and in what words."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

pytest.importorskip("cryptography")

from tests.signatures.cases import NOW
from tests.signatures.schemes import ENVELOPE, JSON, scheme
from tests.signatures.test_adcp_vectors import VECTORS
from tests.signatures.test_transient import Source, jwk

from oncekey import MemoryStore, PolicyError
from oncekey.adcp.signatures import adcp_hmac_provider, adcp_provider
from oncekey.receiver import WebhookReceiver, WebhookResponse
from oncekey.signatures import hmac_provider
from oncekey.signatures.jwks import FetchedKeys
from oncekey.signatures.target_uri import ascii_host
from oncekey.testing import ManualClock

ENVELOPES = json.loads((VECTORS / "webhook-receiver-envelope.json").read_text("utf-8"))
FORMS = ("adcp", "adcp-hmac")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "body", [b'{"a": 1, "a": 2}', b'{"x": {"b": 1, "b": 1}}', b"{", b'{"n": NaN}', b"\xff"]
)
def test_a_body_that_receivers_must_refuse_is_not_signed(name: str, body: bytes) -> None:
    """Names sent twice, and what is no JSON; an empty body may be signed."""
    signer = scheme(name).provider
    with pytest.raises(PolicyError, match="can't be sent"):
        signer.sign("POST", "https://hooks.example.com/h", JSON, body)
    assert signer.sign("POST", "https://hooks.example.com/h", JSON, b"").headers


def received(name: str, payload: Any) -> tuple[WebhookResponse, list[Any]]:
    handled: list[Any] = []
    receiver = WebhookReceiver(scheme(name).provider, MemoryStore())
    receiver.on()(handled.append)
    body = json.dumps(payload).encode()
    return receiver.receive(*scheme(name).sign(body), now=NOW), handled


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("vector", ENVELOPES["negative"], ids=lambda one: one["id"])
def test_what_is_no_envelope_gets_to_no_handler(name: str, vector: dict[str, Any]) -> None:
    """Each negative vector is a 400 that says which rule it broke."""
    answer, handled = received(name, vector["payload"])
    has_key = "idempotency_key" in vector["payload"]
    assert (answer.status, handled) == (400, [])
    assert answer.code == (vector["expected_error"] if has_key else "id_missing")


@pytest.mark.parametrize("name", FORMS)
def test_envelopes_of_every_kind_are_handled(name: str) -> None:
    """Those of tasks, whole; and other notifications, which have a key and their own schema."""
    key = "whk_20260526_example_000099"
    others = [{"notification_type": "creative.purged"}, {"event": "property_list_changed"}]
    payloads = [one["payload"] for one in ENVELOPES["positive"]]
    for payload in [*payloads, *({"idempotency_key": key, **other} for other in others)]:
        answer, handled = received(name, payload)
        assert (answer.status, len(handled)) == (200, 1), answer


@pytest.mark.parametrize("field", ["operation_id", "task_id", "task_type", "status", "timestamp"])
@pytest.mark.parametrize("value", [None, "", 7, []])
def test_a_field_of_a_task_must_be_text(field: str, value: object) -> None:
    """The refusal names the field, and nothing of what it held."""
    payload = {"idempotency_key": "k" * 16, **ENVELOPE, field: value}
    answer, handled = received("adcp", payload)
    assert (answer.status, answer.code, handled) == (400, "missing_envelope_fields", [])
    assert field in json.loads(answer.body)["message"]


# Words


def test_refusals_speak_to_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    """What the owner of the receiver can do is logged, and never sent."""
    acme = hmac_provider("acme", secret="s" * 32, header="X-Sig", event_id="id")
    batch = hmac_provider("acme", secret="s" * 32, header="X-Sig", batch="$")

    def none_here(payload: Any) -> str:
        return str(payload["no such name"])

    cases: list[tuple[Any, bytes, dict[str, Any], str]] = [
        (batch, b"[{}]", {}, "pass key= to the receiver"),
        (acme, b'{"id": "e"}', {"key": none_here}, "key= found no key"),
        (acme, b'{"id": "e"}', {"key": lambda payload: 7}, "key= found no key"),
    ]
    for source, body, options, logged in cases:
        receiver = WebhookReceiver(source, MemoryStore(), **options)
        receiver.on()(lambda event: pytest.fail("handled"))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "oncekey"):
            answer = receiver.receive(*source.sign("POST", "https://x.example/", JSON, body))
        assert (answer.status, answer.code) == (400, "id_missing")
        message = json.loads(answer.body)["message"]
        for word in ("key=", "pass ", "receiver", "Error", "str("):
            assert word not in message, message
        assert logged in caplog.text


@pytest.mark.parametrize("name", FORMS)
def test_a_webhook_without_a_key_is_told_what_to_send(name: str) -> None:
    """The sender of AdCP reads of its own field."""
    answer, _ = received(name, ENVELOPE)
    message = json.loads(answer.body)["message"]
    assert "idempotency_key" in message
    assert "key=" not in message


# Key sets


def test_a_made_up_key_id_does_not_turn_a_rotation_into_refusals(clock: ManualClock) -> None:
    """Within the cool-down a new key is a 503 and then found; forgeries cause no more fetches."""
    fetched: list[float] = []
    source = Source({"keys": [jwk("k0")]})

    def fetch() -> Any:
        fetched.append(clock())
        return source()

    keys = FetchedKeys(fetch, clock=clock)
    provider = adcp_provider(allowed_hosts="*", jwks=keys)
    receiver = WebhookReceiver(provider, MemoryStore())
    receiver.on()(lambda event: None)
    forger = adcp_provider(
        allowed_hosts="*", signing_key=scheme("adcp").provider.signing_key, key_id="made-up"
    )
    genuine = scheme("adcp")
    body = genuine.case.body

    def forged() -> WebhookResponse:
        return receiver.receive(*forger.sign("POST", URL, JSON, body, now=NOW), now=NOW)

    assert forged().status == 401  # the set was read for it
    source.document = {"keys": [jwk("k0"), jwk("k1")]}  # the sender begins to use k1
    refused = receiver.receive(*genuine.sign(), now=NOW)
    assert (refused.status, refused.outcome) == (503, "unavailable")
    assert refused.code == "webhook_signature_key_unknown"
    assert int(refused.headers["Retry-After"]) >= 1
    clock.advance(29)
    assert forged().status == 503  # nothing is certain, and nothing is fetched
    assert len(fetched) == 1
    clock.advance(1)
    assert forged().status == 401
    assert receiver.receive(*genuine.sign(), now=NOW).outcome == "handled"
    assert len(fetched) == 2


# Hosts

URL = "https://hooks.example.com/webhooks"


@pytest.mark.parametrize(
    "host",
    [
        *("b\u00fccher.example", "B\u00dcCHER.Example.", "stra\u00dfe.example", "\u4f8b\u3048.jp"),
        *("\u03b5\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03cc\u03c2.gr", "bu\u0308cher.example"),
        *("\u043f\u0440\u0438\u043c\u0435\u0440.\u0440\u0444", "\uff45xample.com", "example.com"),
    ],
)
def test_a_host_has_the_ascii_form_that_the_peer_gives_it(host: str) -> None:
    """UTS 46 without transitional processing: a sharp s stays one."""
    from adcp.signing._idna_canonicalize import canonicalize_host

    assert ascii_host(host).lower().removesuffix(".") == canonicalize_host(host)
    assert ascii_host(f"{host}:8443") == f"{ascii_host(host)}:8443"


@pytest.mark.parametrize(
    "host", ["b\u00fc\u200dcher.example", "b\u00fc cher.example", "\u00fc\uff0ecom", "\u00fc\u2026"]
)
def test_a_host_that_could_be_two_is_refused(host: str) -> None:
    """What rules read differently is not guessed at."""
    with pytest.raises(ValueError, match="host"):
        ascii_host(host)


def test_senders_write_hosts_in_ascii_and_receivers_take_nothing_else() -> None:
    """Signing turns the host into its form for the wire; a raw one that arrives is refused."""
    key = scheme("adcp").provider.signing_key
    url = "https://b\u00fccher.example/h"
    sender = adcp_provider(allowed_hosts="*", signing_key=key, key_id="k1")
    request = sender.sign("POST", url, JSON, scheme("adcp").case.body, now=NOW)
    assert request.url == "https://xn--bcher-kva.example/h"
    for options in ({"allowed_hosts": ["b\u00fccher.example"]}, {"public_url": url}):
        mine: Any = adcp_provider(signing_key=key, key_id="k1", **options)
        assert mine.verify(*request, now=NOW).ok
    raw = sender.verify(*request._replace(url=url), now=NOW)
    assert raw.code == "webhook_target_uri_malformed"
    with pytest.raises(PolicyError, match="can't be signed"):
        sender.sign("POST", "https://b\u00fc\u200dcher.example/", JSON, b"{}")


def test_the_hmac_form_is_unchanged_for_bodies_that_may_be_sent() -> None:
    """A body that is signed is one that verifies."""
    one = adcp_hmac_provider(secret="0123456789abcdef0123456789abcdef")
    body = scheme("adcp-hmac").case.body
    assert one.verify(*one.sign("POST", URL, JSON, body, now=NOW), now=NOW).ok
