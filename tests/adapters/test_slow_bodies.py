"""Bodies that come slowly, or broken, under real servers: given up, answered, and nobody waits."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from tests.adapters.hooks import PATIENCE, make_hook, signed
from tests.adapters.sites import ALL as LOOPS
from tests.adapters.sites import READ_AHEAD, site
from tests.adapters.webhook_scenarios import fresh, send, stripe
from tests.adapters.webhook_sites import Site, serve

THREADED = ("flask-gunicorn", "flask-gthread", "flask-werkzeug", "django-gunicorn")
SOON = "0.3"  # seconds that a body may take; no test is right or wrong by how long that is


@pytest.fixture(scope="module", params=[*THREADED, "wsgi-wsgiref"])
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A site of a WSGI server that gives bodies little time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SITE_BODY_TIMEOUT", SOON)
        yield from serve(request.param, tmp_path_factory.mktemp(request.param))


@contextlib.contextmanager
def begun(url: str, headers: dict[str, str], sent: bytes) -> Iterator[socket.socket]:
    """A request whose body is not whole yet."""
    address = urlsplit(url)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"POST {address.path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""])
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + sent)
        yield connection


def dripped(connection: socket.socket) -> bytes:
    """The status of the answer to a body that comes byte by byte, and never ends."""
    while not select.select([connection], [], [], 0.02)[0]:
        connection.sendall(b" ")
    return status(connection)


def status(connection: socket.socket) -> bytes:
    answer = connection.makefile("rb").readline()
    return answer.split()[1] if answer else b"none"


def slow(url: str) -> contextlib.AbstractContextManager[socket.socket]:
    fields = {"Content-Type": "application/json", "Content-Length": "900"}
    return begun(url, fields, b"{")


def test_a_body_that_never_ends_is_given_up(shop: Site) -> None:
    """A client that sends a byte now and then gets a 408, whatever the server reads at once."""
    with slow(f"{shop.url}/hooks/stripe") as connection:
        assert dripped(connection) == b"408"
    assert send(stripe(shop, fresh())).status_code == 200


@pytest.mark.parametrize("shop", THREADED, indirect=True)  # wsgiref shows no socket to be shut
def test_a_client_that_falls_silent_holds_no_thread_for_long(shop: Site) -> None:
    """More silent clients than threads: each gets a 408, and a genuine delivery is handled."""
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(slow(f"{shop.url}/hooks/stripe")) for _ in range(5)]
        event = fresh()
        assert send(stripe(shop, event)).status_code == 200
        assert [status(connection) for connection in waiting] == [b"408"] * 5
    assert shop.notes("effects").count(event) == 1


@pytest.mark.parametrize("broken", [b"zz\r\n{}\r\n", b"5\r\n{}\r\n0\r\n\r\n", b"-1\r\n\r\n"])
def test_a_broken_chunk_is_a_400(shop: Site, broken: bytes) -> None:
    """No server's own error becomes a 500 with a traceback in the log."""
    fields = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    with begun(f"{shop.url}/hooks/stripe", fields, broken) as connection:
        connection.shutdown(socket.SHUT_WR)
        # A server without chunks takes the body for empty, which has no signature.
        assert status(connection) in (b"400", b"401")
    assert send(stripe(shop, fresh())).status_code == 200
    assert "Traceback" not in (shop.folder / "log").read_text()


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in READ_AHEAD])
def test_event_loops_give_slow_bodies_up_too(name: str) -> None:
    """The same deadline in each framework of an event loop, for async and sync receivers."""
    hooks = {one: make_hook(one, body_timeout=float(SOON)) for one in ("async", "sync")}
    with site(name, hooks) as found:
        for hook in hooks.values():
            with slow(found.base + hook.path) as connection:
                assert dripped(connection) == b"408"
            request = signed(hook, "evt_1")
            answer = httpx.post(
                found.base + hook.path, content=request.body, headers=request.headers
            )
            assert answer.status_code == 200
