"""Answers encrypted at rest: what is stored, who can read it, and what happens without the key."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pickle
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.servers.fixtures_pg import sql

from oncekey import (
    AsyncOnce,
    AsyncSQLiteStore,
    BackendMismatchError,
    IdempotencyStore,
    MemoryBackend,
    MemoryStore,
    Once,
    PgBackend,
    PgStore,
    PolicyError,
    RedisBackend,
    RedisStore,
    SQLiteStore,
    StoreConfigError,
    StoreCorruptError,
    SyncWebhookDedupStore,
    ToolContext,
    WebhookDedupStore,
    current_claim,
)
from oncekey._core.fingerprint import fingerprint as fingerprint_of
from oncekey.abc import (
    AsyncStore,
    AsyncSweepable,
    AsyncTransactional,
    ClockInjectable,
    IdempotencyBackend,
    Markable,
    Store,
    Sweepable,
    Transactional,
)
from oncekey.encryption import Keyring, encrypted
from oncekey.models import Key, Scope, State
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider

SECRET = "4929-1111-2222-3333"  # what must not be found in any store
OLD, NEW = Keyring.generate(), Keyring.generate()
RING = Keyring([OLD])
Places = tuple[Callable[..., Any], ...]
BLOCK = Scope("once", "default")


# The keyring


def test_what_is_sealed_opens_again() -> None:
    """Any bytes come back; no two seals of one answer are alike."""
    for answer in (b"", b"j1", os.urandom(1000)):
        sealed = [RING.seal(answer, b"record") for _ in range(3)]
        assert len(set(sealed)) == 3
        assert all(RING.open(one, b"record") == answer for one in sealed)
        assert all(len(one) == len(answer) + 37 for one in sealed)


def test_the_first_key_seals_and_all_open() -> None:
    """Rotation: the new key in front takes over, and old answers stay readable."""
    both, new = Keyring([NEW, OLD]), Keyring([NEW])
    old_answer = RING.seal(b"old", b"record")
    new_answer = both.seal(b"new", b"record")
    assert both.open(old_answer, b"record") == b"old"
    assert new.open(new_answer, b"record") == b"new"
    assert both.ids == [*new.ids, *RING.ids]
    with pytest.raises(StoreConfigError, match=RING.ids[0]):
        new.open(old_answer, b"record")


def test_the_format_never_changes() -> None:
    """An answer that was sealed by the first release opens."""
    ring = Keyring([bytes(range(32))])
    sealed = bytes.fromhex(
        "e12486520a5252ab4cd6f3d5bbe169beefd24f4b5b728c23b5"
        "7b7cdbedaec4ab398f1d3632df27a290d12282c1b0b4be"
    )
    assert ring.open(sealed, b"record") == b'j{"paid":5}'
    assert sealed[0] == 0xE1
    assert sealed[1:9].hex() == ring.ids[0]


def test_no_changed_byte_goes_unseen() -> None:
    """Each bit that is flipped, each cut and another record are errors of ours."""
    sealed = RING.seal(b'j{"paid":5}', b"record")
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1 << (at % 8)
        with pytest.raises((StoreCorruptError, StoreConfigError)):
            RING.open(bytes(changed), b"record")
        with pytest.raises(StoreCorruptError):
            RING.open(sealed[:at], b"record")
    for other in (b"", b"recor", b"record2"):
        with pytest.raises(StoreCorruptError, match="another record"):
            RING.open(sealed, other)


def test_keys_may_be_text_of_any_base64() -> None:
    """Standard and URL-safe, with and without padding, and plain bytes are the same key."""
    raw = bytes(range(200, 232))
    texts = [base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()]
    forms = [raw, bytearray(raw), *texts, *(text.rstrip("=") for text in texts), f" {texts[0]}\n"]
    assert len({tuple(Keyring([form]).ids) for form in forms}) == 1  # type: ignore[list-item]


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [b""],
        [b"x" * 31],
        [b"x" * 33],
        ["hunter2"],
        ["not base64!" * 4],
        [base64.b64encode(b"x" * 24).decode()],
        [None],
        [7],
        OLD,
        b"x" * 32,
        [OLD, OLD],
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_bad_keys_are_refused_without_being_shown(keys: Any) -> None:
    """A password, a short key or none at all is an error that names the fix and shows no key."""
    with pytest.raises(PolicyError) as refused:
        Keyring(keys)
    told = str(refused.value)
    assert (
        "generate()" in told or "remove it" in told or "Keyring([key])" in told or "base64" in told
    )
    for secret in (OLD, "hunter2", "xxx", "not base64!"):
        assert secret not in told


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several keys stand in one variable, the newest first."""
    monkeypatch.setenv("KEYS", f"{NEW}, {OLD}\n")
    assert Keyring.from_env("KEYS").ids == Keyring([NEW, OLD]).ids
    monkeypatch.setenv("ONCEKEY_ENCRYPTION_KEYS", NEW)
    assert Keyring.from_env().ids == Keyring([NEW]).ids
    for empty in ("", "  ,"):
        monkeypatch.setenv("KEYS", empty)
        with pytest.raises(PolicyError):
            Keyring.from_env("KEYS")


