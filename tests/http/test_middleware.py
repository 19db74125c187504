"""The Idempotency-Key header, by both middlewares alike."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import threading
from typing import Any

import pytest
from tests.http.conftest import Make
from tests.http.doors import JSON, AsgiDoor, Calls, Door, Handled, WsgiDoor

from oncekey import (
    MemoryBackend,
    MemoryStore,
    PolicyError,
    StoreUnavailableError,
    current_claim,
)
from oncekey.encryption import Keyring, encrypted
from oncekey.http import Answer
from oncekey.testing import ManualClock


def test_first_answer_is_replayed(make: Make) -> None:
    """A retry gets status, headers and body of the first answer, and the handler runs once."""
    answer = (201, [JSON, ("location", "/pay/1"), ("x-debug", "1")], b'{"id": 1}')
    calls = Calls(lambda body: answer)
    door = make(calls)
    first, again = door.post(), door.post()
    assert (first.status, first.body, first.replayed) == (201, b'{"id": 1}', False)
    assert (again.status, again.body, again.replayed) == (201, b'{"id": 1}', True)
    assert again.header("location") == "/pay/1"
    assert again.header("content-type") == "application/json"
    assert again.header("content-length") == "9"
    assert first.header("x-debug") == "1"
    assert again.header("x-debug") is None
    assert calls.count == 1
    assert calls.bodies == [b'{"amount": 1}']


def test_another_spelling_of_the_same_json_is_a_retry(make: Make) -> None:
    """Key order and spaces don't make another request."""
    calls = Calls()
    door = make(calls)
    assert not door.post(body=b'{"a":1,"b":2}').replayed
    assert door.post(body=b'{ "b": 2, "a": 1.0 }').replayed


@pytest.mark.parametrize(
    "change",
    [
        {"body": b'{"amount": 2}'},
        {"path": "/refund"},
        {"query": "dry=1"},
        {"method": "PATCH"},
    ],
)
def test_the_same_key_for_another_request_is_refused(make: Make, change: dict[str, Any]) -> None:
    """Another body, path, query or method is a 422, says nothing of the first, and runs nothing."""
    calls = Calls()
    door = make(calls)
    door.post()
    reply = door.post(**change)
    assert (reply.status, reply.problem, calls.count) == (422, "key-reused", 1)
    assert reply.header("content-type") == "application/problem+json"
    document = json.loads(reply.body)
    assert document["status"] == 422
    assert document["documentation"].startswith("https://")
    assert "amount" not in reply.body.decode()
    assert 'rel="help"' in (reply.header("link") or "")


def test_without_a_key_requests_pass(make: Make) -> None:
    """Unkeyed requests run each time; with ``required`` they are a 400."""
    calls = Calls()
    door = make(calls)
    door.post(None)
    door.post(None)
    assert calls.count == 2
    strict = make(calls, required=True)
    reply = strict.post(None)
    assert (reply.status, reply.problem, calls.count) == (400, "key-missing", 2)


def test_other_methods_and_paths_pass(make: Make) -> None:
    """A GET with a key is not guarded, nor is what ``applies`` leaves out."""
    calls = Calls()
    door = make(calls, applies=lambda method, path: path.startswith("/pay"))
    for _ in range(2):
        door.post(method="GET")
        door.post(path="/search")
        assert not door.post("other", method="PUT").replayed
    assert calls.count == 6
    assert not door.post().replayed
    assert door.post().replayed
    put = make(calls, methods=["put"])
    assert not put.post(method="PUT").replayed
    assert put.post(method="PUT").replayed


def test_another_header_name(make: Make) -> None:
    """The header's name is an option."""
    door = make(Calls(), header="X-Request-Key")
    again = [door.post(None, headers=[("X-Request-Key", "k")]).replayed for _ in range(2)]
    assert again == [False, True]


@pytest.mark.parametrize("key", ["", "a b", "caf\xe9", "k" * 300, "a\x01b", '"open'])
def test_bad_keys_are_a_400(make: Make, key: str) -> None:
    """A key that can't be used is refused before the handler."""
    calls = Calls()
    reply = make(calls).post(key)
    assert (reply.status, reply.problem, calls.count) == (400, "key-invalid", 0)


def test_two_keys_are_a_400(make: Make) -> None:
    """A request with two keys says two things."""
    calls = Calls()
    reply = make(calls).post("one", headers=[("Idempotency-Key", "two")])
    assert (reply.status, reply.problem, calls.count) == (400, "key-invalid", 0)


