"""A store that takes everything and answers nothing: guards fail closed, and soon."""

from __future__ import annotations

import time

import pytest

from oncekey import Once, connect
from oncekey.errors import StoreError
from oncekey.receiver import WebhookReceiver
from oncekey.testing import Proxy, deliver, sample, sample_provider

DEADLINE = 1.0
GENEROUS = 30.0


@pytest.fixture(params=["postgresql", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    """A server, with a deadline for its calls."""
    if request.param == "postgresql":
        return f"{request.getfixturevalue('own_url')}?timeout={DEADLINE}"
    return f"{request.getfixturevalue('redis_server').url}?check=off&timeout={DEADLINE}"


def test_a_guarded_call_fails_and_nothing_runs(url: str) -> None:
    """Past the deadline there is an error, retryable, and the function was not called."""
    calls: list[str] = []
    with Proxy(url) as proxy, connect(proxy.url) as store:
        once = Once(store, scope="dark", wait=5)

        @once(key="name", name=None)
        def work(name: str) -> str:
            calls.append(name)
            return name

        assert work("before") == "before"
        with proxy.blackhole():
            begun = time.monotonic()
            for name in ("before", "during"):
                with pytest.raises(StoreError) as caught:
                    work(name)
                assert caught.value.retryable
            assert time.monotonic() - begun < GENEROUS
        assert calls == ["before"]
        assert work("during") == "during"
        assert work("before") == "before"
    assert calls == ["before", "during"]


def test_a_receiver_asks_for_a_retry(url: str) -> None:
    """A delivery in the dark is answered 503, and handled once when its retry comes."""
    handled: list[str] = []
    with Proxy(url) as proxy, connect(proxy.url) as store:
        receiver = WebhookReceiver(sample_provider("stripe"), store)
        receiver.on("invoice.paid")(lambda event: handled.append(event.id))
        delivery = sample("stripe", type="invoice.paid")
        with proxy.blackhole():
            assert deliver(receiver, delivery).status == 503
        assert handled == []
        assert [deliver(receiver, delivery.again()).status for _ in range(3)] == [200] * 3
    assert len(handled) == 1
