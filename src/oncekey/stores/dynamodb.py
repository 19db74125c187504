"""``dynamodb://table?region=eu-west-1``: one item a key, changed by conditional writes.

Each change decides by the table of transitions and puts the result on the condition that the item
is still the one that was read; if it is not, it looks again. Each put has a random name in ``v``: a
put whose reply was lost, and that boto3 sent again, is known by it. A new key takes one request,
and so does a completion. DynamoDB has no clock to ask, so that the machines' own decide:
``clock_margin`` is how far they may be apart. An item holds 400 KB: a longer answer is kept in
several, which are put before the record that names them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, Self, TypeVar
from urllib.parse import parse_qsl

from oncekey import transitions
from oncekey.abc import Browsable, Clock, ClockInjectable, Store
from oncekey.errors import (
    StoreClosedError,
    StoreConfigError,
    StoreCorruptError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from oncekey.models import ClaimReply, ClaimVerdict, Entry, Key, Page, Record, State, Terms
from oncekey.policy import did_you_mean
from oncekey.stores._browsing import after_digest, bounded, entry_of
from oncekey.stores._threaded import Threaded
from oncekey.transitions import Event

__all__ = ["AsyncDynamoDBStore", "DynamoDBStore"]

R = TypeVar("R")
Item = dict[str, Any]
Decide = Callable[[Record | None], tuple[R, Record | None]]

CHUNK: Final = 350_000  # bytes of an answer that one item holds, of the 400 KB that it may have
KEEP_SECONDS: Final = 3600  # past its time, before DynamoDB's TTL may take an item: clocks differ
NO_TERMS: Final = Terms(lease_ms=0, ttl_ms=0)
OPTIONS: Final = ("region", "endpoint", "timeout", "clock_margin")
THREADS: Final = 32  # of the async store; as many connections
REFUSALS: Final = ("AccessDenied", "ExpiredToken", "InvalidSignature", "UnrecognizedClient")
PK: Final = {"AttributeName": "pk", "AttributeType": "B"}
KEYS: Final = [{"AttributeName": "pk", "KeyType": "HASH"}]
BARE: Final = "pk, c, s, o, f, p, l, e, g, n, z"  # an item without its answer


class _Changed(Exception):
    """The item is not what the condition says. Its ``item`` is what there is."""

    def __init__(self, item: Item | None) -> None:
        self.item = item


def _number(value: int) -> Item:
    return {"N": str(value)}


def _lasting(purge_at: int) -> Item:
    return _number(purge_at // 1000 + KEEP_SECONDS)


def _item(key: Key, record: Record) -> Item:
    """A record as an item, but for its answer. ``t`` is the TTL's, ``v`` names this put."""
    state, owner, fence, fingerprint, *times, _ = record
    return {
        "pk": {"B": key.digest},
        "c": {"S": key.scope.label},
        "s": _number(state),
        "o": {"B": owner},
        "f": _number(fence),
        "p": {"B": fingerprint},
        **{name: _number(value) for name, value in zip("legn", times, strict=True)},
        "t": _lasting(record.purge_at),
        "v": {"B": os.urandom(16)},
    }


def _record(item: Item | None) -> Record | None:
    """An item as a record. A long answer, which lies in other items, is empty here."""
    if not item:
        return None
    owner, fingerprint = bytes(item["o"]["B"]), bytes(item["p"]["B"])
    state, fence, lease, expires, purge, attempts = (int(item[n]["N"]) for n in "sflegn")
    answer = bytes(item["a"]["B"]) if "a" in item else b"" if "w" in item else None
    times = (lease, expires, purge, attempts)
    return Record(State(state), owner, fence, fingerprint, *times, answer)


def _made(region: str | None, endpoint: str | None, timeout: float) -> Any:
    """A client of our own. Its session is its own, too: no lock of it was held at a fork."""
    from boto3.session import Session
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": 3}
    times = {"connect_timeout": timeout, "read_timeout": timeout}
    config = Config(**times, retries=retries, max_pool_connections=THREADS)
    place: Any = {"region_name": region, "endpoint_url": endpoint}
    return Session().client("dynamodb", **place, config=config)


