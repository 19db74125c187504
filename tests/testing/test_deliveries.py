"""Deliver once, twice and at once: what is right passes, and each fault is named."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.testing import naive

from oncekey import MemoryBackend, MemoryStore
from oncekey.errors import PermanentError, PolicyError
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.testing import (
    Answer,
    adeliver,
    adeliver_concurrently,
    adeliver_twice,
    assert_handled_once,
    deliver,
    deliver_concurrently,
    deliver_twice,
    sample,
)

COPIES = 6


def ours(handler: Callable[..., Any], **options: Any) -> WebhookReceiver:
    receiver = WebhookReceiver(naive.STRIPE, MemoryStore(), **options)
    receiver.on("invoice.paid")(handler)
    return receiver


@pytest.fixture
def charged() -> list[str]:
    return []


def delivery(**options: Any) -> Any:
    return sample(naive.STRIPE, **options)


# What is right


def test_our_receiver_passes(charged: list[str]) -> None:
    """Twice and at once, one effect, and the report says so."""
    receiver = ours(lambda event: charged.append(event.id))

    twice = assert_handled_once(deliver_twice(receiver, delivery(), effects=charged))
    many = assert_handled_once(
        deliver_concurrently(receiver, delivery(), COPIES, effects=lambda: len(charged))
    )

    assert [one.outcome for one in twice.answers] == ["handled", "duplicate"]
    assert (twice.handled, twice.duplicates, twice.effects, twice.retryable) == (1, 1, 1, 0)
    assert (many.handled, many.duplicates, many.effects, many.wrong) == (1, COPIES - 1, 1, [])
    assert many.outcomes == {"handled": 1, "duplicate": COPIES - 1}
    assert len(charged) == 2


async def test_our_async_receiver_passes(charged: list[str]) -> None:
    """The same in an event loop, with effects counted by a coroutine."""
    receiver = AsyncWebhookReceiver(naive.STRIPE, MemoryBackend())

    @receiver.on("invoice.paid")
    async def paid(event: Any) -> None:
        await asyncio.sleep(0)
        charged.append(event.id)

    async def count() -> int:
        return len(charged)

    assert (await adeliver(receiver, delivery())).outcome == "handled"
    assert_handled_once(await adeliver_twice(receiver, delivery(), effects=count))
    found = await adeliver_concurrently(receiver, delivery(), COPIES, effects=count)
    assert assert_handled_once(found).outcomes == {"handled": 1, "duplicate": COPIES - 1}


def test_copies_at_once_are_in_hand_at_once() -> None:
    """All copies are under way before the first is answered."""
    together = threading.Barrier(COPIES)

    def receive(method: str, url: str, headers: Any, body: bytes) -> int:
        together.wait(30)  # breaks, and raises, unless all come
        return 200

    found = deliver_concurrently(receive, delivery(), COPIES)

    assert [one.status for one in found.answers] == [200] * COPIES


def test_a_copy_that_is_told_to_retry_is_fine_while_another_is_in_hand(charged: list[str]) -> None:
    """503 to a copy is no fault; if all get it, the kit retries once, as senders do."""
    leave = threading.Event()

    def slow(event: Any) -> None:
        charged.append(event.id)
        leave.wait(30)  # until the other copy has its answer

    receiver = WebhookReceiver(naive.STRIPE, MemoryStore(), wait=0)
    receiver.on()(slow)

    def receive(method: str, url: str, headers: Any, body: bytes) -> Any:
        answer = receiver.receive(method, url, headers, body)
        if answer.status == 503:
            leave.set()
        return answer

    found = deliver_concurrently(receive, delivery(), 2)
    assert_handled_once(found, effects=len(charged))
    assert found.retryable == 1

    told = iter([503, 503, 200])
    retried = deliver_concurrently(lambda m, u, h, b: next(told), delivery(), 2)
    assert [one.status for one in assert_handled_once(retried).answers] == [503, 503, 200]


def test_a_handler_that_fails_once_is_retried() -> None:
    """500 and then 2xx is what retries are for."""
    tries = iter([ValueError("not now"), None])

    def handle(event: Any) -> None:
        error = next(tries)
        if error is not None:
            raise error

    found = deliver_twice(ours(handle), delivery())
    assert [one.outcome for one in assert_handled_once(found).answers] == ["failed", "handled"]


# What is wrong


def fails(report: Any, says: str, **options: Any) -> None:
    with pytest.raises(AssertionError, match=says):
        assert_handled_once(report, **options)


def test_twice_finds_a_receiver_that_remembers_nothing() -> None:
    """Two effects for two copies."""
    receiver = naive.Forgetful()
    found = deliver_twice(receiver, delivery(), effects=receiver.charged)

    assert found.effects == 2
    fails(found, "happened 2 times for 1 event: copies are not recognised. Record the event's id")


def test_twice_finds_a_409_to_the_duplicate() -> None:
    """The message says why that is wrong, and what to answer."""
    receiver = naive.Conflict()
    found = deliver_twice(receiver, delivery(), effects=receiver.charged)

    assert [one.status for one in found.answers] == [200, 409]
    assert len(found.wrong) == 1
    fails(found, "the duplicate was answered 409: senders treat that as a failure and retry for")
    fails(deliver_concurrently(receiver, delivery(), COPIES), "the duplicate was answered 409")


def test_at_once_finds_check_then_mark() -> None:
    """Copies that all looked before any of them marked: one after another they seem fine."""
    receiver = naive.CheckThenMark()
    assert_handled_once(deliver_twice(receiver, delivery(), effects=receiver.charged))

    receiver.between = threading.Barrier(COPIES).wait
    found = deliver_concurrently(receiver, delivery(), COPIES, effects=receiver.charged)

    assert found.effects == COPIES
    fails(found, f"happened {COPIES} times for 1 event: .* must be one atomic step")


def test_at_once_finds_check_then_mark_without_help() -> None:
    """Threads take turns at every call, so that even a window of two lines is hit."""

    def found() -> bool:
        receiver = naive.CheckThenMark()
        report = deliver_concurrently(receiver, delivery(), effects=receiver.charged)
        return (report.effects or 0) > 1

    assert any(found() for _ in range(20))  # nearly every single one; none without turns


async def test_at_once_finds_check_then_mark_in_an_event_loop(charged: list[str]) -> None:
    """Between two awaits other tasks run."""
    done: set[str] = set()

    async def receive(method: str, url: str, headers: Any, body: bytes) -> int:
        name = naive.STRIPE.verify(method, url, headers, body).event_id or ""
        if name not in done:
            await asyncio.sleep(0)
            charged.append(name)
            done.add(name)
        return 200

    found = await adeliver_concurrently(receive, delivery(), COPIES, effects=charged)
    fails(found, f"happened {COPIES} times for 1 event: .* must be one atomic step")


def test_a_unique_constraint_that_nobody_catches_is_found() -> None:
    """500 to a duplicate: the error of the database is named."""
    with contextlib.closing(naive.Unique()) as receiver:
        found = deliver_twice(receiver, delivery(), effects=receiver.charged)
        assert found.effects == 1
        fails(found, r"answered 500: the sender retries for nothing.*\[IntegrityError: UNIQUE")
        fails(deliver_concurrently(receiver, delivery()), "the duplicate was answered 500")


def test_an_acknowledged_event_without_its_effect_is_found() -> None:
    """2xx and no effect: the event is lost."""
    receiver = naive.AckOnly()
    found = deliver_twice(receiver, delivery(), effects=receiver.charged)

    fails(found, "never happened, though 1 event was answered 2xx: the sender does not send it")
    fails(found, r"or it was handled before this test: use delivery\.another\(\)")


def test_a_late_503_is_found() -> None:
    """Once an event is acknowledged its copies are, too."""
    told = iter([200, 503])
    fails(
        deliver_twice(lambda m, u, h, b: next(told), delivery()),
        "answered 503, though its event was handled",
    )


def test_two_copies_that_a_receiver_says_it_handled_are_found() -> None:
    """Outcomes are enough, where nobody counts effects."""
    found = [Answer(200, outcome="handled"), Answer(200, outcome="handled")]
    fails(found, "more than one copy was handled: copies are not recognised")


@pytest.mark.parametrize(
    "status, says",
    [
        (301, "answered 301: senders do not follow redirects"),
        (308, "answered 308: senders do not follow redirects"),
        (400, "answered 400: it was taken for malformed"),
        (401, "answered 401: the signature was refused"),
        (403, "csrf_exempt"),
        (404, "nothing is at this path"),
        (405, "route POST to it"),
        (409, "nobody sent it before"),
        (413, "too large"),
        (415, "accept application/json"),
        (418, "that is no answer to a delivery"),
        (422, "take the raw body, not a parsed model"),
        (429, "a rate limit struck"),
        (500, "the handler failed"),
        (503, "the handler failed"),
    ],
)
def test_a_first_copy_that_is_refused_says_why(status: int, says: str) -> None:
    """The status tells which mistake it is."""
    fails(deliver(naive.Refuses(status), delivery()), says)
    fails(deliver_twice(naive.Refuses(status), delivery()), says)
    fails(deliver_concurrently(naive.Refuses(status), delivery(), 2), says)


def test_outcomes_of_our_receiver_are_explained() -> None:
    """No handler, a handler that gives up, a wrong secret, a worker that hangs."""

    def give_up(event: Any) -> None:
        raise PermanentError("no such customer")

    fails(deliver(ours(print), delivery(type="other")), "no handler for its type")
    buried = ours(give_up, dead_letters=lambda letter: None)
    fails(deliver(buried, delivery()), "gave the event up with PermanentError")
    wrong = sample("stripe", secret="whsec_another")
    fails(deliver(ours(print), wrong), r"answered 401 \(signature_mismatch\): the signature was")
    hung = Answer(503, outcome="in_flight", code="IDEMPOTENCY_IN_FLIGHT")
    fails(hung, "another worker has the event in hand")
    fails(Answer(503, outcome="unavailable"), "the store failed")


def test_what_no_server_answers_is_explained() -> None:
    """Nobody listens there."""
    found = deliver("http://127.0.0.1:9/hooks", delivery())

    assert (found.status, found.retryable) == (0, True)
    fails(found, r"no answer came \(ConnectionRefusedError: .*is the server running")


def test_answers_are_shown_without_what_a_terminal_obeys() -> None:
    """An excerpt is one line of printable text."""
    assert Answer(500, body=b"a\x1b[2Jb\nc" + b"x" * 900).excerpt == "a [2Jb c" + "x" * 192


# What is called wrongly


def test_wrong_calls_are_refused_with_what_to_do() -> None:
    """Targets that are none, effects that can't be counted, copies that are none."""
    for target in (object(), 7, "localhost:8000", "ftp://x/", lambda one: 200, print):
        with pytest.raises(PolicyError, match=r"no target|no URL to deliver to"):
            deliver(target, delivery())
    with pytest.raises(PolicyError, match="effects= gave a float"):
        deliver_twice(naive.Forgetful(), delivery(), effects=lambda: 1.5)
    with pytest.raises(PolicyError, match="effects= is async"):
        deliver_twice(naive.Forgetful(), delivery(), effects=_no_number)
    with pytest.raises(PolicyError, match="n must be 2 or more"):
        deliver_concurrently(naive.Forgetful(), delivery(), 1)
    with pytest.raises(PolicyError, match="the target gave a NoneType"):
        deliver(lambda m, u, h, b: None, delivery())
    with pytest.raises(PolicyError, match="nothing was delivered"):
        assert_handled_once([])


async def _no_number() -> int:
    return 1


async def test_a_sync_form_in_an_event_loop_names_the_async_one() -> None:
    """It would block the loop that it needs."""
    receiver = AsyncWebhookReceiver(naive.STRIPE, MemoryBackend())
    with pytest.raises(PolicyError, match="such as adeliver"):
        deliver(receiver, delivery())


def test_an_interrupt_is_not_taken_for_an_answer() -> None:
    """Ctrl-C ends an experiment, also from another thread."""

    def receive(method: str, url: str, headers: Any, body: bytes) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deliver(receive, delivery())
    with pytest.raises(KeyboardInterrupt):
        deliver_concurrently(receive, delivery(), 2)


def test_a_failed_assertion_shows_what_was_found() -> None:
    """Each problem on a line of its own, then the numbers."""
    receiver = naive.Forgetful()
    with pytest.raises(AssertionError) as caught:
        deliver_twice(receiver, delivery(), effects=receiver.charged).check()

    lines = str(caught.value).splitlines()
    assert lines[0].startswith("- the effect happened 2 times")
    assert lines[-1] == "twice: 1 event, 2 deliveries (2 200), 2 effects"
