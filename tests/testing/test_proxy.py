"""The network that fails when a test says so, before a server that echoes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from oncekey.testing import Proxy

PATIENCE = 30.0


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy before a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo(one: socket.socket) -> None:
            with one, contextlib.suppress(OSError):
                while data := one.recv(65_536):
                    one.sendall(data)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = listener.accept()
                    threading.Thread(target=echo, args=(one,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with Proxy(f"127.0.0.1:{listener.getsockname()[1]}") as made:
            yield made
        listener.shutdown(socket.SHUT_RDWR)


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)


def echoed(one: socket.socket, data: bytes) -> bytes:
    one.sendall(data)
    return one.recv(65_536)


def works(proxy: Proxy) -> bool:
    """Whether a new connection is of any use."""
    try:
        with connected(proxy) as one:
            return echoed(one, b"hello") == b"hello"
    except OSError:
        return False


def until_it_breaks(one: socket.socket) -> None:
    """Use a connection for as long as it lasts; one that was closed in order is broken too."""
    while echoed(one, b"x") == b"x":
        pass
    raise ConnectionError


def test_replies_to_some_requests_are_lost(proxy: Proxy) -> None:
    """Only the reply to a request that holds the bytes is, and once."""
    proxy.lose_replies(1, after=b"COMMIT")
    with connected(proxy) as one:
        assert echoed(one, b"BEGIN") == b"BEGIN"
        assert echoed(one, b"COMMIT") == b""
    with connected(proxy) as one:
        assert echoed(one, b"COMMIT") == b"COMMIT"
    assert proxy.lost == 1


def test_a_delay_holds_both_ways(proxy: Proxy) -> None:
    """A round trip takes the delay twice; afterwards it does not."""
    with connected(proxy) as one:
        with proxy.delay(0.1):
            begun = time.monotonic()
            assert echoed(one, b"slow") == b"slow"
            assert time.monotonic() - begun >= 0.2
        assert echoed(one, b"again") == b"again"


def test_a_reset_is_an_error_and_not_an_end(proxy: Proxy) -> None:
    """What stands is broken as by a machine that vanished; new connections work."""
    with connected(proxy) as one:
        assert echoed(one, b"x") == b"x"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    assert works(proxy)


def test_a_cut_is_an_end(proxy: Proxy) -> None:
    """What stands is closed in order."""
    with connected(proxy) as one:
        assert echoed(one, b"x") == b"x"
        proxy.cut()
        assert one.recv(1) == b""


def test_a_blackhole_loses_what_it_takes(proxy: Proxy) -> None:
    """Nothing comes back, not even later; connections that lost something are cut at its end."""
    old, calm = connected(proxy), connected(proxy)
    with old, calm:
        assert echoed(old, b"x") == b"x"
        assert echoed(calm, b"x") == b"x"
        with proxy.blackhole():
            old.sendall(b"lost")
            with connected(proxy) as new:
                new.sendall(b"lost too")
                new.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    new.recv(1)
        assert old.recv(1) == b""
        assert echoed(calm, b"y") == b"y"


def test_a_refusing_server_is_down(proxy: Proxy) -> None:
    """What stands breaks, and new connections are of no use until it is over."""
    with connected(proxy) as one:
        assert echoed(one, b"x") == b"x"
        with proxy.refuse():
            with pytest.raises(OSError):
                until_it_breaks(one)
            assert not works(proxy)
    assert works(proxy)


def test_flapping_breaks_connections_until_it_is_over(proxy: Proxy) -> None:
    """Every connection breaks sooner or later; afterwards none does."""
    with proxy.flapping(0.01, seed=1):
        for _ in range(3):
            with pytest.raises(OSError), connected(proxy) as one:
                until_it_breaks(one)
    assert works(proxy)
    assert proxy.connections == 4
