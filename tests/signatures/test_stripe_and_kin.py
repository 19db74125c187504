"""HMAC schemes, where they differ from one another."""

from __future__ import annotations

import hashlib
import hmac
import json

import pytest
from tests.signatures.cases import NOW, SECRET, URL, make, signed

from oncekey.signatures import hmac_provider, provider
from oncekey.signatures.base import UnreadableError


def hex_mac(message: bytes, secret: str = SECRET, algorithm: str = "sha256") -> str:
    return hmac.new(secret.encode(), message, algorithm).hexdigest()


BODY = b'{"id": "evt_1"}'
STAMP = str(int(NOW))
GOOD = hex_mac(f"{STAMP}.".encode() + BODY)


@pytest.mark.parametrize(
    "header, code",
    [
        (f"t={STAMP},v1={GOOD}", "ok"),
        (f"v1={GOOD},t={STAMP}", "ok"),
        (f"t={STAMP},v1={'0' * 64},v1={GOOD}", "ok"),
        (f"t={STAMP},v1=short,v1={GOOD}", "ok"),
        (f"t={STAMP},v1={GOOD}t={STAMP},v1={GOOD}", "ok"),
        (f"t={STAMP},v0={'0' * 64},v2=x=y,v1={GOOD}", "ok"),
        (f"t={STAMP}," + ",".join([f"v1={'0' * 64}"] * 15) + f",v1={GOOD}", "ok"),
        (f"t={STAMP}," + ",".join([f"v1={'0' * 64}"] * 16) + f",v1={GOOD}", "header_malformed"),
        (f"t={STAMP},v1={'0' * 64}", "signature_mismatch"),
        (f"t={STAMP},v0={GOOD}", "header_malformed"),
        (f"t={STAMP},t={STAMP},v1={GOOD}", "header_malformed"),
        (f"t={STAMP},v1={GOOD},", "ok"),
        (f"t={STAMP},v1,v1={GOOD},v1=\xe9", "ok"),
        (f"t={STAMP}," + "v1=abc," * 40 + f"v1={GOOD}", "ok"),
        (f"t={STAMP},v1=abc", "header_malformed"),
        (f"t={STAMP}, v1={GOOD}", "ok"),
        (f" t={STAMP},\tv1={GOOD}", "ok"),
        (f"t ={STAMP}, v1={GOOD}", "timestamp_missing"),
        (f"t={STAMP},v1={GOOD.upper()}", "header_malformed"),
        (f"t={STAMP},v1={GOOD},t={STAMP}", "header_malformed"),
        (f"v1={GOOD}", "timestamp_missing"),
    ],
)
def test_stripe_header(header: str, code: str) -> None:
    """Entries are judged one by one: one timestamp, and at least one v1 that can be read."""
    verdict = make("stripe").verify("POST", URL, {"stripe-signature": header}, BODY, now=NOW)

    assert verdict.code == code
    assert verdict.signature == (GOOD if code == "ok" else "")


def test_the_matching_signature_is_told_whichever_came_first() -> None:
    """A replay guard needs the one that was right, not the first of the header."""
    both = provider("stripe", secret="a" * 32, previous=SECRET)
    header = f"t={STAMP},v1={'0' * 64},v1={GOOD}"

    assert both.verify("POST", URL, {"Stripe-Signature": header}, BODY, now=NOW).signature == GOOD


def test_github_published_one() -> None:
    """The values that docs.github.com, Validating webhook deliveries, gives to test with."""
    github = provider("github", secret="It's a Secret to Everybody")
    digest = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    headers = {
        "X-Hub-Signature-256": f"sha256={digest}",
        "X-GitHub-Delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
    }
    assert github.verify("POST", URL, headers, b"Hello, World!").ok
    assert github.verify("POST", URL, headers, b"Hello, World?").code == "signature_mismatch"


def test_github_ignores_the_older_signature() -> None:
    """Only SHA-256 counts."""
    old = {"X-Hub-Signature": "sha1=" + hex_mac(BODY, algorithm="sha1"), "X-GitHub-Delivery": "1"}

    assert make("github").verify("POST", URL, old, BODY).code == "header_missing"


def test_shopify_takes_the_newer_headers() -> None:
    """Both families are read; the topic and the subscription's name belong to the key."""
    method, url, headers, body = signed("shopify")
    signature = headers.pop("X-Shopify-Hmac-Sha256")
    newer = {
        "shopify-hmac-sha256": signature,
        "shopify-webhook-id": "w-1",
        "shopify-topic": "Product",
        "shopify-name": "a:b",
    }
    verdict = make("shopify").verify(method, url, newer, body)

    assert verdict.event_id == "w-1:Product:a%3Ab"
    alone = {"shopify-hmac-sha256": signature, "shopify-webhook-id": "w-1"}
    assert make("shopify").verify(method, url, alone, body).event_id == "w-1"
    del newer["shopify-webhook-id"]
    assert make("shopify").verify(method, url, newer, body).code == "id_missing"


