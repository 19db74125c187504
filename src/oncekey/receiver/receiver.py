"""``WebhookReceiver`` and ``AsyncWebhookReceiver``: framework-free, raw bytes in, answer out."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, Unpack, cast

from oncekey._core.call import CURRENT, Result, acall, call, is_async
from oncekey._core.drive import Flow, Op, arun, run
from oncekey._core.limiter import check_limits
from oncekey._core.switch import switched
from oncekey._core.transact import (
    acall_in_transaction,
    call_in_transaction,
    check_transactional,
)
from oncekey.abc import AsyncStore, Store
from oncekey.drivers import driver_error
from oncekey.errors import (
    BackendMismatchError,
    IdempotencyConflictError,
    IdempotencyExpiredError,
    OncekeyError,
    PermanentError,
    PolicyError,
)
from oncekey.instrument import events
from oncekey.models import ClaimVerdict
from oncekey.policy import check_names
from oncekey.receiver.answers import Outcome, failed, malformed, refused
from oncekey.receiver.decisions import Decisions, Registered, Work, is_ours
from oncekey.receiver.events import WebhookEvent, WebhookResponse
from oncekey.receiver.settings import Handler, ReceiverSettings
from oncekey.signatures.base import Provider
from oncekey.signatures.delivery import Delivery, Headers, RawHeaders, as_delivery
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.verdict import Verdict
from oncekey.stores.urls import aconnect, connect, what_is

if TYPE_CHECKING:
    from oncekey.receiver.options import ReceiverOptions
    from oncekey.signatures.asking import AskingProvider

__all__ = ["AsyncWebhookReceiver", "WebhookReceiver"]

H = TypeVar("H", bound=Handler)
S = TypeVar("S", Store, AsyncStore)


class _Receiver(Generic[S]):
    """All of a receiver but what differs with the store: how a handler is run, and waited for.

    Attributes:
        provider: Whose deliveries these are.
        settings: How they are treated.
        content_types: What is taken, the provider's own among it; empty: anything.
    """

    _store: Any
    _kind: ClassVar[type[Any]]
    _connect: ClassVar[Any]
    _needs: ClassVar[str]

    def __init__(
        self,
        provider: Provider,
        store: S | str,
        *,
        settings: ReceiverSettings | None = None,
        **options: Unpack[ReceiverOptions],
    ) -> None:
        if settings is not None and options:
            raise PolicyError("give a ReceiverSettings or single options, not both")
        check_names(
            options, (one.name for one in fields(ReceiverSettings) if one.init), "a receiver"
        )
        settings = settings or ReceiverSettings(**options)
        self._decisions = Decisions(provider, settings)
        self.provider = provider
        self.settings = settings
        self.content_types = self._decisions.types
        opened = self._connect(store) if isinstance(store, str) else store
        if not isinstance(opened, self._kind):
            raise BackendMismatchError(f"{self._needs}, got {what_is(store)}")
        self._use(opened)

    def _use(self, store: Store | AsyncStore) -> None:
        """Keep records in this store, and nonces where the provider's rules want that."""
        settings, provider = self.settings, self.provider
        seen = store
        if settings.on_outage is not None or settings.journal is not None:
            from oncekey.resilience.outage import seen_by

            seen = seen_by(store, settings.on_outage, settings.journal)
        self._store = seen = switched(seen)
        check_limits(settings.limits, seen)
        if settings.transactional:
            check_transactional(seen, settings.on)
        if getattr(provider, "needs_nonces", False):
            nonces = Nonces(_shut(store), namespace=self._decisions.namespace)
            provider = cast("AskingProvider", provider).with_nonces(nonces)
        self._verifier = provider
        self._judges = is_ours(provider, "verify")

    def on(self, *types: str) -> Callable[[H], H]:
        """Decorate the handler of one or several types of events.

        With ``transactional`` the handler is called as ``handler(event, tx)``, else
        ``handler(event)``. Without a type: the handler of every event that has no other.
        """
        if types and callable(types[0]):
            raise PolicyError('write @receiver.on("invoice.paid"), or @receiver.on() for any event')

        rules = self._decisions

        def decorate(handler: H) -> H:
            self._check_handler(handler)
            takes_tx = self.settings.transactional and _takes_tx(handler)
            _check_takes(handler, takes_tx)
            registered = Registered(handler, takes_tx)
            for kind in types:
                if kind in rules.handlers:
                    raise PolicyError(f"there is a handler for {kind!r} already")
                rules.handlers[kind] = registered
            if not types:
                if rules.fallback is not None:
                    raise PolicyError("there is a handler for all other events already")
                rules.fallback = registered
            return handler

        return decorate

    def _marking(self, event_id: str) -> Flow[bool]:
        rules = self._decisions
        key = rules.key_named(self.provider.sender, event_id)
        first: bool = yield Op("first_seen", (key, rules.plan.terms))
        return first

    def _check_handler(self, handler: Handler) -> None:
        """Raise if ``handler`` can't be called by this receiver."""
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise PolicyError(
                f"{getattr(handler, '__name__', handler)} yields: a call runs none of it. Write "
                "a handler that returns"
            )

    def _receiving(self, delivery: Delivery, now: float | None) -> Flow[WebhookResponse]:
        """One delivery from end to end. Yields what may have to be waited for."""
        rules, begun = self._decisions, time.monotonic()
        works: list[Work | Outcome] = []
        outcomes: list[Outcome] = []
        verdict: Any = None  # until it is asked for
        response = rules.refuse_unread(delivery)
        if response is None:
            if self._judges:
                verdict = self._verifier.judge(delivery, now)
            else:
                verdict = yield Op("_verify", (delivery, now), self)
            if not verdict.ok:
                response = refused(self.provider, verdict)
            elif rules.has_tests:
                response = rules.greeting(delivery, verdict)
            if response is None:
                try:
                    works = rules.works(delivery, verdict)
                except OncekeyError as error:
                    response = malformed(error)
                else:
                    for work in works:
                        if isinstance(work, Work):
                            outcomes.append((yield from self._handling(work)))
                            if events._listeners:
                                rules.attention.met(work.job.key, work.sender.as_sender_identity())
                                rules.tell_effect(work, outcomes[-1], begun, verdict, now)
                        else:
                            outcomes.append(work)
                    response = rules.answer(outcomes)
        if events._listeners:
            rules.tell_delivery(response, begun, verdict, now)
        if self.settings.audit is not None:
            rules.audit(begun, response, works, outcomes)
        return response

    def _handling(self, work: Work) -> Flow[Outcome]:
        """Have one event handled, unless it was before. Every error has an outcome."""
        rules, guard = self._decisions, work.guard
        try:
            if rules.limits.shared:
                sender, name = work.sender.as_sender_identity(), work.job.key.name
                wait = yield from rules.limits.everywhere(sender, name, guard)
                if wait is not None:
                    events.emit(events.EventKind.LIMITED, work.job.key, rules.operation)
                    return Outcome("limited", retry_after=wait)
            if guard is not None:
                reply = yield Op("claim", rules.binding(work, guard))
                if reply.verdict is ClaimVerdict.CONFLICT:
                    work = rules.as_first_named(work, guard, (yield Op("read", (guard,))))
            try:
                return rules.outcome(work, (yield Op("_run", (work,), self)))
            except IdempotencyExpiredError:
                if work.renamed:
                    return rules.replayed(work)
            # Seen before, and forgotten since: handled as new, and recorded as late.
            work = rules.forgotten(work)
            key, mark = work.job[:2]
            rules.attention.late(key, mark, (yield Op("read", (key,))))
            return rules.outcome(work, (yield Op("_run", (work,), self)))
        except Exception as error:  # noqa: BLE001
            if isinstance(error, IdempotencyConflictError):
                rules.attention.changed(work.job.key)
            return failed(error, self.provider, work)