def test_generated_keys_are_random() -> None:
    """Each is 32 bytes, and none comes twice."""
    made = {Keyring.generate() for _ in range(100)}
    assert len(made) == 100
    assert all(len(base64.b64decode(key)) == 32 for key in made)


def test_no_key_is_shown_anywhere() -> None:
    """Neither a repr, nor the attributes, nor an error of a keyring or store holds a key."""
    raw = base64.b64decode(OLD)
    store = encrypted(MemoryStore(), RING)
    shown = [repr(RING), repr(store), repr(vars(RING)), repr(vars(store)), str(RING.ids)]
    with contextlib.suppress(StoreConfigError):
        Keyring([NEW]).open(RING.seal(b"x", b""), b"")
    assert not any(text in one for one in shown for text in (OLD, raw.hex(), repr(raw)[2:-1]))
    with pytest.raises(TypeError):
        pickle.dumps(RING)


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is an error that says what to install."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(PolicyError, match=r"oncekey\[crypto\]"):
        Keyring([OLD])


# The store around a store

POWERS = (
    AsyncStore,
    AsyncSweepable,
    AsyncTransactional,
    ClockInjectable,
    IdempotencyBackend,
    Markable,
    Store,
    Sweepable,
    Transactional,
)


@pytest.mark.parametrize(
    "kind",
    [
        MemoryStore,
        MemoryBackend,
        SQLiteStore,
        AsyncSQLiteStore,
        PgStore,
        PgBackend,
        RedisStore,
        RedisBackend,
    ],
)
def test_an_encrypted_store_can_do_what_the_store_can(kind: Any) -> None:
    """The same capabilities and settings, no more and no less."""
    inner = object.__new__(kind)
    around = encrypted(inner, RING)
    assert [isinstance(around, power) for power in POWERS] == [
        isinstance(inner, power) for power in POWERS
    ]
    for name in ("complete_on", "transaction", "sweep", "marker", "with_clock", "hand"):
        assert hasattr(around, name) == hasattr(inner, name)
    for name in ("poll_seconds", "never_waits", "one_writer"):
        assert getattr(around, name, None) == getattr(inner, name, None)


@pytest.mark.parametrize("wrong", [None, "memory://", object(), Keyring])
def test_only_stores_can_be_encrypted(wrong: Any) -> None:
    """Something else is refused, and so is a key in place of a keyring."""
    with pytest.raises(BackendMismatchError):
        encrypted(wrong, RING)
    with pytest.raises(PolicyError, match="Keyring"):
        encrypted(MemoryStore(), OLD)  # type: ignore[call-overload]


def raw_answer(inner: Any, name: str, scope: Scope = BLOCK) -> bytes:
    """The bytes that a store keeps."""
    record = inner.read(Key(scope, name))
    assert record.state is State.COMPLETED
    answer: bytes = record.answer
    return answer


