"""The functions and commands for operators, on every store, sync and async."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect as python
import json
import os
import pty
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import oncekey.operate
from oncekey import (
    MemoryStore,
    Once,
    PolicyError,
    StoreConfigError,
    aconnect,
    connect,
    current_claim,
)
from oncekey._core.flows import new_owner
from oncekey.abc import Store
from oncekey.cli import main
from oncekey.instrument import Event, EventKind, subscribe
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.operate import Listing, plan
from oncekey.operate.planning import measured
from oncekey.stores.redis.browsing import BROWSE

TERMS = Terms(lease_ms=600_000, ttl_ms=86_400_000)
LAPSED = Terms(lease_ms=1, ttl_ms=86_400_000)
SCOPE = Scope("once", "shop", "charge")
PAYLOAD = b"p" * 64


def key(name: str) -> Key:
    return Key(SCOPE, name)


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keys.db"
    if request.param == "postgres":
        found: str = request.getfixturevalue("pg_url")
        return found
    return f"{request.getfixturevalue('redis_server').url}?prefix={os.urandom(4).hex()}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with connect(url) as opened:
        yield opened


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, store: Store, url: str) -> Callable[..., Any]:
    """Calls a function of ``oncekey.operate`` on the store, in its sync or its async form."""

    def call(name: str, *args: Any, **options: Any) -> Any:
        if request.param == "sync":
            return getattr(oncekey.operate, name)(store, *args, **options)

        async def there() -> Any:
            opened = aconnect(url)
            try:
                return await getattr(oncekey.operate, f"a{name}")(opened, *args, **options)
            finally:
                await opened.aclose()

        return asyncio.run(there())

    return call


def claimed(store: Store, name: str, terms: Terms = TERMS) -> tuple[Key, bytes, int]:
    """A claim that is held, or was: nobody waits for a lease of a millisecond."""
    made, owner = key(name), new_owner()
    fence = store.claim(made, owner, PAYLOAD, terms).fence
    if terms is LAPSED:
        until = store.now() + 1
        while store.now() <= until:
            pass
    return made, owner, fence


def completed(store: Store, name: str, answer: bytes = b"j1") -> Key:
    made, owner, fence = claimed(store, name)
    assert store.complete(made, owner, fence, answer, TERMS)
    return made


def test_inspect_says_what_a_retry_gets(store: Store, ask: Callable[..., Any]) -> None:
    """Each situation of a key is told, by its name and by its digest alike."""
    released, owner, fence = claimed(store, "released")
    store.release(released, owner, fence)
    cases = {
        "in flight": claimed(store, "busy")[0],
        "lapsed": claimed(store, "dead", LAPSED)[0],
        "done": completed(store, "done", b"j" * 100),
        "released": released,
        "unknown": key("nobody"),
    }
    for situation, one in cases.items():
        for given in (one, one.digest):
            found = ask("inspect", given)
            assert found.situation == situation
            assert found.digest == one.digest.hex()
            assert found.retry
    done = ask("inspect", cases["done"])
    assert done.answer_bytes == 100
    assert 86_000 < done.ends_in <= 86_400
    assert 0 <= done.age < 60
    busy = ask("inspect", cases["in flight"])
    assert 590 < busy.lease_left <= 600
    assert ask("inspect", cases["lapsed"]).lease_left < 0


def test_evicted_outcome_runs_again(store: Store, ask: Callable[..., Any]) -> None:
    """After an eviction the next claim wins, with a higher fence and any payload."""
    one = completed(store, "paid")
    before = store.read(one)
    assert before is not None
    done = ask("evict", one.digest)
    assert done.evicted
    assert done.before.situation == "done"
    assert "again" in done.outcome
    reply = store.claim(one, new_owner(), b"another payload", TERMS)
    assert reply.verdict is Verdict.WON
    assert reply.fence > before.fence


def test_evicted_claim_is_fenced_off(store: Store, ask: Callable[..., Any]) -> None:
    """A worker whose claim was evicted can't record over the next one's outcome."""
    one, owner, fence = claimed(store, "hung")
    assert ask("evict", one).evicted
    heir = new_owner()
    reply = store.claim(one, heir, PAYLOAD, TERMS)
    assert reply.verdict is Verdict.WON
    assert not store.complete(one, owner, fence, b"jlate", TERMS)
    assert store.complete(one, heir, reply.fence, b"jnew", TERMS)


def test_nothing_to_evict(store: Store, ask: Callable[..., Any]) -> None:
    """A key that is free, unknown, or about to end is left as it is, and that is said."""
    assert not ask("evict", key("nobody")).evicted
    free, owner, fence = claimed(store, "free")
    store.release(free, owner, fence)
    assert not ask("evict", free).evicted
    ending = key("ending")
    store.write(ending, PAYLOAD, b"j1", store.now() + 5000)
    done = ask("evict", ending)
    assert not done.evicted
    assert "by itself" in done.outcome
    record = store.read(ending)
    assert record is not None
    assert record.answer == b"j1"


def test_eviction_is_an_event(store: Store, ask: Callable[..., Any]) -> None:
    """Whoever listens is told which key was evicted, and no event comes where none was."""
    one = completed(store, "told")
    seen: list[Event] = []
    with subscribe(seen.append):
        ask("evict", key("nobody"))
        ask("evict", one)
    kinds = [event for event in seen if event.kind is EventKind.EVICTED]
    assert [event.key for event in kinds] == [one.shown]


def test_stuck_finds_dead_and_long_claims(store: Store, ask: Callable[..., Any]) -> None:
    """Claims past their lease are found, and with a shorter limit those that still run."""
    for number in range(5):
        completed(store, f"done {number}")
    dead, busy = claimed(store, "dead", LAPSED)[0], claimed(store, "busy")[0]
    found = ask("stuck")
    assert [one.digest for one in found.found] == [dead.digest.hex()]
    assert found.looked_at == 7
    assert found.cursor is None
    both = ask("stuck", longer_than=0)
    assert {one.digest for one in both.found} == {dead.digest.hex(), busy.digest.hex()}
    assert ask("stuck", scope="once:other").found == []
    digest = bytes.fromhex(found.found[0].digest)
    assert ask("evict", digest).evicted
    assert ask("stuck").found == []


def test_stuck_goes_on_at_its_cursor(store: Store, ask: Callable[..., Any]) -> None:
    """A listing that was bounded goes on where it ended, until all was looked at."""
    want = {claimed(store, f"dead {number}", LAPSED)[0].digest.hex() for number in range(12)}
    found: set[str] = set()
    cursor: str | None = ""
    pages = 0
    while cursor is not None:
        page: Listing = ask("stuck", cursor=cursor, limit=3, most=4)
        found |= {one.digest for one in page.found}
        cursor, pages = page.cursor, pages + 1
        assert pages < 2000
    assert found == want


def test_wrong_cursor_is_refused(store: Store, ask: Callable[..., Any]) -> None:
    """What is no cursor of this store is said to be none."""
    with pytest.raises(StoreConfigError, match="cursor"):
        ask("stuck", cursor="no cursor at all")


def test_stats_count(store: Store, ask: Callable[..., Any]) -> None:
    """Records are counted by situation and, where the store has them, by scope."""
    for number in range(3):
        completed(store, f"done {number}", b"j" * 10)
    claimed(store, "busy")
    store.write(key("ended"), PAYLOAD, b"j1", store.now() - 5000)
    found = ask("stats")
    assert found.exact
    assert found.records == found.looked_at == 5
    assert found.situations == {"done": 3, "in flight": 1, "ended": 1}
    assert found.oldest_pending >= 0
    assert found.sweep_lag >= 5
    assert found.scopes in ({SCOPE.label: 5}, {})


def test_stats_estimate(store: Store, ask: Callable[..., Any]) -> None:
    """With more records than it may look at, the count is near the truth and said to be a guess."""
    for number in range(600):
        store.first_seen(key(f"{number}"), TERMS)
    found = ask("stats", most=200)
    assert not found.exact
    assert found.looked_at < 600
    assert 400 < found.records < 800


def test_sweep_removes_what_is_over(store: Store, ask: Callable[..., Any]) -> None:
    """Records past their time are gone; a store that does it by itself says so."""
    store.write(key("over"), PAYLOAD, b"j1", store.now() - 120_000)
    kept = completed(store, "kept")
    swept = ask("sweep")
    # Redis removes it a minute after its time, by itself.
    assert swept.removed == (0 if swept.by_itself else 1)
    assert ask("stats").records == (2 if swept.by_itself else 1)
    assert ask("inspect", kept).situation == "done"


def test_twins_take_the_same_arguments() -> None:
    """The async form of each function has the same parameters and defaults."""
    for name in ("inspect", "evict", "stuck", "sweep", "stats"):
        one = python.signature(getattr(oncekey.operate, name)).parameters
        other = python.signature(getattr(oncekey.operate, f"a{name}")).parameters
        plain = {name: (one.kind, one.default) for name, one in one.items()}
        assert plain == {name: (two.kind, two.default) for name, two in other.items()}


def test_a_key_of_several_arguments_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``key=[...]`` by the arguments that it names, in any order; what is none is told."""
    url = f"sqlite:///{tmp_path}/keys.db"
    once = Once(url, scope="billing")

    @once(key=["customer", "invoice"], name="charge")
    def charge(customer: str, invoice: int, cents: int) -> int:
        return cents

    charge("c-1", 7, 500)
    words = ("inspect", url, "--scope", "once:billing:charge", "--arguments")
    for text, code in (
        ('{"invoice": 7, "customer": "c-1"}', 0),
        ('{"customer": "c-1", "invoice": 8}', 1),
        ("c-1", 2),
    ):
        assert main([words[0], text, *words[1:]]) == code
    assert "write KEY as a JSON object" in capsys.readouterr().err


