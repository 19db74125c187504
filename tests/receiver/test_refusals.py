"""What a receiver refuses, for every scheme: the right status, a reason, no secret, no store call.

Each refusal is looked at in the same way: the status and code, a message that a person can act
on, headers that are safe, nothing of a secret in the answer or in a log, no handler called, and
not one call to the store.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cryptography")

from tests.cells import every
from tests.signatures.cases import NOW
from tests.signatures.schemes import ENDPOINT, JSON, NAMES, Scheme, scheme

from oncekey import MemoryBackend, MemoryStore
from oncekey.adcp.signatures import adcp_provider
from oncekey.errors import PolicyError, StoreUnavailableError
from oncekey.receiver import AsyncWebhookReceiver, AuditEntry, WebhookReceiver, WebhookResponse
from oncekey.signatures import Provider, SignedRequest, Verdict, provider
from oncekey.signatures.base import MAX_BATCH
from oncekey.signatures.nonces import Nonces

IN_BODY = ("mailgun", "adyen", "aws-sns")  # the signature is in the body, and no header holds one
FREE_BODY = (*IN_BODY, "twilio")  # values are signed, not the bytes that carry them
BATCH_OBJECTS = ("adyen", "hmac-batch")  # the list of events is a member of the body
BATCHES = ("hubspot", "sendgrid", *BATCH_OBJECTS)
STAMPED = [
    name
    for name in NAMES
    if scheme(name).provider.tolerance is not None or name.startswith("rfc9421")
]
CALLS = ("claim", "complete", "release", "renew", "first_seen", "read", "write", "now", "wait")


class Counting:
    """Notes every call."""

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS:
            self.__dict__.setdefault("noted", []).append(name)
        return super().__getattribute__(name)

    @property
    def calls(self) -> list[str]:
        """What was called."""
        noted: list[str] = self.__dict__.get("noted", [])
        return noted


class Counted(Counting, MemoryStore): ...


class AsyncCounted(Counting, MemoryBackend): ...


Give = Callable[..., WebhookResponse]


@pytest.fixture
def refused(caplog: pytest.LogCaptureFixture) -> Give:
    """Deliver, and check all that a refusal must be."""

    def give(
        one: Scheme,
        request: Any,
        status: int,
        *codes: str,
        by: Provider | None = None,
        now: float = NOW,
        **options: Any,
    ) -> WebhookResponse:
        store, entries = Counted(), list[AuditEntry]()
        receiver = WebhookReceiver(by or one.provider, store, audit=entries.append, **options)
        receiver.on()(lambda event: pytest.fail(f"handled {event}"))
        with caplog.at_level(logging.DEBUG):
            answer = receiver.receive(*request, now=now)
        assert answer.status == status, answer
        assert bare(answer.code) in codes, answer
        assert answer.outcome == "rejected"
        told = json.loads(answer.body)
        assert told["error"] == answer.code
        assert len(told["message"]) > 10
        check_headers(one, answer)
        shown = f"{answer!r} {caplog.text} {entries}"
        assert not [secret for secret in one.secrets if secret in shown]
        assert store.calls == []
        assert [(entry.outcome, entry.status) for entry in entries] == [("rejected", status)]
        return answer

    return give


def bare(code: str) -> str:
    """A code without AdCP's prefix."""
    return code.removeprefix("webhook_signature_").removeprefix("webhook_")


def check_headers(one: Scheme, answer: WebhookResponse) -> None:
    assert answer.headers["Content-Type"] == "application/json"
    assert all(value.isascii() and value.isprintable() for value in answer.headers.values())
    challenge = answer.headers.get("WWW-Authenticate")
    if answer.status != 401:
        assert challenge is None
        return
    code = answer.code
    if one.name == "adcp-hmac" and not code.startswith("webhook_"):
        code = "webhook_signature_invalid"  # AdCP knows no other for its legacy form
    assert challenge == f'Signature error="{code}"'