def test_nothing_of_an_answer_is_stored_in_the_clear(places: Places) -> None:
    """The stored bytes hold neither the answer nor a noted call, and replays are as they were."""
    with places[0]() as inner:
        once = Once(encrypted(inner, RING))
        runs = []

        @once(key="order_id")
        def charge(order_id: str) -> dict[str, str]:
            runs.append(1)
            current_claim().before_call("stripe", SECRET)
            return {"card": SECRET}

        assert charge("o-1") == charge("o-1") == {"card": SECRET}
        assert len(runs) == 1
        scope = Scope("once", "", f"{charge.__module__}.{charge.__qualname__}")
        kept = raw_answer(inner, "o-1", scope)
        noted = raw_answer(inner, "o-1", Scope("calls", "once", *scope.parts))
        assert kept[0] == noted[0] == 0xE1
        assert SECRET.encode() not in kept + noted


async def test_async_answers_are_encrypted_and_replayed(places: Places) -> None:
    """The asynchronous form stores and reads the same bytes as the synchronous one."""
    async with places[1]() as inner:
        store = encrypted(inner, RING)
        async with AsyncOnce(store).guard("o-1") as claim:
            claim.answer = SECRET
        async with AsyncOnce(store).guard("o-1") as claim:
            assert claim.replayed
            assert claim.answer == SECRET
        record = await inner.read(Key(BLOCK, "o-1"))
        assert SECRET.encode() not in record.answer
        with places[0]() as other, Once(encrypted(other, RING)).guard("o-1") as blocking:
            assert blocking.answer == SECRET


async def test_the_file_holds_nothing_in_the_clear(tmp_path: Path) -> None:
    """Every API over an encrypted store leaves no trace of its answers in the file's bytes."""
    path = tmp_path / "x.db"
    caller = ToolContext(caller_identity="acme")
    backend = encrypted(AsyncSQLiteStore(path), RING)

    @IdempotencyStore(backend).wrap
    async def create(params: dict[str, Any], context: Any = None) -> dict[str, str]:
        return {"card": SECRET}

    for _ in range(2):
        assert await create({"idempotency_key": "k"}, caller) == {"card": SECRET}
    entry = await backend.get("acme", "k")
    assert entry is not None
    assert entry.response == {"card": SECRET}
    await backend.put("acme", "k2", entry)
    async with backend.transaction("tx") as tx:
        tx.answer = SECRET
    async with backend.transaction("tx") as tx:
        assert tx.replayed
        assert tx.answer == SECRET
    await backend.aclose()
    with encrypted(SQLiteStore(path), RING) as store, store.transaction("tx2") as tx:
        tx.answer = [SECRET]
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_transactions_seal_their_answers(kind: str, request: Any, tmp_path: Path) -> None:
    """Effect and sealed answer commit together, on the store's own or a caller's connection."""
    if kind == "sqlite":
        inner: Any = SQLiteStore(tmp_path / "x.db")
    else:
        inner = PgStore(request.getfixturevalue("pg_url"))
    with encrypted(inner, RING) as store:
        once = Once(store)
        runs = []

        @once(key="order_id", transactional=True)
        def charge(order_id: str) -> str:
            runs.append(1)
            return SECRET

        assert charge("o-1") == charge("o-1") == SECRET
        assert len(runs) == 1
        with once.transaction("mine") as tx:
            tx.answer = SECRET
        kept = raw_answer(inner, "mine")
        assert SECRET.encode() not in kept
        with once.transaction("mine") as tx:
            assert (tx.replayed, tx.answer) == (True, SECRET)
        with once.guard("mine") as claim:
            assert claim.answer == SECRET
        with contextlib.suppress(RuntimeError), once.transaction("fails") as tx:
            raise RuntimeError
        assert inner.read(Key(BLOCK, "fails")) is None


async def test_async_transactions_seal_their_answers(pg_url: str) -> None:
    """The same with an asynchronous driver."""
    async with encrypted(PgBackend(pg_url), RING) as store:
        once = AsyncOnce(store)
        for replayed in (False, True):
            async with once.transaction("o-1") as tx:
                assert tx.replayed is replayed
                if not tx.replayed:
                    tx.answer = SECRET
    assert not [
        row
        for row in sql(pg_url, "SELECT answer FROM oncekey_records")
        if SECRET.encode() in row[0]
    ]


