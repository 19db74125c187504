"""A gateway on a real inbox, in this process, and what to talk to it with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from tests.server.kit import CONFIG, ENVIRON, HOST

from oncekey.server.app import make_app
from oncekey.server.config import settings_from
from oncekey.server.gateway import Gateway
from oncekey.testing import SignedDelivery, sample


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway that takes events in and delivers nothing: that is the worker's, tested apart."""
    text = CONFIG.format(store=f"sqlite:///{tmp_path}/inbox.db")
    opened = await Gateway.open(settings_from(text, "gateway.toml", ENVIRON))
    yield opened
    await opened.stop(1)


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to it."""
    transport = httpx.ASGITransport(app=make_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
        yield client


@pytest.fixture
def signed(gateway: Gateway) -> Callable[..., SignedDelivery]:
    """Makes a delivery for a source: ``signed("shop", type="invoice.paid")``."""

    def make(source: str, **options: object) -> SignedDelivery:
        provider = gateway.settings.sources[source].provider
        return sample(provider, url=f"{HOST}/hooks/{source}", **options)

    return make