def test_store_that_cannot_be_looked_through() -> None:
    """It can be asked for a key by its name, and refuses the rest with a reason."""

    class Plain(Store):
        pass

    for name in Store.__abstractmethods__:
        method = getattr(MemoryStore, name)
        setattr(Plain, name, lambda self, *args, _m=method: _m(self.inner, *args))
    Plain.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    store = Plain()  # type: ignore[abstract]
    store.inner = MemoryStore()  # type: ignore[attr-defined]
    one = completed(store, "x", b"j123")
    assert oncekey.operate.inspect(store, one).answer_bytes == 4
    assert oncekey.operate.evict(store, one).evicted
    with pytest.raises(StoreConfigError, match="key and its scope"):
        oncekey.operate.inspect(store, one.digest)
    for name in ("stuck", "stats"):
        with pytest.raises(StoreConfigError, match="Browsable"):
            getattr(oncekey.operate, name)(store)


def test_memory_browses_scopes_with_odd_names() -> None:
    """Scopes and names with bars, colons and letters of every kind come back as they are."""
    store = MemoryStore()
    scopes = [Scope("once", "a|b:c"), Scope("once", "ä", "|"), Scope("once", "")]
    store._table.scopes = {scopes[0].prefix: "0|"}
    keys = [Key(scope, name) for scope in scopes for name in ("x", "|y:", "é|1:2")]
    full = type(store._table).new_scope
    try:  # the later two as if there were too many scopes for short names
        type(store._table).new_scope = lambda self, prefix: prefix.decode() + "|"  # type: ignore[method-assign]
        for one in keys:
            store.first_seen(one, TERMS)
            entry = store.find(one.digest)
            assert entry is not None
            assert entry.key == one
    finally:
        type(store._table).new_scope = full  # type: ignore[method-assign]


