"""The receiver: verify, dedup, handle once, and the right answer to everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.signatures.cases import NOW, signed
from tests.signatures.cases import make as signing

from oncekey import (
    BackendMismatchError,
    MemoryBackend,
    MemoryStore,
    PolicyError,
    SQLiteStore,
    StoreUnavailableError,
)
from oncekey.errors import PermanentError
from oncekey.receiver import (
    AsyncWebhookReceiver,
    AuditEntry,
    RetentionWarning,
    TableAudit,
    WebhookEvent,
    WebhookReceiver,
    WebhookResponse,
)
from oncekey.signatures import hmac_provider, provider
from oncekey.testing import ManualClock

STRIPE = provider("stripe", secret="whsec_test")
JSON = {"Content-Type": "application/json"}
DAY = 86_400


class Counted(MemoryStore):
    """Counts the calls of each method."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("claim", "complete", "release", "renew", "first_seen", "read", "write"):
            self.calls.append(name)
        return found


def event(number: object = 1, kind: str = "paid", **more: Any) -> bytes:
    return json.dumps({"id": f"evt_{number}", "type": kind, **more}).encode()


def deliver(receiver: WebhookReceiver, body: bytes) -> WebhookResponse:
    return receiver.receive(*receiver.provider.sign("POST", "https://x.example/h", JSON, body))


def receiver_of(handler: Callable[..., Any], store: Any = None, **options: Any) -> WebhookReceiver:
    receiver = WebhookReceiver(STRIPE, store or MemoryStore(), **options)
    receiver.on()(handler)
    return receiver


@pytest.mark.parametrize("kind", ["paid", "unknown"])
def test_what_is_added_to_an_answer_stays_with_it(kind: str) -> None:
    """Header fields that an application adds to one answer are in no other, first or copy."""
    receiver = WebhookReceiver(STRIPE, MemoryStore())
    receiver.on("paid")(lambda _: None)
    for number in (1, 1, 2, 2):
        headers: Any = deliver(receiver, event(number, kind)).headers
        assert "Set-Cookie" not in headers
        headers["Set-Cookie"] = "session=of-one-caller"


def test_first_copy_is_handled_and_others_are_answered_the_same() -> None:
    """A first delivery costs a claim and a completion, a duplicate one claim; both get 200."""
    seen: list[WebhookEvent] = []
    store = Counted()
    receiver = receiver_of(seen.append, store)
    first = deliver(receiver, event())
    assert (first.status, first.outcome, store.calls) == (200, "handled", ["claim", "complete"])
    store.calls.clear()
    again = deliver(receiver, event())
    assert (again.status, again.outcome, store.calls) == (200, "duplicate", ["claim"])
    assert [(one.id, one.type, one.attempt) for one in seen] == [("evt_1", "paid", 1)]


@pytest.mark.parametrize(
    "headers, body, status, code",
    [
        ({**JSON, "Stripe-Signature": "t=1,v1=" + "0" * 64}, event(), 401, "timestamp_too_old"),
        (JSON, event(), 401, "header_missing"),
        ({"Content-Type": "text/html"}, event(), 415, "content_type"),
        (JSON, b"x" * 2000, 413, "body_too_large"),
        ({**JSON, "Stripe-Signature": "\xff\x00"}, event(), 401, "header_malformed"),
    ],
)
def test_what_is_not_genuine_touches_no_store(
    headers: dict[str, str], body: bytes, status: int, code: str
) -> None:
    """A delivery that is refused makes no call to the store, and says why without a secret."""
    store = Counted()
    receiver = receiver_of(lambda _: pytest.fail("handled"), store, max_body_bytes=1000)
    answer = receiver.receive("POST", "https://x.example/h", headers, body)
    assert (answer.status, answer.code, answer.outcome) == (status, code, "rejected")
    assert store.calls == []
    assert b"whsec_test" not in answer.body


def test_a_body_that_was_written_again_is_refused() -> None:
    """The signature is over the raw bytes: the same JSON with other spaces is another body."""
    receiver = receiver_of(lambda _: None)
    request = STRIPE.sign("POST", "https://x.example/h", JSON, event())
    changed = json.dumps(json.loads(request.body), indent=1).encode()
    answer = receiver.receive(request.method, request.url, request.headers, changed)
    assert (answer.status, answer.code) == (401, "signature_mismatch")


def test_malformed_bodies_are_a_400() -> None:
    """A signed body without an id, or that is no JSON, is refused and stored nowhere."""
    store = Counted()
    receiver = receiver_of(lambda _: None, store)
    for body in (b"{}", b"not json", b'{"id": "a", "id": "b"}'):
        assert deliver(receiver, body).status == 400
    assert store.calls == []


