"""Stores over TLS. The servers of the tests speak none: a terminator stands before each."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from tests.servers.papers import Papers
from tests.servers.redis import Server
from tests.servers.wire import SSL_REQUEST

from oncekey import aconnect, connect
from oncekey.models import Key, Scope, Terms, Verdict
from oncekey.testing import Proxy

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)
A, B = b"a" * 16, b"b" * 16


class Terminator:
    """Takes TLS on a port, and hands plain bytes to a server. PostgreSQL's clients ask for it."""

    def __init__(self, papers: Papers, port: int, asked: bool) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(papers.certificate, papers.key)
        self._target = port
        self._asked = asked
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.versions: set[str | None] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as ends:
            ends.callback(plain.close)
            if self._asked:
                assert struct.unpack("!ii", plain.recv(8)) == (8, SSL_REQUEST)
                plain.sendall(b"S")
            safe = ends.enter_context(self._context.wrap_socket(plain, server_side=True))
            server = ends.enter_context(socket.create_connection(("127.0.0.1", self._target)))
            self.versions.add(safe.version())
            while True:
                ready = [safe] if safe.pending() else select.select([safe, server], [], [])[0]
                for one in ready:
                    data = one.recv(65_536)
                    if not data:
                        return
                    (server if one is safe else safe).sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(params=["postgresql", "redis"])
def url(request: pytest.FixtureRequest, papers: Papers) -> Iterator[str]:
    """A server that takes nothing but TLS, and is verified by its name."""
    if request.param == "postgresql":
        plain = urlsplit(request.getfixturevalue("own_url"))
        terminator = Terminator(papers, plain.port or 5432, asked=True)
        place = f"{plain.username}@127.0.0.1:{terminator.port}{plain.path}"
        yield f"postgresql://{place}?sslmode=verify-full&sslrootcert={papers.root}"
    else:
        server: Server = request.getfixturevalue("redis_server")
        terminator = Terminator(papers, server.port, asked=False)
        yield f"rediss://127.0.0.1:{terminator.port}?check=off&ssl_ca_certs={papers.root}"
    terminator.close()
    assert terminator.versions == {"TLSv1.3"}


def key(name: str) -> Key:
    return Key(Scope("once", "tls"), name)


def test_a_call_over_tls(url: str) -> None:
    """Claim, complete and replay, with the server's certificate verified."""
    with connect(url) as store:
        won = store.claim(key("k"), A, b"f", TERMS)
        assert won.verdict is Verdict.WON
        assert store.complete(key("k"), A, won.fence, b"j" * 100_000, TERMS)
        reply = store.claim(key("k"), B, b"f", TERMS)
        assert (reply.verdict, reply.answer) == (Verdict.REPLAY, b"j" * 100_000)


async def test_an_async_call_over_tls(url: str) -> None:
    """Async: the same."""
    async with aconnect(url) as store:
        won = await store.claim(key("a"), A, b"f", TERMS)
        assert await store.complete(key("a"), A, won.fence, b"j1", TERMS)
        assert (await store.claim(key("a"), B, b"f", TERMS)).answer == b"j1"


def test_broken_tls_connections_are_made_anew(url: str) -> None:
    """Connections that were reset, and replies that were lost, cost no outcome."""
    with Proxy(url) as proxy, connect(proxy.url) as store:
        won = store.claim(key("r"), A, b"f", TERMS)
        proxy.reset()
        assert store.complete(key("r"), A, won.fence, b"j1", TERMS)
        proxy.reset()
        assert store.claim(key("r"), B, b"f", TERMS).answer == b"j1"