def test_redis_skips_what_is_not_ours(redis_server: Any) -> None:
    """Keys of others on the same server, and records of another prefix, are in no listing."""
    client = redis_server.client()
    prefix = os.urandom(4).hex()
    with connect(f"{redis_server.url}?prefix={prefix}") as store:
        client.set(f"{prefix}:short", "x")
        client.set(f"{prefix}x:{'y' * 32}", "x")
        mine = completed(store, "mine")
        listing = store.browse("", 1000)  # type: ignore[attr-defined]
        cursor, digests = listing.cursor, {entry.key.digest for entry in listing.entries}
        while cursor is not None:
            listing = store.browse(cursor, 1000)  # type: ignore[attr-defined]
            cursor = listing.cursor
            digests |= {entry.key.digest for entry in listing.entries}
        assert digests == {mine.digest}
        assert BROWSE.name == "browse"
    client.close()


# Planning


def test_plan_grows_with_the_load() -> None:
    """Twice the rate needs twice of everything; a longer answer needs more of it."""
    one, two, long = plan(100, 3600), plan(200, 3600), plan(100, 3600, 20_000)
    for small, large, wide in zip(one, two, long, strict=True):
        assert large.keys == 2 * small.keys
        assert large.written_bytes == pytest.approx(2 * small.written_bytes, abs=2)
        assert wide.memory_bytes + wide.disk_bytes > 5 * (small.memory_bytes + small.disk_bytes)
    assert {plan.backend for plan in one} == {"memory", "sqlite", "postgresql", "redis"}