def test_handlers_are_found_by_type() -> None:
    """Each type has its handler; a type without one is acknowledged and stored nowhere."""
    store = Counted()
    receiver = WebhookReceiver(STRIPE, store)
    paid: list[str] = []
    receiver.on("paid", "refunded")(lambda one: paid.append(one.type))
    assert [deliver(receiver, event(kind, kind)).outcome for kind in ("paid", "refunded")] == [
        "handled",
        "handled",
    ]
    assert paid == ["paid", "refunded"]
    store.calls.clear()
    other = deliver(receiver, event(9, "other"))
    assert (other.status, other.outcome, store.calls) == (200, "ignored", [])
    with pytest.raises(PolicyError, match="already"):
        receiver.on("paid")(print)


def test_failed_handler_frees_the_event() -> None:
    """An error is a 500, and the sender's retry runs the handler again."""
    attempts: list[int] = []

    def fails_once(one: WebhookEvent) -> None:
        attempts.append(one.attempt)
        if len(attempts) == 1:
            raise ValueError("not now")

    receiver = receiver_of(fails_once)
    assert (deliver(receiver, event()).status, deliver(receiver, event()).status) == (500, 200)
    assert attempts == [1, 2]


def test_permanent_error_goes_to_the_dead_letters() -> None:
    """What no retry can help is acknowledged once it is buried, and never handled again."""
    dead: list[Any] = []

    def hopeless(one: WebhookEvent) -> None:
        raise PermanentError("no such account")

    receiver = receiver_of(hopeless, dead_letters=dead.append)
    first, again = deliver(receiver, event()), deliver(receiver, event())
    assert (first.status, first.outcome) == (200, "dead")
    assert (again.status, again.outcome) == (200, "duplicate")
    assert [(letter.event.id, letter.error) for letter in dead] == [
        ("evt_1", "PermanentError: no such account")
    ]


def test_a_dead_letter_that_can_not_be_kept_is_a_failure() -> None:
    """If burying fails the event is not acknowledged, so that it is not lost."""

    def hopeless(one: WebhookEvent) -> None:
        raise PermanentError("no")

    def full(letter: Any) -> None:
        raise OSError("disk full")

    receiver = receiver_of(hopeless, dead_letters=full)
    assert deliver(receiver, event()).status == 500


def test_copy_in_flight_is_told_to_retry() -> None:
    """While one copy is being handled another gets a 503 with a short Retry-After."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(one: WebhookEvent) -> None:
        inside.set()
        assert go_on.wait(60)

    receiver = receiver_of(slow, wait=0)
    thread = threading.Thread(target=deliver, args=(receiver, event()))
    thread.start()
    assert inside.wait(60)
    busy = deliver(receiver, event())
    go_on.set()
    thread.join()
    assert (busy.status, busy.outcome, busy.headers["Retry-After"]) == (503, "in_flight", "5")
    assert deliver(receiver, event()).outcome == "duplicate"


def test_changed_payload_follows_the_policy() -> None:
    """First wins by default; with on_changed="reject" another payload under the id is a 409."""
    lenient, strict = receiver_of(lambda _: None), receiver_of(lambda _: None, on_changed="reject")
    for receiver in (lenient, strict):
        assert deliver(receiver, event(amount=1)).outcome == "handled"
    assert deliver(lenient, event(amount=2)).outcome == "duplicate"
    changed = deliver(strict, event(amount=2))
    assert (changed.status, changed.outcome) == (409, "conflict")
    assert deliver(strict, event(amount=1)).outcome == "duplicate"


def test_late_copy_is_handled_as_new_and_recorded(clock: ManualClock) -> None:
    """After its window an event is handled again, marked late, for reconciliation."""
    seen: list[bool] = []
    entries: list[AuditEntry] = []
    store = MemoryStore(clock=clock)
    with pytest.warns(RetentionWarning):
        receiver = receiver_of(
            lambda one: seen.append(one.late), store, retention=DAY, audit=entries.append
        )
    deliver(receiver, event())
    clock.advance(DAY + 1)
    assert deliver(receiver, event()).outcome == "handled"
    assert seen == [False, True]
    assert [entry.outcome for entry in entries] == ["first", "late"]


@pytest.mark.parametrize("kind", [WebhookReceiver, AsyncWebhookReceiver])
def test_a_retention_under_what_the_provider_sends_again_warns(kind: Any) -> None:
    """The warning has both figures and points at whoever made the receiver."""
    with pytest.warns(RetentionWarning, match=r"for 1 days.*Stripe.*day more.*is 31 days") as told:
        kind(STRIPE, "memory://", retention=60)
    assert told[0].filename == __file__
    assert "pass 2678400" in str(told[0].message)
    kind(STRIPE, "memory://", retention=31 * DAY)
    kind(STRIPE, "memory://")


@pytest.mark.parametrize(
    "name, days", [("stripe", 30), ("github", 7), ("paypal", 30), ("paddle", 90), ("svix", 90)]
)
def test_an_event_is_remembered_as_long_as_it_can_be_sent_by_hand(
    name: str, days: int, clock: ManualClock
) -> None:
    """The longest documented redelivery is a duplicate, whoever asked for it."""
    source = signing(name)
    store = MemoryStore(clock=clock)
    receiver = WebhookReceiver(source, store)
    receiver.on()(lambda one: None)
    request = signed(name)
    given = {**JSON, **request.headers}
    first = receiver.receive(request.method, request.url, given, request.body, now=NOW)
    clock.advance(days * DAY)
    again = receiver.receive(request.method, request.url, given, request.body, now=NOW)
    assert (first.outcome, again.outcome) == ("handled", "duplicate")


def test_store_failure_is_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is down is a 503 with Retry-After, before the handler runs."""
    store = MemoryStore()
    receiver = receiver_of(lambda _: pytest.fail("handled"), store)

    def down(*args: object) -> None:
        raise StoreUnavailableError("down")

    monkeypatch.setattr(store, "claim", down)
    answer = deliver(receiver, event())
    assert (answer.status, answer.outcome) == (503, "unavailable")
    assert "Retry-After" in answer.headers


