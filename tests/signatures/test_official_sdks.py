"""Cross-checks with the providers' own Python SDKs.

Ours accepts what theirs signs, theirs accepts what ours signs, and what theirs rejects ours
rejects. Where theirs crashes on a hostile header, ours gives a verdict.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.signatures.cases import (
    CASES,
    HEX_KEY,
    NOW,
    OLD_SECRET,
    SECRET,
    URL,
    WHSEC,
    adyen_body,
    keys,
    make,
)
from tests.signatures.sdks import paddle, sdk

from oncekey.signatures import SignedRequest

LISTS = ("stripe", "paddle", "standard-webhooks", "svix")

Check = Callable[[SignedRequest], bool]


def fresh(name: str, *, age: float = 0, body: bytes | None = None) -> SignedRequest:
    """Signed by us, for the clock that their SDKs read."""
    case = CASES[name]
    moment = time.time() - age
    content = case.body if body is None else body
    return make(name).sign("POST", URL, case.headers, content, now=moment, event_id=case.send_id)


def agree(name: str, theirs: Check, request: SignedRequest) -> bool:
    """Both must say the same, which is returned; an exception of theirs is a no."""
    try:
        yes = bool(theirs(request))
    except Exception:
        yes = False
    ours = make(name).verify(*request)
    assert ours.ok == yes, (ours, request)
    return yes


def agree_on_all(name: str, theirs: Check, header: str, *, stamped: float | None = None) -> None:
    """Genuine, changed, re-encoded, and with hostile headers."""
    request = fresh(name)
    assert agree(name, theirs, request)
    assert not agree(name, theirs, request._replace(body=request.body + b" "))
    genuine = request.headers[header]
    for hostile in (
        *("", " ", "x", "=", ",", ";", "v1", "v1,", "t=1", "ts=1;h1=", "a,b,c", "\xe9", "\u0661"),
        *(genuine[:-1], genuine + "0", genuine[::-1]),
        # A list of signatures is judged entry by entry, and the genuine one is still in these.
        *(() if name in LISTS else (genuine + ",", " " + genuine, genuine * 2)),
        *(genuine[:-2] + ("00" if not genuine.endswith("00") else "11"), "9" * 5000),
    ):
        changed = request._replace(headers={**request.headers, header: hostile})
        # Some of theirs forgive a space or a comma at the end. Ours is never the wider one.
        assert not make(name).verify(*changed).ok, hostile
        with contextlib.suppress(Exception):
            theirs(changed)
    missing = {key: value for key, value in request.headers.items() if key != header}
    assert not agree(name, theirs, request._replace(headers=missing))
    if stamped is not None:
        assert agree(name, theirs, fresh(name, age=stamped * 0.2))
        assert not agree(name, theirs, fresh(name, age=stamped + 5))


def test_stripe() -> None:
    """Stripe's library signs and verifies the same bytes."""
    stripe = sdk("stripe", "stripe")
    library = stripe.WebhookSignature

    def theirs(request: SignedRequest) -> bool:
        header = request.headers.get("Stripe-Signature")
        return library.verify_header(request.body, header, SECRET, 300)

    agree_on_all("stripe", theirs, "Stripe-Signature", stamped=300)
    genuine = fresh("stripe")
    first, last = genuine.headers["Stripe-Signature"].split(",")
    for entries in (f"{first},v1=abc,{last}", f"{first},{last},v0", f"{first},,{last},v1=,"):
        assert agree("stripe", theirs, genuine._replace(headers={"Stripe-Signature": entries}))
    body = CASES["stripe"].body
    header = library.generate_signature_header(body.decode(), SECRET)
    assert make("stripe").verify("POST", URL, {"Stripe-Signature": header}, body).ok
    other = library.generate_signature_header(body.decode(), OLD_SECRET)
    verdict = make("stripe").verify("POST", URL, {"Stripe-Signature": other}, body)
    assert verdict.code == "signature_mismatch"
    future = library.generate_signature_header(body.decode(), SECRET, int(time.time()) + 3600)
    assert library.verify_header(body, future, SECRET, 300), "theirs takes any future"
    verdict = make("stripe").verify("POST", URL, {"Stripe-Signature": future}, body)
    assert verdict.code == "timestamp_in_future"


@pytest.mark.parametrize("name, family", [("standard-webhooks", "webhook"), ("svix", "svix")])
def test_standard_webhooks_and_svix(name: str, family: str) -> None:
    """The reference library and Svix's."""
    package = "standardwebhooks" if family == "webhook" else "svix"
    module = sdk(f"{package}.webhooks", package)
    library = module.Webhook(WHSEC)

    def theirs(request: SignedRequest) -> bool:
        library.verify(request.body, request.headers)
        return True

    agree_on_all(name, theirs, f"{family}-signature", stamped=300)
    assert not agree(name, theirs, fresh(name, age=-400))
    moment, body = datetime.datetime.now(datetime.UTC), CASES[name].body
    headers = {
        f"{family}-id": "msg_x",
        f"{family}-timestamp": str(int(moment.timestamp())),
        f"{family}-signature": "v2,AAAA " + library.sign("msg_x", moment, body.decode()),
    }
    assert make(name).verify("POST", URL, headers, body).event_id == "msg_x"