def test_slack_answers_its_handshake() -> None:
    """The test of the endpoint carries no event, is genuine, and is answered with its challenge."""
    slack = make("slack")
    body = b'{"type": "url_verification", "challenge": "3eZbrw1aB"}'
    verdict = slack.verify(*slack.sign("POST", URL, {}, body, now=NOW), now=NOW)

    assert (verdict.ok, verdict.event_id) == (True, None)
    answer = slack.handshake(body)
    assert answer is not None
    assert (answer.status, answer.body) == (200, b"3eZbrw1aB")
    assert slack.handshake(b'{"type": "event_callback"}') is None
    assert slack.handshake(b"\xff") is None
    assert make("stripe").handshake(body) is None


@pytest.mark.parametrize(
    "challenge", [None, [], {}, 7, "", "x" * 513, "<b>", "a b", "a\r\nX-Y: z", "\u00e9", "\x00"]
)
def test_a_hostile_challenge_is_no_handshake(challenge: object) -> None:
    """What is sent back is bounded and plain; anything else is a delivery without an id."""
    slack = make("slack")
    body = json.dumps({"type": "url_verification", "challenge": challenge}).encode()

    assert slack.handshake(body) is None
    assert slack.verify(*slack.sign("POST", URL, {}, body, now=NOW), now=NOW).code == "id_missing"


def test_linear_trusts_only_the_time_in_the_body() -> None:
    """Signing writes it there; a header of that name changes nothing."""
    request = signed("linear")
    stale = {**request.headers, "Linear-Timestamp": "0"}

    assert make("linear").verify("POST", URL, stale, request.body, now=NOW + 60).ok
    assert make("linear").verify(*request, now=NOW + 61).code == "timestamp_too_old"


def test_zendesk_signs_a_date() -> None:
    """Its timestamp is a date, and an empty body is signed too."""
    zendesk = make("zendesk")
    request = zendesk.sign("DELETE", URL, {}, b"", now=NOW, event_id="i-1")

    assert request.headers["X-Zendesk-Webhook-Signature-Timestamp"] == "2026-11-16T03:33:20Z"
    assert zendesk.verify(*request, now=NOW).event_id == "i-1"


def test_square_signs_the_url_of_its_dashboard() -> None:
    """Behind a proxy the server sees another URL; ``public_url`` says what was signed."""
    inner = "http://10.0.0.7:8080/webhooks?tenant=7"
    outside = make("square")
    method, _, headers, body = signed("square")

    assert outside.verify(method, inner, headers, body).code == "signature_mismatch"
    for public in ("https://example.com", "https://example.com/", "https://example.com/webhooks"):
        assert make("square", public_url=public).verify(method, inner, headers, body).ok
    for bad in ("example.com", "https://a/?q=1", "https://u@a/", "ftp://a/", "https://a b/"):
        with pytest.raises(ValueError, match="public_url"):
            make("square", public_url=bad)


def test_hubspot_refuses_the_older_versions() -> None:
    """A plain hash with the secret in front is no signature; the message says what is missing."""
    body = b'[{"eventId": 1}]'
    old = {
        "X-HubSpot-Signature": hashlib.sha256(SECRET.encode() + body).hexdigest(),
        "X-HubSpot-Signature-Version": "v1",
        "X-HubSpot-Request-Timestamp": str(int(NOW * 1000)),
    }
    verdict = make("hubspot").verify("POST", URL, old, body, now=NOW)

    assert verdict.code == "header_missing"
    assert "older form" in verdict.message


def test_hubspot_signs_the_decoded_url() -> None:
    """Reserved characters are decoded before signing; the form as sent is accepted too."""
    import base64

    sent = "https://example.com/h%2Fook?a=%3A%40&b=%20"
    body, stamp = b'[{"eventId": 1}]', str(int(NOW * 1000))
    for uri in (sent, "https://example.com/h/ook?a=:@&b=%20"):
        message = f"POST{uri}".encode() + body + stamp.encode()
        mac = base64.b64encode(hmac.digest(SECRET.encode(), message, "sha256")).decode()
        headers = {"X-HubSpot-Signature-v3": mac, "X-HubSpot-Request-Timestamp": stamp}
        assert make("hubspot").verify("POST", sent, headers, body, now=NOW).ok
        assert not make("hubspot").verify("PUT", sent, headers, body, now=NOW).ok


def test_a_batch_is_split_into_its_events() -> None:
    """Each has an id of its own; a list that is empty or holds an event without one is refused."""
    hubspot = make("hubspot")
    body = b'[{"eventId":1,"subscriptionId":2,"subscriptionType":"a.b"},{"eventId":9}]'
    items = hubspot.items({}, body)

    assert [(one.event_id, one.event_type) for one in items] == [("1:2", "a.b"), ("9", None)]
    assert items[0].payload["eventId"] == 1
    for bad, code in (
        (b"[]", "body_malformed"),
        (b"{}", "body_malformed"),
        (b'[{"eventId":1},{"eventId":null}]', "id_missing"),
        (b"[1]", "id_missing"),
        (b"nonsense", "body_malformed"),
    ):
        request = hubspot.sign("POST", URL, {}, bad, now=NOW)
        assert hubspot.verify(*request, now=NOW).code == code
        with pytest.raises(ValueError):
            hubspot.items({}, bad)


