"""Answers above a size are compressed in the store, and come back as they were."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from oncekey import (
    AnswerOmittedError,
    AsyncMemoryStore,
    AsyncOnce,
    IdempotencyStore,
    MemoryStore,
    Once,
    PolicyError,
    ToolContext,
)
from oncekey._core.codec import Codec, decode_json
from oncekey._core.packing import MOST, packed, unpacked
from oncekey.encryption import Keyring, encrypted
from oncekey.errors import StoreCorruptError
from oncekey.http.answer import Answer, AnswerCodec

LONG = {"text": "the same again " * 1000}


def stored(store: MemoryStore) -> list[bytes]:
    """The answers that a store holds."""
    entries = store.browse().entries
    found = [store.read(entry.key) for entry in entries]
    return [record.answer for record in found if record is not None and record.answer is not None]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_long_answer_is_stored_short(sealed: bool) -> None:
    """What is stored is a fraction, and a replay equals the first answer; encrypted as well."""
    inner = MemoryStore()
    store = encrypted(inner, Keyring([Keyring.generate()])) if sealed else inner
    once = Once(store, compress_above=1000)

    @once(key="k")
    def work(k: str) -> dict[str, str]:
        return LONG

    assert work("a") == work("a") == LONG
    (raw,) = stored(inner)
    assert len(raw) < 500
    assert raw.startswith(b"\xe1" if sealed else b"z")


async def test_async_answers_and_short_ones() -> None:
    """The async form does the same; a short answer stays as it is, and old ones are read."""
    store = AsyncMemoryStore()
    before, after = AsyncOnce(store, scope="s"), AsyncOnce(store, scope="s", compress_above=1000)
    for once, key in ((before, "old"), (after, "new"), (after, "short")):
        async with once.guard(key) as claim:
            claim.answer = LONG if key != "short" else "ok"
    for once in (before, after):
        for key in ("old", "new", "short"):
            async with once.guard(key) as claim:
                assert claim.replayed
                assert claim.answer == (LONG if key != "short" else "ok")


async def test_requests_are_compressed_too() -> None:
    """``IdempotencyStore`` takes the option, and ``get`` of its backend reads what it stored."""
    backend = AsyncMemoryStore()
    idempotency = IdempotencyStore(backend, compress_above=1000)

    @idempotency.wrap
    async def buy(params: Any, context: Any = None) -> Any:
        return LONG

    caller = ToolContext(caller_identity="acme")
    for _ in range(2):
        assert await buy({"idempotency_key": "k-1"}, caller) == LONG
    found = await backend.get("acme", "k-1")
    assert found is not None
    assert found.response == LONG


def test_the_limit_counts_the_whole_answer() -> None:
    """``max_answer_bytes`` is of what a reader has to unpack, not of what is stored."""
    once = Once("memory://", compress_above=100, max_answer_bytes=1000)
    with once.guard("k") as claim:
        claim.answer = LONG
    with pytest.raises(AnswerOmittedError), once.guard("k"):
        pytest.fail("ran again")


def test_what_does_not_get_shorter_stays() -> None:
    """Data that don't compress are stored as they are."""
    raw = b"j" + json.dumps(zlib.compress(bytes(range(256)) * 4).hex()).encode()
    assert unpacked(packed(raw)) == raw
    assert packed(b"jnull") == b"jnull"


BOMB = zlib.compress(bytes(2_000_000))


@pytest.mark.parametrize(
    "raw",
    [
        b"z",
        b"z12",
        b"z\n" + BOMB,
        b"z0\n" + BOMB,
        b"z-5\n" + BOMB,
        b"z99\n" + BOMB,  # more comes out than it says
        b"z3000000\n" + BOMB,  # and less
        b"z2000000\n" + BOMB[:-1],
        b"z2000000\n" + BOMB + b"more",
        b"z%d\n" % (MOST + 1) + BOMB,
        b"z5\nnone",
        packed(b"z" * 1000),  # twice
    ],
)
@pytest.mark.parametrize("decode", [Codec().decode, AnswerCodec().decode, decode_json])
def test_no_bomb_and_no_damage_is_unpacked(raw: bytes, decode: Any) -> None:
    """Data that are cut, longer than they say, or packed twice are a corrupt store."""
    with pytest.raises(StoreCorruptError, match=r"damaged|form"):
        decode(raw)


def test_an_answer_of_either_kind_is_read() -> None:
    """Compressed forms of each codec decode to what went in."""
    answer = Answer(201, ((b"x", b"y"),), b"b" * 5000)
    assert AnswerCodec().decode(packed(AnswerCodec().encode(answer))) == answer
    assert Codec().decode(packed(Codec().encode(LONG))) == LONG


def test_a_negative_size_is_refused() -> None:
    """There is no such size."""
    with pytest.raises(PolicyError, match="compress_above"):
        Once("memory://", compress_above=-1)
