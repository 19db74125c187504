"""The DynamoDB store on moto's server: an emulator, not AWS."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from oncekey import AsyncOnce, Once, StoreConfigError, aconnect, connect
from oncekey._core.flows import new_owner
from oncekey.cli import main
from oncekey.conformance import CHECKS, Check, arun_check, run_check
from oncekey.errors import StoreClosedError, StoreCorruptError, StoreUnavailableError
from oncekey.models import ClaimVerdict, Key, Scope, Terms
from oncekey.testing import ManualClock

pytest.importorskip("moto", reason="make test-brokers installs it")

from botocore.exceptions import EndpointConnectionError

from oncekey.stores.dynamodb import AsyncDynamoDBStore, DynamoDBStore

TERMS = Terms(lease_ms=10_000, ttl_ms=60_000)
_numbers = itertools.count()


@pytest.fixture(scope="session")
def url(aws: str) -> Callable[[], str]:
    """The URL of a new, empty table."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "test")

    def make() -> str:
        at = f"region=eu-west-1&endpoint={aws}&timeout=60"  # one request at a time: races queue
        made = f"dynamodb://keys-{next(_numbers)}?{at}"
        with connect(made) as store:
            assert isinstance(store, DynamoDBStore)
            assert len(store.create_schema()) == 2
            assert store.create_schema() == []
        return made

    return make


@pytest.fixture(scope="session")
def table(url: Callable[[], str]) -> str:
    return url()


def _key() -> Key:
    return Key(Scope("test", new_owner().hex()), "key")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sync_store_keeps_the_contract(check: Check, table: str) -> None:
    """Every promise of the contract, by the machine's clock."""
    run_check(check, lambda: connect(table))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_async_store_keeps_the_contract(check: Check, table: str) -> None:
    """Every promise of the contract, in threads."""
    await arun_check(check, lambda: aconnect(table))


async def test_guards_work_on_it(table: str) -> None:
    """``Once`` and ``AsyncOnce`` by URL see each other's records."""
    runs: list[str] = []
    once, aonce = Once(table, scope="shop"), AsyncOnce(table, scope="shop")

    @once(key="order", name="charge")
    def charge(order: str) -> dict[str, str]:
        runs.append(order)
        return {"charged": order}

    @aonce(key="order", name="charge")
    async def acharge(order: str) -> dict[str, str]:
        raise AssertionError("ran twice")

    name = new_owner().hex()
    assert charge(name) == await acharge(name) == {"charged": name}
    assert runs == [name]
    once.store.close()
    await aonce.store.aclose()


def test_a_new_key_and_a_completion_are_one_request_each(table: str) -> None:
    """Counted where boto3 sends them."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        sent: list[str] = []
        events = store._client().meta.events
        events.register("before-send.dynamodb.*", lambda event_name, **_: sent.append(event_name))
        key, owner = _key(), new_owner()
        won = store.claim(key, owner, b"", TERMS)
        assert store.complete(key, owner, won.fence, b"j1", TERMS)
        assert [name.rpartition(".")[2] for name in sent] == ["PutItem", "UpdateItem"]
        assert store.claim(key, new_owner(), b"", TERMS).answer == b"j1"
        assert len(sent) == 3
        assert store.first_seen(_key(), TERMS)
        assert len(sent) == 4


def test_clocks_may_be_apart_by_the_margin(table: str) -> None:
    """A lease that has ended by another machine's clock is left alone for ``clock_margin``."""
    here, there = ManualClock(1_000_000), ManualClock(1_000_000)
    options: dict[str, Any] = {"clock_margin": 2}
    with connect(table, clock=here, **options) as mine, connect(table, clock=there) as other:
        key, owner = _key(), new_owner()
        won = mine.claim(key, owner, b"", TERMS)
        there.advance(10.5)
        reply = other.claim(key, new_owner(), b"", TERMS)
        assert (reply.verdict, reply.fence) == (ClaimVerdict.IN_FLIGHT, won.fence)
        assert other.first_seen(key, TERMS) is False
        there.advance(0.5)
        assert other.claim(key, new_owner(), b"", TERMS).takeover


class Lossy:
    """Loses the reply of the first request of an operation, once; boto3 itself sends it again."""

    def __init__(self, store: DynamoDBStore, operation: str) -> None:
        self.sent, self._send, self._operation = 0, None, operation
        session = store._client()._endpoint.http_session
        self._send, session.send = session.send, self.send

    def send(self, request: Any) -> Any:
        reply = self._send(request)  # type: ignore[misc]
        if request.headers["X-Amz-Target"].decode().endswith(self._operation):
            self.sent += 1
            if self.sent == 1:
                raise EndpointConnectionError(endpoint_url=request.url)
        return reply


