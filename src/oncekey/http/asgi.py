"""``IdempotencyMiddleware`` for any ASGI application.

The first answer is recorded before its last byte leaves. Until then the key is held: a framework
middleware inside, a background task that raises and a client that hangs up don't free it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from oncekey._core.call import Job, agive_up, arecord, guarded
from oncekey._core.flows import Claim
from oncekey.abc import AsyncStore
from oncekey.errors import BackendMismatchError, ClaimLostError, StoreError
from oncekey.http.answer import Answer
from oncekey.http.body import ClientGoneError, SlowBodyError, asgi_body
from oncekey.http.entry import aenter, aidentify
from oncekey.http.facts import Facts, asgi_facts
from oncekey.http.problems import Refusal, unread
from oncekey.http.rules import Rules, settings_of
from oncekey.http.settings import Settings
from oncekey.policy import milliseconds
from oncekey.stores.urls import aconnect

__all__ = ["IdempotencyMiddleware", "claim_now", "ready"]

logger = logging.getLogger("oncekey")

ASGIScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[ASGIScope, Receive, Send], Awaitable[None]]

MARK: Final = "oncekey.http"  # in the scope of a request that is guarded already
# Ways to answer that go past ``send``, so that the answer could not be recorded.
BYPASSES: Final = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)


def ready(
    store: AsyncStore | str, settings: Settings | None, options: dict[str, Any]
) -> tuple[AsyncStore, Settings]:
    """An open store and checked settings, from what somebody gave.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is synchronous.
    """
    checked = settings_of(settings, options)
    opened = aconnect(store) if isinstance(store, str) else store
    if not isinstance(opened, AsyncStore):
        raise BackendMismatchError(
            f"this needs an async store, got {type(store).__name__}: pass a URL, MemoryBackend(), "
            "SQLiteBackend('file.db') or aconnect(url)"
        )
    return opened, checked


LATER: ContextVar[Callable[[], Awaitable[Answer | None]] | None] = ContextVar(
    "oncekey_later", default=None
)


async def claim_now() -> Answer | None:
    """Claim the key of the request that is being handled, where that was left to its endpoint.

    Returns:
        What to answer instead of running; ``None``: go on.
    """
    later = LATER.get()
    if later is None:
        return None
    LATER.set(None)
    return await later()


class IdempotencyMiddleware:
    """Runs each keyed request once, and replays its answer to every retry.

    Args:
        app: The application.
        store: An async store, or a URL.
        settings: A ``Settings``; its options may be given singly instead.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is synchronous.

    Example:
        >>> from oncekey.http.asgi import IdempotencyMiddleware
        >>> async def app(scope, receive, send):
        ...     await send({"type": "http.response.start", "status": 201, "headers": []})
        ...     await send({"type": "http.response.body", "body": b"made"})
        >>> guarded = IdempotencyMiddleware(app, "memory://")
    """

    inside = False  # whether the application calls claim_now, after its own checks

    def __init__(
        self,
        app: ASGIApp,
        store: AsyncStore | str,
        *,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        self.app = app
        self.store, checked = ready(store, settings, options)
        self.rules = Rules(checked)
        grace = checked.disconnect_grace
        self.grace = None if grace is None else milliseconds(grace, "disconnect_grace") / 1000

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        rules = self.rules
        if scope["type"] != "http" or scope["method"] not in rules.methods or MARK in scope:
            await self._pass(scope, receive, send)
            return
        facts = asgi_facts(scope, rules.header_name, scope)
        exchange: _Exchange | None = None
        instead: Answer | None = None
        try:
            key = rules.key(facts)
            if key is not None:
                # Who is nobody is refused before a body is read, unless that is known later.
                caller = None if self.inside else await aidentify(rules, self.store, facts)
                most = rules.settings.max_body_bytes
                body = await asgi_body(receive, most, facts.length, rules.body_seconds)
                exchange = _Exchange(self, key, facts, receive, send, body)
                if caller is not None:
                    instead = await exchange.open(caller)
        except Refusal as no:
            await _send(send, rules.refusal(no))
            return
        except SlowBodyError as slow:
            await _send(send, rules.refusal(unread(slow)))
            return
        except ClientGoneError:
            return  # before its request was complete: nothing was begun
        # Not in the block above: what the application raises is its own affair.
        if exchange is None:
            await self._pass(scope, receive, send)
        elif instead is None:
            await self._run(exchange, scope)
        else:
            await self.admit(scope)
            await _send(send, instead)

    async def _pass(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Let a request through that is not guarded, or not by this."""
        if not self.inside or MARK in scope:
            await self.app(scope, receive, send)
            return
        # The request of a handler that calls its own application: that one's key is not its own.
        token = LATER.set(None)
        try:
            await self.app(scope, receive, send)
        finally:
            LATER.reset(token)

    async def admit(self, scope: ASGIScope) -> None:
        """Called before a replay, for frameworks whose own checks are inside of this."""

    async def _run(self, exchange: _Exchange, scope: ASGIScope) -> None:
        """Run the application, as the one that holds the key, or will."""
        child = {**scope, MARK: True}
        extensions = scope.get("extensions")
        if extensions:
            child["extensions"] = {
                name: value for name, value in extensions.items() if name not in BYPASSES
            }
        try:
            with exchange.held:
                if exchange.claim is not None:
                    exchange.hold(exchange.claim)
                else:
                    # What the framework's checks find out stands in the scope that they are given.
                    exchange.facts = exchange.facts._replace(source=child)
                    # Who shares this context must not find it: the endpoint may never be reached,
                    # and a handler that calls its own application has one of its own.
                    exchange.held.callback(LATER.set, LATER.get())
                    LATER.set(exchange.open_inside)
                await self.app(child, exchange.receive, exchange.send)
        except GeneratorExit:
            raise  # thrown away with its loop: the lease frees the key
        except BaseException as error:
            claim = exchange.claim
            if claim is None:
                raise
            if exchange.began_to_answer:
                await exchange.record(None)  # the client has seen a status: it counts
            elif not exchange.recorded:
                await agive_up(self.store, exchange.job, claim, error)
                if isinstance(error, ClaimLostError) and claim.lost:
                    told = self.rules.refusal(self.rules.failure(error))
                    await _send(exchange.real_send, told)
                    return
            if isinstance(error, ClaimLostError) and claim.lost:
                return  # stopped in the middle of its answer, which ends here
            raise
        if exchange.claim is not None and not exchange.recorded and exchange.start is not None:
            await exchange.record(None)  # the application stopped halfway, as if it was done
            await exchange.begin()


