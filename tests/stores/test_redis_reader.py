"""Replies without hiredis: the same values, however the bytes arrive."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers.redis import Server, _plain_server, redis_server

from oncekey.conformance import CHECKS, Check, arun_check
from oncekey.stores import _redis_aio, _redis_reader
from oncekey.stores._redis_reader import ReplyError, _Reader
from oncekey.stores.redis import RedisBackend

__all__ = ["_plain_server", "redis_server"]

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=40),
        st.text("abc XYZ", min_size=1, max_size=20).map(ReplyError),
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def packed(value: Any) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, ReplyError):
        return b"-" + str(value).encode() + b"\r\n"
    return b"*%d\r\n" % len(value) + b"".join(map(packed, value))


def plain(value: Any) -> Any:
    if isinstance(value, ReplyError):
        return ("error", str(value))
    return [plain(item) for item in value] if isinstance(value, list) else value


@given(st.lists(VALUES, max_size=5), st.integers(1, 30))
def test_replies_come_out_as_they_went_in(values: list[Any], size: int) -> None:
    """Any replies, cut into pieces of any size, give the same values in order."""
    data = b"".join(map(packed, values))
    reader = _Reader()
    found: list[Any] = []
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
        while (reply := reader.gets()) is not False:
            found.append(reply)
    assert plain(found) == plain(values)


@given(st.lists(VALUES, max_size=5))
def test_the_reader_agrees_with_hiredis(values: list[Any]) -> None:
    """Where hiredis is installed it gives what our own reader gives."""
    hiredis = pytest.importorskip("hiredis")
    data = b"".join(map(packed, values))
    ours, theirs = _Reader(), hiredis.Reader(replyError=ReplyError)
    ours.feed(data)
    theirs.feed(data)
    for _ in range(len(values) + 1):
        assert plain(ours.gets()) == plain(theirs.gets())


def test_what_is_not_the_protocol_is_an_error() -> None:
    """Bytes that no Redis sends are refused, not guessed at."""
    reader = _Reader()
    reader.feed(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(ValueError, match="protocol"):
        reader.gets()


def test_hiredis_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hiredis our own reader stands in."""

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(_redis_reader, "import_module", missing)
    assert isinstance(_redis_reader.new_reader(), _Reader)
    monkeypatch.setattr(_redis_reader, "import_module", importlib.import_module)
    pytest.importorskip("hiredis")
    assert not isinstance(_redis_reader.new_reader(), _Reader)


@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if "racing" in check.__name__ or "replays" in check.__name__],
    ids=lambda check: check.__name__,
)
async def test_the_store_works_without_hiredis(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    """Checks of the contract with our own reader."""
    monkeypatch.setattr(_redis_aio, "new_reader", _Reader)
    await arun_check(check, lambda: RedisBackend(redis_server.url, prefix=os.urandom(4).hex()))
