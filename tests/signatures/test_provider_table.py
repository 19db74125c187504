"""The table of providers: complete, sourced, and consistent with itself."""

from __future__ import annotations

import pytest
from tests.signatures.cases import CASES, NOW, OURS, URL, make, signed

from oncekey.signatures import provider, providers
from oncekey.signatures.event_fields import event_field

EXPECTED = [
    "stripe",
    "github",
    "shopify",
    "slack",
    "twilio",
    "paypal",
    "square",
    "standard-webhooks",
    "svix",
    "zendesk",
    "discord",
    "paddle",
    "mailgun",
    "hubspot",
    "intercom",
    "linear",
    "sendgrid",
    "adyen",
    "sports-stack",
    "adcp",
    "adcp-hmac",
]


def test_the_known_providers_are_all_there() -> None:
    """At least these; their names are part of senders' identities and must not change."""
    assert set(EXPECTED) <= set(providers())


@pytest.mark.parametrize("name", list(providers()))
def test_every_row_says_where_it_comes_from(name: str) -> None:
    """A source of a known kind, a date, and what to pass as the secret."""
    facts = providers()[name]
    words = ("SDK", "docs", "code", "specification", "secondary", "unverified")

    assert name == name.lower() == facts.name
    assert facts.source.startswith(words)
    assert facts.checked in ("2026-11", "2026-11-18")
    assert facts.title
    assert facts.retries
    assert facts.notes.endswith((".", "!"))
    assert facts.secret


@pytest.mark.parametrize("name", list(providers()))
def test_an_event_is_remembered_longer_than_it_can_arrive(name: str) -> None:
    """Past the retries, and past the age at which a captured delivery is still fresh."""
    facts = providers()[name]

    assert facts.retention >= 86_400
    assert facts.retention > facts.retry_seconds
    assert facts.retention > (facts.max_age or facts.tolerance or 0)
    if facts.max_age is not None and facts.scheme != "jwt":  # each delivery has its own token
        assert facts.max_age >= facts.retry_seconds


@pytest.mark.parametrize("name", list(providers()))
def test_places_can_be_read(name: str) -> None:
    """Every place in the table parses."""
    facts = providers()[name]
    for text in (facts.event_id, facts.event_type):
        if text is not None:
            assert event_field(text).text == text


@pytest.mark.parametrize("name", OURS)
def test_attributes_come_from_the_table(name: str) -> None:
    """A receiver finds all it needs on the provider."""
    maker, facts = make(name), providers()[name]

    assert (maker.name, maker.title) == (name, facts.title)
    assert maker.retention_seconds == facts.retention
    assert (maker.source, maker.notes) == (facts.source, facts.notes)
    assert maker.checked == facts.checked
    assert 200 <= maker.ack.status < 300
    assert maker.batch == facts.batch


@pytest.mark.parametrize("name", [one for one in OURS if providers()[one].event_type])
def test_the_type_is_where_the_table_says(name: str) -> None:
    """Where the example delivery has one, it is found."""
    request = signed(name)
    types = [one.event_type for one in make(name).items(request.headers, request.body)]

    known = {"stripe": "invoice.paid", "slack": "app_mention", "adyen": "AUTHORISATION"}
    if name in known:
        assert set(types) == {known[name]}
    assert all(one is None or one for one in types)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A typing error is easily mended."""
    with pytest.raises(ValueError, match=r"no provider 'Stripe'; did you mean 'stripe'\? There"):
        provider("Stripe", secret="x")
    with pytest.raises(ValueError, match=r"no provider 'acme'; there are stripe, github"):
        provider("acme", secret="x")


@pytest.mark.parametrize("name", ["adcp", "adcp-hmac"])
def test_rows_with_a_factory_are_made_by_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table hands over exactly what it was given."""
    import sys
    import types

    given: list[dict[str, object]] = []
    module = types.ModuleType("oncekey.adcp.signatures")

    def factory(*, secret: str, account: str, tolerance: int, extra: int) -> str:
        given.append({"secret": secret, "account": account, "tolerance": tolerance, "extra": extra})
        return "made"

    module.__dict__.update(adcp_provider=factory, adcp_hmac_provider=factory)
    monkeypatch.setitem(sys.modules, "oncekey.adcp.signatures", module)
    assert provider(name, secret="s", account="a", tolerance=5, extra=1) == "made"
    assert given == [{"secret": "s", "account": "a", "tolerance": 5, "extra": 1}]


@pytest.mark.parametrize(
    "text, headers, payload, expected",
    [
        ("id", {}, {"id": "a"}, "a"),
        ("id", {}, {"id": 7}, "7"),
        ("id", {}, {"id": 1.5}, None),
        ("id", {}, {"id": True}, None),
        ("id", {}, {"id": ""}, None),
        ("id", {}, {"id": "x" * 256}, None),
        ("id", {}, [], None),
        ("id", {}, None, None),
        ("a.b[0].c", {}, {"a": {"b": [{"c": "d"}]}}, "d"),
        ("header:X-A", {"x-a": "1"}, None, "1"),
        ("header:X-A", {"x-a": "\u00e9"}, None, None),
        ("header:X-A", {"x-a": " "}, None, None),
        ("header:X-A|X-B", {"x-b": "2"}, None, "2"),
        ("header:X-A+t", {"x-a": "1"}, {"t": "u:v%"}, "1:u%3Av%25"),
        ("header:X-A+t?", {"x-a": "1"}, {}, "1"),
        ("header:X-A+t", {"x-a": "1"}, {}, None),
        ("a+b", {}, {"a": "x" * 200, "b": "y" * 200}, None),
        ("a+b", {}, {"a": "x", "b": {}}, None),
        ("a|b", {}, {"a": "x", "b": "y"}, "x"),
        ("a|b.c", {}, {"b": {"c": "y"}}, "y"),
        ("a|b", {}, {"a": None, "b": 7}, "7"),
        ("a|b", {}, {"a": [], "b": 7}, None),
        ("a|b+c?", {}, {"b": "y", "c": "z"}, "y:z"),
    ],
)
def test_places(text: str, headers: dict[str, str], payload: object, expected: str | None) -> None:
    """What is there, joined without ambiguity, or nothing."""
    from oncekey.signatures import Headers

    assert event_field(text).read(Headers(headers), payload) == expected


def test_an_id_header_that_came_twice_is_malformed() -> None:
    """Two ids are none."""
    _, _, headers, body = signed("github")
    twice = [*headers.items(), ("x-github-delivery", "other")]

    assert make("github").verify("POST", URL, twice, body, now=NOW).code == "header_malformed"
    assert CASES["github"].send_id == "guid-1"