class _Exchange:
    """One guarded request: gives the body to the application, and keeps what it answers."""

    __slots__ = (
        "beat",
        "began_to_answer",
        "body",
        "claim",
        "facts",
        "finished",
        "given",
        "gone_at",
        "grace",
        "held",
        "instead",
        "job",
        "key",
        "parts",
        "real_receive",
        "real_send",
        "recorded",
        "rules",
        "size",
        "start",
        "store",
        "whole",
    )

    job: Job  # once it is opened

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        key: str,
        facts: Facts,
        receive: Receive,
        send: Send,
        body: bytes,
    ) -> None:
        self.rules = middleware.rules
        self.grace = middleware.grace
        self.gone_at: float | None = None  # when it was first seen that the client is gone
        self.store = middleware.store
        self.key = key
        self.facts = facts
        self.claim: Claim | None = None
        self.held = contextlib.ExitStack()
        self.real_receive = receive
        self.real_send = send
        self.body = body
        self.whole = body
        self.beat: Any = None
        self.given = False
        self.start: Message | None = None
        self.parts: list[bytes] | None = []  # None: too much to keep
        self.size = 0
        self.began_to_answer = False  # the client has seen the status
        self.recorded = False
        self.finished: asyncio.Event | None = None
        self.instead: Answer | None = None  # what to answer in place of what the application said

    async def open(self, caller: tuple[str, str]) -> Answer | None:
        """Claim the key; or what to answer instead.

        Raises:
            Refusal: It can't be had.
        """
        self.job = self.rules.job(self.key, caller, self.facts, self.whole)
        self.whole = b""
        opened = await aenter(self.rules, self.store, self.job, self.facts)
        if isinstance(opened, Answer):
            return opened
        self.claim = opened
        return None

    def hold(self, claim: Claim) -> None:
        """Keep the claim alive until the application is done."""
        self.beat = self.held.enter_context(guarded(self.store, self.job, claim))

    async def open_inside(self) -> Answer | None:
        """``open`` and ``hold``, when the framework has let the request through."""
        try:
            instead = await self.open(await aidentify(self.rules, self.store, self.facts))
        except Refusal as no:
            return self.rules.refusal(no)
        if self.claim is not None:
            self.hold(self.claim)
        return instead

    async def receive(self) -> Message:
        """The body; then whatever comes after it."""
        if not self.given:
            self.given = True
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self.real_receive()
        if message["type"] == "http.disconnect" and (left := self._grace_left()) != 0:
            # Frameworks stop a handler that streams when they hear of this. The answer is for the
            # retry, too, so that there is time to complete it first.
            if self.finished is None:
                self.finished = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.finished.wait()
        return message

    def _grace_left(self) -> float | None:
        """For how long the application is not told yet that its client is gone.

        ``None``: until its answer is complete.
        """
        if self.recorded or self.parts is None or self.claim is None:
            return 0
        if self.grace is None:
            return None
        now = time.monotonic()
        if self.gone_at is None:
            self.gone_at = now
        return max(0, self.gone_at + self.grace - now)

    async def send(self, message: Message) -> None:
        """What the application answers."""
        if self.claim is None:
            await self.real_send(message)
            return
        if self.instead is not None:
            return
        kind = message["type"]
        if kind == "http.response.start":
            self.start = message
            if _is_endless(message):
                self._drop()
                await self.begin()
        elif kind == "http.response.body" and not self.recorded:
            await self._send_body(message)
        else:
            await self._forward(message)

    async def _send_body(self, message: Message) -> None:
        part = message.get("body", b"")
        parts = self.parts
        if message.get("more_body", False):
            if parts is not None:
                parts.append(part)
                self.size += len(part)
                if self.size > self.rules.settings.max_answer_bytes:
                    self._drop()
            await self.begin()
            await self._forward(message)
            return
        if parts:
            parts.append(part)
            part = b"".join(parts)
        await self.record(part if parts is not None else None)
        if await self.begin():
            await self._forward(message)

    def _drop(self) -> None:
        """The body is too much to keep: its status and headers will be."""
        self.parts = None
        if self.finished is not None:
            self.finished.set()

    async def begin(self) -> bool:
        """Pass the status on, which is held back until there is a body.

        False: something else was answered instead.
        """
        if self.began_to_answer or self.start is None:
            return True
        self.began_to_answer = True
        if self.instead is not None:
            await _send(self.real_send, self.instead)
            return False
        start = self.start
        if self.rules.settings.expose_cors:
            start = {**start, "headers": self.rules.exposed(start.get("headers", ()))}
        await self._forward(start)
        return True

    async def _forward(self, message: Message) -> None:
        try:
            await self.real_send(message)
        except OSError:  # the client is gone; the answer is still wanted by its retry
            if message["type"] == "http.response.body" and self._grace_left() == 0:
                raise

    async def record(self, body: bytes | None) -> None:
        """Record the answer, before its last part leaves."""
        if self.recorded or self.claim is None:
            return
        self.recorded = True
        if self.finished is not None:
            self.finished.set()
        if self.beat is not None:
            self.beat.stop()  # a renewal after this would look like a lost claim
        start: Message = self.start or {"status": 500}
        fields = tuple([(name.lower(), value) for name, value in start.get("headers", ())])
        kept = self.rules.kept(self.job, Answer(start["status"], fields, body))
        try:
            result = await arecord(self.store, self.job, self.claim, kept)
        except (ClaimLostError, StoreError) as error:
            if not self.began_to_answer:
                self.instead = self.rules.refusal(self.rules.failure(error))
            else:
                logger.warning("an answer was sent that could not be recorded: %s", error)
            return
        if result.replayed and not self.began_to_answer:
            # Another worker's outcome counts.
            self.instead = self.rules.replay(result.value, self.facts)
        elif kept is not None and self.rules.local is not None and not result.replayed:
            self.rules.local.put(self.job, kept)


def _is_endless(start: Message) -> bool:
    """Whether an answer is a stream of events, which has no end to wait for."""
    for name, value in start.get("headers", ()):
        if name.lower() == b"content-type":
            return bool(value.startswith(b"text/event-stream"))
    return False


async def _send(send: Send, answer: Answer) -> None:
    """Send a whole answer."""
    status, headers, body = answer
    body = body or b""
    fields = list(headers)
    if status >= 200 and status not in (204, 304):
        fields.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