@pytest.mark.parametrize(
    "body, headers, status, name",
    [
        (b"x" * 30_000, [], 413, "body-too-large"),
        (b"{", [], 400, "body-malformed"),
        (b'{"a":1,"a":2}', [], 400, "body-malformed"),
        (b'"\xff"', [], 400, "body-malformed"),
        (b"[" * 600 + b"]" * 600, [], 400, "body-malformed"),
        (gzip.compress(b"{}", mtime=0)[:-5], [("Content-Encoding", "gzip")], 400, "body-malformed"),
    ],
)
def test_bad_bodies_are_refused_before_the_handler(
    make: Make, body: bytes, headers: list[tuple[str, str]], status: int, name: str
) -> None:
    """Oversized, malformed, doubled, deep and cut off: a 4xx problem, never a 500."""
    calls = Calls()
    reply = make(calls, max_body_bytes=25_000).post(body=body, headers=headers)
    assert (reply.status, calls.count) == (status, 0)
    assert reply.problem == name


def test_the_declared_length_is_looked_at_first(make: Make, side: str) -> None:
    """A body that says it is too large is refused before it is read."""
    calls = Calls()
    door = make(calls, max_body_bytes=10)
    reply = door.post(body=b"{}", headers=[("Content-Length", "11")])
    assert (reply.status, calls.count) == (413, 0)


def test_concurrent_copies_run_once(make: Make) -> None:
    """Sixteen copies at once: one runs, the others are told 409 or replay, none runs too."""
    calls = Calls()
    replies = make(calls).together(16)
    assert calls.count == 1
    assert {reply.status for reply in replies} <= {201, 409}
    assert sum(reply.status == 201 and not reply.replayed for reply in replies) == 1


def test_a_copy_in_flight_is_told_when_to_come_back(make: Make) -> None:
    """409 with a short Retry-After, not with the whole lease."""
    entered, go = threading.Event(), threading.Event()

    def slow(body: bytes) -> Handled:
        entered.set()
        assert go.wait(30)
        return 201, [JSON], b"{}"

    door = make(slow, lease=300)
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.append(door.post()))
    thread.start()
    assert entered.wait(30)
    copy = door.post()
    other = door.post(body=b'{"amount": 2}')
    go.set()
    thread.join()
    assert (copy.status, copy.problem, copy.header("retry-after")) == (409, "in-flight", "1")
    assert (other.status, other.problem) == (422, "key-reused")
    assert first[0].status == 201
    assert door.post().replayed


def test_waiting_copies_get_the_answer(make: Make) -> None:
    """With ``wait`` a copy gets the first one's answer."""
    calls = Calls()
    replies = make(calls, wait=30).together(8)
    assert calls.count == 1
    assert [reply.status for reply in replies] == [201] * 8
    assert sum(reply.replayed for reply in replies) == 7


def test_an_error_frees_the_key(make: Make) -> None:
    """A handler that raises, or answers 500, may be tried again at once."""
    answers = iter([(500, [JSON], b"{}"), (201, [JSON], b"{}")])
    door = make(lambda body: next(answers))
    assert door.post().status == 500
    assert (door.post().status, door.post().replayed) == (201, True)

    def broken(body: bytes) -> Handled:
        raise ZeroDivisionError

    failing = Calls(broken)
    door = make(failing)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            door.post()
    assert failing.count == 2


def test_errors_of_the_application_stay_its_own(make: Make) -> None:
    """A handler that uses oncekey itself may raise its errors: they are not taken for ours."""

    def broken(body: bytes) -> Handled:
        raise StoreUnavailableError("another store, of the handler's own")

    calls = Calls(broken)
    door = make(calls)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            door.post()
    assert calls.count == 2


@pytest.mark.parametrize(
    "status, stored",
    [
        *((status, True) for status in (200, 204, 303, 402, 409, 410)),
        *((status, False) for status in (400, 401, 403, 404, 408, 422, 429, 500, 503)),
    ],
)
def test_which_answers_are_stored(make: Make, status: int, stored: bool) -> None:
    """What means done or finally refused is; what may be another answer tomorrow is not."""
    body = b"" if status == 204 else b"{}"
    door = make(lambda _: (status, [JSON], body))
    door.post()
    again = door.post()
    assert (again.status, again.replayed) == (status, stored)


def test_server_errors_and_own_choice_of_statuses(make: Make) -> None:
    """5xx by option; or a function of the status."""
    door = make(lambda _: (502, [JSON], b"{}"), store_server_errors=True)
    assert [door.post().replayed for _ in range(2)] == [False, True]
    door = make(lambda _: (404, [JSON], b"{}"), store_status=lambda status: status < 500)
    assert [door.post().replayed for _ in range(2)] == [False, True]


def test_stripe_profile(make: Make) -> None:
    """Stripe's wording: 400 for a reused key, 500s replayed."""
    door = make(lambda _: (500, [JSON], b"{}"), profile="stripe")
    door.post()
    again = door.post()
    assert (again.status, again.replayed) == (500, True)
    reused = door.post(body=b"{}")
    error = json.loads(reused.body)["error"]
    assert (reused.status, error["type"]) == (400, "idempotency_error")
    assert reused.header("content-type") == "application/json"


