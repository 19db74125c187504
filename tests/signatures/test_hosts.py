"""Providers that sign the URL: what was signed for one host is not accepted on another."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cryptography")

import httpx
from tests.adapters.sites import listening, serve_asgi

from oncekey import PolicyError
from oncekey.adapters.asgi import WebhookApp
from oncekey.adcp.signatures import adcp_provider
from oncekey.receiver import AsyncWebhookReceiver
from oncekey.signatures import Provider, UnpinnedHostWarning, hmac_provider, provider
from oncekey.signatures.rfc9421 import rfc9421_provider
from oncekey.testing import sample

SECRET = "of-both-staging-and-production-0123456789"


def _pair() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(bytes(32))


def _custom(**options: Any) -> Provider:
    return hmac_provider(
        "acme", secret=SECRET, header="X-Sig", signed="{url}{body}", event_id="id", **options
    )


MAKERS: dict[str, Callable[..., Provider]] = {
    "twilio": lambda **options: provider("twilio", secret=SECRET, **options),
    "square": lambda **options: provider("square", secret=SECRET, **options),
    "hubspot": lambda **options: provider("hubspot", secret=SECRET, **options),
    "custom": _custom,
    "adcp": lambda **options: adcp_provider(signing_key=_pair(), key_id="k1", **options),
    "rfc9421": lambda **options: rfc9421_provider(
        signing_key=SECRET.encode(), key_id="k1", event_id="id", **options
    ),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Provider]:
    return MAKERS[request.param]


def test_what_was_signed_for_staging_is_refused_in_production(
    make: Callable[..., Provider],
) -> None:
    """On a real server, which takes the host from the header: the pinned ones refuse it."""
    answers = {}
    staging = make(allowed_hosts="*")
    delivery = sample(
        staging,
        url="http://staging.example/hooks",
        id="evt_0123456789abcdef",
        headers={"Host": "staging.example"},
    )
    for name, options in {
        "hosts": {"allowed_hosts": ["production.example", "www.production.example"]},
        "url": {"public_url": "http://production.example"},
        "nothing": {"allowed_hosts": "*"},
    }.items():
        receiver = AsyncWebhookReceiver(make(**options), "memory://")
        handled = []
        receiver.on()(handled.append)
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(listening())
            app = WebhookApp(receiver)
            stack.enter_context(serve_asgi(_with_lifespan(app), sock))
            # The socket is production's; the header is whatever the sender wants.
            answer = httpx.post(
                f"http://127.0.0.1:{sock.getsockname()[1]}/hooks{_query(delivery.url)}",
                headers=dict(delivery.headers),
                content=delivery.body,
            )
        answers[name] = (answer.status_code, len(handled))

    assert answers["hosts"] == answers["url"] == (401, 0)
    assert answers["nothing"][1] == 1  # that it is the host which decides


def _query(url: str) -> str:
    _, question, query = url.partition("?")
    return question + query


def _with_lifespan(app: WebhookApp) -> Any:
    async def both(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            return await app(scope, receive, send)
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})

    return both


def test_neither_given_is_said_when_it_is_made(make: Callable[..., Provider]) -> None:
    """The warning names both options and the line that made the provider."""
    with pytest.warns(UnpinnedHostWarning, match=r"public_url=.*allowed_hosts=") as caught:
        make()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(public_url="https://production.example")
        make(allowed_hosts="production.example")
        make(allowed_hosts="*")


@pytest.mark.parametrize(
    "url, ok",
    [
        ("https://production.example/in", True),
        ("https://PRODUCTION.example:443/in", True),
        ("https://production.example:8443/in", True),
        ("https://production.example:9443/in", False),
        ("https://production.example.evil.example/in", False),
        ("https://evil.example/production.example", False),
        ("https://production.example@evil.example/in", False),
        ("https://evil.example\\@production.example/in", False),
        ("https://production.example\n.evil.example/in", False),
        ("https:///in", False),
        ("/in", False),
        ("", False),
    ],
)
def test_hosts_are_compared_whole(url: str, ok: bool) -> None:
    """Letter case and the scheme's own port are no difference; everything else is."""
    mine = _custom(allowed_hosts=["production.example", "production.example:8443"])
    verdict = mine.verify(*_custom(allowed_hosts="*").sign("POST", url, {}, b'{"id": "e1"}'))
    assert verdict.ok == ok
    assert ok or verdict.code in ("host_not_allowed", "url_malformed")


@pytest.mark.parametrize(
    "bad", ["https://a.example", "a.example/", "a b", "u@a.example", [1], ".."]
)
def test_what_is_no_host_is_refused(bad: Any) -> None:
    """A pin that can't fit would refuse every delivery."""
    with pytest.raises(PolicyError, match="allowed_hosts"):
        _custom(allowed_hosts=bad)


def test_a_pin_on_what_is_not_signed_is_refused() -> None:
    """Stripe signs no URL: a host that is compared would protect nothing."""
    for option in ({"allowed_hosts": "a.example"}, {"public_url": "https://a.example"}):
        with pytest.raises(PolicyError, match="does not sign the URL"):
            provider("stripe", secret="s", **option)