def test_webhooks_work_on_encrypted_stores(tmp_path: Path) -> None:
    """Marks, claims, ``complete_on`` and a receiver: duplicates are known as before."""
    path = tmp_path / "x.db"
    store = encrypted(SQLiteStore(path), RING)
    dedup = SyncWebhookDedupStore(store)
    assert [dedup.check_and_record("s", "e-1") for _ in range(2)] == [True, False]
    claim = dedup.claim("s", "e-2", "hash")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        assert claim.claim_token is not None
        assert dedup.complete_on(db, "s", "e-2", "hash", claim.claim_token)
        db.execute("COMMIT")
        kept = db.execute("SELECT answer FROM oncekey_records WHERE answer IS NOT NULL").fetchall()
    assert dedup.claim("s", "e-2", "hash").status == "handled"
    assert [answer[:1] for (answer,) in kept] == [b"\xe1"]
    scheme = provider("stripe", secret="whsec_test")
    receiver = WebhookReceiver(scheme, store, transactional=True)
    seen = []
    receiver.on()(lambda event, tx: seen.append(event.id))
    body = b'{"id": "evt_1", "type": "invoice.paid"}'
    request = scheme.sign("POST", "https://x/", {"Content-Type": "application/json"}, body)
    assert [receiver.receive(*request).outcome for _ in range(2)] == ["handled", "duplicate"]
    assert seen == ["evt_1"]
    receiver.close()


async def test_marks_stay_fast_on_encrypted_memory() -> None:
    """A store whose marks never wait still offers them as a plain function."""
    dedup = WebhookDedupStore(encrypted(MemoryBackend(), RING))
    assert [await dedup.check_and_record("s", "e-1") for _ in range(2)] == [True, False]
    assert dedup._markers


# Without the key


def replay(store: Any) -> Any:
    """A second call of something that was done. It must never run."""

    def work() -> None:
        raise AssertionError("ran again")

    return Once(store)(key=lambda: "o-1", name="work")(work)()


