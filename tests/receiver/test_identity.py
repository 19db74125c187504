"""Which event a delivery is: who sent it is part of that, and no unsigned byte is."""

from __future__ import annotations

import pytest

from oncekey import MemoryStore
from oncekey.receiver import WebhookReceiver
from oncekey.testing import sample

pytest.importorskip("cryptography")


def test_one_tenants_event_is_not_anothers_duplicate() -> None:
    """Two accounts that map their key to one publisher share a store, and no events."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from oncekey.signatures.adcp import adcp_provider

    key, store, handled = Ed25519PrivateKey.generate(), MemoryStore(), []
    outcomes = []
    for account in ("tenant-a", "tenant-b", "tenant-a"):
        tenant = adcp_provider(
            signing_key=key, key_id="k1", account=account, publisher="seller.example"
        )
        receiver = WebhookReceiver(tenant, store)
        receiver.on()(lambda event: handled.append(event.sender.account))
        delivery = sample(tenant, id="whk_01HW9D3H8FZP2N6R8T0V4X6Z9B")
        outcomes.append(receiver.receive(*delivery).outcome)

    assert outcomes == ["handled", "handled", "duplicate"]
    assert handled == ["tenant-a", "tenant-b"]
