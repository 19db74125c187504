"""What a handler is, and what is never taken for one that has run."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import oncekey.signatures
from oncekey import MemoryBackend, MemoryStore, PolicyError, aconnect
from oncekey.cli import main
from oncekey.errors import BackendMismatchError
from oncekey.receiver import AsyncWebhookReceiver, WebhookEvent, WebhookReceiver
from oncekey.signatures import Ack, Item, Verdict, provider
from oncekey.signatures.verdict import CODES
from oncekey.testing import sample


async def waits(event: WebhookEvent) -> None:
    pytest.fail("nobody awaits it")


def yields(event: WebhookEvent) -> Iterator[None]:
    pytest.fail("nobody goes through it")
    yield


async def yields_in_a_loop(event: WebhookEvent) -> AsyncIterator[None]:
    pytest.fail("nobody goes through it")
    yield


class Waits:
    async def __call__(self, event: WebhookEvent) -> None:
        pytest.fail("nobody awaits it")


def test_a_handler_that_would_not_run_is_refused_when_it_is_given() -> None:
    """A function that yields for both receivers, an async one for the sync receiver."""
    delivery = sample("stripe")
    sync = WebhookReceiver(delivery.provider, MemoryStore())
    loop = AsyncWebhookReceiver(delivery.provider, MemoryBackend())
    for receiver in (sync, loop):
        for handler in (yields, yields_in_a_loop):
            with pytest.raises(PolicyError, match="yields"):
                receiver.on()(handler)
    for handler in (waits, Waits()):
        with pytest.raises(BackendMismatchError, match=r"write a sync handler \(def\), or"):
            sync.on()(handler)


@pytest.mark.parametrize("work", [waits, yields, yields_in_a_loop], ids=lambda one: one.__name__)
def test_work_that_a_handler_only_returns_is_not_taken_for_done(
    work: Callable[[WebhookEvent], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A lambda that gives a coroutine back: the sender retries, the log says why."""
    delivery = sample("stripe")
    receiver = WebhookReceiver(delivery.provider, MemoryStore())
    receiver.on()(lambda event: work(event))
    answers = [receiver.receive(*delivery) for _ in range(2)]
    assert [(one.status, one.outcome) for one in answers] == [(500, "failed")] * 2
    assert "nothing of it has run" in caplog.text


async def test_work_that_is_only_returned_in_a_loop_is_not_taken_for_done() -> None:
    """The async receiver awaits what can be awaited, and refuses what yields."""
    delivery = sample("stripe")
    for work in (yields, yields_in_a_loop):
        receiver = AsyncWebhookReceiver(delivery.provider, MemoryBackend())
        receiver.on()(lambda event, work=work: work(event))
        assert (await receiver.receive(*delivery)).outcome == "failed"


def test_an_event_does_not_show_its_payload() -> None:
    """Neither does what it is part of: both end up in logs."""
    delivery, seen = sample("github"), list[WebhookEvent]()
    receiver = WebhookReceiver(delivery.provider, MemoryStore())
    receiver.on()(seen.append)
    receiver.receive(*delivery)
    (event,) = seen
    assert isinstance(event.payload, dict)
    assert event.id in repr(event)
    assert "payload" not in repr(event)
    assert str(event.payload) not in repr(event)


