"""``WebhookReceiver`` and ``AsyncWebhookReceiver``: framework-free, raw bytes in, answer out."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oncekey._core.call import Result, acall, call, is_async
from oncekey._core.transact import (
    acall_in_transaction,
    call_in_transaction,
    check_transactional,
)
from oncekey.abc import AsyncStore, Store
from oncekey.errors import (
    BackendMismatchError,
    IdempotencyExpiredError,
    OncekeyError,
    PermanentError,
    PolicyError,
)
from oncekey.models import Verdict as Answer
from oncekey.receiver._intake import Intake, Outcome, Work, malformed
from oncekey.receiver.events import WebhookResponse
from oncekey.receiver.settings import Handler, Settings
from oncekey.signatures.base import Provider
from oncekey.signatures.delivery import Headers, RawHeaders, as_delivery
from oncekey.signatures.nonces import Nonces
from oncekey.stores.urls import aconnect, connect

if TYPE_CHECKING:
    from oncekey.signatures.asking import AskingProvider

__all__ = ["AsyncWebhookReceiver", "WebhookReceiver"]

H = TypeVar("H", bound=Handler)


class _Receiver:
    """Handlers and settings, which both forms share."""

    _store: Any

    def __init__(self, provider: Provider, settings: Settings | None, options: Any) -> None:
        if settings is not None and options:
            raise PolicyError("give a Settings or single options, not both")
        try:
            settings = settings or Settings(**options)
        except TypeError as error:
            raise PolicyError(f"a receiver has no such option: {error}") from None
        self._intake = Intake(provider, settings)
        self._given_tx: dict[int, bool] = {}  # by the handler's id: not all can be hashed

    def _verifier_on(self, store: Store | AsyncStore) -> Provider:
        """The provider, with a place for its nonces where its rules want one and it has none."""
        provider = self._intake.provider
        if getattr(provider, "needs_nonces", False):
            nonces = Nonces(store, namespace=self._intake.namespace)
            return cast("AskingProvider", provider).with_nonces(nonces)
        return provider

    @property
    def provider(self) -> Provider:
        """Whose deliveries these are."""
        return self._intake.provider

    @property
    def settings(self) -> Settings:
        """How they are treated."""
        return self._intake.settings

    def on(self, *types: str) -> Callable[[H], H]:
        """Decorate the handler of one or several types of events.

        With ``transactional`` the handler is called as ``handler(event, tx)``, else
        ``handler(event)``. Without a type: the handler of every event that has no other.
        """
        if types and callable(types[0]):
            raise PolicyError('write @receiver.on("invoice.paid"), or @receiver.on() for any event')

        def decorate(handler: H) -> H:
            self._check_handler(handler)
            self._given_tx[id(handler)] = _takes_tx(handler)  # it stays: nobody gets its id
            for kind in types:
                if kind in self._intake.handlers:
                    raise PolicyError(f"there is a handler for {kind!r} already")
                self._intake.handlers[kind] = handler
            if not types:
                if self._intake.fallback is not None:
                    raise PolicyError("there is a handler for all other events already")
                self._intake.fallback = handler
            return handler

        return decorate

    def _check_handler(self, handler: Handler) -> None:
        """Raise if ``handler`` can't be called by this receiver."""
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise PolicyError(
                f"{getattr(handler, '__name__', handler)} yields: a call runs none of it. Write "
                "a handler that returns"
            )


