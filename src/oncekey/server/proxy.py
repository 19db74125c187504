"""The ``Idempotency-Key`` rules before any upstream, streaming both ways; ``oncekey proxy``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from oncekey.abc import AsyncStore
from oncekey.http.answer import Answer
from oncekey.http.asgi import ASGIScope, IdempotencyMiddleware, Receive, Send, send_answer
from oncekey.server.forwarding import ProxyRules, Way, answer_fields, problem
from oncekey.server.listening import Announce, listen, run_server, uvicorn_config
from oncekey.server.tunnel import tunnel_to
from oncekey.stores.urls import aconnect

__all__ = ["Proxy", "ProxySettings", "serve_proxy"]

logger = logging.getLogger("oncekey")

LONGEST_FIELD = 65_536
_CUT_OFF = 5.0  # seconds after the time that requests have
IDLE = 4.0  # seconds that a connection waits for another request: servers close it after 5 or more


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """What ``oncekey proxy`` does.

    Attributes:
        rules: What is done with requests.
        store: The URL of the store of keys.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        stop_seconds: How long requests under way have to end.
    """

    rules: ProxyRules
    store: str
    host: str = "127.0.0.1"
    port: int = 8081
    stop_seconds: float = 20.0


class _BrokenError(Exception):
    """The upstream went away in the middle of its answer."""


class _Upload:
    """The body of a request on its way, once, and the client's going away."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._begun = False
        self.done = asyncio.Event()
        self.failed: Answer | None = None  # why it did not all come
        self.deadline: asyncio.Timeout | None = None  # of the upstream: it waits for the client

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it comes in."""
        if self._begun:
            raise _BrokenError  # the client of HTTP would send it again, and it is gone
        self._begun = True
        more = True
        while more:
            self._upstream_has(None)
            try:
                async with asyncio.timeout(self._seconds):
                    message = await self._receive()
            except TimeoutError:
                self.failed = problem(
                    408, "body-slow", "Request timeout", "The body did not come in time."
                )
                raise _BrokenError from None
            finally:
                self._upstream_has(self._seconds)
            if message["type"] == "http.disconnect":
                self.failed = problem(400, "client-gone", "Bad request", "The body broke off.")
                raise _BrokenError
            more = message.get("more_body", False)
            if part := message.get("body", b""):
                yield part
        self.done.set()

    def _upstream_has(self, seconds: float | None) -> None:
        if self.deadline is not None and not self.deadline.expired():
            now = asyncio.get_running_loop().time()
            self.deadline.reschedule(None if seconds is None else now + seconds)

    async def client_gone(self) -> None:
        """Wait until the client hangs up, after its body."""
        await self.done.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


class _Forwarder:
    """The ASGI app that asks the upstream. It knows nothing of keys."""

    def __init__(self, rules: ProxyRules, session: aiohttp.ClientSession) -> None:
        self._rules = rules
        self._upstream = rules.upstream
        self._seconds = rules.answer_seconds
        self._session = session

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Pass one request on; what of it is under way ends if the client hangs up."""
        upload = _Upload(receive, self._seconds)
        work = asyncio.ensure_future(self._forward(scope, upload, send))
        gone = asyncio.ensure_future(upload.client_gone())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for one in (work, gone):
                one.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _forward(self, scope: ASGIScope, upload: _Upload, send: Send) -> None:
        try:
            asked = self._asked(scope, upload)
        except ValueError:
            told = "The path or a header can't be passed on."
            await send_answer(send, problem(400, "not-forwardable", "Bad request", told))
            return
        try:
            async with asyncio.timeout(self._seconds) as upload.deadline:
                answer = await self._session.request(**asked)
        except (aiohttp.ClientError, OSError, _BrokenError) as error:
            instead = upload.failed or _instead(error)
            logger.warning("the upstream gave no answer (%s)", type(error).__name__)
            await send_answer(send, instead, head=scope["method"] == "HEAD")
            return
        async with answer:
            await self._relay(answer, send)

    def _asked(self, scope: ASGIScope, upload: _Upload) -> dict[str, Any]:
        """What to ask the upstream for.

        Raises:
            ValueError: It can't be asked for that.
        """
        to, fields = self._upstream, scope["headers"]
        path = scope.get("raw_path") or b""
        if not path.startswith(b"/") or self._rules.refuses(path):
            raise ValueError("no path to pass on")
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        name = f"[{to.host}]" if ":" in to.host else to.host
        target = f"{to.scheme}://{name}:{to.port}{to.path}{(path + query).decode('ascii')}"
        client = (scope.get("client") or ("-",))[0]
        named = {name for name, _ in fields}
        bodied = b"transfer-encoding" in named or dict(fields).get(b"content-length", b"0") != b"0"
        if not bodied:
            upload.done.set()
        return {
            "method": scope["method"],
            "url": URL(target, encoded=True),
            "headers": [
                (name.decode("ascii"), value.decode("utf-8"))
                for name, value in self._rules.request_fields(fields, client, scope["scheme"])
            ],
            "data": upload.chunks() if bodied else None,
            "allow_redirects": False,
        }

    async def _relay(self, answer: aiohttp.ClientResponse, send: Send) -> None:
        """Pass the answer on as it comes.

        Raises:
            _BrokenError: It ends too early.
        """
        fields = answer_fields(answer.status, answer.raw_headers)
        endless = answer.content_type == "text/event-stream"
        left = answer.content_length  # None: not known
        await send({"type": "http.response.start", "status": answer.status, "headers": fields})
        more = True
        while more:
            try:
                async with asyncio.timeout(None if endless else self._seconds):
                    part = await answer.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                logger.warning("the upstream broke off its answer (%s)", type(error).__name__)
                raise _BrokenError from None
            if left is not None:
                left -= len(part)
            # Whoever has all bytes that were promised has the answer: the last of them must be sent
            # as the last, as an answer is recorded before that leaves.
            more = bool(part) and left != 0
            await send({"type": "http.response.body", "body": part, "more_body": more})


