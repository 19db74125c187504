"""Limits that hold across processes, counted by the store; and those that each counts by itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.receiver.test_receiver import JSON, STRIPE, event
from tests.resilience.conftest import TERMS, key
from tests.resilience.servers import Outage, outage

from oncekey import AsyncMemoryStore, IdempotencyStore, MemoryStore, aconnect, connect
from oncekey.adcp import profile
from oncekey.errors import BackendMismatchError, IdempotencyRateLimitedError, PolicyError
from oncekey.http.asgi import IdempotencyMiddleware as AsgiMiddleware
from oncekey.http.wsgi import IdempotencyMiddleware
from oncekey.instrument import Event, EventKind, subscribe
from oncekey.models import Key, Scope
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.resilience import Breaker, resilient

__all__ = ["outage"]

HOUR = 3_600_000


@pytest.fixture
def store(outage: Outage) -> Iterator[Any]:
    """An empty store that counts."""
    with connect(outage.url) as made:
        made.clear()
        yield made


def test_a_window_begins_with_the_first_and_ends(store: Any) -> None:
    """Counts rise within a window, for each key alone, and begin anew after it."""
    one, other = key("one"), key("other")
    assert [store.count(one, HOUR)[0] for _ in range(3)] == [1, 2, 3]
    count, left = store.count(other, HOUR)
    assert count == 1
    assert HOUR - 60_000 < left <= HOUR
    brief = key("brief")
    assert store.count(brief, 1)[0] == 1
    before = store.now()
    while store.now() <= before + 1:
        pass
    assert store.count(brief, 1)[0] == 1


def test_a_counter_is_a_record_like_others(store: Any) -> None:
    """It can be read and looked through, and is swept when its window is over."""
    store.count(key("one"), HOUR)
    store.count(key("one"), HOUR)
    record = store.read(key("one"))
    assert record.attempts == 2
    assert record.expires_at == record.purge_at
    found = store.find(key("one").digest)
    assert found is not None
    assert store.claim(key("free"), b"o" * 16, b"", TERMS).attempts == 1


COUNTING = """
import sys, threading
from oncekey import connect
from oncekey.models import Key, Scope
store = connect(sys.argv[1])
def work():
    for _ in range(25):
        store.count(Key(Scope("limit", "race"), "k"), 3_600_000)
threads = [threading.Thread(target=work) for _ in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
store.close()
"""


def test_processes_and_threads_count_together(store: Any, outage: Outage) -> None:
    """Nothing is lost between two processes with four threads each."""
    workers = [subprocess.Popen([sys.executable, "-c", COUNTING, outage.url]) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert store.count(Key(Scope("limit", "race"), "k"), HOUR)[0] == 201


def test_receivers_share_their_limits(store: Any, outage: Outage) -> None:
    """Two receivers, as of two processes, take together what one may; the rest gets a 429."""
    seen: list[Event] = []
    answers: list[Any] = []
    with connect(outage.url) as other, subscribe(seen.append):
        for one in (store, other):
            receiver = WebhookReceiver(STRIPE, one, per_sender=(3, 3600), limits="shared")
            receiver.on()(lambda _: None)
            for number in range(2):
                body = event(f"{id(one)}-{number}")
                signed = STRIPE.sign("POST", "https://x.example/h", JSON, body)
                answers.append(receiver.receive(*signed))
    assert [one.outcome for one in answers] == ["handled", "handled", "handled", "limited"]
    assert answers[-1].status == 429
    assert 0 < int(answers[-1].headers["Retry-After"]) <= 3600
    assert [one.kind for one in seen].count(EventKind.LIMITED) == 1


def test_a_key_is_limited_across_processes_too(store: Any, outage: Outage) -> None:
    """The async form, by the key: copies count, wherever they come."""

    async def main() -> list[str]:
        async with aconnect(outage.url) as one, aconnect(outage.url) as two:
            outcomes = []
            for at in (one, two, two):
                receiver = AsyncWebhookReceiver(STRIPE, at, per_key=(2, 3600), limits="shared")
                receiver.on()(lambda _: None)
                signed = STRIPE.sign("POST", "https://x.example/h", JSON, event())
                outcomes.append((await receiver.receive(*signed)).outcome)
            return outcomes

    assert asyncio.run(main()) == ["handled", "duplicate", "limited"]


def request(app: Any, name: str) -> str:
    """The status of a keyed request."""
    import io

    told: list[str] = []
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/",
        "SERVER_NAME": "x",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "HTTP_IDEMPOTENCY_KEY": name,
        "HTTP_AUTHORIZATION": "Bearer of-one-caller",
        "CONTENT_LENGTH": "0",
        "wsgi.input": io.BytesIO(b""),
    }
    list(app(environ, lambda status, headers, *more: told.append(status)))
    return told[0][:3]


def test_the_header_shares_its_limit(store: Any, outage: Outage) -> None:
    """New keys of one caller are counted for all workers; retries of known keys are answered."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("201 Created", [])
        return [b"made"]

    with connect(outage.url) as other:
        workers = [
            IdempotencyMiddleware(
                app, one, max_new_keys=(2, 3600), limits="shared", secret=b"x" * 16
            )
            for one in (store, other)
        ]
        assert [request(workers[0], "k-1"), request(workers[1], "k-2")] == ["201", "201"]
        assert request(workers[0], "k-3") == "429"
        assert request(workers[1], "k-4") == "429"
        assert request(workers[0], "k-2") == "201"
        assert store.read(key("k-3")) is None


async def arequest(app: Any, name: str) -> str:
    """The status of a keyed request, under ASGI."""
    told: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        told.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "headers": [
            (b"idempotency-key", name.encode()),
            (b"authorization", b"Bearer of-one-caller"),
        ],
    }
    await app(scope, receive, send)
    return str(told[0]["status"])