def test_limits_hold_up_one_key_and_one_sender() -> None:
    """An abusive retry loop gets 429 with Retry-After; other keys go on."""
    receiver = receiver_of(lambda _: None, per_key=(2, 60))
    assert [deliver(receiver, event()).status for _ in range(3)] == [200, 200, 429]
    assert deliver(receiver, event(2)).status == 200
    whole = receiver_of(lambda _: None, per_sender=(1, 60))
    assert [deliver(whole, event(n)).status for n in (1, 2)] == [200, 429]


def test_replay_guard_knows_a_delivery_under_a_fresh_id() -> None:
    """Where the id is not signed, the same signature under another id is a duplicate."""
    github = provider("github", secret="s")
    handled: list[str] = []
    receiver = WebhookReceiver(github, MemoryStore(), replay_guard=True)
    receiver.on()(lambda one: handled.append(one.id))
    body = b'{"action": "opened"}'
    outcomes = [
        receiver.receive(*github.sign("POST", "https://x.example/h", JSON, body, event_id=name))
        for name in ("one", "two")
    ]
    assert [one.outcome for one in outcomes] == ["handled", "duplicate"]
    assert len(handled) == 1
    with pytest.raises(PolicyError, match="not signed"):
        WebhookReceiver(STRIPE, MemoryStore(), replay_guard=True)


def test_batches_dedup_each_item_and_answer_once() -> None:
    """A batch is one answer; what was handled of it is not handled again by the retry."""
    acme = hmac_provider("acme", secret="s", header="X-Sig", event_id="id", batch="$")
    handled: list[str] = []

    def handle(one: WebhookEvent) -> None:
        if one.id == "b" and handled.count("b") == 0 and "failed" not in handled:
            handled.append("failed")
            raise ValueError("not now")
        handled.append(one.id)

    receiver = WebhookReceiver(acme, MemoryStore())
    receiver.on()(handle)
    body = json.dumps([{"id": "a"}, {"id": "b"}, {"id": "c"}]).encode()
    first = deliver(receiver, body)
    assert (first.status, first.outcomes) == (500, ("handled", "failed", "handled"))
    second = deliver(receiver, body)
    assert (second.status, second.outcomes) == (200, ("duplicate", "handled", "duplicate"))
    assert handled == ["a", "failed", "c", "b"]


def test_transactional_handler_commits_with_the_mark(tmp_path: Path) -> None:
    """Effect and mark commit together; an error undoes both; a dead letter undoes the effect."""
    path = tmp_path / "app.db"
    with contextlib.closing(sqlite3.connect(path)) as own:
        own.execute("CREATE TABLE effects (id TEXT)")
        own.commit()
    fail = [True]

    def handle(one: WebhookEvent, tx: Any) -> None:
        tx.connection.execute("INSERT INTO effects VALUES (?)", (one.id,))
        if one.type == "hopeless":
            raise PermanentError("no")
        if fail.pop() if fail else False:
            raise ValueError("not now")

    def effects() -> int:
        with contextlib.closing(sqlite3.connect(path)) as own:
            return int(own.execute("SELECT count(*) FROM effects").fetchone()[0])

    with SQLiteStore(path) as store:
        receiver = receiver_of(handle, store, transactional=True, dead_letters=lambda _: None)
        assert (deliver(receiver, event()).status, effects()) == (500, 0)
        assert (deliver(receiver, event()).outcome, effects()) == ("handled", 1)
        assert (deliver(receiver, event()).outcome, effects()) == ("duplicate", 1)
        assert (deliver(receiver, event(2, "hopeless")).outcome, effects()) == ("dead", 1)
        assert (deliver(receiver, event(2, "hopeless")).outcome, effects()) == ("duplicate", 1)


