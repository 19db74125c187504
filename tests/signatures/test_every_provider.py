"""What holds for every provider in the table: round trips, and each way to be rejected."""

from __future__ import annotations

import json

import pytest
from tests.signatures.cases import (
    NO_SECRET,
    NOW,
    OURS,
    TOKENS,
    UNSIGNED_BODIES,
    URL,
    case_of,
    make,
    other,
    secret_of,
    signature_headers,
    signed,
)

from oncekey.signatures import CODES, SignedRequest, Verdict, provider, providers
from oncekey.testing._placing import in_batch

pytest.importorskip("cryptography")

STAMPED = [name for name in OURS if providers()[name].tolerance is not None]
UNSIGNED_IDS = {
    *("github", "shopify", "twilio", "zendesk", "linear", "mailgun", "paypal", "gitlab"),
    *("google-pubsub", "telegram", "jira", "bitbucket", "razorpay", "sentry", "woocommerce"),
}
IN_BODY = {"mailgun", "adyen", "aws-sns"}  # no header holds the signature
FREE_BODIES = {*UNSIGNED_BODIES} - {"paypal"}  # nothing of the body is signed
ID_IN_BODY = [
    name for name in OURS if (place := providers()[name].event_id) and "header:" not in place
]


def test_every_provider_of_the_table_has_a_sample() -> None:
    """A row that is added without a delivery to try it on fails here."""
    from oncekey.testing._bodies import BODIES

    assert set(BODIES) == set(providers()) - {"twilio"}  # whose sample is a form


@pytest.mark.parametrize("name", OURS)
def test_what_is_signed_is_verified(name: str) -> None:
    """A signed delivery is genuine, from this sender, and is the event it says."""
    case, stable = case_of(name), make(name, account="acct_1")
    verdict = stable.verify(*signed(name), now=NOW)

    assert verdict.code == "ok", verdict
    assert verdict.ok
    assert verdict.sender is not None
    assert verdict.sender.as_sender_identity() == f"{name}:acct_1"
    assert verdict.event_id == case.event_id
    assert verdict.id_is_signed == stable.id_is_signed == (name not in UNSIGNED_IDS)
    assert verdict.signature
    assert (verdict.timestamp == NOW) == (name in STAMPED)


@pytest.mark.parametrize("name", OURS)
def test_header_names_match_in_any_letter_case_and_as_bytes(name: str) -> None:
    """Servers give header names as they like."""
    method, url, headers, body = signed(name)
    shouted = [(one.upper().encode(), value.encode()) for one, value in headers.items()]

    assert make(name).verify(method, url, shouted, body, now=NOW).ok


@pytest.mark.parametrize("name", OURS)
def test_another_secret_is_a_mismatch(name: str) -> None:
    """Whoever does not hold the secret can't sign."""
    verdict = make(name, **other(name)).verify(*signed(name), now=NOW)

    assert (verdict.ok, verdict.code) == (False, "signature_mismatch")
    assert verdict.sender is None
    assert verdict.event_id is None


@pytest.mark.parametrize("name", [one for one in OURS if one not in NO_SECRET])
def test_the_previous_secret_is_accepted_while_it_is_passed(name: str) -> None:
    """A provider that still signs with the old secret is heard during a change-over."""
    request = signed(name)
    old = make(name).verify(*request, now=NOW)
    new = make(name, **other(name))

    assert old.ok
    assert not new.verify(*request, now=NOW).ok
    current, previous = other(name)["secret"], secret_of(name)
    for both in (
        make(name, secret=current, previous=previous),
        make(name, secret=[current, previous]),
        make(name, secret=[current], previous=[previous]),
    ):
        verdict = both.verify(*request, now=NOW)
        assert verdict.ok
        assert verdict.sender == old.sender


@pytest.mark.parametrize("name", [one for one in OURS if one not in {*IN_BODY, *FREE_BODIES}])
def test_a_body_written_again_is_a_mismatch(name: str) -> None:
    """Parsing and writing JSON changes bytes, and bytes are what is signed."""
    method, url, headers, body = signed(name)
    again = body + b" " if name != "twilio" else body + b"&x=1"

    assert make(name).verify(method, url, headers, again, now=NOW).code == "signature_mismatch"