def test_the_header_shares_its_limit_under_asgi(store: Any, outage: Outage) -> None:
    """The same in an event loop; and what one worker refused, a worker under WSGI refuses too."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    options: Any = {"max_new_keys": (2, 3600), "limits": "shared", "secret": b"x" * 16}

    async def main() -> None:
        async with aconnect(outage.url) as one, aconnect(outage.url) as two:
            workers = [AsgiMiddleware(app, at, **options) for at in (one, two)]
            assert await arequest(workers[0], "k-1") == "201"
            assert await arequest(workers[1], "k-2") == "201"
            assert await arequest(workers[0], "k-3") == "429"
            assert await arequest(workers[1], "k-4") == "429"
            assert await arequest(workers[0], "k-2") == "201"

    asyncio.run(main())
    other = IdempotencyMiddleware(lambda environ, start: [], store, **options)
    assert request(other, "k-5") == "429"


@pytest.fixture
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdCP's limits of new keys are thousands: these have the same form."""
    monkeypatch.setattr(profile, "INSERT_WINDOWS", ((5, 7200), (3, 3600)))
    monkeypatch.setattr(profile, "READ_WINDOWS", ((4, 7200), (9, 3600)))


def agent(name: str) -> dict[str, str]:
    """Who calls."""
    return {"caller_identity": name}


def made(number: int) -> dict[str, str]:
    """A request with a key of its own."""
    return {"idempotency_key": f"request-number-{number:04}"}


def test_requests_share_their_limit_of_new_keys(store: Any, outage: Outage, few_keys: None) -> None:
    """Two workers take as many new keys as one may; known keys, other callers and reads go on."""
    ran: list[str] = []
    seen: list[Event] = []
    with connect(outage.url) as other, subscribe(seen.append):
        workers = [
            IdempotencyStore(one, limit_inserts=True, limits="shared") for one in (store, other)
        ]

        def buy(params: Any, context: Any = None) -> dict[str, int]:
            ran.append(params["idempotency_key"])
            return {"made": len(ran)}

        one, two = (worker.wrap(buy) for worker in workers)
        read = workers[1].wrap(read_only=True)(buy)
        first = [one(made(1), agent("a")), two(made(2), agent("a")), one(made(3), agent("a"))]
        assert first == [{"made": 1}, {"made": 2}, {"made": 3}]
        for worker in (one, two):
            with pytest.raises(IdempotencyRateLimitedError) as refused:
                worker(made(4), agent("a"))
            assert 0 < (refused.value.retry_after or 0) <= 3600
        assert two(made(1), agent("a")) == {"made": 1}
        assert two(made(4), agent("b")) == {"made": 4}
        for number in range(5, 9):
            read(made(number), agent("a"))
        with pytest.raises(IdempotencyRateLimitedError):  # of the longer window
            read(made(9), agent("a"))
    assert len(ran) == 8
    assert [one.kind for one in seen].count(EventKind.LIMITED) == 3


def test_async_requests_share_it_too(store: Any, outage: Outage, few_keys: None) -> None:
    """In an event loop, in the profile that limits by itself."""

    async def main() -> list[Any]:
        async with aconnect(outage.url) as one, aconnect(outage.url) as two:
            found: list[Any] = []
            for at, number in ((one, 1), (two, 2), (one, 3), (two, 4), (two, 1)):
                worker = IdempotencyStore(at, profile="adcp-3.2", limits="shared")

                @worker.wrap
                async def buy(params: Any, context: Any = None) -> dict[str, Any]:
                    return {"made": True}

                try:
                    found.append(await buy(made(number), agent("a")))
                except IdempotencyRateLimitedError as error:
                    found.append(error.code)
            return found

    new = {"made": True}
    assert asyncio.run(main()) == [new, new, new, "RATE_LIMITED", {**new, "replayed": True}]


def test_a_store_around_a_store_counts_as_it_does(store: Any, tmp_path: Any) -> None:
    """A resilient or an encrypted store passes counting on; one that is away and open lets pass."""
    from oncekey.encryption import Keyring, encrypted

    around: Any = encrypted(resilient(store), Keyring([b"k" * 32]))
    assert [around.count(key("one"), HOUR)[0] for _ in range(2)] == [1, 2]
    wide: Any = resilient(store, on_outage="open", journal=tmp_path, breaker=Breaker(failures=1))
    wide.breaker.failed(wide.breaker.admit(), RuntimeError("gone"))
    assert wide.count(key("one"), HOUR) == (0, HOUR)


def test_stores_that_cannot_count_say_so() -> None:
    """Memory and SQLite are of one machine: limits are each process's there."""
    with pytest.raises(BackendMismatchError, match="PostgreSQL or Redis"):
        WebhookReceiver(STRIPE, MemoryStore(), limits="shared")
    with pytest.raises(BackendMismatchError, match="PostgreSQL or Redis"):
        IdempotencyMiddleware(lambda e, s: [], MemoryStore(), limits="shared")
    with pytest.raises(BackendMismatchError, match="PostgreSQL or Redis"):
        IdempotencyStore(AsyncMemoryStore(), limits="shared")
    with pytest.raises(PolicyError, match="limits"):
        WebhookReceiver(STRIPE, MemoryStore(), limits="everywhere")
    with pytest.raises(PolicyError, match="limits"):
        IdempotencyStore(AsyncMemoryStore(), limits="everywhere")  # type: ignore[arg-type]
