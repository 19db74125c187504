"""How HTTP is spoken to targets: a small protocol, and aiohttp behind it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from oncekey.errors import StoreConfigError
from oncekey.inbox.targets.addresses import BlockedAddressError, public_only

__all__ = ["AiohttpClient", "Client", "Reply", "SendError"]

BODY_READ: Final = 16_384  # bytes of an answer that are read; then the connection is closed
MOST_INTERIM: Final = 8  # answers of 1xx before the one that counts


class SendError(Exception):
    """A request that got no answer. Its text is a short cause, the same for failures alike."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The beginning of an answer."""

    status: int
    retry_after: str | None
    body: bytes = field(repr=False)


class Client(Protocol):
    """Posts to one target. Follows no redirects, uses no proxy of the environment's."""

    async def post(self, url: str, headers: dict[str, str], body: bytes, seconds: float) -> Reply:
        """Send a request and read the beginning of its answer, all within the time.

        Raises:
            SendError: There was no answer.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class AiohttpClient:
    """A client on aiohttp. Connections are its own, so that nobody's rules are another's.

    Args:
        allow_private: Connect to any address, not only to those of the public internet.
        connections: The most connections at a time.

    Raises:
        StoreConfigError: aiohttp is not installed.
    """

    def __init__(self, *, allow_private: bool, connections: int) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError:
            raise StoreConfigError(
                "HTTP targets need aiohttp: run pip install 'oncekey[serve]'"
            ) from None
        self._aiohttp = aiohttp
        self._allow_private = allow_private
        self._connections = connections
        self._session: Any = None

    def _opened(self) -> Any:
        if self._session is None:
            aiohttp = self._aiohttp
            connector = aiohttp.TCPConnector(
                limit=self._connections,
                ttl_dns_cache=10,
                socket_factory=None if self._allow_private else public_only,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,  # a small answer may be a large one in disguise
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None),
                response_class=_bounded(aiohttp),
                skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept", "Content-Type"),
                trust_env=False,
            )
        return self._session

    async def post(self, url: str, headers: dict[str, str], body: bytes, seconds: float) -> Reply:
        """See ``Client``."""
        try:
            async with asyncio.timeout(seconds):
                return await self._post(url, headers, body)
        except TimeoutError:
            raise SendError("timeout") from None
        except _InterimError:
            raise SendError("too many interim answers") from None
        except (OSError, self._aiohttp.ClientError, ValueError) as error:
            raise SendError(_cause(error)) from error

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> Reply:
        async with self._opened().post(
            url, data=body, headers=headers, allow_redirects=False
        ) as answer:
            read = b""
            while len(read) < BODY_READ:
                piece = await answer.content.read(BODY_READ - len(read))
                if not piece:
                    break
                read += piece
            if not answer.content.at_eof():
                answer.close()  # no more of it is read, however much there is
            return Reply(answer.status, answer.headers.get("Retry-After"), read)

    async def aclose(self) -> None:
        """See ``Client``."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _InterimError(Exception):
    """Too many answers of 1xx."""


def _bounded(aiohttp: Any) -> Any:
    """Its class of answers, which reads any number of 1xx without a pause: the loop would stand."""
    base: Any = aiohttp.ClientResponse

    class Answer(base):  # type: ignore[misc, unused-ignore]
        async def start(self, connection: Any) -> Any:
            protocol = connection.protocol
            read, seen = protocol.read, 0

            async def counted() -> Any:
                nonlocal seen
                seen += 1
                if seen > MOST_INTERIM + 1:
                    raise _InterimError
                return await read()

            protocol.read = counted
            try:
                return await super().start(connection)
            finally:
                del protocol.read

    return Answer


def _cause(error: BaseException) -> str:
    """A few words that are the same for failures that are alike."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BlockedAddressError):
            return "private address refused"
        if isinstance(seen, ConnectionRefusedError):
            return "connection refused"
        seen = getattr(seen, "os_error", None) or seen.__cause__ or seen.__context__
    if "private" in str(error) and "allow_private" in str(error):
        return "private address refused"  # several addresses, and none that may be used
    return {
        "ClientConnectorDNSError": "name not found",
        "ClientConnectorCertificateError": "certificate refused",
        "ClientConnectorSSLError": "TLS failed",
        "ServerDisconnectedError": "connection closed",
        "ClientPayloadError": "answer cut off",
        "ClientOSError": "connection lost",
        "ClientConnectorError": "can't connect",
    }.get(type(error).__name__, type(error).__name__)