def test_a_verdict_without_what_was_signed_is_no_fault_of_the_sender(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A provider of one's own that forgot it: the sender retries, the log says why."""
    delivery = sample("github")
    maker: Any = delivery.provider
    verify = maker.verify
    maker.verify = lambda *given, now=None: replace(verify(*given, now=now), signed_message=None)
    receiver = WebhookReceiver(maker, MemoryStore())
    receiver.on()(lambda event: pytest.fail("it is guarded by nothing"))
    answer = receiver.receive(*delivery)
    assert (answer.status, answer.outcome) == (500, "failed")
    assert "without the message that was signed" in caplog.text
    assert b"provider" not in answer.body


@pytest.mark.parametrize("path", ["data[", "a..b"])
def test_a_batch_that_is_no_path_is_refused_when_the_provider_is_made(path: str) -> None:
    """Not by an error at the first delivery."""
    with pytest.raises(PolicyError, match="not a path"):
        provider("stripe", secret="whsec_test", batch=path)


def texts() -> Iterator[str]:
    """All that is written in the source as a reason for a sender."""
    yield from CODES.values()
    for path in Path(inspect.getfile(oncekey.signatures)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Rejection"):
                for text in ast.walk(node):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        yield text.value


def test_no_reason_for_a_sender_speaks_of_python() -> None:
    """The sender can set no option here: what its owner can do is for the log."""
    found = set(texts())
    assert len(found) > 60
    python = re.compile(
        r"\bpass |\b[a-z]+(_[a-z]+)*=(?!$)(?![A-Z{])\S|@receiver|oncekey|\(\)|None\b"
    )
    assert [text for text in found if python.search(text)] == []


def test_every_provider_is_printed_with_all_that_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The list has each by its name, and each page its source, its date and its days."""
    assert main(["providers"]) == 0
    rows = capsys.readouterr().out.splitlines()
    known = oncekey.signatures.providers()
    assert {row.split()[0] for row in rows[1:-1]} == set(known)
    for name, facts in known.items():
        assert main(["providers", name]) == 0
        page = capsys.readouterr().out
        assert all(text in page for text in (facts.title, facts.source, str(facts.retention)))
        assert all(text in page for text in (facts.notes, facts.retries, facts.redelivery))


def _own(methods: dict[str, Any]) -> Any:
    """Stripe's provider as a class of somebody's own, with these methods."""
    maker = sample("stripe").provider
    own = type("Own", (type(maker),), methods)
    made = own.__new__(own)
    made.__dict__.update(maker.__dict__)
    return made


async def test_what_a_provider_of_somebodys_own_says_is_what_counts() -> None:
    """Verify, the events and the endpoint's test are asked of the class that overrides them."""
    refuses = {"verify": lambda self, *given, now=None: Verdict.rejected("own_rule", "no")}
    renames = {"items": lambda self, *given: [Item("own-id", "own.type", {})]}
    greets = {"handshake": lambda self, body: Ack(202, b"hello")}
    found = []
    for methods in (refuses, renames, greets):
        provider, delivery = _own(methods), sample("stripe")
        seen: list[str] = []
        for receiver in (
            WebhookReceiver(provider, MemoryStore()),
            AsyncWebhookReceiver(provider, aconnect("memory://")),
        ):
            receiver.on()(lambda event, seen=seen: seen.append(event.id))
            answer: Any = receiver.receive(*delivery)
            answer = await answer if inspect.isawaitable(answer) else answer
            found.append((answer.status, answer.code, [*seen]))
            seen.clear()
    assert found == [
        *[(401, "own_rule", [])] * 2,
        *[(200, "", ["own-id"])] * 2,
        *[(202, "handshake", [])] * 2,
    ]


def test_the_name_of_a_handlers_error_is_not_for_its_sender() -> None:
    """Who sends gets a fixed code; the log and the outcome have the name."""
    delivery = sample("stripe")
    receiver = WebhookReceiver(delivery.provider, MemoryStore())

    @receiver.on()
    def fails(event: WebhookEvent) -> None:
        raise ZeroDivisionError

    answer = receiver.receive(*delivery)
    assert (answer.status, answer.code) == (500, "ZeroDivisionError")
    assert json.loads(answer.body)["code"] == "HANDLER_FAILED"
    assert b"ZeroDivision" not in answer.body


def test_the_digits_of_an_event_in_the_log_are_those_that_inspect_prints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that one who has an id finds its lines, as the page for troubles says."""
    url = f"sqlite:///{tmp_path / 'hooks.db'}"
    delivery = sample("stripe")
    receiver = WebhookReceiver(delivery.provider, url)

    @receiver.on()
    def fails(event: WebhookEvent) -> None:
        raise ZeroDivisionError

    receiver.receive(*delivery)
    receiver.close()
    part = ["--part", "webhook", "--part", "webhook", "--part", "stripe:"]
    assert main(["inspect", str(delivery.event_id), *part, url]) in (0, 1)
    digest = re.search(r"[0-9a-f]{64}", capsys.readouterr().out)
    assert digest is not None
    assert f"(event {digest[0][:12]}…)" in caplog.text
