"""What is given in place of a number, a path or a store is told by name, when it is given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from oncekey import (
    AsyncWebhookDedup,
    BackendMismatchError,
    IdempotencyStore,
    MemoryBackend,
    MemoryStore,
    PermanentError,
    PolicyError,
    SQLiteStore,
    StoreConfigError,
    WebhookDedup,
    aconnect,
    connect,
)
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider
from oncekey.testing import sample

ANY: Any = None
URL: Any = "memory://"
DAY: Any = timedelta(days=1)


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: WebhookDedup(MemoryStore(), ttl_seconds=DAY), "ttl_seconds=86400"),
        (
            lambda: WebhookDedup(MemoryStore(), processing_ttl_seconds=DAY),
            "processing_ttl_seconds=86400",
        ),
        (
            lambda: IdempotencyStore(MemoryBackend(), 86_400, lease_seconds=DAY),
            "lease_seconds=86400",
        ),
        (
            lambda: IdempotencyStore(MemoryBackend(), 86_400, in_flight_max_seconds=DAY),
            "in_flight_max_seconds=86400",
        ),
        (lambda: SQLiteStore("never-made.db", busy_timeout=DAY), "busy_timeout=86400"),
    ],
)
def test_a_timedelta_for_seconds_is_told(make: Callable[[], object], name: str) -> None:
    """With the number to write."""
    with pytest.raises(PolicyError, match=f"number of seconds, got a timedelta: write {name}"):
        make()


@pytest.mark.parametrize(
    "make", [lambda given: WebhookDedup(given), lambda given: AsyncWebhookDedup(given)]
)
def test_a_url_or_nothing_for_a_store_is_told(make: Callable[[Any], object]) -> None:
    """A URL goes to ``connect``; ``None`` is mostly a variable that is not set."""
    with pytest.raises(BackendMismatchError, match=r"got a URL, which goes to connect\(url\)"):
        make("memory://")
    with pytest.raises(BackendMismatchError, match=r"got None \(is the environment variable"):
        make(None)


def test_nothing_for_a_store_is_told_by_others() -> None:
    """A receiver, the older form for requests, and a file."""
    with pytest.raises(BackendMismatchError, match="is the environment variable set"):
        WebhookReceiver(sample("stripe").provider or ANY, ANY)
    with pytest.raises(BackendMismatchError, match="which goes to connect"):
        IdempotencyStore(URL, 86_400)
    with pytest.raises(StoreConfigError, match=r"must be text, got NoneType\. Is the environment"):
        SQLiteStore(ANY)


@pytest.mark.parametrize("open_it", [connect, aconnect])
def test_options_in_a_url_of_memory_are_told(open_it: Callable[[str], object]) -> None:
    """They were taken for the store's name."""
    with pytest.raises(StoreConfigError, match="takes no options in its URL"):
        open_it("memory://?max_entries=3")


def test_an_event_that_is_given_up_is_told_with_its_type_and_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one bounded line, whatever the sender wrote."""
    delivery, answers = (
        sample("stripe", type="invoice." + "c" * 200),
        iter([KeyError, PermanentError]),
    )
    receiver = WebhookReceiver(delivery.provider or ANY, MemoryStore())

    @receiver.on()
    def handle(event: object) -> None:
        raise next(answers)

    receiver.receive(*delivery)
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        receiver.receive(*delivery)
    [line] = [one.getMessage() for one in caplog.records if "gave up" in one.getMessage()]
    assert "attempt 2" in line
    assert "type 'invoice.ccc" in line
    assert len(line) < 300


def test_an_option_that_a_provider_does_not_have_names_the_nearest() -> None:
    """And the others after it."""
    with pytest.raises(
        PolicyError, match=r"no option tolerence; did you mean 'tolerance'\? It takes"
    ):
        provider("stripe", secret="whsec_test", tolerence=3)