def test_a_missing_key_stops_the_replay(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    """The error says which key is missing; the work does not run, and the answer is kept."""
    caplog.set_level(logging.DEBUG)
    with places[0]() as inner:
        scope = Scope("once", "", "work")
        owner, terms = os.urandom(16), Once(inner)._block("x", None, {}, Any).plan.terms
        sealing, key = encrypted(inner, RING), Key(scope, "o-1")
        won = sealing.claim(key, owner, b"", terms)
        assert sealing.complete(key, owner, won.fence, b"j1", terms)
        with pytest.raises(StoreConfigError, match=f"key {RING.ids[0]}") as missing:
            replay(encrypted(inner, Keyring([NEW])))
        assert not missing.value.retryable
        assert replay(encrypted(inner, Keyring([NEW, OLD]))) == 1
        with places[0]() as other:  # a transaction looks in its own way
            if isinstance(other, Transactional):
                with pytest.raises(StoreConfigError):
                    replay_in_transaction(encrypted(other, Keyring([NEW])))
    assert OLD not in caplog.text
    assert NEW not in caplog.text


def replay_in_transaction(store: Any) -> Any:
    """The same in a transaction."""

    def work() -> None:
        raise AssertionError("ran again")

    return Once(store)(key=lambda: "o-1", name="work", transactional=True)(work)()


async def test_a_missing_key_stops_the_replay_async() -> None:
    """The asynchronous form does the same."""
    inner = MemoryBackend()
    async with AsyncOnce(encrypted(inner, RING)).guard("o-1") as claim:
        claim.answer = 1
    with pytest.raises(StoreConfigError, match="keyring"):
        await AsyncOnce(encrypted(inner, Keyring([NEW]))).guard("o-1").__aenter__()


def test_a_receiver_without_the_key_asks_for_a_retry() -> None:
    """A copy of an event that was handled under another key is not handled again: 503, later."""
    scheme, inner, seen = provider("stripe", secret="whsec_test"), MemoryStore(), []
    body = b'{"id": "evt_1", "type": "invoice.paid"}'
    request = scheme.sign("POST", "https://x/", {"Content-Type": "application/json"}, body)
    statuses = []
    for ring in (RING, Keyring([NEW]), Keyring([NEW, OLD])):
        receiver = WebhookReceiver(scheme, encrypted(inner, ring))
        receiver.on()(seen.append)
        statuses.append(receiver.receive(*request).status)
    assert statuses == [200, 503, 200]
    assert len(seen) == 1


def test_an_emptied_fingerprint_does_not_match_anything(places: Places) -> None:
    """The payload is sealed with its answer: another one does not get it, whatever the row says."""
    with places[0]() as inner:
        once = Once(encrypted(inner, RING))
        with once.guard("o-1", payload={"cents": 5}) as claim:
            claim.answer = SECRET
        key = Key(BLOCK, "o-1")
        row = inner.read(key)
        for fingerprint in (b"", fingerprint_of({"cents": 6})):
            inner.write(key, fingerprint, row.answer, row.expires_at)
            with pytest.raises(StoreCorruptError, match="another payload"):
                once.guard("o-1", payload={"cents": 6}).__enter__()
            with pytest.raises(StoreCorruptError, match="another payload"):
                once.store.read(key)
        inner.write(key, row.fingerprint, row.answer, row.expires_at)
        for payload in ({"cents": 5}, None):  # None: the caller has nothing to compare
            with once.guard("o-1", payload=payload) as claim:
                assert claim.answer == SECRET


async def test_an_emptied_fingerprint_does_not_match_in_transactions(tmp_path: Path) -> None:
    """Nor do answers that a transaction recorded, sync or async, or ``complete_on``."""
    path = tmp_path / "x.db"
    with encrypted(SQLiteStore(path), RING) as store:
        with Once(store).transaction("tx", payload=1) as tx:
            tx.answer = SECRET
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            assert db.execute("UPDATE oncekey_records SET fingerprint = x''").rowcount == 1
        with pytest.raises(StoreCorruptError, match="another payload"):
            Once(store).transaction("tx", payload=2).__enter__()
    async with encrypted(AsyncSQLiteStore(path), RING) as backend:
        with pytest.raises(StoreCorruptError, match="another payload"):
            await AsyncOnce(backend).transaction("tx", payload=2).__aenter__()
        with pytest.raises(StoreCorruptError, match="another payload"):
            await AsyncOnce(backend).guard("tx", payload=2).__aenter__()


def test_a_removed_answer_does_not_replay_nothing(places: Places) -> None:
    """A record that is done but has no answer is refused, and the work does not run again."""
    with places[0]() as inner:
        once = Once(encrypted(inner, RING))
        terms = Once(inner)._block("x", None, {}).plan.terms
        assert inner.first_seen(Key(BLOCK, "o-1"), terms)  # done, without an answer
        with pytest.raises(StoreCorruptError, match="no answer"):
            once.guard("o-1").__enter__()
        with Once(encrypted(inner, RING, allow_plain=True)).guard("o-1") as claim:
            assert claim.replayed


async def test_a_null_in_the_table_does_not_replay_nothing(tmp_path: Path) -> None:
    """The same for a row whose answer somebody has set to NULL."""
    path = tmp_path / "x.db"
    async with encrypted(AsyncSQLiteStore(path), RING) as store:
        async with AsyncOnce(store).guard("o-1") as claim:
            claim.answer = SECRET
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            assert db.execute("UPDATE oncekey_records SET answer = NULL").rowcount == 1
        with pytest.raises(StoreCorruptError, match="no answer"):
            await AsyncOnce(store).guard("o-1").__aenter__()


async def test_claims_that_are_not_remembered_are_completed_all_the_same(places: Places) -> None:
    """A store that has won more claims than it remembers reads with which payload."""
    with places[0]() as inner:
        won, done = encrypted(inner, RING), encrypted(inner, RING)
        key, mark = Key(BLOCK, "o-1"), fingerprint_of(1)
        terms = Once(inner)._block("x", None, {}).plan.terms
        reply = won.claim(key, b"o" * 16, mark, terms)
        assert done.complete(key, b"o" * 16, reply.fence, b"j1", terms)
        assert won.claim(key, b"p" * 16, mark, terms).answer == b"j1"
        inner.write(key, b"", inner.read(key).answer, inner.read(key).expires_at)
        with pytest.raises(StoreCorruptError, match="another payload"):
            won.claim(key, b"p" * 16, fingerprint_of(2), terms)
    async with places[1]() as inner:
        awon, adone = encrypted(inner, RING), encrypted(inner, RING)
        key = Key(BLOCK, "o-2")
        reply = await awon.claim(key, b"o" * 16, mark, terms)
        assert await adone.complete(key, b"o" * 16, reply.fence, b"j1", terms)
        assert (await awon.claim(key, b"p" * 16, mark, terms)).answer == b"j1"


def test_answers_sealed_without_a_payload_stay_readable(places: Places) -> None:
    """What was sealed before payloads were sealed with answers is replayed."""
    with places[0]() as inner:
        store, key = encrypted(inner, RING), Key(BLOCK, "o-1")
        sealed = RING.seal(b'j"old"', bytes(8) + key.digest)
        inner.write(key, fingerprint_of(1), sealed, inner.now() + 60_000)
        with Once(store).guard("o-1", payload=1) as claim:
            assert claim.answer == "old"


def test_an_answer_that_was_moved_does_not_open(tmp_path: Path) -> None:
    """Whoever can write to the table can't have one caller's answer replayed to another."""
    path = tmp_path / "x.db"
    with encrypted(SQLiteStore(path), RING) as store:
        for name in ("mine", "theirs"):
            with Once(store).guard(name) as claim:
                claim.answer = name
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            digests = [Key(BLOCK, name).digest for name in ("theirs", "mine")]
            db.execute(
                "UPDATE oncekey_records SET answer = "
                "(SELECT answer FROM oncekey_records WHERE key = ?) WHERE key = ?",
                digests,
            )
        with pytest.raises(StoreCorruptError, match="another record"):
            Once(store).guard("mine").__enter__()
        with Once(store).guard("theirs") as claim:
            assert claim.answer == "theirs"


def test_an_answer_of_another_tenant_does_not_open(pg_url: str) -> None:
    """Two tenants' rows of one key differ by nothing else, and are told apart."""
    for tenant in ("acme", "globex"):
        with encrypted(PgStore(pg_url, tenant=tenant), RING) as store:
            for replayed in (False, True):
                with Once(store).guard("o-1") as claim:
                    assert claim.replayed is replayed
    sql(
        pg_url,
        "UPDATE oncekey_records SET answer = (SELECT answer FROM oncekey_records "
        "WHERE tenant = 'globex') WHERE tenant = 'acme'",
    )
    with encrypted(PgStore(pg_url, tenant="acme"), RING) as store:
        with pytest.raises(StoreCorruptError, match="another record"):
            Once(store).guard("o-1").__enter__()


def test_plain_answers_need_leave(places: Places) -> None:
    """Answers from before are refused, so that none can be slipped in, unless that is allowed."""
    with places[0]() as inner:
        with Once(inner).guard("o-1") as claim:
            claim.answer = "plain"
        with pytest.raises(StoreConfigError, match="allow_plain=True"):
            Once(encrypted(inner, RING)).guard("o-1").__enter__()
        store = encrypted(inner, RING, allow_plain=True)
        with Once(store).guard("o-1") as claim:
            assert claim.answer == "plain"
        with Once(store).guard("o-2") as claim:
            claim.answer = "sealed"
        assert raw_answer(inner, "o-2")[0] == 0xE1


def test_rotation_while_keys_live(tmp_path: Path) -> None:
    """Each step of a rotation, as the docs say it: every answer is readable all the time."""
    path, seen = tmp_path / "x.db", []
    for step, keys in enumerate(([OLD], [OLD, NEW], [NEW, OLD])):
        with encrypted(SQLiteStore(path), Keyring(keys)) as store:
            with Once(store).guard(f"o-{step}") as claim:
                claim.answer = step
            for earlier in range(step + 1):
                with Once(store).guard(f"o-{earlier}") as claim:
                    seen.append((claim.replayed, claim.answer))
    assert seen == [(True, 0), (True, 0), (True, 1), (True, 0), (True, 1), (True, 2)]
