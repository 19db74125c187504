"""The checks of stores that can be looked through; others pass them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from oncekey._core.drive import Op
from oncekey._core.flows import new_owner
from oncekey.abc import AsyncBrowsable, Browsable
from oncekey.conformance.steps import Can, Step
from oncekey.models import Entry, Key, Scope, Terms

__all__ = ["LISTINGS"]

TERMS: Final = Terms(lease_ms=60_000, ttl_ms=60_000)
PAYLOAD: Final = b"a" * 64


def _some_keys() -> Generator[Step, Any, dict[bytes, Key]]:
    """Keys in every state: pending, completed, released and marked."""
    scope = Scope("conformance", new_owner().hex())
    keys = [Key(scope, f"key {number}") for number in range(7)]
    for number, key in enumerate(keys[:6]):
        owner = new_owner()
        won = yield Op("claim", (key, owner, PAYLOAD, TERMS))
        if number % 3 == 1:
            yield Op("complete", (key, owner, won.fence, b"j" * (10 + number), TERMS))
        elif number % 3 == 2:
            yield Op("release", (key, owner, won.fence))
    yield Op("first_seen", (keys[6], TERMS))
    return {key.digest: key for key in keys}


def _listed(limit: int) -> Generator[Step, Any, dict[bytes, Entry]]:
    found: dict[bytes, Entry] = {}
    cursor, share = "", 0.0
    while cursor is not None:
        page = yield Op("browse", (cursor, limit))
        assert 0 <= page.share <= 1, f"a page covers {page.share}"
        assert page.share >= share, "a page covers less than the one before it"
        found |= {entry.key.digest: entry for entry in page.entries}
        cursor, share = page.cursor, page.share
    assert share == 1, f"the last page covers {share}, not all"
    return found


def listing_has_every_record() -> Generator[Step, Any, None]:
    """Page after page, a listing has every record as it stands, without its answer."""
    if not (yield Can(Browsable, AsyncBrowsable)):
        return
    keys = yield from _some_keys()
    for limit in (3, 1000):
        found = yield from _listed(limit)
        for digest, key in keys.items():
            assert digest in found, "a record is in no page"
            record = yield Op("read", (key,))
            entry = found[digest]
            bare = entry.record
            assert bare.answer is None, "a listing must not give an answer away"
            assert bare[:4] == record[:4], "a listing must show the record as it stands"
            assert abs(bare.expires_at - record.expires_at) <= 2, "the end of a record"
            size = None if record.answer is None else len(record.answer)
            assert (entry.answer_bytes is None) == (size is None), "the length of an answer"


def entries_are_found_and_usable() -> Generator[Step, Any, None]:
    """A record is found by its digest, and its key works with the store's other methods."""
    if not (yield Can(Browsable, AsyncBrowsable)):
        return
    keys = yield from _some_keys()
    assert (yield Op("find", (bytes(32),))) is None, "found what is not there"
    for digest, key in keys.items():
        entry = yield Op("find", (digest,))
        assert entry is not None, "a record is not found by its digest"
        assert entry.key.digest == digest, "another record is found"
        seen = yield Op("read", (entry.key,))
        real = yield Op("read", (key,))
        assert seen is not None, "the key of an entry can't be read by"
        assert seen[:4] == real[:4], "the key of an entry reads another record"


LISTINGS: Final = (listing_has_every_record, entries_are_found_and_usable)
