"""``provider("stripe", secret=...)``: every provider that is known, from one table.

The table is ``providers.toml`` and what goes on in the files beside it: facts with their source and
date, and no code.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final, cast

from oncekey.errors import PolicyError
from oncekey.policy import did_you_mean
from oncekey.signatures.base import Facts, Provider, Secrets

__all__ = ["known_provider", "provider", "providers"]

TABLES: Final = ("providers.toml", "providers_tools.toml", "providers_business.toml")
SCHEMES: Final = MappingProxyType(
    {
        "hmac": "oncekey.signatures.hmac_schemes:HmacProvider",
        "token": "oncekey.signatures.token:TokenProvider",
        "jwt": "oncekey.signatures.jwt:JwtProvider",
        "sns": "oncekey.signatures.sns:SnsProvider",
        "standard-webhooks": "oncekey.signatures.standard_webhooks:StandardWebhooksProvider",
        "twilio": "oncekey.signatures.twilio:TwilioProvider",
        "paypal": "oncekey.signatures.paypal:PayPalProvider",
        "adyen": "oncekey.signatures.adyen:AdyenProvider",
        "mailgun": "oncekey.signatures.mailgun:MailgunProvider",
        "key-pair": "oncekey.signatures.asymmetric:KeyPairProvider",
    }
)


@cache
def providers() -> dict[str, Facts]:
    """What is known of every provider, by name, in the order of the table."""
    found: dict[str, Facts] = {}
    for table in TABLES:
        text = files("oncekey.signatures").joinpath(table).read_text("utf-8")
        found |= {name: Facts(name=name, **row) for name, row in tomllib.loads(text).items()}
    return found


def known_provider(name: str) -> Facts:
    """What is known of a provider.

    Raises:
        PolicyError: Nothing: it names the nearest.
    """
    known = providers()
    if name not in known:
        raise PolicyError(
            f"there is no provider {name!r}{did_you_mean(name.lower(), known)} {', '.join(known)}. "
            "For another one, see hmac_provider"
        )
    return known[name]


def provider(
    name: str,
    secret: Secrets | None = None,
    *,
    previous: Secrets | None = None,
    account: str = "",
    tolerance: float | None = None,
    **options: Any,
) -> Provider:
    """A provider's verifier and signer.

    Args:
        name: Lower case with hyphens, such as ``stripe``. ``providers()`` has them all.
        secret: The shared secret, or for key pairs the public key; or several of them.
        previous: Older ones that are still accepted, while the provider changes over.
        account: Which of your endpoints or accounts the secret belongs to. Part of the sender's
            identity, so two accounts never share an event id.
        tolerance: Seconds that the clocks may differ, either way; the provider's if not given.
        **options: ``event_id``, ``event_type`` and ``batch`` say where to look instead of where
            the provider documents it (``event_id=None``: there is none, your key strategy finds
            one). Some take more: ``public_url`` and ``allowed_hosts`` (providers that sign the URL:
            pass one of them), ``webhook_id``, ``fetch`` and ``trust`` (PayPal), ``topics`` and
            ``sha1`` (SNS), ``keys``, ``audience`` and ``email`` (JSON Web Tokens),
            ``verify_token`` (Meta), ``accept_unsigned`` (who doesn't sign the body: say
            ``"body"``), ``signing_key`` (to sign with a key pair, for tests).

    Raises:
        PolicyError: No such provider or option, or a secret that is empty or can't be one. It is
            a ``ValueError``, and says what to pass.

    Example:
        >>> stripe = provider("stripe", secret="whsec_test")
        >>> request = stripe.sign("POST", "https://example.com/", {}, b'{"id": "evt_1"}')
        >>> verdict = stripe.verify(*request)
        >>> verdict.ok, verdict.event_id, verdict.sender.as_sender_identity()
        (True, 'evt_1', 'stripe:')
    """
    facts = known_provider(name)
    given: dict[str, Any] = {"secret": secret, "account": account, **options}
    if previous is not None:
        given["previous"] = previous
    if tolerance is not None:
        given["tolerance"] = tolerance
    make = _load(facts.factory or SCHEMES[facts.scheme])
    known = _options(make)
    if unknown := sorted(set(given) - known):
        near = did_you_mean(unknown[0], sorted(known)) if len(unknown) == 1 else ""
        meant, asked, _ = near.partition("?")
        raise PolicyError(
            f"{name} has no option {', '.join(unknown)}{meant + '? It' if asked else '; it'} takes "
            + ", ".join(sorted(known))
        )
    return cast("Provider", make(**given) if facts.factory else make(facts, **given))


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return cast("Callable[..., Any]", getattr(import_module(module), name))


def _options(make: Callable[..., Any]) -> set[str]:
    """The keywords of a factory; or of a provider's class and the class they have in common."""
    found = list(inspect.signature(make).parameters.values())
    if inspect.isclass(make):
        found += inspect.signature(Provider).parameters.values()
    return {one.name for one in found if one.kind is one.KEYWORD_ONLY}
