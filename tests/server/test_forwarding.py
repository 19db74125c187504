"""What a proxy changes of a request, and which paths and numbers it takes: without a connection."""

from __future__ import annotations

import asyncio

import pytest

from oncekey.server.forwarding import ProxyRules, climbs, header_settings, upstream_at
from oncekey.server.tunnel import HEAD_MOST, _agreed, _RefusedError


@pytest.mark.parametrize(
    "path",
    [
        b"/api/../x",
        b"/api/..;/manager/html",
        b"/api/..;a=b/x",
        b"/api/%2e%2e;/x",
        b"/api/..%3Ba/x",
        b"/api/%2e%2e%2fx",
        b"/api/..\\x",
        b"/api/..;a\\x",
        b"/api/%252e%252e/x",
        b"/api/%25252525252e./x",
        b"/api/%25%32%65./x",
        b"/api/%2%35%32%65./x",
        b"/api/..%252fx",
        b"/api/..",
        b"/%2%35%32%35%32%35%32%65%%32%35%32%35%32%65",
    ],
)
def test_a_path_that_climbs_is_seen(path: bytes) -> None:
    """However it is written: with parameters that are cut off, or encoded twice."""
    assert climbs(path)


@pytest.mark.parametrize(
    "path",
    [b"/", b"/a/...", b"/a..b/..c", b"/a;..", b"/100%25/%e2%82%ac", b"/a?x=/../"],
)
def test_other_paths_pass(path: bytes) -> None:
    """Dots that are no segment of their own, parameters, and the query lead nowhere."""
    assert not climbs(path)


def test_a_client_can_not_take_away_what_it_was_judged_by() -> None:
    """``Connection`` names what is about one connection; not who calls, nor the key."""
    header = header_settings(namespace="p", scope_header="X-Account", keep_host=False)
    rules = ProxyRules(upstream=upstream_at("http://127.0.0.1:9000"), header=header)
    kept = {
        b"authorization": b"Bearer a",
        b"x-account": b"a",
        b"idempotency-key": b"k",
        b"content-type": b"application/json",
        b"cookie": b"c=1",
    }
    names = b", ".join([*(name.title() for name in kept), b"X-Own", b"close"])
    sent = [*kept.items(), (b"x-own", b"1"), (b"te", b"trailers"), (b"connection", names)]
    given = dict(rules.request_fields(sent, "192.0.2.1", "http"))
    assert {name: given.get(name) for name in kept} == kept
    assert not given.keys() & {b"x-own", b"te", b"connection"}


async def test_numbers_of_an_upstream_are_bounded() -> None:
    """A length or status of thousands of digits, which Python refuses to read, is a refusal."""
    digits = b"9" * 5000
    for head, status, size in (
        (b"HTTP/1.1 403 No\r\nContent-Length: " + digits + b"\r\n\r\n", 403, HEAD_MOST),
        (b"HTTP/1.1 403 No\r\nContent-Length: " + b"0" * 5000 + b"5\r\n\r\n", 403, 5),
        (b"HTTP/1.1 " + digits + b" No\r\n\r\n", 599, 0),
    ):
        reader = asyncio.StreamReader()
        reader.feed_data(b"x" * (HEAD_MOST + 1))
        reader.feed_eof()
        with pytest.raises(_RefusedError) as caught:
            await _agreed(head, reader)
        assert caught.value.answer.status == status
        assert len(caught.value.answer.body or b"") == size