async def test_async_receiver_handles_concurrent_copies_once() -> None:
    """Of copies that come at once one is handled; the others wait and are answered the same."""
    handled: list[str] = []
    receiver = AsyncWebhookReceiver(STRIPE, MemoryBackend())

    @receiver.on("paid")
    async def paid(one: WebhookEvent) -> None:
        await asyncio.sleep(0)
        handled.append(one.id)

    request = STRIPE.sign("POST", "https://x.example/h", JSON, event())
    answers = await asyncio.gather(*(receiver.receive(*request) for _ in range(20)))
    assert sorted(one.outcome for one in answers) == ["duplicate"] * 19 + ["handled"]
    assert {one.status for one in answers} == {200}
    assert handled == ["evt_1"]


def test_senders_are_kept_apart() -> None:
    """The same event id of another account is another event."""
    handled: list[str] = []
    store = MemoryStore()
    for account in ("shop-a", "shop-b"):
        receiver = WebhookReceiver(provider("stripe", secret="s", account=account), store)
        receiver.on()(lambda one: handled.append(one.sender.account))
        assert deliver(receiver, event()).outcome == "handled"
    assert handled == ["shop-a", "shop-b"]


def test_every_decision_is_audited_without_secrets(tmp_path: Path) -> None:
    """The audit table has a row for each decision, the key only as a hash."""
    path = str(tmp_path / "audit.db")
    audit = TableAudit(path)
    receiver = receiver_of(lambda _: None, audit=audit)
    deliver(receiver, event())
    deliver(receiver, event())
    receiver.receive("POST", "https://x.example/h", JSON, event())
    audit.close()
    with contextlib.closing(sqlite3.connect(path)) as own:
        rows = own.execute("SELECT outcome, status, sender, key_hash FROM oncekey_audit").fetchall()
    assert [row[:2] for row in rows] == [("first", 200), ("duplicate", 200), ("rejected", 401)]
    assert rows[0][3] == rows[1][3] != ""
    assert "evt_1" not in str(rows)


def test_wrong_options_are_named() -> None:
    """Stores of the other world, unknown options and things that are no provider are refused."""
    with pytest.raises(BackendMismatchError):
        WebhookReceiver(STRIPE, MemoryBackend())  # type: ignore[arg-type]
    with pytest.raises(BackendMismatchError):
        AsyncWebhookReceiver(STRIPE, MemoryStore())  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="retenshun"):
        WebhookReceiver(STRIPE, MemoryStore(), retenshun=5)
    with pytest.raises(PolicyError, match="no provider"):
        WebhookReceiver("stripe", MemoryStore())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="raw bytes"):
        receiver_of(print).receive("POST", "u", JSON, {"id": 1})  # type: ignore[arg-type]

    async def handler(one: WebhookEvent) -> None: ...

    with pytest.raises(BackendMismatchError, match="async"):
        receiver_of(handler)


async def test_copies_of_a_handled_event_do_not_hold_each_other_up(tmp_path: Path) -> None:
    """In transactions, too, all copies at once get the answer without a wait."""
    receiver = AsyncWebhookReceiver(
        STRIPE, f"sqlite:///{tmp_path / 'hooks.db'}", transactional=True, wait=0
    )

    @receiver.on()
    async def handle(event: WebhookEvent, tx: Any) -> None: ...

    request = STRIPE.sign("POST", "https://x.example/h", JSON, event())
    assert (await receiver.receive(*request)).outcome == "handled"
    copies = await asyncio.gather(*(receiver.receive(*request) for _ in range(6)))
    assert [copy.outcome for copy in copies] == ["duplicate"] * 6
    await receiver.aclose()


def test_nonces_are_kept_in_the_receivers_own_store() -> None:
    """AdCP's rules: the very same signed bytes again are refused as replayed, not a duplicate."""
    pytest.importorskip("cryptography")
    from oncekey.testing import sample

    delivery = sample("adcp")
    assert delivery.provider is not None
    receiver = WebhookReceiver(delivery.provider, MemoryStore())
    receiver.on()(lambda event: None)
    assert receiver.receive(*delivery).outcome == "handled"
    replayed = receiver.receive(*delivery)
    assert (replayed.status, replayed.code) == (401, "webhook_signature_replayed")
    assert receiver.receive(*delivery.again()).outcome == "duplicate"