@pytest.mark.parametrize("name", [one for one in OURS if one not in IN_BODY])
def test_each_signature_header_must_come_exactly_once(name: str) -> None:
    """Missing is one code; twice is another, even with the same value."""
    method, url, headers, body = signed(name)
    needed = [
        one
        for one in signature_headers(name, SignedRequest(method, url, headers, body))
        if make(name).signed_headers() & {one.lower()}
        or "sig" in one.lower()
        or "hmac" in one.lower()
        or one in ("Authorization", "Plaid-Verification")
        or (name in TOKENS and "token" in one.lower())
    ]
    assert needed
    for one in needed:
        rest = {key: value for key, value in headers.items() if key != one}
        verdict = make(name).verify(method, url, rest, body, now=NOW)
        assert verdict.code in ("header_missing", "timestamp_missing"), one
        twice = [*headers.items(), (one, headers[one])]
        verdict = make(name).verify(method, url, twice, body, now=NOW)
        assert verdict.code == "header_malformed", one


@pytest.mark.parametrize("name", STAMPED)
def test_the_clock_is_held_on_both_sides(name: str) -> None:
    """A delivery at the edge passes; one second further, it is too old or in the future."""
    past, future = make(name).tolerance or (0, 0)
    for offset, code in (
        (past, "ok"),
        (-future, "ok"),
        (past + 1, "timestamp_too_old"),
        (-future - 1, "timestamp_in_future"),
        (10**9, "timestamp_too_old"),
        (-(10**9), "timestamp_in_future"),
    ):
        assert make(name).verify(*signed(name), now=NOW + offset).code == code, offset


@pytest.mark.parametrize("name", STAMPED)
def test_tolerance_can_be_set(name: str) -> None:
    """``tolerance=`` replaces the provider's, on both sides."""
    strict = make(name, tolerance=2)

    assert strict.tolerance == (2, 2)
    assert strict.verify(*signed(name), now=NOW + 2).ok
    assert strict.verify(*signed(name), now=NOW + 3).code == "timestamp_too_old"
    assert strict.verify(*signed(name), now=NOW - 3).code == "timestamp_in_future"
    for bad in (0, -1, float("nan"), float("inf"), "5"):
        with pytest.raises(ValueError, match="tolerance"):
            make(name, tolerance=bad)


@pytest.mark.parametrize("name", [one for one in OURS if one not in STAMPED])
def test_a_tolerance_without_a_signed_timestamp_is_refused(name: str) -> None:
    """It could not be held, so it is not pretended."""
    with pytest.raises(ValueError, match="signs no timestamp"):
        make(name, tolerance=300)
    assert make(name).tolerance is None


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("empty", ["", b"", [], [""], None, "  ", "secret\n"])
def test_empty_secrets_are_refused_with_what_to_pass(name: str, empty: object) -> None:
    """An empty secret would let anybody sign."""
    accepted = {"accept_unsigned": "body"} if name in UNSIGNED_BODIES else {}
    with pytest.raises(ValueError, match=r"secret|pass webhook_id="):
        provider(name, secret=empty, **accepted)  # type: ignore[arg-type]
    if name not in NO_SECRET:
        with pytest.raises(ValueError, match=r"previous|white space|empty"):
            make(name, previous=empty if empty is not None else [None])


@pytest.mark.parametrize("name", OURS)
def test_unknown_options_are_named(name: str) -> None:
    """A typing error must not be silently ignored."""
    with pytest.raises(
        ValueError, match=r"no option tolerence; .*t takes accept_unsigned, account"
    ):
        make(name, tolerence=3)


@pytest.mark.parametrize("name", OURS)
def test_an_oversized_header_or_url_is_rejected(name: str) -> None:
    """Both are bounded at 8 KB."""
    method, url, headers, body = signed(name)
    verdict = make(name).verify(method, url + "x" * 8192, headers, body, now=NOW)
    assert verdict.code == "url_malformed"
    for one in [] if name in IN_BODY else signature_headers(name, signed(name)):
        long = {**headers, one: "9" * 8193}
        assert make(name).verify(method, url, long, body, now=NOW).code in (
            "header_malformed",
            "timestamp_malformed",
        ), one


