"""A replay is as safe and as readable as the first answer."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from tests.http.conftest import Make
from tests.http.doors import JSON, Calls

from oncekey import PolicyError
from oncekey.errors import StoreCorruptError
from oncekey.http import Settings
from oncekey.http.answer import Answer
from oncekey.http.coding import MAX_PLAIN, accepts
from oncekey.http.rules import KNOWN, Rules

SAFETY = {
    "content-security-policy": "default-src 'none'",
    "content-security-policy-report-only": "default-src 'self'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "strict-transport-security": "max-age=1",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-resource-policy": "same-origin",
    "access-control-allow-origin": "https://shop.example",
    "access-control-allow-credentials": "true",
    "access-control-expose-headers": "X-Total",
    "vary": "Origin",
}


def test_headers_that_make_an_answer_safe_are_replayed(make: Make) -> None:
    """Policies for browsers, and who may read the answer, are as on the first answer."""
    door = make(lambda _: (200, [("content-type", "text/html"), *SAFETY.items()], b"<b>hi</b>"))
    door.post()
    again = door.post()
    assert again.replayed
    assert {name.lower(): value for name, value in again.headers}.items() >= SAFETY.items()


def test_exposed_headers_are_one_list(make: Make) -> None:
    """Where the application exposes headers of its own, ours join them."""
    own = ("access-control-expose-headers", "X-Total")
    door = make(lambda _: (200, [JSON, own], b"{}"), expose_cors=True)
    door.post()
    again = door.post()
    fields = [value for name, value in again.headers if name.lower() == own[0]]
    assert fields == ["X-Total, Idempotent-Replayed, Retry-After"]


TEXT = b'{"made": "%b"}' % (b"x" * 5000)
_raw = zlib.compressobj(wbits=-15)
PACKED = {
    "gzip": gzip.compress(TEXT),
    "x-gzip": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    "DEFLATE": _raw.compress(TEXT) + _raw.flush(),
}


@pytest.mark.parametrize("coding", PACKED)
def test_a_packed_answer_is_unpacked_for_who_can_not_read_it(make: Make, coding: str) -> None:
    """With the coding in Accept-Encoding the stored bytes, without it what they hold."""
    fields = [JSON, ("content-encoding", coding), ("etag", '"1"'), ("vary", "Accept-Encoding")]
    calls = Calls(lambda _: (201, fields, PACKED[coding]))
    door = make(calls)
    door.post(headers=[("Accept-Encoding", "gzip, deflate")])
    same = door.post(headers=[("Accept-Encoding", "br;q=1, gzip;q=0.5, deflate")])
    assert (same.body, same.header("content-encoding")) == (PACKED[coding], coding)
    assert same.header("etag") == '"1"'
    for accepted in ([], [("Accept-Encoding", "identity")], [("Accept-Encoding", "*;q=0, br")]):
        plain = door.post(headers=accepted)
        assert (plain.status, plain.body, plain.replayed) == (201, TEXT, True)
        assert plain.header("content-encoding") is None
        assert plain.header("content-length") == str(len(TEXT))
        assert plain.header("etag") == 'W/"1"'
    assert calls.count == 1


@pytest.mark.parametrize(
    "coding, body",
    [
        ("br", b"\x0b\x02\x80hello\x03"),
        ("gzip, br", b"x"),
        ("gzip", b"not gzip"),
        ("gzip", PACKED["gzip"][:-9]),
        ("gzip", gzip.compress(bytes(MAX_PLAIN + 1))),
    ],
    ids=["br", "two", "broken", "cut", "bomb"],
)
def test_what_can_not_be_unpacked_is_told(make: Make, coding: str, body: bytes) -> None:
    """To who can't read it: the first status, and that the body is not to be had; it runs once."""
    calls = Calls(lambda _: (201, [JSON, ("content-encoding", coding)], body))
    door = make(calls)
    door.post(headers=[("Accept-Encoding", coding)])
    reply = door.post()
    assert (reply.status, reply.problem, calls.count) == (201, "body-unavailable", 1)
    assert "Accept-Encoding" in json.loads(reply.body)["detail"]
    assert reply.header("content-encoding") is None
    assert door.post(headers=[("Accept-Encoding", coding)]).body == body