def test_secrets_of_one_answer_are_not_stored(make: Make) -> None:
    """Cookies and credentials are for the first caller at that time only."""
    headers = [JSON, ("set-cookie", "s=1"), ("authorization", "x"), ("x-rate", "9")]
    door = make(lambda _: (200, headers, b"{}"), stored_headers=["X-Rate"])
    first, again = door.post(), door.post()
    assert first.header("set-cookie") == "s=1"
    assert again.header("set-cookie") is None
    assert again.header("authorization") is None
    assert again.header("x-rate") == "9"
    with pytest.raises(PolicyError, match="set-cookie"):
        make(Calls(), stored_headers=["Set-Cookie"])


def test_answers_that_must_not_be_stored(make: Make) -> None:
    """``no-store`` keeps the outcome but not the body: the retry runs nothing and is told so."""
    calls = Calls(lambda _: (201, [JSON, ("cache-control", "private, no-store")], b'"secret"'))
    door = make(calls)
    door.post()
    again = door.post()
    assert (again.status, again.replayed, calls.count) == (201, True, 1)
    assert again.problem == "body-unavailable"
    assert b"secret" not in again.body
    kept = make(calls, honor_no_store=False)
    kept.post()
    assert kept.post().body == b'"secret"'


def test_large_answers_are_done_without_a_body(make: Make) -> None:
    """Over the cap only status and headers are kept; the request never runs again."""
    headers = [("content-type", "text/plain"), ("location", "/pay/1")]
    calls = Calls(lambda _: (201, headers, b"x" * 101))
    door = make(calls, max_answer_bytes=100)
    assert len(door.post().body) == 101
    again = door.post()
    assert (again.status, again.replayed, calls.count) == (201, True, 1)
    assert (again.problem, again.header("location")) == ("body-unavailable", "/pay/1")
    assert again.header("content-type") == "application/problem+json"


def test_callers_do_not_see_each_other(make: Make, side: str) -> None:
    """The same key of another caller is another key."""
    calls = Calls()
    door = make(calls)
    assert not door.post(headers=[("Authorization", "Bearer a")]).replayed
    assert not door.post(headers=[("Authorization", "Bearer b")]).replayed
    assert not door.post().replayed
    assert door.post(headers=[("Authorization", "Bearer a")]).replayed

    def user(request: Any) -> str | None:
        if side == "wsgi":
            return request.get("HTTP_X_USER")
        return dict(request["headers"]).get(b"x-user", b"").decode() or None

    door = make(calls, scope=user, anonymous="refuse")
    assert not door.post(headers=[("X-User", "ann")]).replayed
    assert not door.post(headers=[("X-User", "bob")]).replayed
    assert door.post(headers=[("X-User", "ann"), ("Authorization", "Bearer new")]).replayed
    reply = door.post()
    assert (reply.status, reply.problem) == (401, "caller-unknown")
    assert reply.header("www-authenticate") == "Bearer"


def test_keys_end_with_their_time(make: Make, store: Any, clock: ManualClock) -> None:
    """After the time to live a key is a fresh one."""
    calls = Calls()
    door = make(calls, store, ttl=60)
    door.post()
    clock.advance(59)
    assert door.post().replayed
    clock.advance(2)
    assert not door.post().replayed
    assert calls.count == 2


def test_local_answers_need_no_store(make: Make, side: str) -> None:
    """With a local cache a replay makes no call to the store, and another payload still asks it."""
    base = MemoryBackend if side == "asgi" else MemoryStore
    asked: list[str] = []

    class Counted(base):  # type: ignore[misc,valid-type]
        def claim(self, *args: Any) -> Any:
            asked.append("claim")
            return super().claim(*args)

    door = make(Calls(), Counted(), cache_entries=2)
    door.post()
    assert (door.post().replayed, asked) == (True, ["claim"])
    assert door.post(body=b"{}").status == 422
    for key in "abc":
        door.post(key)
    asked.clear()
    assert door.post().replayed
    assert asked == ["claim"]  # pushed out of the cache by newer ones


