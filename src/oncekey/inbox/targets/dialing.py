"""How a connection to a target begins: its name looked up, its address judged, TLS on top.

The address is judged on the socket that is about to connect to it: whatever a name leads to, and
however an address is written, ends up there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final

from oncekey.inbox.targets.addresses import BlockedAddressError, any_address, public_only
from oncekey.inbox.targets.replies import SendError
from oncekey.inbox.targets.wire import Connection

__all__ = ["Dialer"]

_KNOWN_FOR: Final = 10.0  # seconds that a name's addresses are used before it is looked up again
_EACH: Final = 2.0  # seconds for an address, where there are others to try
_SHUTDOWN: Final = 1.0

Make = Callable[[socket.socket], Connection]


@functools.cache
def _usual_tls() -> ssl.SSLContext:
    """Trusts what the system trusts; reading that takes a while, so it is read once."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Dialer:
    """Opens connections to one host and port.

    Args:
        host: A name or an address.
        port: Its port.
        tls: Whether to speak TLS; a context of the caller's, or the usual one.
        allow_private: Connect to any address, not only to those of the public internet.
    """

    def __init__(
        self, host: str, port: int, *, tls: ssl.SSLContext | bool, allow_private: bool
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._socket = any_address if allow_private else public_only
        self._found: list[Any] = []
        self._found_at = 0.0
        self._looking: asyncio.Future[list[Any]] | None = None

    async def open(self, make: Make) -> Connection:
        """A new connection. The caller bounds the time.

        Raises:
            SendError: There is none to be had.
        """
        try:
            sock = await self._connected(await self._addresses())
        except BlockedAddressError:
            raise SendError("private address refused") from None
        except socket.gaierror:
            raise SendError("name not found") from None
        except ConnectionRefusedError:
            raise SendError("connection refused") from None
        except (OSError, UnicodeError) as error:
            raise SendError("can't connect") from error
        try:
            return await self._spoken_to(sock, make)
        except ssl.SSLCertVerificationError:
            raise SendError("certificate refused") from None
        except (ssl.SSLError, ConnectionError, EOFError) as error:
            raise SendError("TLS failed" if self._tls else "connection lost") from error
        except (OSError, ValueError) as error:
            raise SendError("can't connect") from error

    # Names

    async def _addresses(self) -> list[Any]:
        with contextlib.suppress(socket.gaierror):  # an address needs nobody's help
            return _look_up(self._host, self._port, socket.AI_NUMERICHOST)
        loop = asyncio.get_running_loop()
        if self._found and loop.time() - self._found_at < _KNOWN_FOR:
            return self._found
        # One look at a time for a target, in a thread of its own: a name server that hangs takes
        # no thread from anybody else, and does not keep the process from ending.
        if self._looking is None:
            self._looking = loop.create_future()
            looking = (loop, self._looking)
            threading.Thread(target=self._look, args=looking, daemon=True).start()
        return await asyncio.shield(self._looking)

    def _look(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[list[Any]]) -> None:
        found: list[Any] | Exception
        try:
            found = _look_up(self._host, self._port, 0)
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._looked, loop.time(), future, found)

    def _looked(
        self, at: float, future: asyncio.Future[list[Any]], found: list[Any] | Exception
    ) -> None:
        self._looking = None
        if isinstance(found, Exception):
            future.set_exception(found)
            future.exception()  # whoever waited may have gone
        else:
            self._found, self._found_at = found, at
            future.set_result(found)

    # Sockets

    async def _connected(self, addresses: list[Any]) -> socket.socket:
        """One address after another; the last has all the time that is left."""
        failed: OSError | None = None
        for number, info in enumerate(addresses, 1):
            try:
                sock = self._socket(info)
            except OSError as error:
                failed = failed or error
                continue
            try:
                sock.setblocking(False)
                async with asyncio.timeout(_EACH if number < len(addresses) else None):
                    await asyncio.get_running_loop().sock_connect(sock, info[4])
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                failed = error  # a time that is over is one, too
                continue
            return sock
        self._found = []  # the name may lead elsewhere by now
        raise failed or OSError("no address")

    async def _spoken_to(self, sock: socket.socket, make: Make) -> Connection:
        loop = asyncio.get_running_loop()
        connection = make(sock)
        more: dict[str, Any] = {}
        if self._tls:
            more["ssl"] = self._tls if isinstance(self._tls, ssl.SSLContext) else _usual_tls()
            more["server_hostname"] = self._host
            more["ssl_shutdown_timeout"] = _SHUTDOWN
        try:
            await loop.create_connection(lambda: connection, sock=sock, **more)
        except ValueError:  # before there was a transport, which closes what it has
            sock.close()
            raise
        return connection


def _look_up(host: str, port: int, flags: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