@pytest.mark.parametrize("name", ID_IN_BODY)
def test_a_signed_body_without_an_id_is_told_apart(name: str) -> None:
    """The signature is right, the id is not there: its own code, so that nobody looks for a key."""
    stable = make(name)
    empty = json.dumps(in_batch(stable, {"nothing": 1}, {})).encode()
    if name == "adyen":
        empty = b'{"notificationItems":[{"NotificationRequestItem":{"eventCode":"A"}}]}'
    request = stable.sign("POST", URL, {}, empty, now=NOW)

    assert stable.verify(*request, now=NOW).code == "id_missing"
    without = make(name, event_id=None).verify(*request, now=NOW)
    assert (without.code, without.event_id) == ("ok", None)


@pytest.mark.parametrize("name", [one for one in ID_IN_BODY if one not in IN_BODY])
def test_a_signed_body_with_a_name_twice_is_malformed(name: str) -> None:
    """Two parsers could read two different events out of it."""
    stable = make(name)
    request = stable.sign("POST", URL, {}, b'{"id": 1, "id": 2}', now=NOW)

    assert stable.verify(*request, now=NOW).code == "body_malformed"


@pytest.mark.parametrize("name", OURS)
def test_no_secret_in_any_text(name: str) -> None:
    """Not in a repr, and not in a message, whatever goes wrong."""
    import base64

    from tests.signatures import cases

    secrets = [cases.SECRET, cases.WHSEC, cases.WHSEC[6:], cases.HEX_KEY, cases.OLD_SECRET]
    secrets += [cases.keys().discord, base64.b64decode(cases.WHSEC[6:] + "==").hex()]
    secrets += cases.keys().sendgrid.decode().splitlines()[1:-1]
    stable = make(name)
    method, url, headers, body = signed(name)
    texts = [repr(stable), str(stable), repr(stable.sender)]
    for fields in ({}, headers, dict.fromkeys(headers, "ÿ" * 9)):
        for raw in (body, b"", b"{}", b"\xff"):
            for moment in (NOW, 0.0, 1e12):
                texts.append(repr(stable.verify(method, url, fields, raw, now=moment)))
                texts.append(stable.verify(method, url, fields, raw, now=moment).message)
    for text in texts:
        assert not [one for one in secrets if one in text]


@pytest.mark.parametrize("name", OURS)
def test_every_code_is_known_and_says_what_to_do(name: str) -> None:
    """A rejected verdict has a message that a person can act on."""
    for verdict in _rejections(name):
        assert verdict.code in CODES or verdict.code == "url_malformed"
        assert len(verdict.message) > 10


def _rejections(name: str) -> list[Verdict]:
    stable = make(name)
    method, url, headers, body = signed(name)
    tries = [
        stable.verify(method, url, {}, body, now=NOW),
        stable.verify(method, url, {}, b"", now=NOW),
        stable.verify(method, url * 400, headers, body, now=NOW),
        make(name, **other(name)).verify(method, url, headers, body, now=NOW),
    ]
    return [one for one in tries if not one.ok]


@pytest.mark.parametrize("name", OURS)
def test_a_body_that_is_not_bytes_is_a_programming_error(name: str) -> None:
    """A parsed body can't be verified, and that is said at once."""
    with pytest.raises(TypeError, match="raw bytes"):
        make(name).verify("POST", URL, {}, json.loads("{}"))


def test_an_event_id_for_a_provider_that_reads_it_from_the_body_is_refused() -> None:
    """It would be silently ignored otherwise."""
    with pytest.raises(ValueError, match="from the body at id"):
        make("stripe").sign("POST", URL, {}, b'{"id": "a"}', event_id="b")
    with pytest.raises(ValueError, match="nowhere"):
        make("stripe", event_id=None).sign("POST", URL, {}, b"{}", event_id="b")