class WebhookReceiver(_Receiver):
    """Receives webhooks: verifies, dedups, and runs each event's handler once.

    Args:
        provider: From ``oncekey.signatures.provider(...)``.
        store: A sync store, or a URL.
        settings: A ``Settings``; its options may be given singly instead.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is asynchronous.
    """

    def __init__(
        self,
        provider: Provider,
        store: Store | str,
        *,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        super().__init__(provider, settings, options)
        self._store = connect(store) if isinstance(store, str) else store
        if not isinstance(self._store, Store):
            raise BackendMismatchError(
                f"WebhookReceiver needs a sync store, got {type(store).__name__}: pass connect(url)"
                ", or use AsyncWebhookReceiver"
            )
        if getattr(provider, "is_async", False):
            raise BackendMismatchError("this provider must be awaited: use AsyncWebhookReceiver")
        self._verifier = self._verifier_on(self._store)
        if self.settings.transactional:
            check_transactional(self._store)

    def _check_handler(self, handler: Handler) -> None:
        super()._check_handler(handler)
        if is_async(handler):
            raise BackendMismatchError(
                f"{getattr(handler, '__name__', handler)} is async: use AsyncWebhookReceiver"
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
        intake, begun = self._intake, time.monotonic()
        delivery = as_delivery(method, url, headers, body)
        works: list[Work | Outcome] = []
        outcomes: list[Outcome] = []
        response = intake.refuse_unread(delivery)
        if response is None:
            verdict = self._verifier.verify(*delivery, now=now)
            if not verdict.ok:
                response = intake.refuse_verdict(verdict)
            else:
                response = greeting(intake, delivery.body)
            if response is None:
                try:
                    works = intake.works(delivery, verdict)
                except OncekeyError as error:
                    response = malformed(error)
                else:
                    outcomes = [
                        work if isinstance(work, Outcome) else self._handle(work) for work in works
                    ]
                    response = intake.answer(outcomes)
        intake.audit(begun, response, works, outcomes)
        return response

    def _handle(self, work: Work) -> Outcome:
        intake, guard = self._intake, work.guard
        try:
            if guard is not None:
                reply = self._store.claim(*intake.binding(work, guard))
                if reply.verdict is Answer.CONFLICT:
                    work = intake.as_first_named(work, guard, self._store.read(guard))
            try:
                return intake.outcome(work, self._run(work, work.job, late=False), None, False)
            except IdempotencyExpiredError:
                if work.renamed:
                    return intake.replayed(work)
                # Seen before, and forgotten since: handled as new, and recorded as late.
                job = intake.forgotten(work)
                return intake.outcome(work, self._run(work, job, late=True), None, True)
        except Exception as error:  # noqa: BLE001 - every error has an answer
            return intake.outcome(work, None, error, False)

    def _run(self, work: Work, job: Any, late: bool) -> Result:
        intake = self._intake
        if self.settings.transactional:
            return call_in_transaction(
                self._store,
                self.settings.on,
                job,
                lambda tx: _none(
                    intake.call(work, late, (tx,) if self._given_tx[id(work.handler)] else ())
                ),
                lambda error: intake.bury(work, error),
            )

        def handler() -> Any:
            try:
                return _none(intake.call(work, late, ()))
            except PermanentError as error:
                return intake.bury(work, error)

        return call(self._store, job, handler)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class AsyncWebhookReceiver(_Receiver):
    """Receives webhooks in an event loop. Takes what ``WebhookReceiver`` takes, an async store.

    Handlers may be async or not; one that is not blocks the loop while it runs.
    """

    def __init__(
        self,
        provider: Provider,
        store: AsyncStore | str,
        *,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        super().__init__(provider, settings, options)
        self._store = aconnect(store) if isinstance(store, str) else store
        if not isinstance(self._store, AsyncStore):
            raise BackendMismatchError(
                f"AsyncWebhookReceiver needs an async store, got {type(store).__name__}: pass "
                "aconnect(url), or use WebhookReceiver"
            )
        self._verifier = self._verifier_on(self._store)
        if self.settings.transactional:
            check_transactional(self._store)

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
        intake, begun = self._intake, time.monotonic()
        delivery = as_delivery(method, url, headers, body)
        works: list[Work | Outcome] = []
        outcomes: list[Outcome] = []
        response = intake.refuse_unread(delivery)
        if response is None:
            averify = getattr(self._verifier, "averify", None)
            if averify is not None:
                verdict = await averify(*delivery, now=now)
            else:
                verdict = self._verifier.verify(*delivery, now=now)
            if not verdict.ok:
                response = intake.refuse_verdict(verdict)
            else:
                response = greeting(intake, delivery.body)
            if response is None:
                try:
                    works = intake.works(delivery, verdict)
                except OncekeyError as error:
                    response = malformed(error)
                else:
                    outcomes = [
                        work if isinstance(work, Outcome) else await self._handle(work)
                        for work in works
                    ]
                    response = intake.answer(outcomes)
        intake.audit(begun, response, works, outcomes)
        return response

    async def _handle(self, work: Work) -> Outcome:
        intake, guard = self._intake, work.guard
        try:
            if guard is not None:
                reply = await self._store.claim(*intake.binding(work, guard))
                if reply.verdict is Answer.CONFLICT:
                    work = intake.as_first_named(work, guard, await self._store.read(guard))
            try:
                result = await self._run(work, work.job, late=False)
                return intake.outcome(work, result, None, False)
            except IdempotencyExpiredError:
                if work.renamed:
                    return intake.replayed(work)
                job = intake.forgotten(work)
                return intake.outcome(work, await self._run(work, job, late=True), None, True)
        except Exception as error:  # noqa: BLE001 - every error has an answer
            return intake.outcome(work, None, error, False)

    async def _run(self, work: Work, job: Any, late: bool) -> Result:
        intake = self._intake

        if self.settings.transactional:

            async def in_transaction(tx: Any) -> None:
                arguments = (tx,) if self._given_tx[id(work.handler)] else ()
                value = intake.call(work, late, arguments)
                _none(await value if inspect.isawaitable(value) else value)

            return await acall_in_transaction(
                self._store,
                self.settings.on,
                job,
                in_transaction,
                lambda error: intake.bury(work, error),
            )

        async def handler() -> Any:
            try:
                value = intake.call(work, late, ())
                _none(await value if inspect.isawaitable(value) else value)
            except PermanentError as error:
                return intake.bury(work, error)

        return await acall(self._store, job, handler)

    async def aclose(self) -> None:
        """Close the store."""
        await self._store.aclose()


def _takes_tx(handler: Handler) -> bool:
    try:
        parameters = inspect.signature(handler).parameters
    except (TypeError, ValueError):
        return False
    return "tx" in parameters or len(parameters) > 1


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


def greeting(intake: Intake, body: bytes) -> WebhookResponse | None:
    """The answer to the provider's own test of the endpoint, if the delivery is one."""
    handshake = getattr(intake.provider, "handshake", None)
    ack = handshake(body) if handshake is not None else None
    if ack is None:
        return None
    headers = {"Content-Type": ack.content_type} if ack.body else {}
    return WebhookResponse(ack.status, headers, ack.body, "ignored", "handshake")
