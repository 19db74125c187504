"""Which requests are the same, and which bodies are refused."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.http.fingerprint import Fingerprint, fingerprint
from oncekey.http.problems import Refusal

MOST = 100_000


def mark(
    body: bytes,
    content_type: str = "application/json",
    *,
    method: str = "POST",
    target: bytes = b"/pay",
    encoding: str = "",
    how: Fingerprint = "auto",
) -> bytes:
    return fingerprint(how, method, target, content_type, encoding, body, MOST)


def multipart(boundary: str, *, note: str = "hi", file: bytes = b"\x00\r\n--x\r\nbytes") -> bytes:
    line = f"--{boundary}\r\n".encode()
    return (
        line
        + f'Content-Disposition: form-data; name="note"\r\n\r\n{note}\r\n'.encode()
        + line
        + b'Content-Disposition: form-data; name="f"; filename="a.bin"\r\n'
        + b"Content-Type: application/octet-stream\r\n\r\n"
        + file
        + f"\r\n--{boundary}--\r\n".encode()
    )


def test_json_is_compared_by_value() -> None:
    """Spaces, key order and the spelling of numbers don't matter; values do."""
    assert mark(b'{"a":1,"b":2.0}') == mark(b'{ "b": 2, "a": 1 }')
    assert mark(b'{"a":1}') != mark(b'{"a":2}')
    assert mark(b'{"a":null}') != mark(b"{}")
    assert mark(b'{"a":1}', "application/vnd.api+json; charset=utf-8") == mark(b'{"a": 1}')


def test_method_path_and_query_are_part_of_it() -> None:
    """The same body on another route, or by another method, is another request."""
    marks = {
        mark(b"{}"),
        mark(b"{}", method="PATCH"),
        mark(b"{}", target=b"/refund"),
        mark(b"{}", target=b"/pay?dry=1"),
    }
    assert len(marks) == 4


def test_raw_compares_bytes() -> None:
    """With ``raw`` another spelling is another request, and nothing is parsed."""
    assert mark(b'{"a":1}', how="raw") != mark(b'{"a": 1}', how="raw")
    assert mark(b"{broken", how="raw") == mark(b"{broken", how="raw")


def test_own_function() -> None:
    """A function of body and type decides what counts."""

    def only_id(body: bytes, content_type: str) -> str:
        return str(json.loads(body)["id"])

    assert mark(b'{"id":1,"at":5}', how=only_id) == mark(b'{"id":1,"at":6}', how=only_id)
    assert mark(b'{"id":1}', how=only_id) != mark(b'{"id":2}', how=only_id)


def test_multipart_is_compared_by_its_parts() -> None:
    """A retry with a fresh boundary is the same request; another file or field is not."""
    kind = 'multipart/form-data; boundary="{}"'.format
    first = mark(multipart("aaa"), kind("aaa"))
    assert first == mark(multipart("zzzz"), kind("zzzz"))
    assert first == mark(multipart("zzzz"), "multipart/form-data; charset=utf-8; BOUNDARY=zzzz")
    assert first != mark(multipart("aaa", note="ho"), kind("aaa"))
    assert first != mark(multipart("aaa", file=b"other"), kind("aaa"))


@pytest.mark.parametrize(
    "body, content_type",
    [
        (b"no boundary in sight", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\ncut off", "multipart/form-data; boundary=x"),
        (b"--x\r\nno blank line\r\n--x--", "multipart/form-data; boundary=x"),
        (b"--x--", "multipart/form-data"),
        (b"--x\r\n\r\n\r\n" * 2000 + b"--x--", "multipart/form-data; boundary=x"),
        (b"{", "application/json"),
        (b'{"a":1,"a":2}', "application/json"),
        (b'{"a":"\xff"}', "application/json"),
        (b"\xef\xbb\xbf{}", "application/json"),
        (b"[" * 10_000 + b"]" * 10_000, "application/json"),
        (b"NaN", "application/json"),
        (b'"\\ud800"', "application/json"),
    ],
)
def test_malformed_bodies_are_refused(body: bytes, content_type: str) -> None:
    """Two readers could take them for two things: a 400 that says what is wrong."""
    with pytest.raises(Refusal) as refused:
        mark(body, content_type)
    assert refused.value.name == "body-malformed"


def test_integers_past_a_double_are_taken_as_spelled() -> None:
    """A 64-bit id is good JSON: it is compared by its digits, never rounded."""
    assert mark(b'{"id":9007199254740993}') == mark(b'{"id":9007199254740993}')
    assert mark(b'{"id":9007199254740993}') != mark(b'{"id":9007199254740992}')


@pytest.mark.parametrize("encoding, pack", [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies_are_compared_by_what_they_hold(
    encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    """Two runs of gzip need not give the same bytes."""
    assert mark(pack(b'{"a":1}'), encoding=encoding) == mark(pack(b'{"a": 1 }'), encoding=encoding)
    assert mark(pack(b'{"a":1}'), encoding=encoding) == mark(b'{"a":1}')


@pytest.mark.parametrize(
    "body, name",
    [
        (gzip.compress(b"0" * 50_000_000), "body-too-large"),
        (gzip.compress(b"{}")[:-5], "body-malformed"),
        (gzip.compress(b"{}") + b"more", "body-malformed"),
        (b"no gzip", "body-malformed"),
    ],
    ids=["a bomb", "cut off", "something after it", "no gzip"],  # gzip writes the time
)
def test_bombs_and_broken_compression_are_refused(body: bytes, name: str) -> None:
    """A body is never unpacked past the limit."""
    with pytest.raises(Refusal) as refused:
        mark(body, encoding="gzip")
    assert refused.value.name == name


@given(
    st.binary(max_size=300),
    st.sampled_from(
        ["application/json", "multipart/form-data; boundary=a", "text/plain", "", "multipart/x"]
    ),
    st.sampled_from(["", "gzip", "deflate", "br"]),
)
def test_any_body_has_a_fingerprint_or_is_refused(
    body: bytes, content_type: str, encoding: str
) -> None:
    """Hostile bytes never get further than a refusal."""
    try:
        found = mark(body, content_type, encoding=encoding)
    except Refusal:
        return
    assert len(found) == 64
    assert found == mark(body, content_type, encoding=encoding)
