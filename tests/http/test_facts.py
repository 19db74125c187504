"""Every way in tells the same facts of a request, and reads its body alike."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, unquote_to_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.http.doors import AsgiDoor, Calls, Door, WsgiDoor

from oncekey import AsyncSQLiteStore, MemoryBackend, MemoryStore, SQLiteStore
from oncekey.adapters.awslambda import idempotent
from oncekey.http.body import ClientGoneError, asgi_body, wsgi_body
from oncekey.http.facts import Facts, asgi_facts, facts_of, wsgi_facts

HEADERS = [
    ("Idempotency-Key", "k"),
    ("Content-Type", "application/json"),
    ("Content-Encoding", "gzip"),
    ("Authorization", "Bearer x"),
    ("Content-Length", "2"),
    ("Host", "Shop.Example:8080"),
]


def of_asgi(path: str, query: str, root: str = "", *, told: bool = True) -> Facts:
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": unquote(path),
        "root_path": root,
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in HEADERS],
    }
    if told:
        scope["raw_path"] = path.encode()
    return asgi_facts(scope, b"idempotency-key", None)


def of_wsgi(path: str, query: str, script: str = "") -> Facts:
    environ = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": script,
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
    }
    for name, value in HEADERS:
        plain = name.upper().replace("-", "_")
        environ[plain if plain in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{plain}"] = value
    return wsgi_facts(environ, "Idempotency-Key", None)


def of_others(path: str, query: str) -> Facts:
    target = f"{path}?{query}" if query else path
    return facts_of("POST", target.encode(), HEADERS, "Idempotency-Key", None)


def shown(facts: Facts) -> tuple[Any, ...]:
    """The facts, with text for what may be bytes."""
    return tuple(
        [one.decode() if isinstance(one, bytes) else one for one in part]
        if isinstance(part, list)
        else part.decode()
        if isinstance(part, bytes)
        else part
        for part in facts
    )


PLAIN = "abz09-._~!$&'()*+,;=:@/"
paths = st.lists(
    st.one_of(
        st.sampled_from(list(PLAIN)),
        st.characters(codec="utf-8").map(lambda one: quote(one, "")),
        st.characters(codec="ascii").map(lambda one: f"%{ord(one):02x}"),
    ),
    max_size=12,
).map(lambda parts: "/" + "".join(parts))
queries = st.text(PLAIN + "?%", max_size=8)


@given(paths, queries)
@example("/caf%C3%A9", "")
@example("/a%3Fb", "")
@example("/a%3Fb", "c")
@example("/%2525", "")
def test_every_way_in_tells_the_same(path: str, query: str) -> None:
    """ASGI with and without a raw path, WSGI, and what has neither agree on every fact."""
    expected = shown(of_asgi(path, query))
    assert shown(of_asgi(path, query, told=False)) == expected
    assert shown(of_wsgi(path, query)) == expected
    assert shown(of_others(path, query)) == expected
    assert expected[8] == "shop.example:8080"


@given(paths, paths, queries, queries)
@example("/a%3Fb", "/a", "", "b")
@example("/a%3Fb", "/a%253Fb", "", "")
def test_other_paths_are_other_targets(one: str, two: str, query: str, other: str) -> None:
    """Two targets are one only if their paths stand for the same bytes, and the queries are one."""
    same = unquote_to_bytes(one) == unquote_to_bytes(two) and query == other
    assert (of_asgi(one, query).target == of_wsgi(two, other).target) == same


def test_bytes_that_are_no_text() -> None:
    """A path that is not UTF-8 is compared by its bytes."""
    assert of_asgi("/%FF", "").target == of_wsgi("/%ff", "").target == b"/%FF"
    assert of_asgi("/%FF", "").target != of_asgi("/%FE", "").target


def test_a_prefix_is_part_of_the_path_wherever_it_is_told() -> None:
    """``root_path`` in front of the path or beside it, and ``SCRIPT_NAME``, mean the same."""
    expected = b"/api/v%201/pay"
    assert of_asgi("/api/v%201/pay", "", "/api/v 1").target == expected
    assert of_asgi("/pay", "", "/api/v 1").target == expected
    assert of_asgi("/pay", "", "/api/v 1/").target == expected
    assert of_wsgi("/pay", "", "/api/v 1").target == expected
    assert of_asgi("/apiary", "", "/api").target == b"/api/apiary"


def test_a_whole_url_in_the_request_line() -> None:
    """Of the absolute form only path and query count, as a proxy may have written it."""
    assert of_others("http://shop.example/pay", "a=1").target == b"/pay?a=1"
    assert of_asgi("http://shop.example/pay", "a=1").target == b"/pay?a=1"


# Both middlewares

MAKERS: list[Any] = [
    lambda calls, **options: Door(AsgiDoor(calls, MemoryBackend(), **options)),
    lambda calls, **options: Door(WsgiDoor(calls, MemoryStore(), **options)),
]


@pytest.mark.parametrize("made", MAKERS)
def test_keys_of_each_host(made: Any) -> None:
    """With ``per_host`` a key means nothing at another host; without it, it does."""
    for options, runs in (({}, 1), ({"per_host": True}, 2)):
        calls = Calls()
        door = made(calls, **options)
        for host in ("a.example", "A.example", "b.example"):
            assert door.post(headers=[("Host", host)]).status == 201
        assert calls.count == runs


@pytest.mark.parametrize("made", MAKERS)
def test_a_long_host_is_no_error(made: Any) -> None:
    """A host of any length is taken: it may only lead to keys that nobody else uses."""
    calls = Calls()
    assert made(calls, per_host=True).post(headers=[("Host", "h" * 5000)]).status == 201


# Bodies


def asgi_pieces(*pieces: bytes, gone: bool = False) -> Any:
    left = [
        {"type": "http.request", "body": piece, "more_body": gone or number < len(pieces)}
        for number, piece in enumerate(pieces, 1)
    ]

    async def receive() -> Any:
        return left.pop(0) if left else {"type": "http.disconnect"}

    return receive


def read_asgi(most: int, declared: str | None, *pieces: bytes, gone: bool = False) -> bytes:
    return asyncio.run(asgi_body(asgi_pieces(*pieces, gone=gone), most, declared))


def read_wsgi(most: int, declared: str | None, *pieces: bytes) -> bytes:
    environ = {"wsgi.input": io.BytesIO(b"".join(pieces)), "wsgi.input_terminated": True}
    if declared is not None:
        environ["CONTENT_LENGTH"] = declared
    return wsgi_body(environ, most)


@pytest.mark.parametrize("read", [read_asgi, read_wsgi])
def test_bodies_are_read_to_their_limit(read: Any) -> None:
    """Both give the body; of one that is too long, declared or not, something that is too long."""
    assert read(4, "4", b"ab", b"", b"cd") == b"abcd"
    assert read(4, None, b"ab", b"cd") == b"abcd"
    assert len(read(4, None, b"ab", b"cde")) == 5
    assert len(read(4, "9" * 5000, b"")) == 5
    assert read(4, "0", b"") == b""


def test_half_a_body_is_none() -> None:
    """A client that hangs up, or sends less than it declared or a broken chunk, sent nothing."""

    class Broken:
        def read(self, size: int) -> bytes:
            raise RuntimeError("bad chunk")

    with pytest.raises(ClientGoneError):
        read_asgi(10, "4", b"ab", gone=True)
    with pytest.raises(ClientGoneError):
        read_wsgi(10, "4", b"ab")
    with pytest.raises(ClientGoneError):
        wsgi_body({"wsgi.input": Broken(), "CONTENT_LENGTH": "4"}, 10)


# One store behind several forms


def of_lambda(calls: Calls, store: Any) -> Any:
    """A Lambda function behind an HTTP API, which tells paths decoded."""

    @idempotent(store, anonymous="shared")
    def handler(event: Any, context: Any) -> dict[str, Any]:
        status, _, body = calls(event["body"].encode())
        return {"statusCode": status, "body": body.decode()}

    def post(key: str, path: str) -> int:
        event = {
            "version": "2.0",
            "rawPath": path,
            "rawQueryString": "",
            "headers": {"content-type": "application/json", "idempotency-key": key},
            "body": '{"amount": 1}',
            "requestContext": {"domainName": "shop.example", "http": {"method": "POST"}},
        }
        return int(handler(event, None)["statusCode"])

    return post


@pytest.mark.parametrize("path", ["/café", "/a?b", "/a b%c", "/"])
def test_a_retry_may_reach_another_form(path: str, tmp_path: Path) -> None:
    """WSGI, ASGI and Lambda over one store run a request once; another path is a 422."""
    calls = Calls()
    store = SQLiteStore(tmp_path / "keys.db")
    asgi = Door(AsgiDoor(calls, AsyncSQLiteStore(tmp_path / "keys.db")))
    wsgi = Door(WsgiDoor(calls, store))
    function = of_lambda(calls, store)
    told = path.encode().decode("latin-1")  # as a WSGI server writes it
    assert wsgi.post(path=told).status == 201
    assert asgi.post(path=quote(path, "/")).status == 201
    assert calls.count == 1
    if "%" not in path:  # which an HTTP API does not tell from an escape
        assert function("key-1", path) == 201
    assert calls.count == 1
    assert asgi.post(path=quote(path + "?", "/")).status == 422
    store.close()