def with_header(request: SignedRequest, name: str, value: str | None) -> SignedRequest:
    fields = {key: kept for key, kept in request.headers.items() if key.lower() != name.lower()}
    return request._replace(headers=fields if value is None else {**fields, name: value})


def added_headers(one: Scheme, request: SignedRequest) -> list[str]:
    given = {name.lower() for name in (*JSON, *one.case.headers)}
    return [name for name in request.headers if name.lower() not in given]


def id_headers(one: Scheme) -> tuple[str, ...]:
    place = one.provider._id_field
    return place.headers if place is not None else ()


@pytest.fixture(params=NAMES)
def one(request: pytest.FixtureRequest) -> Scheme:
    return scheme(request.param)


# --- signatures --------------------------------------------------------------------------------


def test_a_genuine_delivery_is_handled(one: Scheme) -> None:
    """What is refused below is refused for its damage, not for what it is."""
    receiver = WebhookReceiver(one.provider, MemoryStore())
    seen: list[str] = []
    receiver.on()(lambda event: seen.append(event.id))
    answer = receiver.receive(*one.sign(), now=NOW)
    assert (answer.status // 100, answer.outcome) == (2, "handled")
    assert seen
    assert one.case.event_id is None or seen == [one.case.event_id]


def test_a_wrong_secret_is_refused(one: Scheme, refused: Give) -> None:
    """Whoever holds another secret is a stranger."""
    answer = refused(one, one.sign(), 401, "signature_mismatch", "invalid", by=one.stranger)
    assert "check" in json.loads(answer.body)["message"] or one.name == "adyen"


def test_a_body_that_was_written_again_is_refused(one: Scheme, refused: Give) -> None:
    """The same JSON with other spaces; where only values are signed, with another value."""
    request = one.sign()
    if one.name == "twilio":
        changed = request.body + b"&Extra=1"
    elif one.name in IN_BODY:
        changed = request.body.replace(b"psp-1", b"psp-9").replace(b'"token":"', b'"token":"0')
        changed = changed.replace(b"sample-1", b"sample-9")
    else:
        changed = json.dumps(json.loads(request.body), indent=1).encode()
    assert changed != request.body
    codes = ("signature_mismatch", "invalid", "digest_mismatch")
    refused(one, request._replace(body=changed), 401, *codes)


def test_each_missing_header_is_refused(one: Scheme, refused: Give) -> None:
    """By its own code: without the id it is a bad request, without the signature a stranger's."""
    request = one.sign()
    for name in added_headers(one, request):
        # Some sign the id, so that without one there is nothing to verify.
        signed = name.lower() in one.provider.signed_headers()
        status = 400 if name.lower() in id_headers(one) and not signed else 401
        codes = ("header_missing", "timestamp_missing", "id_missing", "header_malformed")
        answer = refused(one, with_header(request, name, None), status, *codes)
        if one.name not in ("adcp", "adcp-es256") and not one.name.startswith("rfc9421"):
            assert name.lower() in json.loads(answer.body)["message"].lower()
    if one.name == "aws-sns":
        bare = {k: v for k, v in json.loads(request.body).items() if k != "Signature"}
        refused(one, request._replace(body=json.dumps(bare).encode()), 401, "header_malformed")
    elif one.name in IN_BODY:
        refused(one, request._replace(body=one.case.body), 401, "header_missing")
    elif not one.name.startswith("adcp"):
        refused(one, request._replace(headers=dict(JSON)), 401, "header_missing")


@every("value", ["\xe9\xff", "\u0661\u2028", "\ud800", "\x00", "a\r\nB: c", ""])
def test_headers_that_are_no_headers_are_refused(one: Scheme, value: str, refused: Give) -> None:
    """Non-ASCII, control characters and nothing at all, as text and as bytes."""
    request = one.sign()
    for name in added_headers(one, request):
        changed = with_header(request, name, value)
        assert_refused(one, changed, name, refused)
        if value.isascii() or value == "\xe9\xff":
            pairs = [
                (key.encode(), text.encode("latin-1")) for key, text in changed.headers.items()
            ]
            assert_refused(one, changed._replace(headers=pairs), name, refused)


def assert_refused(one: Scheme, request: Any, name: str, refused: Give) -> None:
    is_id = name.lower() in id_headers(one)
    codes = ["header_malformed", "timestamp_malformed", "id_missing", "key_unknown"]
    if one.name.startswith(("adcp", "rfc9421", "hmac-stamped", "twitch")):
        codes += ["signature_mismatch", "invalid"]  # an empty value, which the signature covers
    unsigned = is_id and name.lower() not in one.provider.signed_headers()
    refused(one, request, 400 if unsigned else 401, *codes)


def test_a_header_that_comes_twice_is_refused(one: Scheme, refused: Give) -> None:
    """Two servers could pick two different ones."""
    request = one.sign()
    for name in added_headers(one, request):
        twice = [*request.headers.items(), (name, request.headers[name])]
        codes = ("header_malformed", "digest_mismatch", "signature_mismatch")
        refused(one, request._replace(headers=twice), 401, *codes)


@pytest.mark.parametrize("name", STAMPED)
@every("offset", [10**7, -(10**7)])
def test_old_and_future_timestamps_are_refused(name: str, offset: int, refused: Give) -> None:
    """Both ways, and the answer says by how much, where the scheme has no code of its own."""
    expected = "timestamp_too_old" if offset > 0 else "timestamp_in_future"
    answer = refused(
        scheme(name), scheme(name).sign(), 401, expected, "window_invalid", now=NOW + offset
    )
    assert "clocks" in json.loads(answer.body)["message"]


# --- size, type and form -----------------------------------------------------------------------


def test_an_oversized_body_is_refused_unread(one: Scheme, refused: Give) -> None:
    """A byte over the limit, whatever is in it."""
    request = one.sign()
    most = len(request.body) - 1
    answer = refused(one, request, 413, "body_too_large", max_body_bytes=most)
    assert str(most) in json.loads(answer.body)["message"]
    noise = request._replace(body=b"\xff" * 2_000_000)
    refused(one, noise, 413, "body_too_large")


@every("kind", ["text/html", "", None, "multipart/form-data", "\xe9", "json", "*/*"])
def test_another_content_type_is_refused_unread(
    one: Scheme, kind: str | None, refused: Give
) -> None:
    """And the answer says what is taken."""
    answer = refused(one, with_header(one.sign(), "Content-Type", kind), 415, "content_type")
    assert "application/json" in json.loads(answer.body)["message"]


def test_two_content_types_are_refused_unread(one: Scheme, refused: Give) -> None:
    """Even two of the same: nobody knows which one another server would take."""
    request = one.sign()
    for second in ("application/json", "text/html"):
        pairs = [*request.headers.items(), ("content-type", second)]
        refused(one, request._replace(headers=pairs), 415, "content_type")


def test_a_url_without_end_is_refused(one: Scheme, refused: Give) -> None:
    """Its length is bounded before anything is computed over it."""
    request = one.sign()._replace(url=ENDPOINT + "x" * 10_000)
    status = 401 if one.name.startswith(("adcp", "rfc9421")) and one.name != "adcp-hmac" else 400
    refused(one, request, status, "url_malformed", "target_uri_malformed", "header_malformed")


DEEP = 10_000
MALFORMED = {
    "no JSON": b"not json",
    "half": b'{"id": "a"',
    "a name twice": b'{"id": "a", "id": "b", "idempotency_key": "a", "idempotency_key": "b"}',
    "lists without end": b"[" * DEEP + b"]" * DEEP,
    "objects without end": b'{"id":' * DEEP + b"1" + b"}" * DEEP,
    "deep below": b'{"id": "a", "x": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "a number without end": b'{"id": "a", "n": ' + b"9" * 5000 + b"}",
    "no number": b'{"id": "a", "n": NaN}',
    "too large a number": b'{"id": "a", "n": 1e999}',
    "half of a pair": b'{"id": "a", "x": "\\ud800"}',
    "no UTF-8": b'{"id": "\xff"}',
    "another UTF": '{"id": "a"}'.encode("utf-16"),
    "a mark before": b'\xef\xbb\xbf{"id": "a"}',
    "a NUL before": b'\x00{"id": "a"}',
}


@every("what", MALFORMED)
def test_a_malformed_body_is_refused(one: Scheme, what: str, refused: Give) -> None:
    """Signed by the right key, and yet nothing that two parsers read alike: 400, not 5xx."""
    body = MALFORMED[what]
    try:
        request = one.sign(body, headers=JSON)
    except PolicyError:  # it signs inside the body, so this can't be signed: a stranger's then
        request = one.sign()._replace(body=body)
        status = 401 if one.name == "linear" else 400
        refused(one, request, status, "body_malformed", "signature_mismatch")
        return
    refused(one, request, 400, "body_malformed")


def test_a_malformed_body_of_a_stranger_is_refused(one: Scheme, refused: Give) -> None:
    """Nothing is parsed for somebody whose signature is wrong, but where it is in the body."""
    for body in (b"", b"\xff", b"{}", b"[]", b"null", b"[" * DEEP):
        request = one.sign()._replace(body=body)
        codes = ("signature_mismatch", "invalid", "digest_mismatch", "header_missing")
        if one.name in IN_BODY:
            status = 401 if one.name == "mailgun" and body in (b"{}", b"[]", b"null") else 400
            refused(one, request, status, "body_malformed", "header_missing")
        elif one.name == "twilio" and body == b"\xff":
            refused(one, request, 400, "body_malformed")
        else:
            refused(one, request, 401, *codes)


# --- ids ---------------------------------------------------------------------------------------

IDS_IN_BODY = [
    name
    for name in NAMES
    if (place := scheme(name).provider._id_field) is not None and place.in_body
]


def with_id(name: str, value: object, body: bytes | None = None) -> bytes:
    """The scheme's body, with another id in it."""
    payload = json.loads(scheme(name).case.body if body is None else body)
    if name in BATCHES:
        holder = payload
        if not isinstance(payload, list):
            holder = payload["events" if name == "hmac-batch" else "notificationItems"]
        item: Any = holder[-1]
        item = item.get("NotificationRequestItem", item)
        first = {"hubspot": "eventId", "sendgrid": "sg_event_id", "adyen": "pspReference"}
        item[first.get(name, "id")] = value
    elif name == "discord":
        payload["event"]["type"] = value
    elif name == "pagerduty":
        payload["event"]["id"] = value
    elif name == "sports-stack":
        payload["event"]["hash"] = value
    elif name == "mailgun":
        payload["event-data"]["id"] = value
    else:
        named = dict.fromkeys(("slack", "square", "paddle", "typeform"), "event_id")
        named |= {"aws-sns": "MessageId", "docusign": "event"}
        payload["idempotency_key" if name.startswith("adcp") else named.get(name, "id")] = value
    return json.dumps(payload).encode()


HOSTILE_IDS: dict[str, object] = {
    "NUL": "evt\0one",
    "2,000 characters": "x" * 2000,
    "empty": "",
    "spaces": "   ",
    "null": None,
    "a list": ["evt_1"],
    "an object": {"id": "evt_1"},
    "a fraction": 1.5,
    "a number without end": 10**400,
}


@pytest.mark.parametrize("name", IDS_IN_BODY)
@every("what", HOSTILE_IDS)
def test_an_id_that_is_none_is_refused(name: str, what: str, refused: Give) -> None:
    """Signed, but with an id that no store could keep: a bad request, in every scheme."""
    one, value = scheme(name), HOSTILE_IDS[what]
    if name in ("discord", "docusign") and what not in ("null", "a number without end"):
        return  # its id is a hash of what the event holds, whatever that is
    try:
        request = one.sign(with_id(name, value))
    except PolicyError:  # Adyen signs the id as text, and this is none
        request = one.sign()
        request = request._replace(body=with_id(name, value, request.body))
    answer = refused(one, request, 400, "id_missing", "body_malformed")
    assert "\\u0000" not in answer.body.decode()


@pytest.mark.parametrize("name", [one for one in NAMES if id_headers(scheme(one))])
@every("value", ["x" * 2000, "x" * 9000, "evt\0one", " ", "\x7f"])
def test_an_id_header_that_is_none_is_refused(name: str, value: str, refused: Give) -> None:
    """The same for ids in a header, which a proxy may have changed."""
    one = scheme(name)
    request = with_header(one.sign(), id_headers(one)[0], value)
    signed = id_headers(one)[0] in one.provider.signed_headers()
    codes = ("id_missing", "header_malformed", "signature_mismatch")
    refused(one, request, 401 if signed or len(value) > 8192 else 400, *codes)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("number", [0, MAX_BATCH + 1])
def test_a_batch_of_none_or_of_too_many_is_refused(name: str, number: int, refused: Give) -> None:
    """Before a single event of it is looked at."""
    payload = json.loads(scheme(name).case.body)
    if isinstance(payload, list):
        body = json.dumps(payload[:1] * number).encode()
    else:
        body = json.dumps({where: found[:1] * number for where, found in payload.items()}).encode()
    options = {"max_body_bytes": 100_000_000}
    if name == "adyen" and number:  # signing so many would take longer than all the other tests
        request = scheme(name).sign()._replace(body=body)
    else:
        request = scheme(name).sign(body)
    refused(scheme(name), request, 400, "body_malformed", **options)


# --- what is odd, and fine ---------------------------------------------------------------------

ODD: dict[str, Any] = {
    "integers past 2**53": {"n": 2**60 + 1, "m": 10**300},
    "NUL in values": {"note": "a\0b", "na\0me": 1},
    "control characters": {"note": "\x1b[31m\r\n\x7f\x85\u2028"},
    "a hundred levels": {"x": json.loads("[" * 100 + "]" * 100)},
    "a type without end": {"type": "t" * 100_000, "event_type": "\0", "topic": "\r\n" * 99},
    "types that are none": {"type": [], "event_type": {}, "topic": 7, "task_type": 1.5},
    "names of methods": {"__class__": 1, "keys": 2, "items": 3, "get": None},
}


@every("what", ODD)
def test_what_is_odd_is_answered_without_a_crash(one: Scheme, what: str) -> None:
    """Signed, valid JSON that a careless receiver stumbles over: a 2xx or a 400, never a 5xx."""
    payload = json.loads(one.case.body) if one.name != "twilio" else {}
    if isinstance(payload, list):
        payload = [{**item, **ODD[what]} for item in payload]
    else:
        payload = {**payload, **ODD[what]}
    request = one.sign(json.dumps(payload).encode(), headers=JSON)
    for options in ({}, {"on_changed": "reject"}):
        receiver = WebhookReceiver(one.provider, MemoryStore(), **options)
        receiver.on()(lambda event: None)
        answer = receiver.receive(*one.sign(request.body, headers=JSON), now=NOW)
        if one.name.startswith("adcp") and what == "types that are none":
            assert (answer.status, answer.code) == (400, "missing_envelope_fields")
        else:
            assert (answer.status // 100, answer.outcome) == (2, "handled"), answer


@pytest.mark.parametrize("name", ["slack", "adcp", "discord", "intercom"])
def test_a_handshake_costs_no_store_call(name: str) -> None:
    """The provider's own test of the endpoint is answered, and no handler sees it."""
    body = {
        "slack": b'{"type": "url_verification", "challenge": "3eZbrw1aBm2rZgRNFdxV2595E9CY"}',
        "adcp": b'{"type": "webhook.challenge", "challenge": "3eZbrw1aBm2rZgRNFdxV2595E9CY"}',
        "discord": b'{"type": 0}',
        "intercom": b'{"topic": "ping"}',
    }[name]
    store = Counted()
    receiver = WebhookReceiver(scheme(name).provider, store)
    receiver.on()(lambda event: pytest.fail("handled"))
    answer = receiver.receive(*scheme(name).sign(body), now=NOW)
    assert (answer.status // 100, answer.outcome, answer.code) == (2, "ignored", "handshake")
    assert store.calls == []
    if name in ("slack", "adcp"):
        assert b"3eZbrw1aBm2rZgRNFdxV2595E9CY" in answer.body


@pytest.mark.parametrize("name", ["slack", "adcp"])
@every("challenge", ["x" * 100_000, "<script>alert(1)</script>", "a\r\nSet-Cookie: b", [], 7, None])
def test_a_hostile_challenge_is_not_echoed(name: str, challenge: Any, refused: Give) -> None:
    """Nothing that a browser or a proxy could trip over is ever sent back."""
    kind = {"slack": "url_verification", "adcp": "webhook.challenge"}[name]
    body = json.dumps({"type": kind, "challenge": challenge}).encode()
    answer = refused(scheme(name), scheme(name).sign(body), 400, "id_missing")
    assert b"script" not in answer.body
    assert len(answer.body) < 300


# --- the asynchronous form ---------------------------------------------------------------------


@every("what", ["stranger", "malformed", "too large", "type"])
async def test_the_asynchronous_receiver_refuses_alike(one: Scheme, what: str) -> None:
    """The same answers, and no call to its store either."""
    store, by, options = AsyncCounted(), one.provider, dict[str, Any]()
    request: Any = one.sign()
    if what == "stranger":
        by = one.stranger
    elif what == "malformed":
        request = request._replace(body=b"\xff")
    elif what == "too large":
        options["max_body_bytes"] = 1
    else:
        request = with_header(request, "Content-Type", "text/html")
    receiver = AsyncWebhookReceiver(by, store, **options)
    receiver.on()(lambda event: pytest.fail("handled"))
    answer = await receiver.receive(*request, now=NOW)
    twin = WebhookReceiver(by, MemoryStore(), **options)
    assert dataclasses.replace(answer) == twin.receive(*request, now=NOW)
    assert answer.status in (400, 401, 413, 415)
    assert store.calls == []


# --- what can't be verified right now ----------------------------------------------------------


class Down(MemoryStore):
    """Can't be asked."""

    def first_seen(self, key: Any, terms: Any) -> bool:
        raise StoreUnavailableError("redis://user:hunter2@cache.example can't be reached")


def _fails(*_: Any) -> Any:
    raise OSError("https://user:hunter2@keys.example can't be reached")


def unavailable() -> dict[str, tuple[Provider, str]]:
    pinned = {"k1": scheme("adcp").provider.signing_key}  # type: ignore[attr-defined]
    from oncekey.signatures.rfc9421 import rfc9421_provider

    return {
        "adcp, keys": (
            adcp_provider(allowed_hosts="*", jwks=_fails),
            "webhook_signature_key_unknown",
        ),
        "adcp, revocations": (
            adcp_provider(allowed_hosts="*", keys=pinned, revocations=_fails),
            "webhook_signature_revocation_stale",
        ),
        "adcp, nonces": (
            adcp_provider(allowed_hosts="*", keys=pinned, nonces=Nonces(Down())),
            "store_unavailable",
        ),
        "adcp, publisher": (
            adcp_provider(allowed_hosts="*", keys=pinned, publisher=_fails),
            "webhook_signature_key_unknown",
        ),
        "rfc9421, keys": (
            rfc9421_provider(allowed_hosts="*", keys=_fails, event_id="id"),
            "key_unknown",
        ),
        "paypal, certificate": (
            provider(
                "paypal",
                webhook_id="1JE4291016473214C",
                fetch=_fails,
                accept_unsigned="body",
            ),
            "key_unknown",
        ),
    }


@pytest.mark.parametrize("what", unavailable())
async def test_what_can_not_be_verified_now_is_retried(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No 401, which a sender may take for good: 503 with Retry-After, and the code it was."""
    maker, code = unavailable()[what]
    one = scheme(what.partition(",")[0])
    store, backend, entries = Counted(), AsyncCounted(), list[AuditEntry]()
    sync = WebhookReceiver(maker, store, audit=entries.append)
    concurrent = AsyncWebhookReceiver(maker, backend, audit=entries.append)
    answers = [sync.receive(*one.sign(), now=NOW), await concurrent.receive(*one.sign(), now=NOW)]
    for answer in answers:
        assert (answer.status, answer.outcome, answer.code) == (503, "unavailable", code)
        assert answer.headers["Retry-After"] == "30"
        assert "WWW-Authenticate" not in answer.headers
        assert json.loads(answer.body)["error"] == code
        assert "hunter2" not in f"{answer}"
    assert store.calls == backend.calls == []
    assert [(entry.outcome, entry.status, entry.code) for entry in entries] == [
        ("unavailable", 503, code)
    ] * 2
    logged = [record.getMessage() for record in caplog.records]
    assert logged
    # The store's own text is its own to keep clean; nobody else's is ever logged.
    assert what == "adcp, nonces" or not any("hunter2" in line for line in logged)


def test_a_key_that_is_not_published_is_refused_for_good(refused: Give) -> None:
    """The set was fetched and read: a stranger, whom no retry helps."""
    one = scheme("adcp")
    by = adcp_provider(allowed_hosts="*", jwks=lambda: {"keys": []})
    refused(one, one.sign(), 401, "key_unknown", by=by)


@pytest.mark.parametrize(
    "status, outcome, options",
    [(500, "failed", {}), (429, "limited", {"per_sender": (1, 60)}), (409, "conflict", {})],
)
def test_other_answers_say_what_to_do_too(
    status: int, outcome: str, options: dict[str, Any]
) -> None:
    """Genuine, and not handled now: a body with a message, and nothing of the error."""
    one = scheme("hmac")
    receiver = WebhookReceiver(one.provider, MemoryStore(), on_changed="reject", **options)

    def fails(event: Any) -> None:
        if event.payload["type"] == "fails":
            raise ValueError("the database's password is hunter2")

    receiver.on()(fails)
    bodies = [b'{"id": "e1", "type": "a"}', b'{"id": "e1", "type": "b"}']
    if outcome == "failed":
        bodies = [b'{"id": "e1", "type": "fails"}']
    answer = [receiver.receive(*one.sign(body), now=NOW) for body in bodies][-1]
    assert (answer.status, answer.outcome) == (status, outcome)
    told = json.loads(answer.body)
    assert (told["error"], len(told["message"]) > 20) == (outcome, True)
    assert "hunter2" not in repr(answer)


# --- what others bring -------------------------------------------------------------------------


@every("code", ['x"\r\nSet-Cookie: a=b', 'a", error="b', "\xe9", "", "x" * 65, "a b", "a\n"])
def test_a_code_of_somebody_elses_provider_can_not_write_headers(code: str) -> None:
    """Whatever a custom provider calls its rejection, the header stays one header."""

    class Own(type(scheme("hmac").provider)):  # type: ignore[misc]
        def verify(self, *args: Any, **options: Any) -> Verdict:
            return Verdict.rejected(code, "no")

    own = Own.__new__(Own)
    own.__dict__.update(scheme("hmac").provider.__dict__)
    answer = WebhookReceiver(own, MemoryStore()).receive(*scheme("hmac").sign(), now=NOW)
    assert (answer.status, answer.code) == (401, "signature_invalid")
    assert answer.headers["WWW-Authenticate"] == 'Signature error="signature_invalid"'


@pytest.mark.parametrize(
    "key",
    [
        lambda payload: payload["order"]["id"],
        lambda payload: payload.order,
        lambda payload: 1 / 0,
        lambda payload: None,
        lambda payload: 7,
        lambda payload: "",
        lambda payload: "a\0b",
        lambda payload: "\ud800",
        lambda payload: "x" * 5000,
    ],
)
def test_a_key_that_your_function_does_not_find_is_refused(key: Any, refused: Give) -> None:
    """What the payload does not have is the sender's fault, not a crash of the receiver."""
    refused(scheme("hmac"), scheme("hmac").sign(), 400, "id_missing", key=key)
