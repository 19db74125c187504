"""Answers in parts, clients that hang up and errors on the way, under WSGI."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncekey import BackendMismatchError, MemoryBackend, MemoryStore
from oncekey.http.wsgi import IdempotencyMiddleware


class Client:
    """Calls a WSGI application part by part."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.status = 0
        self.headers: dict[str, str] = {}
        self.written = b""

    def start_response(self, status: str, headers: Any, exc_info: Any = None) -> Any:
        self.status = int(status[:3])
        self.headers = {name.lower(): value for name, value in headers}

        def write(part: bytes) -> None:
            self.written += part

        return write

    def open(self, body: bytes = b"", **environ: Any) -> Any:
        self.written = b""
        self.status = 0
        return self.app(
            {
                "REQUEST_METHOD": "POST",
                "PATH_INFO": "/",
                "HTTP_IDEMPOTENCY_KEY": "k",
                "HTTP_AUTHORIZATION": "me",
                "CONTENT_LENGTH": str(len(body)),
                "wsgi.input": io.BytesIO(body),
                **environ,
            },
            self.start_response,
        )

    def post(self, body: bytes = b"", **environ: Any) -> tuple[int, bytes, bool]:
        answer = self.open(body, **environ)
        content = b"".join(answer)
        if hasattr(answer, "close"):
            answer.close()
        return self.status, self.written + content, "idempotent-replayed" in self.headers


def application(
    parts: Callable[[], Iterator[bytes]], status: str = "200 OK"
) -> tuple[Any, list[int]]:
    calls: list[int] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        calls.append(1)
        start_response(status, [("Content-Type", "text/plain")])
        return parts()

    return app, calls


def test_streamed_answers_are_kept_whole() -> None:
    """Parts are passed on as they come, each once the next is there; the retry gets them whole."""
    app, calls = application(lambda: iter([b"one,", b"two,", b"three"]))
    client = Client(IdempotencyMiddleware(app, MemoryStore()))
    assert list(client.open()) == [b"one,", b"two,", b"three"]
    assert client.post() == (200, b"one,two,three", True)
    assert calls == [1]


def test_the_outcome_is_recorded_before_the_last_part() -> None:
    """When the last part is given to the server, a retry already finds the answer."""
    app, calls = application(lambda: iter([b"one,", b"two"]))
    guarded = IdempotencyMiddleware(app, MemoryStore())
    parts = Client(guarded).open()
    assert next(parts) == b"one,"
    assert Client(guarded).post()[0] == 409
    assert next(parts) == b"two"
    assert Client(guarded).post() == (200, b"one,two", True)
    assert calls == [1]


def test_streams_over_the_cap_are_done_without_a_body() -> None:
    """A long stream goes through whole; its retry is told that it was done."""
    app, calls = application(lambda: iter([b"x" * 60] * 3))
    client = Client(IdempotencyMiddleware(app, MemoryStore(), max_answer_bytes=100))
    assert client.post() == (200, b"x" * 180, False)
    status, body, replayed = client.post()
    assert (status, replayed, calls) == (200, True, [1])
    assert b"body-unavailable" in body


def test_a_client_that_hangs_up_does_not_free_the_key() -> None:
    """The server closes the answer halfway: the request counts as done."""
    closed = []

    class Parts:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"one,", b"two,", b"three"])

        def close(self) -> None:
            closed.append(1)

    app, calls = application(Parts)  # type: ignore[arg-type]
    guarded = IdempotencyMiddleware(app, MemoryStore())
    answer = Client(guarded).open()
    assert next(answer) == b"one,"
    answer.close()
    status, body, replayed = Client(guarded).post()
    assert (status, replayed, calls, closed) == (200, True, [1], [1])
    assert b"body-unavailable" in body


def test_an_error_halfway_counts_as_done_once_the_status_is_out() -> None:
    """Before the status leaves an error frees the key; after it, the client has seen a success."""

    def early() -> Iterator[bytes]:
        raise ZeroDivisionError
        yield b""

    app, calls = application(early)
    client = Client(IdempotencyMiddleware(app, MemoryStore()))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            client.post()
    assert calls == [1, 1]

    def late() -> Iterator[bytes]:
        yield b"one"
        yield b"two"
        raise ZeroDivisionError

    app, calls = application(late)
    client = Client(IdempotencyMiddleware(app, MemoryStore()))
    with pytest.raises(ZeroDivisionError):
        client.post()
    assert client.post()[2]
    assert calls == [1]


def test_work_after_the_answer_that_raises_does_not_free_the_key() -> None:
    """What runs in ``close``, as background work does, is not part of the outcome."""

    class Broken:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"paid"])

        def close(self) -> None:
            raise ZeroDivisionError

    app, calls = application(Broken)  # type: ignore[arg-type]
    client = Client(IdempotencyMiddleware(app, MemoryStore()))
    with pytest.raises(ZeroDivisionError):
        client.post()
    assert client.post() == (200, b"paid", True)
    assert calls == [1]


def test_the_old_way_to_write() -> None:
    """What is written by ``write()`` is kept like what is returned."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        write = start_response("200 OK", [])
        write(b"one,")
        write(b"two,")
        return [b"three"]

    client = Client(IdempotencyMiddleware(app, MemoryStore()))
    assert client.post() == (200, b"one,two,three", False)
    assert client.post() == (200, b"one,two,three", True)


def test_an_error_page_replaces_a_status_that_was_not_sent() -> None:
    """``start_response`` with ``exc_info`` says another status: that one counts."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            start_response("500 Oops", [], (type(error), error, error.__traceback__))
        return [b"oops"]

    client = Client(IdempotencyMiddleware(app, MemoryStore()))
    assert client.post() == (500, b"oops", False)
    assert client.post() == (500, b"oops", False)


def test_bodies_of_unknown_length() -> None:
    """Chunked bodies are read where the server marks their end, up to the limit."""
    bodies = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        bodies.append(environ["wsgi.input"].read())
        start_response("200 OK", [])
        return [b"ok"]

    client = Client(IdempotencyMiddleware(app, MemoryStore(), max_body_bytes=100))
    chunked = {"CONTENT_LENGTH": "", "wsgi.input_terminated": True}
    assert client.post(b"x" * 100, **chunked)[0] == 200
    assert client.post(b"x" * 101, **chunked)[0] == 413
    assert bodies == [b"x" * 100]


def test_a_body_that_is_cut_off_is_refused() -> None:
    """Less than was declared is half a request."""
    app, calls = application(lambda: iter([b"x"]))
    client = Client(IdempotencyMiddleware(app, MemoryStore()))
    assert client.post(b"ab", CONTENT_LENGTH="3")[0] == 400
    assert calls == []


def test_an_async_store_is_refused() -> None:
    """It can't be awaited here: the error names what to pass."""
    with pytest.raises(
        BackendMismatchError, match=r"got AsyncMemoryStore: pass a URL, MemoryStore\(\.\.\.\)"
    ):
        IdempotencyMiddleware(lambda e, s: [], MemoryBackend())  # type: ignore[arg-type]
