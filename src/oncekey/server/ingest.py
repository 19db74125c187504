"""``/hooks/SOURCE``: from the raw request to an event that is kept. Raw ASGI, no framework.

In the receiver's own order: size, signature, the provider's test of the endpoint, the events and
their keys, limits; then the inbox, and an answer after its commit. A copy gets the same 2xx as the
first. What can't be kept is answered 503: the provider sends it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import parse_qs

from oncekey._core.flows import new_owner
from oncekey.abc import AsyncStore
from oncekey.adapters._webhooks import CUT_SHORT, TOO_SLOW, answer_of
from oncekey.adapters.asgi import request_url
from oncekey.errors import OncekeyError, StoreError
from oncekey.http.asgi import send_answer
from oncekey.http.body import (
    ClientGoneError,
    SlowBodyError,
    asgi_begun,
    asgi_rest,
    declared_length,
)
from oncekey.inbox.abc import AsyncInbox
from oncekey.inbox.models import Arrival, Ingested
from oncekey.inbox.routing import Router
from oncekey.models import ClaimVerdict
from oncekey.receiver.answers import (
    Outcome,
    answer_to,
    greeted,
    malformed,
    refused,
    rejected,
    taken,
)
from oncekey.receiver.decisions import Decisions, Registered, Work
from oncekey.receiver.events import WebhookResponse
from oncekey.receiver.settings import ReceiverSettings
from oncekey.server.settings import SourceSettings
from oncekey.signatures.asking import AskingProvider
from oncekey.signatures.delivery import Delivery, as_delivery
from oncekey.signatures.event_fields import event_field
from oncekey.signatures.handshakes import greeting_to
from oncekey.signatures.nonces import Nonces

__all__ = ["Intake"]

logger = logging.getLogger("oncekey")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_KEPT: Final = ("content-type", "user-agent")
_HUB: Final = {
    "echo": "hub.challenge",
    "token": "hub.verify_token",
    "equals": {"hub.mode": "subscribe"},
}
"""The test by GET of a provider that has no rule of its own: only with a ``verify_token``."""
_OUTCOMES: Final = {"handled": "new", "limited": "rejected"}
_UNKNOWN: Final = "?"  # the name under which requests to no source are counted
MOST_READING: Final = 268_435_456
"""Bytes of bodies that are on their way; then large ones are told to come again."""
_SMALL: Final = 65_536
_BUSY: Final = rejected(
    503, "too_many_bodies", "too many large bodies are on their way", {"Retry-After": "1"}
)


class _Source:
    """One source: its rules, who gets its events, and which headers of a delivery are kept.

    A request goes by one of these from end to end, whatever a reload changes meanwhile.
    """

    def __init__(self, settings: SourceSettings, store: AsyncStore, router: Router) -> None:
        self.settings = settings
        self.router = router
        provider: Any = settings.provider
        if getattr(provider, "needs_nonces", False):
            bound: AskingProvider = provider
            provider = bound.with_nonces(Nonces(store, namespace=f"inbox:{settings.name}"))
        self.provider = provider
        self.rules = Decisions(
            provider,
            ReceiverSettings(
                max_body_bytes=settings.max_body_bytes,
                body_timeout=settings.body_timeout,
                content_types=(),
                namespace=f"inbox:{settings.name}",
            ),
        )
        self.rules.fallback = Registered(_nothing, False)
        self.fresh = _told(taken(provider, "handled"), "new")
        self.copy = _told(taken(provider, "duplicate"), "duplicate")
        fields = [event_field(text) for text in (provider.event_id, provider.event_type) if text]
        self.kept = frozenset(
            [*_KEPT, *settings.keep_headers, *(name for one in fields for name in one.headers)]
        )

    def headers(self, delivery: Delivery) -> tuple[tuple[str, str], ...]:
        return tuple(pair for pair in delivery.headers.items() if pair[0] in self.kept)


class _BusyError(Exception):
    """So much is on its way that no more is taken."""


def _told(answer: WebhookResponse, outcome: str) -> WebhookResponse:
    headers = {**answer.headers, "Oncekey-Outcome": outcome}
    return WebhookResponse(answer.status, headers, answer.body, answer.outcome)


def _nothing(event: object) -> None:
    """In place of a handler: what is to be done is done by whoever the event is delivered to."""


class Intake:
    """Takes deliveries for every source.

    Args:
        inbox: Where events are kept.
        store: Of the same database: for nonces, and for signed messages whose id is not signed.
    """

    def __init__(self, inbox: AsyncInbox, store: AsyncStore) -> None:
        self._inbox = inbox
        self._store = store
        self._sources: dict[str, _Source] = {}
        self._reading = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def prepare(self, sources: Mapping[str, SourceSettings], router: Router) -> Callable[[], None]:
        """Make these sources; what is given back puts them in place, all at once.

        Raises:
            PolicyError: One can't work.
        """
        made = {name: _Source(one, self._store, router) for name, one in sources.items()}

        def use() -> None:
            self._sources = made

        return use

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to ``/hooks/...``."""
        name = str(scope["path"]).removeprefix("/hooks/").rstrip("/")
        source = self._sources.get(name)
        if source is None:
            await self._tell(send, rejected(404, "no_such_source", "there is no such source here"))
            self.outcomes[_UNKNOWN, "rejected"] += 1
            self._inbox.reject(_UNKNOWN, "no_such_source", "a source that is not configured")
            return
        answer = await self._answer(source, scope, receive)
        self.outcomes[name, _OUTCOMES.get(answer.outcome, answer.outcome)] += 1
        await self._tell(send, answer, head=scope["method"] == "HEAD")

    async def _tell(self, send: Send, answer: WebhookResponse, *, head: bool = False) -> None:
        try:
            await send_answer(send, answer_of(answer), head=head)
        except OSError:
            pass  # nobody is there to read it; what was kept is kept

    async def _answer(self, source: _Source, scope: Scope, receive: Receive) -> WebhookResponse:
        if scope["method"] in ("GET", "HEAD"):
            return _greeting(source, scope)
        if scope["method"] != "POST":
            return rejected(405, "method_not_allowed", "send by POST", {"Allow": "POST, GET, HEAD"})
        declared = next(
            (value for key, value in scope["headers"] if key == b"content-length"), None
        )
        settings = source.settings
        try:
            body = await self._body(settings, declared, receive)
        except ClientGoneError as error:
            answer = TOO_SLOW if isinstance(error, SlowBodyError) else CUT_SHORT
        except _BusyError:
            answer = _BUSY
        else:
            delivery = as_delivery("POST", request_url(scope), scope["headers"], body)
            answer = await self._taken(source, delivery)
        if answer.outcome in ("rejected", "limited"):
            told = json.loads(answer.body).get("message", "") if answer.body else ""
            self._inbox.reject(settings.name, answer.code or answer.outcome, told)
        return answer

    async def _body(
        self, settings: SourceSettings, declared: bytes | None, receive: Receive
    ) -> bytes:
        """All of a body. Nobody has signed it yet: what all of them take together is bounded."""
        most, length = settings.max_body_bytes, declared_length(declared)
        if length is not None and length > most:
            return bytes(most + 1)
        if self._reading > MOST_READING and (length is None or length > _SMALL):
            raise _BusyError
        begun = asgi_begun(receive, most)
        if isinstance(begun, bytes):  # here already, as nearly always
            return begun
        size = most if length is None else length
        self._reading += size
        try:
            return await asgi_rest(receive, most, settings.body_timeout, begun)
        finally:
            self._reading -= size

    # From bytes to events

    async def _taken(self, source: _Source, delivery: Delivery) -> WebhookResponse:
        rules = source.rules
        response = rules.refuse_unread(delivery)
        if response is not None:
            return response
        verdict = await source.provider.ajudge(delivery)
        if not verdict.ok:
            return refused(source.provider, verdict)
        if rules.has_tests:
            response = rules.greeting(delivery, verdict)
            if response is not None:
                return response
        try:
            given = rules.works(delivery, verdict)
        except OncekeyError as error:
            return malformed(error)
        limited = [one for one in given if isinstance(one, Outcome)]
        if limited:  # all or nothing: a copy of the whole comes again
            return answer_to(source.provider, limited)
        works = [one for one in given if isinstance(one, Work)]
        kept = source.headers(delivery)
        try:
            if len(works) == 1:  # most of them: no task is needed
                found = [await self._kept(source, work, kept) for work in works]
            else:
                found = await asyncio.gather(*(self._kept(source, work, kept) for work in works))
        except (StoreError, OSError) as error:
            logger.warning(
                "%s: an event can't be kept, its sender is told to retry: %s",
                source.settings.name,
                error,
            )
            return answer_to(source.provider, [Outcome("unavailable", "inbox_unavailable")])
        return _acknowledged(source, found)

    async def _kept(
        self, source: _Source, work: Work, headers: tuple[tuple[str, str], ...]
    ) -> Ingested:
        """Keep one event: claimed, written and routed in one commit, which this waits for."""
        if work.guard is not None:
            work = await self._under_first_name(source, work)
        item, name = work.item, work.job.key.name
        body = work.delivery.body
        if source.provider.batch:
            body = json.dumps(item.payload, separators=(",", ":"), ensure_ascii=False).encode()
        kind = item.event_type or ""
        routes = source.router.routes(source.settings.targets, kind, body)
        return await self._inbox.ingest(
            Arrival(source.settings.name, _key(work, name), kind, body, headers, routes)
        )

    async def _under_first_name(self, source: _Source, work: Work) -> Work:
        """A signed message whose id nobody signed goes by the id that it first came under."""
        guard = work.guard
        if guard is None:
            return work
        key, owner, mark, terms = source.rules.binding(work, guard)
        reply = await self._store.claim(key, owner or new_owner(), mark, terms)
        if reply.verdict is ClaimVerdict.CONFLICT:
            return source.rules.as_first_named(work, guard, await self._store.read(guard))
        return work