class WebhookReceiver(_Receiver[Store]):
    """Receives webhooks: verifies, dedups, and runs each event's handler once.

    Args:
        provider: From ``oncekey.signatures.provider(...)``.
        store: A sync store, or a URL.
        settings: A ``ReceiverSettings``; its options may be given singly instead.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is asynchronous.
    """

    _kind = Store
    _connect = staticmethod(connect)
    _needs = "WebhookReceiver needs a sync store: pass connect(url), or use AsyncWebhookReceiver"

    def _use(self, store: Store | AsyncStore) -> None:
        if getattr(self.provider, "is_async", False):
            raise BackendMismatchError("this provider must be awaited: use AsyncWebhookReceiver")
        super()._use(store)

    def _check_handler(self, handler: Handler) -> None:
        super()._check_handler(handler)
        if is_async(handler):
            raise BackendMismatchError(
                f"{getattr(handler, '__name__', handler)} is async: write a sync handler (def), or "
                "use AsyncWebhookReceiver, where the framework is async too"
            )

    def receive(
        self,
        method: str,
        url: str,
        headers: RawHeaders | Headers,
        body: bytes,
        *,
        now: float | None = None,
    ) -> WebhookResponse:
        """Take one delivery and say what to answer. Raises only for wrong types of arguments.

        Args:
            method: Such as ``POST``.
            url: The whole URL as the sender called it.
            headers: All header fields.
            body: The raw bytes, as they came over the wire.
            now: Seconds since 1970, for tests.
        """
        return run(self._receiving(as_delivery(method, url, headers, body), now), self._store)

    def mark_handled(self, event_id: str) -> bool:
        """Mark an event as handled, by older code for instance: each copy of it is a duplicate.

        For events of this provider and its account, as long as the receiver remembers any.

        Args:
            event_id: What a handler would get as ``event.id``.

        Returns:
            Whether nobody had it before.

        Raises:
            ValueError: It can't be an id.
            StoreError: The store failed.
        """
        return run(self._marking(event_id), self._store)

    def _verify(self, delivery: Delivery, now: float | None) -> Verdict:
        return self._verifier.verify(*delivery, now=now)

    def _run(self, work: Work) -> Result:
        bury = functools.partial(self._decisions.bury, work)
        transactional = self.settings.transactional

        def handler(*tx: Any) -> Any:
            event = work.event(CURRENT.get(None))  # which now knows which attempt this is
            try:
                value = work.handler.function(event, *(tx if work.handler.takes_tx else ()))
                return None if value is None else _none(value)
            except PermanentError as error:
                if transactional:
                    raise  # to roll back first
                return bury(error)
            except Exception as error:
                error.add_note(_attempt(event, error, self.settings))
                raise

        if transactional:
            return call_in_transaction(self._store, self.settings.on, work.job, handler, bury)
        return call(self._store, work.job, handler)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class AsyncWebhookReceiver(_Receiver[AsyncStore]):
    """Receives webhooks in an event loop. Takes what ``WebhookReceiver`` takes, an async store.

    Handlers may be async or not; one that is not blocks the loop while it runs.
    """

    _kind = AsyncStore
    _connect = staticmethod(aconnect)
    _needs = "AsyncWebhookReceiver needs an async store: pass aconnect(url), or use WebhookReceiver"

    def _use(self, store: Store | AsyncStore) -> None:
        super()._use(store)
        nothing_to_await = is_ours(self._verifier, "averify") and is_ours(self._verifier, "ajudge")
        self._awaits = hasattr(self._verifier, "averify") and not nothing_to_await
        self._judges = self._judges and not self._awaits

    async def receive(
        self,
        method: str,
        url: str,
        headers: RawHeaders | Headers,
        body: bytes,
        *,
        now: float | None = None,
    ) -> WebhookResponse:
        """Take one delivery and say what to answer. See ``WebhookReceiver.receive``."""
        flow = self._receiving(as_delivery(method, url, headers, body), now)
        return await arun(flow, self._store)

    async def mark_handled(self, event_id: str) -> bool:
        """Mark an event as handled. See ``WebhookReceiver.mark_handled``."""
        return await arun(self._marking(event_id), self._store)

    async def _verify(self, delivery: Delivery, now: float | None) -> Verdict:
        if self._awaits:
            return await self._verifier.averify(*delivery, now=now)
        return self._verifier.verify(*delivery, now=now)

    async def _run(self, work: Work) -> Result:
        bury = functools.partial(self._decisions.bury, work)
        transactional, store = self.settings.transactional, self._store

        async def handler(*tx: Any) -> Any:
            event = work.event(CURRENT.get(None))
            try:
                value = work.handler.function(event, *(tx if work.handler.takes_tx else ()))
                if inspect.isawaitable(value):
                    value = await value
                return None if value is None else _none(value)
            except PermanentError as error:
                if transactional:
                    raise
                return bury(error)
            except Exception as error:
                error.add_note(_attempt(event, error, self.settings))
                raise

        if transactional:
            return await acall_in_transaction(store, self.settings.on, work.job, handler, bury)
        return await acall(store, work.job, handler)

    async def aclose(self) -> None:
        """Close the store."""
        await self._store.aclose()