def test_plan_is_what_was_measured() -> None:
    """At a size that was measured, a plan is the measured bytes times the keys."""
    for one in plan(1000, 86_400, 200):
        row = measured()["backends"][one.backend]
        place = row["sizes"].index(200)
        assert one.memory_bytes == pytest.approx(one.keys * row["memory"][place], rel=1e-6)
        assert one.disk_bytes == pytest.approx(one.keys * row["disk"][place], rel=1e-6)


def test_measured_bytes_are_of_this_sqlite(tmp_path: Path) -> None:
    """The table is no guess: a file made here is within a third of what it says."""
    path = tmp_path / "some.db"
    with connect(f"sqlite:///{path}", durability="normal") as store:
        empty = path.stat().st_size
        for number in range(2000):
            store.write(key(f"o-{number:012d}"), PAYLOAD, os.urandom(200), store.now() + 10**6)
    row = measured()["backends"]["sqlite"]
    said = row["disk"][row["sizes"].index(200)]
    assert (path.stat().st_size - empty) / 2000 == pytest.approx(said, rel=0.34)


@pytest.mark.parametrize("rate, ttl, size", [(0, 60, 1), (-1, 60, 1), (1, -5, 1), (1, 60, -1)])
def test_plan_refuses_nonsense(rate: float, ttl: float, size: int) -> None:
    """Numbers that mean nothing are refused."""
    with pytest.raises(PolicyError):
        plan(rate, ttl, size)


