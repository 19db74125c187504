"""``IdempotencyMiddleware`` for any ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final, Unpack

from oncekey._core.call import Job, agive_up, aopen_claim, arecord, guarded, recorded_at_once
from oncekey._core.drive import arun
from oncekey._core.flows import new_owner, won
from oncekey.abc import AsyncStore
from oncekey.errors import ClaimLostError, OncekeyError, StoreError
from oncekey.http.answer import Answer
from oncekey.http.body import Begun, ClientGoneError, SlowBodyError, asgi_begun, asgi_rest
from oncekey.http.entry import aidentify, aready, check_app
from oncekey.http.exchange import Exchange
from oncekey.http.facts import Facts, asgi_facts
from oncekey.http.fingerprint import json_mark
from oncekey.http.problems import Refusal, unread
from oncekey.http.rules import Rules
from oncekey.http.settings import Settings
from oncekey.instrument import events
from oncekey.models import ClaimVerdict
from oncekey.policy import milliseconds

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

__all__ = [
    "ASGIApp",
    "ASGIExchange",
    "ASGIScope",
    "IdempotencyMiddleware",
    "Receive",
    "Send",
    "send_answer",
]

ASGIScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[ASGIScope, Receive, Send], Awaitable[None]]

_WON, _REPLAY = ClaimVerdict.WON, ClaimVerdict.REPLAY
MARK: Final = "oncekey.http"  # in the scope of a request that is guarded already
# Ways to answer that go past ``send``, so that the answer could not be recorded.
BYPASSES: Final = frozenset(
    {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}
)


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

    # Called before a replay, for frameworks whose own checks are inside of this.
    admit: Callable[[ASGIScope], Awaitable[None]] | None = None

    def __init__(
        self,
        app: ASGIApp,
        store: AsyncStore | str,
        *,
        settings: Settings | None = None,
        **options: Unpack[SettingsOptions],
    ) -> None:
        check_app(app, 3)
        self.app = app
        self.store, checked = aready(store, settings, options)
        self.rules = Rules(checked)
        grace = checked.disconnect_grace
        self.grace = None if grace is None else milliseconds(grace, "disconnect_grace") / 1000

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        rules = self.rules
        if scope["type"] != "http" or scope["method"] not in rules.methods or MARK in scope:
            await self.pass_on(scope, receive, send)
            return
        try:
            found = self.at_once(scope, receive, send)
            if isinstance(found, ASGIExchange):
                instead = None if found.claim is not None else await self.enter(found)
            else:
                instead = found
        except Refusal as no:
            await send_answer(send, rules.refusal(no))
            return
        except SlowBodyError as slow:
            await send_answer(send, rules.refusal(unread(slow)))
            return
        except ClientGoneError:
            return  # before its request was complete: nothing was begun
        # Not in the block above: what the application raises is its own affair.
        if not isinstance(found, ASGIExchange) or instead is not None:
            if self.admit is not None:
                await self.admit(scope)
            await send_answer(send, instead)  # type: ignore[arg-type]
        elif found.unguarded:
            await self.pass_on(scope, receive, send)
        else:
            child = {**scope, MARK: True}
            if scope.get("extensions"):
                child["extensions"] = _harmless(scope["extensions"])
            await self.run(found, child)

    async def pass_on(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Let a request through that is not guarded, or not by this."""
        await self.app(scope, receive, send)

    def at_once(self, scope: ASGIScope, receive: Receive, send: Send) -> Answer | ASGIExchange:
        """All that can be done without waiting: a replay, or an exchange to ``enter``.

        Which has its claim already if the request is plain to see, its body here, and the store in
        memory: then all of the way was this.

        Raises:
            Refusal: The key can't be had.
        """
        rules = self.rules
        seen = rules.at_sight(scope)
        if seen is None:
            return ASGIExchange(self, scope, receive, send)
        key, head = seen
        body = asgi_begun(receive, rules.most)
        mark = json_mark(head, body) if isinstance(body, bytes) else None
        reply = None
        if mark is not None:
            local, store = rules.local, self.store
            if local is not None and (at_hand := local.get(key, mark)) is not None:
                if events._listeners:
                    rules.tell(key, scope["method"])
                return rules.replay(at_hand, scope)
            straight = store.at_once
            if straight is not None and not events._listeners and rules.limits.wait(key) is None:
                owner, plan = new_owner(), rules.plan
                now = plan.monotonic()
                try:
                    reply = straight.claim(key, owner, mark, plan.claiming or plan.terms)
                    if reply.verdict is _REPLAY:
                        return rules.replayed(reply.answer, scope)
                except OncekeyError as error:
                    raise rules.failure(error) from None
        exchange = ASGIExchange(self, scope, receive, send)
        if mark is None:
            exchange.begun = body
            return exchange
        exchange.job = job = rules.made(key, mark, scope["method"])
        exchange.ready = True
        exchange.body = body  # type: ignore[assignment]
        if reply is not None and reply.verdict is _WON:
            exchange.claim = won(key, owner, reply, plan, job.operation, now, store)  # pyright: ignore[reportPossiblyUnboundVariable]
            rules.limits.count(exchange.claim)
        return exchange

    async def enter(self, exchange: ASGIExchange) -> Answer | None:
        """Claim the key, or say what to answer instead.

        Raises:
            Refusal: It can't be had. Who is nobody is refused before a body is read.
            ClientGoneError: The body does not come.
        """
        rules = self.rules
        if exchange.ready:
            return await exchange.open(exchange.job)
        # The declared length is looked at before the body is.
        if not exchange.look():
            return None
        owner = await aidentify(rules, self.store, exchange.facts)
        await exchange.read()
        return await exchange.open(rules.job(exchange.key, owner, exchange.facts, exchange.body))

    async def run(self, exchange: ASGIExchange, child: ASGIScope) -> None:
        """Run the application, as the one that holds the key."""
        try:
            exchange.hold()
            try:
                await self.app(child, exchange.receive, exchange.send)
            except BaseException as error:
                if exchange.beat is not None:
                    exchange.beat.__exit__(None, error, None)  # may find that the claim is lost
                raise
            if exchange.beat is not None:
                exchange.beat.__exit__(None, None, None)
        except GeneratorExit:
            raise  # thrown away with its loop: the lease frees the key
        except BaseException as error:
            if not await self._failed(exchange, error):
                raise
            return
        if exchange.claim is not None and not exchange.recorded and exchange.start is not None:
            await exchange.record(None)  # the application stopped halfway, as if it was done
            await exchange.begin()

    async def _failed(self, exchange: ASGIExchange, error: BaseException) -> bool:
        """The application raised. True: that is all that there is to say of it."""
        claim = exchange.claim
        if claim is None:
            return False
        lost = isinstance(error, ClaimLostError) and claim.lost
        if exchange.began_to_answer:
            await exchange.record(None)  # the client has seen a status: it counts
        elif not exchange.recorded:
            await agive_up(self.store, exchange.job, claim, error)
            if lost:
                told = self.rules.refusal(self.rules.failure(error))  # type: ignore[arg-type]
                await send_answer(exchange.real_send, told)
        return lost  # stopped in the middle of its answer, which ends here