def test_redaction(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """What is stored can be changed before; if that fails, only the outcome is kept."""

    def hide(answer: Answer) -> Answer:
        return answer._replace(body=(answer.body or b"").replace(b"4242", b"****"))

    door = make(lambda _: (200, [JSON], b'{"card":"4242"}'), redact=hide)
    assert door.post().body == b'{"card":"4242"}'
    assert door.post().body == b'{"card":"****"}'
    door = make(lambda _: (200, [JSON], b'{"card":"4242"}'), redact=lambda answer: 1 / 0)
    assert door.post().status == 200
    again = door.post()
    assert (again.status, again.problem) == (200, "body-unavailable")
    assert "redact failed" in caplog.text


def test_cors_exposure(make: Make) -> None:
    """Scripts of other origins may be let to see the replay header, on every answer."""
    door = make(Calls(), expose_cors=True)
    for _ in range(2):
        assert "Idempotent-Replayed" in (door.post().header("access-control-expose-headers") or "")
    assert "Idempotent-Replayed" in (
        door.post(body=b"[]").header("access-control-expose-headers") or ""
    )


class Failing:
    """A store that fails at one step."""

    def __init__(self, side: str, step: str) -> None:
        base = MemoryBackend if side == "asgi" else MemoryStore

        class Broken(base):  # type: ignore[misc,valid-type]
            pass

        def fail(self: Any, *args: Any) -> Any:
            raise StoreUnavailableError("the disk is gone: secret-host")

        async def afail(self: Any, *args: Any) -> Any:
            raise StoreUnavailableError("the disk is gone: secret-host")

        setattr(Broken, step, afail if side == "asgi" else fail)
        self.store = Broken()


def test_a_store_that_is_down_refuses(make: Make, side: str) -> None:
    """Before the handler: 503 with Retry-After, nothing runs, and nothing of the store is told."""
    calls = Calls()
    reply = make(calls, Failing(side, "claim").store).post()
    assert (reply.status, reply.problem, calls.count) == (503, "store-unavailable", 0)
    assert reply.header("retry-after") is not None
    assert b"secret-host" not in reply.body


def test_an_outcome_that_can_not_be_recorded(
    make: Make, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After the handler: the answer with a warning; or 503 if that is wanted."""
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert make(Calls(), Failing(side, "complete").store).post().status == 201
    assert "could not be recorded" in caplog.text
    strict = make(Calls(), Failing(side, "complete").store, raise_on_persist_error=True)
    assert strict.post().status == 503


def test_a_zombie_gives_the_recorded_answer(
    make: Make, side: str, clock: ManualClock, store: Any
) -> None:
    """A worker that outlived its lease doesn't overwrite, and answers what was recorded."""
    answers = iter([b'"slow"', b'"fast"'])
    door = make(lambda body: second(body), store, lease=30)

    def second(body: bytes) -> Handled:
        mine = next(answers)
        if mine == b'"slow"':
            clock.advance(31)
            assert door.post().body == b'"fast"'
        return 200, [JSON], mine

    reply = door.post()
    assert (reply.body, reply.replayed) == (b'"fast"', True)
    assert door.post().body == b'"fast"'


def test_a_middleware_inside_another_does_not_block_it(side: str) -> None:
    """The whole application and one route guarded: the inner one lets the request pass."""
    calls = Calls()
    kind = AsgiDoor if side == "asgi" else WsgiDoor
    store: Any = MemoryBackend() if side == "asgi" else MemoryStore()
    inner = kind(calls, store)
    outer = kind(calls, store)
    outer.app.app = inner.app
    door = Door(outer)
    assert door.post().status == 201
    assert door.post().replayed
    assert calls.count == 1


def test_wrong_options_are_named(make: Make) -> None:
    """Options that can't work are refused where they are given."""
    for bad in (
        {"header": "bad header"},
        {"methods": "POST"},
        {"profile": "paypal"},
        {"fingerprint": "md5"},
        {"max_body_bytes": 0},
        {"cache_entries": -1},
        {"ttl": 0},
        {"nonsense": 1},
        {"docs_url": "https://x.example/\r\nSet-Cookie: a=b"},
    ):
        with pytest.raises(PolicyError):
            make(Calls(), **bad)
    assert dataclasses.is_dataclass(make(Calls()).real.app.rules.settings)


def test_stored_answers_can_be_encrypted(make: Make, store: Any) -> None:
    """Over an encrypted store replays are the same, and nothing readable lies in the records."""
    pytest.importorskip("cryptography")
    seen: list[bytes] = []
    complete = store.complete

    def look(*args: Any) -> Any:
        seen.append(args[3])
        return complete(*args)

    store.complete = look
    door = make(
        lambda _: (200, [JSON], b'{"card":"4242"}'), encrypted(store, Keyring([Keyring.generate()]))
    )
    first, again = door.post(), door.post()
    assert (first.body, again.body, again.replayed) == (b'{"card":"4242"}', first.body, True)
    assert len(seen) == 1
    assert b"4242" not in seen[0]


def test_handlers_can_derive_keys_for_other_services(make: Make) -> None:
    """The claim of a request is there for its handler, and gives the same key on every attempt."""
    keys: list[str] = []

    def handler(body: bytes) -> Handled:
        keys.append(current_claim().downstream_key("stripe"))
        return (500 if len(keys) == 1 else 200), [JSON], b"{}"

    door = make(handler)
    door.post()
    door.post()
    door.post("key-2")
    assert keys[0] == keys[1] != keys[2]