def _key(work: Work, name: str) -> str:
    """The key within the source: senders that keys tell apart never share one."""
    sender = work.sender
    if not sender.key_id and not sender.publisher:
        return name
    who = hashlib.sha256(sender.as_sender_identity().encode()).hexdigest()[:16]
    return f"{who}:{name}" if len(name) <= 200 else f"{who}:{_digest(name)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def _acknowledged(source: _Source, found: list[Ingested]) -> WebhookResponse:
    fresh = any(one.new for one in found)
    answer = source.fresh if fresh else source.copy
    headers = dict(answer.headers)
    if len(found) == 1:
        headers["Oncekey-Event"] = found[0].id
    return WebhookResponse(answer.status, headers, answer.body, answer.outcome)


def _greeting(source: _Source, scope: Scope) -> WebhookResponse:
    """The answer to a GET or HEAD: some providers test an endpoint so before they send."""
    provider, url = source.provider, request_url(scope)
    own: Mapping[str, Any] = getattr(getattr(provider, "facts", None), "greeting", None) or {}
    rule = own or _HUB
    ack = provider.greeting(url) if own else None  # its options may have the token
    if ack is None:
        ack = greeting_to(url, rule, source.settings.verify_token)
    if ack is not None:
        return greeted(ack)
    names = {rule["echo"], rule.get("token", rule["echo"]), *rule.get("equals", ())}
    query = (scope.get("query_string") or b"").decode("latin-1")
    if names.isdisjoint(parse_qs(query, keep_blank_values=True)):  # anybody who looks
        text = {"Content-Type": "text/plain; charset=utf-8"}
        body = b"This endpoint takes signed deliveries by POST.\n"
        return WebhookResponse(200, text, body, "ignored", "greeting")
    if "token" in rule:
        told = "set verify_token_env to the token of the provider"
        return rejected(403, "verify_token", told)
    return greeted(None)