class ASGIExchange(Exchange):
    """One guarded request: gives the body to the application, and keeps what it answers.

    Attributes:
        key: The name of its key, and
        facts: what else is known, once it was looked at.
        unguarded: It has no key, or none that counts here.
    """

    key: str
    facts: Facts
    unguarded = False
    ready = False  # its job is known
    refused: Refusal | None = None  # to be told later: first come the application's own checks
    begun: bytes | Begun | None = None  # of its body, what was asked for already
    body = b""
    beat: guarded | None = None
    given = False
    start: Message | None = None
    gone_at: float | None = None  # when it was first seen that the client is gone
    finished: asyncio.Event | None = None

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        scope: ASGIScope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.rules = middleware.rules
        self.source = scope
        self.store = middleware.store
        self.grace = middleware.grace
        self.real_receive = receive
        self.real_send = send
        self.parts = []

    def look(self) -> bool:
        """Find the key, and all else that is known. False: it is not guarded.

        Raises:
            Refusal: It can't be taken.
        """
        self.facts = asgi_facts(self.source, self.rules.header_name, self.source)
        key = self.rules.key(self.facts)
        if key is None:
            self.unguarded = True
            return False
        self.key = key
        return True

    async def read(self) -> None:
        """Have the whole body.

        Raises:
            ClientGoneError: It does not come.
        """
        begun, most = self.begun, self.rules.most
        if begun is None:
            begun = asgi_begun(self.real_receive, most)
        if not isinstance(begun, bytes):
            seconds = self.rules.body_seconds
            begun = await asgi_rest(self.real_receive, most, seconds, begun)
        self.body = begun

    async def open(self, job: Job) -> Answer | None:
        """Claim the key; or what to answer instead.

        Raises:
            Refusal: It can't be had.
        """
        self.job, rules = job, self.rules
        if self.given:
            self.body = b""
        if rules.local is not None:
            at_hand = rules.at_hand(job.key, job.fingerprint, job.operation, self.source)
            if at_hand is not None:
                return at_hand
        try:
            if rules.limits.wait(job.key) is not None:
                await arun(rules.limits.check(job), self.store)
            opened = rules.opened(job, await aopen_claim(self.store, job), self.source)
        except OncekeyError as error:
            raise rules.failure(error) from None
        if type(opened) is Answer:
            return opened
        self.claim = opened  # type: ignore[assignment]
        return None

    def hold(self) -> None:
        """Keep the claim alive until the application is done."""
        if self.claim is not None:
            self.beat = guarded(self.store, self.job, self.claim)
            self.beat.__enter__()

    async def receive(self) -> Message:
        """The body; then whatever comes after it."""
        if not self.given:
            self.given = True
            body = self.body
            if self.claim is not None:
                self.body = b""  # it was compared, and nobody else wants it
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
            for name, value in message.get("headers", ()):
                if value.startswith(b"text/event-stream") and name.lower() == b"content-type":
                    self.drop()  # it has no end to wait for
                    await self.begin()
                    break
        elif kind == "http.response.body" and not self.recorded:
            part = message.get("body", b"")
            if message.get("more_body", False):
                self.keep(part)
            elif self.parts is None:
                await self.record(None)
            else:
                await self.record(b"".join((*self.parts, part)) if self.parts else part)
            await self.begin(message)
        else:
            await self.begin(message, after=False)

    def drop(self) -> None:
        """See ``Exchange``. The application may hear now that its client is gone."""
        self.parts = None
        if self.finished is not None:
            self.finished.set()

    async def begin(self, message: Message | None = None, *, after: bool = True) -> None:
        """Pass a message on, ``after`` the status, which is held back until there is a body.

        A client that is gone is no reason to stop, while its retry wants the answer.
        """
        start = self.start
        if after and start is not None and not self.began_to_answer:
            self.began_to_answer = True
            if self.instead is not None:
                await send_answer(self.real_send, self.instead)
                return
            if self.rules.settings.expose_cors:
                start = {**start, "headers": self.rules.exposed(start.get("headers", ()))}
            try:
                await self.real_send(start)
            except OSError:
                pass
        if message is None:
            return
        try:
            await self.real_send(message)
        except OSError:
            if message["type"] == "http.response.body" and self._grace_left() == 0:
                raise

    async def record(self, body: bytes | None) -> None:
        """Record the answer, before its last part leaves."""
        claim = self.claim
        if self.recorded or claim is None:
            return
        if self.finished is not None:
            self.finished.set()
        if self.beat is not None:
            self.beat.stop()  # a renewal after this would look like a lost claim
        self.recorded = True
        start: Message = self.start or {"status": 500}
        rules, job = self.rules, self.job
        kept = rules.kept(job, (start["status"], start.get("headers", ()), body))
        try:
            at_once = rules.local is None and self.store.at_once is not None
            if at_once and recorded_at_once(self.store, job, claim, kept):
                return
            result = await arecord(self.store, job, claim, kept)
        except (ClaimLostError, StoreError) as error:
            self.unsettled(error)
        else:
            if result.replayed or rules.local is not None:
                self.settled(kept, result)


def _harmless(extensions: Mapping[str, Any]) -> dict[str, Any]:
    """The extensions that an application may use: none that goes past ``send``."""
    return {name: value for name, value in extensions.items() if name not in BYPASSES}


async def send_answer(send: Send, answer: Answer, *, head: bool = False) -> None:
    """Send a whole answer; without its body to a ``HEAD`` request."""
    status, headers, body = answer
    body = body or b""
    fields = list(headers)
    if status >= 200 and status not in (204, 304):
        fields.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": b"" if head else body})
