"""Events that older code handled are marked, by the receiver that is not to handle them again."""

from __future__ import annotations

import pytest

from oncekey import MemoryBackend, MemoryStore, WebhookDedup
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.testing import sample, sample_provider

DAY = 86_400


def test_a_marked_event_is_a_duplicate() -> None:
    """Marked twice, it was new once; another account's event of that id is another."""
    store, shop = MemoryStore(), sample_provider("stripe", account="shop")
    receiver = WebhookReceiver(shop, store)
    receiver.on()(lambda event: pytest.fail("it was handled before"))
    assert [receiver.mark_handled("evt_1") for _ in range(2)] == [True, False]
    assert receiver.receive(*sample(shop, id="evt_1")).outcome == "duplicate"
    other = WebhookReceiver(sample_provider("stripe", account="other"), store)
    other.on()(lambda event: None)
    assert other.receive(*sample(other.provider, id="evt_1")).outcome == "handled"


async def test_the_async_receiver_marks_too() -> None:
    """By the same rules, awaited."""
    stripe = sample_provider("stripe")
    receiver = AsyncWebhookReceiver(stripe, MemoryBackend())
    receiver.on()(lambda event: pytest.fail("it was handled before"))
    assert await receiver.mark_handled("evt_1")
    assert (await receiver.receive(*sample(stripe, id="evt_1"))).outcome == "duplicate"


def test_a_mark_lasts_as_long_as_the_receiver_remembers() -> None:
    """Stripe may send an event again after 30 days: a mark of a week would not do."""
    now = [1_794_800_000.0]
    store, stripe = MemoryStore(clock=lambda: now[0]), sample_provider("stripe")
    receiver = WebhookReceiver(stripe, store)
    receiver.on()(lambda event: pytest.fail("it was handled before"))
    receiver.mark_handled("evt_1")
    now[0] += 30 * DAY
    assert receiver.receive(*sample(stripe, id="evt_1")).outcome == "duplicate"


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_what_can_be_no_id_is_not_marked(name: str) -> None:
    """It would be a mark for nothing."""
    receiver = WebhookReceiver(sample_provider("stripe"), MemoryStore())
    with pytest.raises(ValueError, match="the event id"):
        receiver.mark_handled(name)


def test_a_dedup_of_ones_own_marks_by_the_providers_sender() -> None:
    """The text "stripe" is another sender than the one that a receiver knows."""
    store, stripe = MemoryStore(), sample_provider("stripe")
    dedup = WebhookDedup(store, 604_800)
    dedup.check_and_record(stripe.sender, "evt_1")
    dedup.check_and_record("stripe", "evt_2")
    receiver = WebhookReceiver(stripe, store)
    receiver.on()(lambda event: None)
    outcomes = [receiver.receive(*sample(stripe, id=f"evt_{n}")).outcome for n in (1, 2)]
    assert outcomes == ["duplicate", "handled"]
