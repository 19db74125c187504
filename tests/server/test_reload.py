"""Another config while the gateway runs: all of it or nothing, and requests end as they began."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from oncekey.errors import PolicyError
from oncekey.server.gateway import Gateway
from oncekey.server.serving import _Reload
from oncekey.testing import SignedDelivery

SOON = 30.0


async def test_a_request_under_way_goes_by_the_config_that_it_began_with(
    gateway: Gateway, http: httpx.AsyncClient, signed: Callable[..., SignedDelivery]
) -> None:
    """A target that goes while a body is on its way still gets its event: no 500, no loss."""
    one = signed("shop", id="evt_1")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield one.body[:10]
        begun.set()
        await go_on.wait()
        yield one.body[10:]

    async with asyncio.timeout(SOON):
        headers = dict(one.headers)
        sending = asyncio.ensure_future(http.post(one.url, headers=headers, content=body()))
        await begun.wait()
        old = gateway.settings
        shop = dataclasses.replace(old.sources["shop"], targets=("other",))
        targets = {"other": old.targets["other"]}
        await gateway.use(
            dataclasses.replace(
                old, sources={"shop": shop}, targets=targets, proxies=dict(old.proxies)
            )
        )
        go_on.set()
        answer = await sending
    assert answer.status_code == 200
    found = await gateway.inbox.event(answer.headers["oncekey-event"])
    assert found is not None
    assert [delivery.target for delivery in found.deliveries] == ["app"]


async def test_a_config_that_fails_at_the_end_changes_nothing(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the last part can't work, neither sources nor targets are others."""

    def wrong(routes: Any) -> Any:
        raise PolicyError("a route that can't work")

    monkeypatch.setattr(gateway.proxies, "prepare", wrong)
    old = gateway.settings
    new = dataclasses.replace(old, sources={}, targets={})
    with pytest.raises(PolicyError, match="can't work"):
        await gateway.use(new)
    assert gateway.settings is old
    assert {one.target for one in gateway.deliveries._worker.report()} == set(old.targets)
    assert (await http.get("/hooks/shop")).status_code == 200


async def test_a_signal_during_a_reload_is_another_reload(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written after the file was read is used too."""
    read = []
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def slow(settings: Any) -> None:
        inside.set()
        await go_on.wait()

    def reading() -> Any:
        read.append(len(read))
        return gateway.settings

    monkeypatch.setattr(gateway, "use", slow)
    reload = _Reload(gateway, reading)
    reload.begin()
    async with asyncio.timeout(SOON):
        await inside.wait()
        reload.begin()
        reload.begin()
        go_on.set()
        assert reload._task is not None
        await reload._task
    assert read == [0, 1]