class DynamoDBStore(Store, Browsable, ClockInjectable):
    """The synchronous DynamoDB store. Safe to use from several threads and after a fork.

    Promises: of all machines one wins; what was acknowledged is kept, as DynamoDB keeps it. Reads
    are consistent. The clocks of the machines decide when a lease or a record ends.

    Args:
        table: The table's name. ``create_schema`` makes it.
        region: The AWS region. Default: as boto3 finds it.
        endpoint: Another address than AWS's, such as an emulator's.
        timeout: Seconds that one request may take; boto3 tries it up to three times.
        clock_margin: Seconds that the machines' clocks may be apart: a lease that has ended is left
            to its owner for so long. An owner that lives has renewed it by then.
        client: A DynamoDB client of boto3's, used instead of one of our own, and not closed. A
            forked child can't use it: open the store there.
        clock: Seconds since 1970; inject one in tests.
    """

    poll_seconds = 1.0  # each look is a request

    def __init__(
        self,
        table: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        timeout: float = 5.0,
        clock_margin: float = 1.0,
        client: Any = None,
        clock: Clock = time.time,
    ) -> None:
        if not table:
            raise StoreConfigError("name the table: dynamodb://table?region=eu-west-1")
        if timeout <= 0 or clock_margin < 0:
            raise StoreConfigError("timeout must be above 0, and clock_margin 0 or above")
        import_module("boto3")  # its absence is told here, not by the first call
        self.table = table
        self._clock = clock
        self._margin = round(clock_margin * 1000)
        self._reach = (region, endpoint, timeout)
        self._given = client
        # By process: a forked child opens its own. Opened by the first call, which may be in a
        # thread: it reads files, and may ask the network for credentials.
        self._clients: dict[int, Any] = {} if client is None else {os.getpid(): client}
        self._closed = threading.Event()
        self._opened = True

    def _client(self) -> Any:
        if self._closed.is_set():
            raise StoreClosedError("this store is closed: open another")
        client = self._clients.get(os.getpid())
        if client is None:
            if self._given is not None:
                raise StoreConfigError(
                    "this store was given a client before the process forked, and processes can't "
                    "share its connections: open the store in the child"
                )
            try:
                client = self._clients.setdefault(os.getpid(), _made(*self._reach))
            except Exception as error:
                raise _named(error, self.table) from error
        return client

    def with_clock(self, clock: Clock) -> Self:
        """The same records, seen by another clock, which is taken to be everybody's."""
        view = object.__new__(type(self))
        vars(view).update(vars(self), _clock=clock, _margin=0, _opened=False)
        return view

    def _ask(self, method: str, **arguments: Any) -> Any:
        """One request. Raises ``_Changed`` where a condition does not hold, else ``StoreError``."""
        client = self._client()
        changed = client.exceptions.ConditionalCheckFailedException
        try:
            return getattr(client, method)(TableName=self.table, **arguments)
        except (changed, client.exceptions.ResourceInUseException) as error:
            raise _Changed(error.response.get("Item")) from None
        except Exception as error:
            raise _named(error, self.table) from error

    # One step: read, decide, put if nothing changed.

    def _decide(self, key: Key, decide: Decide[R], item: Item | None) -> R:
        """What ``decide`` says of the record, with its result written. It starts from ``item``."""
        while True:
            result, new = decide(_record(item))
            if new is None:
                return result
            put = _item(key, new)
            if new.answer is not None:
                put.update(self._kept(key, new.answer, new.purge_at))
            condition: dict[str, Any] = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
            condition["ConditionExpression"] = "attribute_not_exists(pk)"
            if item:
                condition["ConditionExpression"] = "v = :v"
                condition["ExpressionAttributeValues"] = {":v": item["v"]}
            try:
                self._ask("put_item", Item=put, **condition)
            except _Changed as changed:
                item = changed.item or self._get(key)
                if item and item["v"] == put["v"]:
                    return result  # it was ours: the reply was lost, and boto3 asked again
            else:
                return result

    def _get(self, key: Key) -> Item | None:
        found = self._ask("get_item", Key={"pk": {"B": key.digest}}, ConsistentRead=True)
        item: Item | None = found.get("Item")
        return item

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        found: Record | None = None

        def decide(record: Record | None) -> tuple[ClaimReply, Record | None]:
            nonlocal found
            found = record
            now = int(self._clock() * 1_000_000)
            late = self._in_margin(record, owner, now)
            reply, new = transitions.claim(record, owner, fingerprint, terms, now - late)
            return reply._replace(lease_ms=self._margin) if late and not new else reply, new

        reply = self._decide(key, decide, None)
        if reply.verdict is ClaimVerdict.REPLAY and reply.answer == b"":
            whole = self.read(key)
            if whole is None or found is None or whole.fence != found.fence:
                return self.claim(key, owner, fingerprint, terms)  # it changed meanwhile
            reply = reply._replace(answer=whole.answer)
        return reply

    def _in_margin(self, record: Record | None, owner: bytes, now_us: int) -> int:
        """How far a lease of another is past its end, if clocks may be that far apart; else 0."""
        if record is None or record.state is not State.PENDING or record.owner == owner:
            return 0
        past = now_us - record.lease_until * 1000
        return past + 1 if 0 <= past < self._margin * 1000 else 0

    def complete(self, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms) -> bool:
        if terms.sticky:  # then its end is the record's, which has to be read
            return self._settle(Event.COMPLETE, key, owner, fence, terms, answer)
        now = self.now()
        expires_at = now + terms.ttl_ms
        purge_at = expires_at + terms.skew_ms + terms.remember_ms
        kept = self._kept(key, answer, purge_at)
        times = {"l": _number(0), "e": _number(expires_at), "g": _number(purge_at)}
        put = {"s": _number(State.COMPLETED), **times, "t": _lasting(purge_at), **kept}
        put["v"] = {"B": os.urandom(16)}
        values = {":o": {"B": owner}, ":f": _number(fence), ":was": _number(State.PENDING)}
        values |= {f":{name}_": value for name, value in put.items()}
        try:
            self._ask(
                "update_item",
                Key={"pk": {"B": key.digest}},
                UpdateExpression="SET " + ", ".join(f"{n} = :{n}_" for n in put),
                ConditionExpression="o = :o AND f = :f AND s = :was",
                ExpressionAttributeValues=values,
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        except _Changed as changed:
            # Completed by this owner: the reply was lost, and boto3 asked again.
            record = _record(changed.item or self._get(key))
            return transitions.settle(record, Event.COMPLETE, owner, fence, terms, now, answer)[0]
        return True

    def _settle(
        self, event: Event, key: Key, owner: bytes, fence: int | None, terms: Terms, *answer: bytes
    ) -> bool:
        def decide(record: Record | None) -> tuple[bool, Record | None]:
            return transitions.settle(record, event, owner, fence, terms, self.now(), *answer)

        return self._decide(key, decide, self._get(key))

    def renew(self, key: Key, owner: bytes, fence: int, terms: Terms) -> bool:
        return self._settle(Event.RENEW, key, owner, fence, terms)

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        return self._settle(Event.RELEASE, key, owner, fence, NO_TERMS)

    def first_seen(self, key: Key, terms: Terms) -> bool:
        def decide(record: Record | None) -> tuple[bool, Record | None]:
            now = int(self._clock() * 1_000_000)
            new = transitions.mark(record, terms, now - self._in_margin(record, b"", now))
            return new is not None, new

        return self._decide(key, decide, None)

    def write(self, key: Key, fingerprint: bytes, answer: bytes, expires_at: int) -> None:
        def decide(record: Record | None) -> tuple[None, Record]:
            fence = max(self.now() * 1000, 0 if record is None else record.fence + 1)
            times = (0, expires_at, expires_at, 1)
            return None, Record(State.COMPLETED, b"", fence, fingerprint, *times, answer)

        self._decide(key, decide, self._get(key))

    # Answers

    def _kept(self, key: Key, answer: bytes, purge_at: int) -> Item:
        """The attributes that an answer is kept by; what is too long for an item is put first."""
        size = _number(len(answer))
        if len(answer) <= CHUNK:
            return {"a": {"B": answer}, "z": size}
        group = os.urandom(16)
        for number, at in enumerate(range(0, len(answer), CHUNK)):
            place = {"B": key.digest + group + number.to_bytes(2)}
            part = {"B": answer[at : at + CHUNK]}
            self._ask("put_item", Item={"pk": place, "a": part, "t": _lasting(purge_at)})
        return {"w": {"B": group}, "z": size}

    def _gathered(self, key: Key, item: Item) -> bytes | None:
        """A long answer, from its items. ``None``: some are gone."""
        parts, size = [], int(item["z"]["N"])
        for number in range(-(-size // CHUNK)):
            place = {"B": key.digest + bytes(item["w"]["B"]) + number.to_bytes(2)}
            found = self._ask("get_item", Key={"pk": place}, ConsistentRead=True).get("Item")
            if found is None:
                return None
            parts.append(bytes(found["a"]["B"]))
        return b"".join(parts)

    def read(self, key: Key) -> Record | None:
        seen: Item | None = None
        while True:
            item = self._get(key)
            record = _record(item)
            if item is None or record is None or "w" not in item:
                return record
            answer = self._gathered(key, item)
            if answer is not None:
                return record._replace(answer=answer)
            if item == seen:
                raise StoreCorruptError(
                    f"parts of the answer for key {key.shown} are gone from the table "
                    f"{self.table!r}: something beside its TTL removes items"
                )
            seen = item

    # Operators and tests

    def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``Browsable``. How much of the table a page covers is not known before the last."""
        arguments: dict[str, Any] = {"Limit": bounded(limit), "ProjectionExpression": BARE}
        if cursor:
            arguments["ExclusiveStartKey"] = {"pk": {"B": after_digest(cursor)}}
        found = self._ask("scan", FilterExpression="attribute_exists(s)", **arguments)
        entries = [_entry(item) for item in found["Items"]]
        last = found.get("LastEvaluatedKey")
        return Page(entries, bytes(last["pk"]["B"]).hex() if last else None, 0.0 if last else 1.0)

    def find(self, digest: bytes) -> Entry | None:
        found = self._ask(
            "get_item", Key={"pk": {"B": digest}}, ConsistentRead=True, ProjectionExpression=BARE
        )
        return _entry(found["Item"]) if "Item" in found else None

    def now(self) -> int:
        return int(self._clock() * 1000)

    def clear(self) -> None:
        """Remove every record, one by one. For tests."""
        page: Any = {"LastEvaluatedKey": None}
        while "LastEvaluatedKey" in page:
            more = {"ExclusiveStartKey": page["LastEvaluatedKey"]} if len(page) > 1 else {}
            page = self._ask("scan", ProjectionExpression="pk", ConsistentRead=True, **more)
            for place in page["Items"]:
                self._ask("delete_item", Key=place)

    def create_schema(self) -> list[str]:
        """Make the table, paid by request, and let its TTL remove old records. Gives what was done.

        Harmless where it is there. A table of your own needs a partition key ``pk`` of type binary
        and no sort key, and TTL on the attribute ``t``. ``oncekey migrate URL`` does the same.

        Raises:
            StoreError: It could not be made, or is not as it must be; says what to do.
        """
        done = []
        made = {"AttributeDefinitions": [PK], "KeySchema": KEYS, "BillingMode": "PAY_PER_REQUEST"}
        try:
            self._ask("create_table", **made)
            done.append(f"table {self.table}")
        except _Changed:
            pass  # it is there
        while (there := self._ask("describe_table")["Table"])["TableStatus"] == "CREATING":
            time.sleep(1)
        if there["KeySchema"] != KEYS or PK not in there["AttributeDefinitions"]:
            raise _wrong_table(self.table)
        ttl = self._ask("describe_time_to_live")["TimeToLiveDescription"]
        if ttl["TimeToLiveStatus"] not in ("ENABLED", "ENABLING"):
            wanted = {"Enabled": True, "AttributeName": "t"}
            self._ask("update_time_to_live", TimeToLiveSpecification=wanted)
            done.append("time to live on t")
        return done

    def close(self) -> None:
        """Close the connections that this store opened."""
        if self._opened and not self._closed.is_set():
            self._closed.set()
            client = self._clients.pop(os.getpid(), None)
            if client is not None and self._given is None:
                client.close()


def _entry(item: Item) -> Entry:
    size = int(item["z"]["N"]) if "z" in item else None
    return entry_of((item["pk"]["B"], item["c"]["S"], *(_record(item) or ())[:-1], size))


def _wrong_table(table: str) -> StoreConfigError:
    return StoreConfigError(
        f"the table {table!r} is not made for oncekey: it needs a partition key pk of type binary "
        "and no sort key; name another table, and run oncekey migrate with its URL"
    )


def _named(error: Exception, table: str) -> StoreError:
    """An error of boto3's with a name, a reason and a fix."""
    from botocore import exceptions as aws

    code = error.response["Error"]["Code"] if isinstance(error, aws.ClientError) else ""
    if code == "ResourceNotFoundException":
        return StoreConfigError(
            f"DynamoDB has no table {table!r} in this region: run oncekey migrate with this URL "
            "(or create_schema() of the store), or correct the table's name or the region"
        )
    if code == "ValidationException":
        return _wrong_table(table)
    if code.removesuffix("Exception") in REFUSALS:
        return StoreConfigError(
            f"DynamoDB refuses these credentials for the table {table!r} ({code}): they need "
            "GetItem, PutItem and UpdateItem, and Scan and DeleteItem for operators"
        )
    if isinstance(error, (aws.NoCredentialsError, aws.NoRegionError, aws.PartialCredentialsError)):
        return StoreConfigError(
            f"boto3 does not know where to go: {error} Set AWS_REGION and credentials, or write "
            "dynamodb://table?region=eu-west-1"
        )
    if isinstance(error, (aws.ConnectTimeoutError, aws.ReadTimeoutError)):
        return StoreTimeoutError("DynamoDB did not answer in time: see timeout, and the network")
    if isinstance(error, aws.EndpointConnectionError):
        return StoreUnavailableError("DynamoDB can't be reached: check region, endpoint, network")
    return StoreUnavailableError(
        f"DynamoDB could not be asked ({code or type(error).__name__}); if it is throttled, raise "
        "the table's limits"
    )


class AsyncDynamoDBStore(Threaded[DynamoDBStore], ClockInjectable):
    """The asynchronous DynamoDB store: the synchronous one, in threads of its own.

    Takes what ``DynamoDBStore`` takes. At most 32 requests are under way at once. A call that is
    cancelled leaves its request to end by itself; a release by the same owner comes after it.
    """

    poll_seconds = 1.0

    def __init__(self, table: str, **options: Any) -> None:
        super().__init__(DynamoDBStore(table, **options), THREADS, "dynamodb")

    async def now(self) -> int:
        return self._store.now()

    async def create_schema(self) -> list[str]:
        """Make the table: see ``DynamoDBStore.create_schema``."""
        return await self._do(self._store.create_schema)

    async def delete_expired(self, now_epoch: float | None = None) -> int:
        """Nothing: the table's TTL removes what has expired."""
        return 0


def _options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """The table and the options of a URL."""
    place, _, query = url.partition("://")[2].partition("?")
    found: dict[str, Any] = {"table": place.strip("/")}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            there = f"{did_you_mean(name, OPTIONS)} {', '.join(OPTIONS)}"
            raise StoreConfigError(f"dynamodb:// has no option {name!r}{there}")
        try:
            found[name] = float(value) if name in ("timeout", "clock_margin") else value
        except ValueError:
            raise StoreConfigError(f"{name} must be a number of seconds, got {value!r}") from None
    return {**found, **options}


def open_sync(url: str, options: dict[str, Any]) -> DynamoDBStore:
    """Open ``dynamodb://table?region=eu-west-1``."""
    return DynamoDBStore(**_options(url, options))


def open_async(url: str, options: dict[str, Any]) -> AsyncDynamoDBStore:
    """Open ``dynamodb://table?region=eu-west-1``."""
    return AsyncDynamoDBStore(**_options(url, options))
