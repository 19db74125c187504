"""``IdempotencyMiddleware`` for any WSGI application. Takes the same options as the one for ASGI.

Every part of an answer is held back until the next one is there, so that the outcome is recorded
before the last byte leaves.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final

from oncekey._core.call import CURRENT, Job, give_up, record
from oncekey._core.flows import Claim
from oncekey._core.heartbeat import Beat
from oncekey.abc import Store
from oncekey.errors import BackendMismatchError, ClaimLostError, StoreError
from oncekey.http.answer import Answer
from oncekey.http.body import ClientGoneError, wsgi_body
from oncekey.http.entry import enter, identify
from oncekey.http.facts import Facts, wsgi_facts
from oncekey.http.problems import Refusal, unread
from oncekey.http.rules import Rules, settings_of
from oncekey.http.settings import Settings
from oncekey.stores.urls import connect

__all__ = ["IdempotencyMiddleware"]

logger = logging.getLogger("oncekey")

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WSGIApp = Callable[[Environ, StartResponse], Iterable[bytes]]

MARK: Final = "oncekey.http"  # in the environ of a request that is guarded already


class IdempotencyMiddleware:
    """Runs each keyed request once, and replays its answer to every retry.

    Args:
        app: The application.
        store: A sync store, or a URL.
        settings: A ``Settings``; its options may be given singly instead.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is asynchronous.

    Example:
        >>> from oncekey.http.wsgi import IdempotencyMiddleware
        >>> def app(environ, start_response):
        ...     start_response("201 Created", [])
        ...     return [b"made"]
        >>> guarded = IdempotencyMiddleware(app, "memory://")
    """

    def __init__(
        self,
        app: WSGIApp,
        store: Store | str,
        *,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        self.app = app
        self.rules = Rules(settings_of(settings, options))
        self.store: Store = connect(store) if isinstance(store, str) else store
        if not isinstance(self.store, Store):
            raise BackendMismatchError(
                f"a WSGI application needs a sync store, got {type(store).__name__}: pass a URL, "
                "MemoryStore(), SQLiteStore('file.db') or connect(url)"
            )

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Handle one request."""
        rules = self.rules
        if MARK in environ or environ["REQUEST_METHOD"] not in rules.methods:
            return self.app(environ, start_response)
        facts = wsgi_facts(environ, rules.header, environ)
        try:
            key = rules.key(facts)
            entered = None if key is None else self._enter(key, facts, start_response)
        except Refusal as no:
            return _give(start_response, rules.refusal(no))
        except ClientGoneError as error:
            return _give(start_response, rules.refusal(unread(error)))
        # Not in the block above: what the application raises is its own affair.
        if entered is None:
            return self.app(environ, start_response)
        if isinstance(entered, Answer):
            return _give(start_response, entered)
        return self._run(*entered, environ)

    def _enter(
        self, key: str, facts: Facts, start_response: StartResponse
    ) -> Answer | tuple[_Exchange, bytes]:
        rules = self.rules
        caller = identify(rules, self.store, facts)
        body = wsgi_body(facts.source, rules.settings.max_body_bytes, rules.body_seconds)
        job = rules.job(key, caller, facts, body)
        opened = enter(rules, self.store, job, facts)
        if isinstance(opened, Answer):
            return opened
        return _Exchange(self, facts, job, opened, start_response), body

    def _run(self, exchange: _Exchange, body: bytes, environ: Environ) -> Iterable[bytes]:
        """Run the application, as the one that holds the key."""
        child = {**environ, MARK: True, "wsgi.input": io.BytesIO(body)}
        child["CONTENT_LENGTH"] = str(len(body))
        child.pop("wsgi.input_terminated", None)
        child.pop("wsgi.file_wrapper", None)  # it would send a file past us
        exchange.beat.__enter__()
        token = CURRENT.set(exchange.claim)
        try:
            exchange.open(self.app(child, exchange.start_response))
        except BaseException as error:
            exchange.fail(error)
            raise
        finally:
            CURRENT.reset(token)
        return exchange