def _instead(error: Exception) -> Answer:
    """What to say for an upstream that says nothing."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        told = "Nothing was done: the upstream can't be reached. Send the request again later."
        return problem(502, "upstream-unreachable", "Bad gateway", told)
    told = "Whether it was done is not known. Send the request again, with the same key."
    if isinstance(error, TimeoutError):
        return problem(504, "upstream-slow", "Gateway timeout", told)
    return problem(502, "upstream-broke-off", "Bad gateway", told)


class Proxy:
    """An ASGI app: the rules before one upstream. Make it where a loop runs, and close it.

    An answer that broke off ends the connection, or is a 502 if nothing of it left yet.

    Args:
        rules: What is done with requests.
        store: Where keys are kept.

    Raises:
        PolicyError: A setting can't work.
    """

    def __init__(self, rules: ProxyRules, store: AsyncStore) -> None:
        self._session = _session(rules)
        self._app = IdempotencyMiddleware(
            _Forwarder(rules, self._session), store, settings=rules.header
        )
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        begun = False

        async def noting(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self._under_way += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, noting)
        except _BrokenError as error:
            if not begun:
                await send_answer(send, _instead(error))
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def aclose(self) -> None:
        """Close its connections, after what is under way."""
        await self._idle.wait()
        await self._session.close()


async def serve_proxy(settings: ProxySettings, announce: Announce | None = None) -> None:
    """Serve until a signal says to stop.

    Args:
        settings: What to do.
        announce: Told the address.

    Raises:
        StoreError: The store can't be used.
        PolicyError: A setting can't work, or a package is missing.
    """
    rules = settings.rules
    listeners = listen(settings.host, settings.port)
    async with aconnect(settings.store) as store:
        proxy = Proxy(rules, store)
        config = uvicorn_config(
            proxy,
            settings.stop_seconds,
            ws=tunnel_to(lambda target: Way(rules, target)),
        )
        try:
            await run_server(config, listeners, announce, bound=settings.stop_seconds + _CUT_OFF)
        finally:
            await proxy.aclose()


def _session(rules: ProxyRules) -> aiohttp.ClientSession:
    """A client of HTTP that adds nothing, follows nothing and keeps nothing of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE),
        timeout=aiohttp.ClientTimeout(total=None, connect=rules.connect_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        max_line_size=LONGEST_FIELD,
        max_field_size=LONGEST_FIELD,
    )