def test_slack() -> None:
    """Slack's verifier."""
    signature = sdk("slack_sdk.signature", "slack-sdk")
    library = signature.SignatureVerifier(SECRET)

    def theirs(request: SignedRequest) -> bool:
        return library.is_valid_request(request.body, request.headers)

    agree_on_all("slack", theirs, "X-Slack-Signature", stamped=300)
    assert not agree("slack", theirs, fresh("slack", age=-400))
    stamp, body = str(int(time.time())), CASES["slack"].body
    headers = {
        "X-Slack-Request-Timestamp": stamp,
        "X-Slack-Signature": library.generate_signature(timestamp=stamp, body=body),
    }
    assert make("slack").verify("POST", URL, headers, body).ok


def test_twilio() -> None:
    """Twilio's validator: forms and JSON, SHA-1 and SHA-256, with a port and without."""
    module = sdk("twilio.request_validator", "twilio")
    multidict = sdk("multidict", "multidict")
    from urllib.parse import parse_qsl

    library = module.RequestValidator(SECRET)

    def theirs(request: SignedRequest) -> bool:
        kind = next((v for k, v in request.headers.items() if k.lower() == "content-type"), "")
        params: Any = request.body.decode()
        if "form" in kind:
            params = multidict.MultiDict(parse_qsl(params, keep_blank_values=True))
        settings = request.headers.get("X-Twilio-Webhooks-Signature-Settings")
        algorithm = module.get_signature_algorithm(settings)
        signature = request.headers["X-Twilio-Signature"]
        return library.validate(request.url, params, signature, algorithm)

    request = fresh("twilio")
    assert agree("twilio", theirs, request)
    assert agree("twilio", theirs, request._replace(url=URL.replace(".com/", ".com:443/")))
    assert not agree("twilio", theirs, request._replace(url=URL + "1"))
    assert not agree("twilio", theirs, request._replace(body=request.body + b"&a=b"))
    as_json = make("twilio").sign("POST", URL, {}, b'{"a": 1}')
    assert agree("twilio", theirs, as_json)
    assert not agree("twilio", theirs, as_json._replace(body=b'{"a": 2}'))
    newer = make("twilio", algorithm="HMAC_SHA256")
    assert agree("twilio", theirs, newer.sign("POST", URL, {}, b'{"a": 1}'))
    signature = library.compute_signature(URL, {"b": "2", "a": "1"})
    headers = {**CASES["twilio"].headers, "I-Twilio-Idempotency-Token": "1"}
    headers["X-Twilio-Signature"] = signature
    assert make("twilio").verify("POST", URL, headers, b"a=1&b=2").ok


def test_square() -> None:
    """Square's helper."""
    helper = sdk("square.utils.webhooks_helper", "squareup")

    def theirs(request: SignedRequest) -> bool:
        return helper.verify_signature(
            request_body=request.body.decode(),
            signature_header=request.headers["x-square-hmacsha256-signature"],
            signature_key=SECRET,
            notification_url=request.url,
        )

    agree_on_all("square", theirs, "x-square-hmacsha256-signature")
    request = fresh("square")
    assert not agree("square", theirs, request._replace(url=URL + "/"))


def test_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle's verifier, with its five seconds, on a clock that stands still for both."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    with paddle(SECRET) as theirs:
        agree_on_all("paddle", theirs, "Paddle-Signature", stamped=5)
        genuine = fresh("paddle")
        first, last = genuine.headers["Paddle-Signature"].split(";")
        for entries in (f"{first};h1=dummy;{last}", f"{first};{last};h1=abc", f"{first};x;{last}"):
            assert agree("paddle", theirs, genuine._replace(headers={"Paddle-Signature": entries}))
        assert not agree("paddle", theirs, fresh("paddle", age=-30))


def test_hubspot() -> None:
    """HubSpot's helper, version 3."""
    module = sdk("hubspot.utils.signature", "hubspot-api-client")

    def theirs(request: SignedRequest) -> bool:
        return module.Signature.is_valid(
            signature=request.headers["X-HubSpot-Signature-v3"],
            client_secret=SECRET,
            request_body=request.body.decode(),
            http_uri=request.url,
            http_method=request.method,
            signature_version="v3",
            timestamp=request.headers["X-HubSpot-Request-Timestamp"],
        )

    agree_on_all("hubspot", theirs, "X-HubSpot-Signature-v3", stamped=300)
    request = fresh("hubspot")
    assert not agree("hubspot", theirs, request._replace(method="PUT"))
    assert not agree("hubspot", theirs, request._replace(url=URL + "1"))