def test_one_event_is_a_batch_of_one() -> None:
    """Receivers can treat all deliveries alike."""
    [item] = make("github").items({"X-GitHub-Delivery": "1", "X-GitHub-Event": "push"}, b"not json")

    assert item == ("1", "push", None)


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/a+json"]
)
def test_what_says_that_it_is_json_must_be(kind: str) -> None:
    """A handler is never given the bytes of a broken body in place of the payload it expects."""
    for bad in (b"not json", b'{"a": 1, "a": 2}', b"[" * 10_000 + b"]" * 10_000, b'"\\ud800"'):
        with pytest.raises(UnreadableError) as caught:
            make("github").items({"Content-Type": kind, "X-GitHub-Delivery": "1"}, bad)
        assert caught.value.reason == "body_malformed"
    assert make("github").items({"Content-Type": kind, "X-GitHub-Delivery": "1"}, b"")
    assert make("github").items({"Content-Type": "text/plain", "X-GitHub-Delivery": "1"}, b"x")


@pytest.mark.parametrize("name", ["hubspot", "sendgrid", "adyen"])
def test_a_batch_is_bounded_before_it_is_split(name: str) -> None:
    """A hundred thousand events are refused by their number, not one by one."""
    body = b"[" + b",".join([b"0"] * 100_000) + b"]"
    if name == "adyen":
        body = b'{"notificationItems":' + body + b"}"
    with pytest.raises(UnreadableError, match="a batch of 100000 events: at most 10000"):
        make(name).items({}, body)
    if name == "adyen":
        verdict = make(name).verify("POST", URL, {}, body, now=NOW)
    else:
        verdict = make(name).verify(*make(name).sign("POST", URL, {}, body, now=NOW), now=NOW)
    assert verdict.code == "body_malformed"
    assert "at most 10000" in verdict.message


def test_paddle_reads_several_signatures() -> None:
    """While a secret is rolled, the header carries one for each."""
    stamp = str(int(NOW))
    good = hex_mac(f"{stamp}:".encode() + b'{"event_id":"e"}')
    header = f"ts={stamp};h1={'0' * 64};h1={good}"

    verdict = make("paddle").verify(
        "POST", URL, {"Paddle-Signature": header}, b'{"event_id":"e"}', now=NOW
    )
    assert verdict.event_id == "e"


def test_a_provider_of_ones_own_takes_five_lines() -> None:
    """Any header, prefix, encoding and template; what is signed decides what is trusted."""
    acme = hmac_provider(
        "acme",
        secret="s3cret",
        header="X-Acme-Signature",
        prefix="sha512=",
        algorithm="sha512",
        encoding="base64url",
        signed="{id}|{timestamp}|{method}|{url}|{body}",
        timestamp_header="X-Acme-Time",
        timestamp_unit="ms",
        event_id="header:X-Acme-Id",
        event_type="header:X-Acme-Type",
        allowed_hosts=["example.com"],
    )
    request = acme.sign("PUT", URL, {}, b"any bytes \xff", now=NOW, event_id="a-1")
    verdict = acme.verify(*request, now=NOW)

    assert (verdict.code, verdict.event_id, verdict.id_is_signed) == ("ok", "a-1", True)
    assert acme.retention_seconds == 4 * 86_400
    for field, value in (("method", "POST"), ("url", URL + "#"), ("body", b"")):
        changed = request._replace(**{field: value})
        assert acme.verify(*changed, now=NOW).code == "signature_mismatch"
    other_id = {**request.headers, "X-Acme-Id": "a-2"}
    assert acme.verify("PUT", URL, other_id, request.body, now=NOW).code == "signature_mismatch"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"encoding": "rot13"}, "encoding"),
        ({"algorithm": "md5"}, "algorithm"),
        ({"timestamp_unit": "days"}, "timestamp_unit"),
        ({"form": "v1={signature}"}, "form"),
        ({"signed": "{timestamp}"}, "signed"),
        ({"signed": "{body}{nonsense}"}, "signed"),
        ({"signed": "{timestamp}.{body}"}, "timestamp"),
        ({"timestamp_header": "X-Time"}, "timestamp"),
        ({"signed": "{id}.{body}"}, "event_id"),
        ({"event_id": ""}, None),
        ({"event_id": "header:"}, "place"),
        ({"event_id": "a..b"}, "path"),
        ({"event_id": "a?"}, "optional"),
        ({"secret": ""}, "secret"),
        ({"tolerance": 0, "timestamp_path": "t"}, "tolerance"),
    ],
)
def test_wrong_options_of_ones_own_provider_are_refused(
    options: dict[str, str], message: str | None
) -> None:
    """What can't be verified, or would only look verified, is said when the provider is made."""
    given = {"secret": "s", "header": "X-Sig", **options}
    if message is None:
        assert hmac_provider("acme", **given).event_id == ""  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=message):
        hmac_provider("acme", **given)  # type: ignore[arg-type]