def _shut(store: Store | AsyncStore) -> Store | AsyncStore:
    """The store without a way to go on when it is away: who may replay nonces is nobody's guess."""
    if not hasattr(store, "store"):
        return store
    from oncekey.resilience.outage import seen_by

    return seen_by(store, "closed", None)


def _takes_tx(handler: Handler) -> bool:
    try:
        parameters = inspect.signature(handler).parameters
    except (TypeError, ValueError):
        return False
    return "tx" in parameters or len(parameters) > 1


def _check_takes(handler: Handler, takes_tx: bool) -> None:
    """Raise if ``handler`` can't be called with an event, and a transaction where it gets one."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # of C, or a class that says nothing
    if _fits(signature, 2 if takes_tx else 1):
        return
    name = getattr(handler, "__name__", handler)
    if not takes_tx and _fits(signature, 2):
        raise PolicyError(
            f"{name} wants a transaction beside the event, and this receiver has none: pass "
            "transactional=True to the receiver, or write a handler of the event alone"
        )
    call = "handler(event, tx)" if takes_tx else "handler(event)"
    raise PolicyError(f"{name}{signature} can't be called as {call}")


def _fits(signature: inspect.Signature, number: int) -> bool:
    try:
        signature.bind(*(None,) * number)
    except TypeError:
        return False
    return True


def _none(value: Any) -> None:
    """What a handler returns is not kept: a sender gets the provider's own answer.

    Raises:
        PolicyError: It returned its work instead of doing it.
    """
    waits = inspect.isawaitable(value)
    if not waits and not inspect.isgenerator(value) and not inspect.isasyncgen(value):
        return
    if inspect.iscoroutine(value):
        value.close()  # it never begins, and says so here
    what = "returned something to await: use AsyncWebhookReceiver" if waits else "yields"
    raise PolicyError(f"a webhook handler {what}; nothing of it has run")


def _attempt(event: WebhookEvent, error: Exception, settings: ReceiverSettings) -> str:
    took = ", after another worker stopped with it in hand" if event.takeover else ""
    told = f"oncekey: this was attempt {event.attempt} at this event{took}"
    code = getattr(driver_error(error), "sqlite_errorcode", -1) & 0xFF
    if settings.transactional and settings.on is None and code in (5, 6):  # busy or locked
        told += (
            ". Its transaction has the SQLite file, and nobody else can write to it meanwhile: "
            "write on tx.connection, or pass your own connection (Django: on=connection)"
        )
    return told