def test_a_lost_reply_is_no_lost_claim(table: str) -> None:
    """A put that boto3 sends again finds itself: the claim is won, with the fence that is kept."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        key, owner, lossy = _key(), new_owner(), Lossy(store, "PutItem")
        won = store.claim(key, owner, b"", TERMS)
        record = store.read(key)
        assert lossy.sent == 2
        assert won.verdict is ClaimVerdict.WON
        assert record is not None
        assert (record.owner, record.fence, record.attempts) == (owner, won.fence, 1)


def test_a_lost_reply_is_no_lost_takeover(table: str) -> None:
    """Nor a takeover, which says that it is one."""
    here = ManualClock(1_000_000)
    with connect(table, clock=here, clock_margin=0) as store:
        assert isinstance(store, DynamoDBStore)
        key = _key()
        store.claim(key, new_owner(), b"", TERMS)
        here.advance(11)
        lossy = Lossy(store, "PutItem")
        assert store.claim(key, new_owner(), b"", TERMS).takeover
        assert lossy.sent == 3  # the first finds the record, and the third the second's


def test_a_lost_reply_is_no_lost_release(table: str) -> None:
    """A release that is sent again is true."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        key, owner = _key(), new_owner()
        won = store.claim(key, owner, b"", TERMS)
        lossy = Lossy(store, "PutItem")
        assert store.release(key, owner, won.fence)
        assert lossy.sent == 2


def test_a_lost_reply_is_no_lost_completion(table: str) -> None:
    """A completion that is sent again is true, and its answer is kept."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        key, owner = _key(), new_owner()
        won = store.claim(key, owner, b"", TERMS)
        lossy = Lossy(store, "UpdateItem")
        assert store.complete(key, owner, won.fence, b"j1", TERMS)
        assert lossy.sent == 2
        assert store.claim(key, new_owner(), b"", TERMS).answer == b"j1"


def test_a_lost_reply_of_a_mark_is_known_again(table: str) -> None:
    """The mark that a request sent again finds is its own: the event is not dropped."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        key, lossy = _key(), Lossy(store, "PutItem")
        assert store.first_seen(key, TERMS) is True
        assert lossy.sent == 2
        assert store.first_seen(key, TERMS) is False


async def test_a_cancelled_claim_is_given_back(table: str) -> None:
    """The release of a caller that was cancelled comes after its claim, which was under way."""
    store = aconnect(table)
    assert isinstance(store, AsyncDynamoDBStore)
    key, owner = _key(), new_owner()
    begun, go = asyncio.Event(), threading.Event()
    loop, ask = asyncio.get_running_loop(), store._store._ask

    def late(method: str, **arguments: Any) -> Any:
        if method == "put_item" and not go.is_set():
            loop.call_soon_threadsafe(begun.set)
            assert go.wait(60)
        return ask(method, **arguments)

    store._store._ask = late  # type: ignore[method-assign]
    claim = asyncio.create_task(store.claim(key, owner, b"", TERMS))
    await begun.wait()
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    release = asyncio.create_task(store.release(key, owner, None))
    while not store._threads()._work_queue.empty():  # a thread has taken it up
        await asyncio.sleep(0)
    go.set()
    assert await release is True
    assert (await store.claim(key, new_owner(), b"", TERMS)).verdict is ClaimVerdict.WON
    await store.aclose()
    with pytest.raises(StoreClosedError):
        await store.read(key)


def test_an_answer_that_was_not_named_is_not_seen(table: str) -> None:
    """A worker that dies between the parts of a long answer and its record leaves no answer."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        key, owner, ask = _key(), new_owner(), store._ask
        won = store.claim(key, owner, b"", TERMS)

        def dying(method: str, **arguments: Any) -> Any:
            if method == "update_item":
                raise KeyboardInterrupt
            return ask(method, **arguments)

        store._ask = dying  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            store.complete(key, owner, won.fence, os.urandom(800_000), TERMS)
        store._ask = ask  # type: ignore[method-assign]
        assert store.claim(key, new_owner(), b"", TERMS).verdict is ClaimVerdict.IN_FLIGHT
        answer = os.urandom(700_001)
        assert store.complete(key, owner, won.fence, answer, TERMS)
        assert store.claim(key, new_owner(), b"", TERMS).answer == answer


def test_long_answers_lie_in_several_items(table: str) -> None:
    """A replay has all of it; should a part be gone, that is told, not replayed."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        key, owner, answer = _key(), new_owner(), os.urandom(800_000)
        won = store.claim(key, owner, b"", TERMS)
        assert store.complete(key, owner, won.fence, answer, TERMS)
        assert store.claim(key, new_owner(), b"", TERMS).answer == answer
        entry = store.find(key.digest)
        assert entry is not None
        assert entry.answer_bytes == 800_000
        item = store._get(key)
        assert item is not None
        part = key.digest + item["w"]["B"] + (1).to_bytes(2)
        store._ask("delete_item", Key={"pk": {"B": part}})
        with pytest.raises(StoreCorruptError, match="parts of the answer"):
            store.claim(key, new_owner(), b"", TERMS)