# Commands


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[tuple[str, Store]]:
    """A SQLite store by its URL, open."""
    url = f"sqlite:///{tmp_path}/shop.db"
    with connect(url) as store:
        yield url, store


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """The exit code and the JSON of a command."""
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_commands_print_what_the_functions_give(
    shop: tuple[str, Store], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command's JSON has the fields of the value that the function of its name gives."""
    url, store = shop
    one = completed(store, "o-1")
    claimed(store, "dead", LAPSED)
    code, found = printed(capsys, "inspect", "o-1", url, "--scope", SCOPE.label)
    assert (code, found["situation"]) == (0, "done")
    assert found.keys() == {f.name for f in dataclasses.fields(oncekey.operate.Inspection)}
    code, found = printed(capsys, "inspect", one.digest.hex(), "--digest", url)
    assert (code, found["situation"]) == (0, "done")
    parts = [word for part in ("once", "shop", "charge") for word in ("--part", part)]
    code, found = printed(capsys, "inspect", "o-1", url, *parts)
    assert (code, found["digest"]) == (0, one.digest.hex())
    code, found = printed(capsys, "inspect", "o-2", url, "--scope", SCOPE.label)
    assert (code, found["situation"]) == (1, "unknown")
    code, found = printed(capsys, "stats", url)
    assert (code, found["records"]) == (0, 2)
    code, found = printed(capsys, "stuck", url)
    assert (code, len(found["found"])) == (1, 1)
    assert found["found"][0]["situation"] == "lapsed"
    code, found = printed(capsys, "sweep", url)
    assert (code, found) == (0, {"removed": 0, "by_itself": False})
    code, found = printed(capsys, "plan", "--rate", "50", "--ttl", "7d", "--size", "300")
    assert (code, len(found)) == (0, 4)
    assert found[0]["keys"] == 50 * (7 * 86_400 + 120)


def test_text_of_commands(shop: tuple[str, Store], capsys: pytest.CaptureFixture[str]) -> None:
    """For people there are names, units and what to do next; digests, and no key or answer."""
    url, store = shop
    one = completed(store, "secret-order-17", b'j"secret answer"')
    claimed(store, "dead", LAPSED)
    text = ""
    for words in (
        ["inspect", "secret-order-17", url, "--scope", SCOPE.label],
        ["stats", url],
        ["stuck", url],
        ["sweep", url],
        ["plan", "--rate", "10"],
    ):
        main(words)
        text += capsys.readouterr().out
    for wanted in (one.digest.hex(), "a retry:", "lapsed", "2 records", "1 stuck", "/s", "removed"):
        assert wanted in text
    assert "secret" not in text


def test_evict_needs_a_word(shop: tuple[str, Store], capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody can be asked nothing is evicted without ``--yes``."""
    url, store = shop
    one = completed(store, "o-1")
    assert main(["evict", "o-1", url, "--scope", SCOPE.label]) == 2
    assert "--yes" in capsys.readouterr().err
    assert oncekey.operate.inspect(store, one).situation == "done"
    code, found = printed(capsys, "evict", "o-1", url, "--scope", SCOPE.label, "--yes")
    assert (code, found["evicted"]) == (0, True)
    code, found = printed(capsys, "evict", "o-1", url, "--scope", SCOPE.label, "--yes")
    assert (code, found["evicted"]) == (1, False)


@pytest.mark.parametrize("word, evicted", [("yes", True), ("no", False)])
def test_evict_asks_at_a_terminal(shop: tuple[str, Store], word: str, evicted: bool) -> None:
    """It shows what is there, and what a retry will do, and goes by the answer."""
    url, store = shop
    one = completed(store, "o-1")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "oncekey", "evict", "o-1", url, "--scope", SCOPE.label]
    process = subprocess.Popen(command, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.write(master, f"{word}\n".encode())
    out, _ = process.communicate(timeout=60)
    os.close(master)
    os.close(slave)
    assert b"run its work again" in out
    assert process.returncode == (0 if evicted else 2)
    assert (oncekey.operate.inspect(store, one).situation == "ended") is evicted


def test_evict_is_audited(shop: tuple[str, Store], tmp_path: Path) -> None:
    """The file has who did what to which digest, before and after, and is its owner's only."""
    url, store = shop
    one = completed(store, "o-1")
    log = tmp_path / "audit.jsonl"
    words = ["evict", "o-1", url, "--scope", SCOPE.label, "--yes", "--audit-file", str(log)]
    assert main([*words, "--reason", "ticket 17"]) == 0
    entries = [json.loads(json.loads(line)[1]) for line in log.read_text().splitlines()]
    assert [one["outcome"] for one in entries] == ["evicting", "evicted"]
    for entry in entries:
        assert entry["key_hash"] == one.digest.hex()
        assert entry["code"] == "ticket 17"
        assert entry["sender"]
    assert "o-1" not in log.read_text()
    assert main(["audit", "verify", str(log)]) == 0
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_unwritable_audit_file_prevents_an_eviction(
    shop: tuple[str, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be written down is not done."""
    url, store = shop
    one = completed(store, "o-1")
    words = ["evict", "o-1", url, "--scope", SCOPE.label, "--yes", "--audit-file", str(tmp_path)]
    assert main(words) == 2
    assert "can't be written" in capsys.readouterr().err
    record = store.read(one)
    assert record is not None
    assert record.state is State.COMPLETED
    assert record.expires_at > 0


@pytest.mark.parametrize(
    "words, told",
    [
        (["inspect", "k", "memory://"], "--scope"),
        (["inspect", "abc", "memory://", "--digest"], "64 hex"),
        (["inspect", "k", "memory://", "--scope", "a", "--part", "b"], "--part"),
        (["stats"], "--url-env"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that can't be carried out says what to add, and ends with 2."""
    assert main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["stuck"],
        ["stats"],
        ["sweep"],
        ["inspect", "k", "--scope", "s"],
        ["evict", "k", "--scope", "s", "--yes"],
    ],
)
def test_a_command_that_looks_makes_no_store(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is not there is a typo: exit 2 and a sentence, not an empty store."""
    for query in ("", "?durability=normal"):
        url = f"sqlite:///{tmp_path}/typo.db{query}"
        where = [words[0], *words[1:2], url, *words[2:]] if words[1:] else [*words, url]
        assert main(where) == 2
        assert f"there is no file {tmp_path}/typo.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_calls_of_a_key_that_is_not_done_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an attempt that failed was about to call; nothing once the key is done."""
    url = f"sqlite:///{tmp_path}/keys.db"
    once, fails = Once(url, scope="shipping"), [True]

    @once(key="order", name="ship")
    def ship(order: str) -> str:
        current_claim().before_call("carrier", f"ref-{order}")
        if fails:
            raise ConnectionError
        return "sent"

    with pytest.raises(ConnectionError):
        ship("o-1")
    words = ("inspect", "o-1", url, "--scope", "once:shipping:ship")
    assert main([*words]) == 0
    assert re.search(r"calls: +carrier ref-o-1 \(attempt 1, ", capsys.readouterr().out)
    _, told = printed(capsys, *words)
    assert [(one["provider"], one["attempt"]) for one in told["calls"]] == [("carrier", 1)]
    fails.clear()
    ship("o-1")
    assert printed(capsys, *words)[1]["calls"] == []
