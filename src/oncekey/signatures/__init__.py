"""Signatures of webhooks: verify and sign, for every provider.

Importing this imports no cryptography, and each scheme only when a provider of it is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncekey.signatures.base import Ack, Facts, Item, Provider, SignedRequest
    from oncekey.signatures.certificates import CertificateCache
    from oncekey.signatures.custom import hmac_provider
    from oncekey.signatures.delivery import Delivery, Headers, RawHeaders
    from oncekey.signatures.table import provider, providers
    from oncekey.signatures.urls import UnpinnedHostWarning
    from oncekey.signatures.verdict import CODES, Nonce, Verdict, VerifiedWebhookSender

__all__ = [
    "CODES",
    "Ack",
    "CertificateCache",
    "Delivery",
    "Facts",
    "Headers",
    "Item",
    "Nonce",
    "Provider",
    "RawHeaders",
    "SignedRequest",
    "UnpinnedHostWarning",
    "Verdict",
    "VerifiedWebhookSender",
    "hmac_provider",
    "provider",
    "providers",
]

_HOMES = {
    "certificates": ("CertificateCache",),
    "custom": ("hmac_provider",),
    "delivery": ("Delivery", "Headers", "RawHeaders"),
    "base": ("Ack", "Facts", "Item", "Provider", "SignedRequest"),
    "table": ("provider", "providers"),
    "urls": ("UnpinnedHostWarning",),
    "verdict": ("CODES", "Nonce", "Verdict", "VerifiedWebhookSender"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'oncekey.signatures' has no attribute {name!r}")
    value = getattr(import_module(f"oncekey.signatures.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