def test_sendgrid() -> None:
    """SendGrid's event webhook helper."""
    module = sdk("sendgrid.helpers.eventwebhook", "sendgrid")
    library = module.EventWebhook(keys().sendgrid_public)

    def theirs(request: SignedRequest) -> bool:
        return library.verify_signature(
            request.body.decode(),
            request.headers["X-Twilio-Email-Event-Webhook-Signature"],
            request.headers["X-Twilio-Email-Event-Webhook-Timestamp"],
        )

    request = fresh("sendgrid")
    assert agree("sendgrid", theirs, request)
    assert not agree("sendgrid", theirs, request._replace(body=request.body.rstrip()))
    for hostile in ("", "x", "====", "AAAA", "\xe9"):
        name = "X-Twilio-Email-Event-Webhook-Signature"
        changed = request._replace(headers={**request.headers, name: hostile})
        assert not agree("sendgrid", theirs, changed)


def test_adyen() -> None:
    """Adyen's helpers; theirs looks at the first item only."""
    util = sdk("Adyen.util", "Adyen")

    def theirs(request: SignedRequest) -> bool:
        return util.is_valid_hmac_notification(json.loads(request.body), HEX_KEY)

    assert agree("adyen", theirs, fresh("adyen", body=adyen_body("one")))
    forged = json.loads(fresh("adyen").body)
    forged["notificationItems"][0]["NotificationRequestItem"]["amount"]["value"] = 1
    assert not agree("adyen", theirs, fresh("adyen")._replace(body=json.dumps(forged).encode()))
    forged = json.loads(fresh("adyen").body)
    forged["notificationItems"][1]["NotificationRequestItem"]["amount"]["value"] = 1
    second = fresh("adyen")._replace(body=json.dumps(forged).encode())
    assert theirs(second), "theirs takes a forged second item"
    assert make("adyen").verify(*second).code == "signature_mismatch"

    def platform(request: SignedRequest) -> bool:
        header = request.headers["HmacSignature"]
        return util.is_valid_hmac_payload(header, HEX_KEY, request.body)

    agree_on_all("adyen-platform", platform, "HmacSignature")


def test_discord() -> None:
    """Discord's helper for interactions, which are signed alike."""
    module = sdk("discord_interactions", "discord-interactions")

    def theirs(request: SignedRequest) -> bool:
        return module.verify_key(
            request.body,
            request.headers["X-Signature-Ed25519"],
            request.headers["X-Signature-Timestamp"],
            keys().discord_public,
        )

    agree_on_all("discord", theirs, "X-Signature-Ed25519")


CRASHES: list[tuple[str, str, str, str]] = [
    # provider, header, a value that makes the official verifier raise something of its own
    ("stripe", "Stripe-Signature", "t=" + "9" * 4301 + ",v1=" + "0" * 64, "timestamp_malformed"),
    ("stripe", "Stripe-Signature", "t=\u00e9,v1=x", "header_malformed"),
    ("standard-webhooks", "webhook-signature", "v1", "header_malformed"),
    ("standard-webhooks", "webhook-signature", "v1,!", "header_malformed"),
    ("svix", "svix-signature", "v1,A,B", "header_malformed"),
    ("slack", "X-Slack-Request-Timestamp", "yesterday", "timestamp_malformed"),
    ("slack", "X-Slack-Signature", "v0=\u00e9", "header_malformed"),
    ("paddle", "Paddle-Signature", "ts=now;h1=0", "header_malformed"),
    ("paddle", "Paddle-Signature", "ts=1;h1=a=b", "header_malformed"),
    ("hubspot", "X-HubSpot-Signature-v3", "\u00e9", "header_malformed"),
    ("sendgrid", "X-Twilio-Email-Event-Webhook-Signature", "A", "header_malformed"),
    ("adyen-platform", "HmacSignature", "\u00e9", "header_malformed"),
    ("discord", "X-Signature-Ed25519", "zz", "header_malformed"),
]


@pytest.mark.parametrize("name, header, value, code", CRASHES)
def test_what_crashes_official_verifiers_is_a_verdict_here(
    name: str, header: str, value: str, code: str
) -> None:
    """Non-ASCII, invalid base64, huge integers, missing commas."""
    request = fresh(name)
    changed = request._replace(headers={**request.headers, header: value})

    assert make(name).verify(*changed).code == code


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_library_that_is_not_there_fails_in_ci(ci: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a laptop the check is left out; in CI nothing may be left out silently."""
    monkeypatch.setenv("CI", ci)
    outcome: Any = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(outcome, match="the package no-such-sdk"):
        sdk("no_such_sdk", "no-such-sdk")
    monkeypatch.setattr("tests.signatures.sdks.PADDLE_HOME", "")
    with pytest.raises(outcome, match="ONCEKEY_TEST_PADDLE"), paddle(SECRET):
        pass