def test_items_carry_their_end_for_the_ttl(table: str) -> None:
    """An hour past the record's own, in seconds: clocks differ."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        key = _key()
        store.claim(key, new_owner(), b"", TERMS)
        item, record = store._get(key), store.read(key)
        assert item is not None
        assert record is not None
        assert int(item["t"]["N"]) == record.purge_at // 1000 + 3600
        client = store._client()
        ttl = client.describe_time_to_live(TableName=store.table)["TimeToLiveDescription"]
        assert ttl == {"TimeToLiveStatus": "ENABLED", "AttributeName": "t"}


def test_what_is_set_up_wrongly_is_told(aws: str, table: str) -> None:
    """A missing table, an unknown option, a wrong number, no name, an address where nothing is."""
    at = f"region=eu-west-1&endpoint={aws}"
    with connect(f"dynamodb://nowhere?{at}") as store:
        with pytest.raises(StoreConfigError, match=r"no table 'nowhere'.*create_schema"):
            store.read(_key())
    for wrong, told in (
        ("dynamodb://keys?regoin=x", "did you mean 'region'"),
        ("dynamodb://keys?timeout=soon", "a number of seconds"),
        ("dynamodb://?region=x", "name the table"),
        (f"dynamodb://keys?{at}&clock_margin=-1", "clock_margin"),
    ):
        with pytest.raises(StoreConfigError, match=told):
            connect(wrong)
    gone = connect("dynamodb://keys?region=eu-west-1&endpoint=http://127.0.0.1:9&timeout=1")
    with gone, pytest.raises(StoreUnavailableError, match="region, endpoint"):
        gone.read(_key())
    with pytest.raises(StoreClosedError):
        gone.read(_key())


def test_a_fork_opens_its_own_connections(table: str) -> None:
    """A child has another client than its parent, and refuses one that its parent was given."""
    with connect(table) as store:
        assert isinstance(store, DynamoDBStore)
        client = store._client()
        given = DynamoDBStore(store.table, client=client)
        assert given.read(_key()) is None
        child = os.fork()
        if child == 0:
            code = 1
            try:
                given.read(_key())
            except StoreConfigError:
                code = 0 if store._client() is not client else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        given.close()
        assert store.read(_key()) is None  # what was given was not closed


async def test_a_fork_takes_no_threads_along(table: str) -> None:
    """A child's async store has threads, too."""
    store = aconnect(table)
    assert isinstance(store, AsyncDynamoDBStore)
    assert await store.read(_key()) is None
    there = store._threads()
    child = os.fork()
    if child == 0:
        os._exit(0 if store._threads() is not there else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    await store.aclose()


def test_a_table_of_somebody_elses_is_refused(client: Callable[[str], Any], aws: str) -> None:
    """Its key is another: ``create_schema`` and the first call say so."""
    client("dynamodb").create_table(
        TableName="theirs",
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    with connect(f"dynamodb://theirs?region=eu-west-1&endpoint={aws}") as store:
        assert isinstance(store, DynamoDBStore)
        for call in (store.create_schema, lambda: store.read(_key())):
            with pytest.raises(StoreConfigError, match="not made for oncekey"):
                call()


def test_commands_know_it(aws: str, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``oncekey migrate`` makes the table; ``doctor`` and ``stats`` look at it."""
    made = f"dynamodb://commanded?region=eu-west-1&endpoint={aws}"
    assert main(["migrate", made]) == 0
    assert "table commanded" in capsys.readouterr().out
    assert main(["migrate", made]) == 0
    assert "up to date" in capsys.readouterr().out
    assert main(["migrate", made, "--partitions", "4"]) == 2
    assert "--partitions" in capsys.readouterr().err
    assert main(["stats", made]) == 0
    assert main(["doctor", made, "--read-only"]) == 0


async def test_it_is_the_small_backend_too(table: str) -> None:
    """``get`` and ``put`` of request-side answers, as every store of ours has them."""
    from oncekey.models import CachedResponse

    store = aconnect(table)
    assert isinstance(store, AsyncDynamoDBStore)
    entry = CachedResponse("mark", {"a": 1}, await store.now() / 1000 + 60)
    await store.put("scope", "key", entry)
    found = await store.get("scope", "key")
    assert found is not None
    assert found.response == {"a": 1}
    assert await store.delete_expired() == 0
    await store.aclose()