class _Exchange:
    """One guarded request: gives the application's answer on, and keeps it."""

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        facts: Facts,
        job: Job,
        claim: Claim,
        start_response: StartResponse,
    ) -> None:
        self._rules = middleware.rules
        self._store = middleware.store
        self._facts = facts
        self._job = job
        self.claim = claim
        self._real_start = start_response
        self.beat = Beat(middleware.store, claim, job.plan)
        self._status = 0
        self._started: tuple[Any, ...] | None = None
        self._headers: list[tuple[str, str]] = []
        self._parts: list[bytes] | None = []  # None: too much to keep
        self._size = 0
        self._held = b""
        self._began_to_answer = False
        self._recorded = False
        self._instead: Answer | None = None
        self._write: Any = None
        self._closers: list[Callable[[], object]] = []
        self._iterator: Iterator[bytes] = iter(())

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], object]:
        """What the application calls; held back until there is a body."""
        if exc_info is not None and self._began_to_answer:
            raise exc_info[1].with_traceback(exc_info[2])
        self._status = int(status[:3])
        self._headers = headers
        self._started = (status, headers)
        return self._write_part

    def _write_part(self, part: bytes) -> None:
        """The old way to answer. What was written is held like any other part."""
        self._keep(part)
        held, self._held = self._held, part
        if held:
            self._begin()
            self._write(held)

    def open(self, answer: Iterable[bytes]) -> None:
        """Take the application's answer. One that is whole already is recorded at once."""
        close = getattr(answer, "close", None)
        if close is not None:
            self._closers.append(close)
        try:
            # Most applications give a list of one part: there is nothing to wait for.
            whole = isinstance(answer, (list, tuple))
            self._iterator = iter(answer)
            if whole:
                for part in self._iterator:
                    self._keep(part)
                    self._held += part
                self._finish()
        except BaseException:
            self._close_all()
            raise

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not self._recorded:
            try:
                part = next(self._iterator)
            except StopIteration:
                self._finish()
                break
            except BaseException as error:
                self.fail(error)
                raise
            self._keep(part)
            held, self._held = self._held, part
            if held:
                self._begin()
                return held
        if self._instead is not None:
            body, self._instead = self._instead.body or b"", None
            self._held = b""
            return body
        if self._held:
            held, self._held = self._held, b""
            return held
        raise StopIteration

    def close(self) -> None:
        """Called by the server at the end, also if the client hung up."""
        try:
            if not self._recorded and self._started is not None:
                self._record(None)  # it stopped halfway, and counts as done
        finally:
            self.beat.__exit__()
            self._close_all()

    def fail(self, error: BaseException) -> None:
        """The application raised."""
        self.beat.__exit__()
        if self._recorded:
            return
        if self._began_to_answer:
            self._record(None)  # the client has seen a status: it counts
        else:
            self._recorded = True
            give_up(self._store, self._job, self.claim, error)

    def _close_all(self) -> None:
        while self._closers:
            self._closers.pop()()

    def _keep(self, part: bytes) -> None:
        if self._parts is not None:
            self._parts.append(part)
            self._size += len(part)
            if self._size > self._rules.settings.max_answer_bytes:
                self._parts = None

    def _begin(self) -> None:
        if self._began_to_answer or self._started is None:
            return
        self._began_to_answer = True
        status, headers = self._started
        if self._rules.settings.expose_cors:
            headers = [*headers, *_texts(self._rules.exposed(()))]
        self._write = self._real_start(status, headers)

    def _finish(self) -> None:
        """The application has said all: record it, then let the last part go."""
        self._record(None if self._parts is None else b"".join(self._parts))
        if self._instead is not None:
            answer = self._instead
            self._began_to_answer = True
            _give(self._real_start, answer)
        else:
            self._begin()

    def _record(self, body: bytes | None) -> None:
        if self._recorded:
            return
        self._recorded = True
        self.beat.__exit__()
        fields = tuple(
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self._headers
        )
        kept = self._rules.kept(self._job, Answer(self._status, fields, body))
        try:
            result = record(self._store, self._job, self.claim, kept)
        except (ClaimLostError, StoreError) as error:
            if not self._began_to_answer:
                self._instead = self._rules.refusal(self._rules.failure(error))
            else:
                logger.warning("an answer was sent that could not be recorded: %s", error)
            return
        if result.replayed and not self._began_to_answer:
            # Another worker's outcome counts.
            self._instead = self._rules.replay(result.value, self._facts)
        elif kept is not None and self._rules.local is not None and not result.replayed:
            self._rules.local.put(self._job, kept)


def _texts(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").title(), value.decode("latin-1")) for name, value in fields]


def _give(start_response: StartResponse, answer: Answer) -> list[bytes]:
    """A whole answer."""
    status, headers, body = answer
    body = body or b""
    fields = _texts(headers)
    if status >= 200 and status not in (204, 304):
        fields.append(("Content-Length", str(len(body))))
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    start_response(f"{status} {phrase}", fields)
    return [body]