@pytest.mark.parametrize(
    "accepted, expected",
    [
        ("gzip", True),
        ("GZIP;q=0.001", True),
        ("x-gzip", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip; q = 0.000", False),
        ("gzip;q=0, *", False),
        ("*;q=0", False),
        ("br", False),
        ("", False),
    ],
)
def test_who_reads_gzip(accepted: str, expected: bool) -> None:
    """Named, or by a star, with a weight that is not zero."""
    assert accepts(accepted, "gzip") is expected


@pytest.mark.parametrize("where", ["inside", "outside"])
async def test_middleware_of_the_application_and_replays(where: str) -> None:
    """Starlette's CORS and gzip, on either side: a replay has each header once, and is readable."""
    import httpx
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from oncekey import MemoryBackend
    from oncekey.adapters.starlette import IdempotencyMiddleware

    origins = ["https://a.example", "https://b.example"]
    theirs = [Middleware(CORSMiddleware, allow_origins=origins), Middleware(GZipMiddleware)]
    ours: Any = Middleware(IdempotencyMiddleware, MemoryBackend())  # type: ignore[arg-type]
    app = Starlette(
        routes=[Route("/", lambda _: PlainTextResponse("x" * 5000, 201), methods=["POST"])],
        middleware=[ours, *theirs] if where == "inside" else [*theirs, ours],
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://shop"
    ) as client:
        sent = {"Idempotency-Key": "k", "Authorization": "me", "Origin": origins[0]}
        first = await client.post("/", headers=sent)
        for coding in ("gzip", "identity"):
            again = await client.post("/", headers={**sent, "Accept-Encoding": coding})
            assert again.headers["idempotent-replayed"] == "true"
            assert again.text == first.text == "x" * 5000
            assert again.headers.get("content-encoding", "identity") == coding
            for name in ("access-control-allow-origin", "content-length"):
                assert len(again.headers.get_list(name)) == 1
            assert again.headers["access-control-allow-origin"] == origins[0]
        # Another origin is not let in by what was said to the first.
        other = await client.post("/", headers={**sent, "Origin": origins[1]})
        allowed = origins[0] if where == "inside" else origins[1]
        assert other.headers["access-control-allow-origin"] == allowed


@pytest.mark.parametrize(
    "name", ["Content-Length", "Transfer-Encoding", "Connection", "Trailer", "Content-Range"]
)
def test_framing_of_an_answer_can_not_be_stored(name: str) -> None:
    """A replay that is unpacked, or sent by another server, would lie about its length."""
    with pytest.raises(PolicyError, match=name.lower()):
        Settings(stored_headers=[name])


def test_a_redacted_header_stays_one_header(make: Make) -> None:
    """A line end in what ``redact`` gives does not become a header of its own in the replay."""

    def redact(answer: Answer) -> Answer:
        return answer._replace(headers=((b"location", b"/a\nset-cookie:session=1"),))

    door = make(Calls(), redact=redact)
    door.post()
    again = door.post()
    assert again.replayed
    assert (again.header("set-cookie"), again.header("location")) == (None, None)


def test_what_is_known_of_an_answer_is_of_its_whole_head() -> None:
    """Answers share what was made of an equal head, and nothing else; a torn record stays torn."""
    rules = Rules(Settings())
    first = rules.replayed(b"h201\nlocation:/a\n\none", {})
    other = rules.replayed(b"h202\nlocation:/a\n\none", {})
    again = rules.replayed(b"h201\nlocation:/a\n\ntwo\n\n", {})
    assert first == Answer(201, ((b"location", b"/a"), (b"idempotent-replayed", b"true")), b"one")
    assert other == first._replace(status=202)
    assert again == first._replace(body=b"two\n\n")
    for torn in (b"h201\nlocation:/a?", b"", None):
        with pytest.raises(StoreCorruptError):
            rules.replayed(torn, {})
    for number in range(KNOWN + 1):
        raw = b"h201\nlocation:/%d\n\n" % number
        assert rules.replayed(raw, {}) == rules.replayed(raw, {})
    assert len(rules._replays) <= KNOWN
