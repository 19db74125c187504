"""``IdempotencyMiddleware`` for any WSGI application. Takes the same options as the one for ASGI.

Every part of an answer is held back until the next one is there, so that the outcome is recorded
before the last byte leaves.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Unpack

from oncekey._core.call import CURRENT, Job, give_up, open_claim, record
from oncekey._core.drive import run
from oncekey._core.flows import Claim
from oncekey._core.heartbeat import Beat
from oncekey.abc import Store
from oncekey.errors import ClaimLostError, OncekeyError, StoreError
from oncekey.http.answer import Answer, fields_of
from oncekey.http.body import ClientGoneError, wsgi_body
from oncekey.http.entry import check_app, identify, ready
from oncekey.http.exchange import Exchange
from oncekey.http.facts import Facts, wsgi_facts
from oncekey.http.problems import Refusal, unread
from oncekey.http.rules import Rules
from oncekey.http.settings import Settings

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

__all__ = ["IdempotencyMiddleware", "WSGIApp", "give_answer"]

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
        **options: Unpack[SettingsOptions],
    ) -> None:
        check_app(app, 2)
        self.app = app
        self.store, checked = ready(store, settings, options)
        self.rules = Rules(checked)

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
            return give_answer(start_response, rules.refusal(no))
        except ClientGoneError as error:
            return give_answer(start_response, rules.refusal(unread(error)))
        # Not in the block above: what the application raises is its own affair.
        if entered is None:
            return self.app(environ, start_response)
        if isinstance(entered, Answer):
            return give_answer(start_response, entered)
        exchange, body = entered
        child = {**environ, MARK: True, "wsgi.input": io.BytesIO(body)}
        child["CONTENT_LENGTH"] = str(len(body))
        child.pop("wsgi.input_terminated", None)
        child.pop("wsgi.file_wrapper", None)  # it would send a file past us
        exchange.run(self.app, child)
        return exchange

    def _enter(
        self, key: str, facts: Facts, start_response: StartResponse
    ) -> Answer | tuple[_Exchange, bytes]:
        rules = self.rules
        owner = identify(rules, self.store, facts)
        body = wsgi_body(facts.source, rules.settings.max_body_bytes, rules.body_seconds)
        job = rules.job(key, owner, facts, body)
        at_hand = rules.at_hand(job.key, job.fingerprint, job.operation, facts.source)
        if at_hand is not None:
            return at_hand
        try:
            if rules.limits.wait(job.key) is not None:
                run(rules.limits.check(job), self.store)
            opened = rules.opened(job, open_claim(self.store, job), facts.source)
        except OncekeyError as error:
            raise rules.failure(error) from None
        if isinstance(opened, Answer):
            return opened
        return _Exchange(rules, facts.source, self.store, job, opened, start_response), body


class _Exchange(Exchange):
    """One guarded request: gives the application's answer on, and keeps it."""

    claim: Claim

    def __init__(
        self,
        rules: Rules,
        source: Any,
        store: Store,
        job: Job,
        claim: Claim,
        start_response: StartResponse,
    ) -> None:
        super().__init__(rules, source)
        self._store = store
        self.job = job
        self.claim = claim  # pyright: ignore[reportIncompatibleVariableOverride]
        self._beat = Beat(store, claim, job.plan)
        self._real_start = start_response
        self._started: tuple[str, list[tuple[str, str]]] | None = None
        self._held = b""
        self._write: Any = None
        self._close: Callable[[], object] | None = None
        self._iterator: Iterator[bytes] = iter(())

    def run(self, app: WSGIApp, environ: Environ) -> None:
        """Run the application. An answer that is whole already is recorded at once."""
        self._beat.__enter__()
        token = CURRENT.set(self.claim)
        try:
            answer = app(environ, self.start_response)
            self._close = getattr(answer, "close", None)
            try:
                self._iterator = iter(answer)
                if isinstance(answer, (list, tuple)):  # as of most: there is nothing to wait for
                    for part in answer:
                        self.keep(part)
                        self._held += part
                    self._finish()
            except BaseException:
                self._close_answer()
                raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            CURRENT.reset(token)

    def start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], object]:
        """What the application calls; held back until there is a body."""
        if exc_info is not None and self.began_to_answer:
            raise exc_info[1].with_traceback(exc_info[2])
        self._started = (status, headers)
        return self._write_part

    def _write_part(self, part: bytes) -> None:
        """The old way to answer. What was written is held like any other part."""
        held = self._hold(part)
        if held:
            self._begin()
            self._write(held)

    def _hold(self, part: bytes) -> bytes:
        """Hold a part back. Gives the one before it."""
        self.keep(part)
        held, self._held = self._held, part
        return held

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not self.recorded:
            try:
                part = next(self._iterator)
            except StopIteration:
                self._finish()
                break
            except BaseException as error:
                self._fail(error)
                raise
            held = self._hold(part)
            if held:
                self._begin()
                return held
        if self.instead is not None:
            body, self.instead = self.instead.body or b"", None
            self._held = b""
            return body
        if self._held:
            held, self._held = self._held, b""
            return held
        raise StopIteration

    def close(self) -> None:
        """Called by the server at the end, also if the client hung up."""
        try:
            if self._started is not None:
                self._record(None)  # if it stopped halfway, it counts as done
        finally:
            self._beat.__exit__()
            self._close_answer()

    def _fail(self, error: BaseException) -> None:
        """The application raised."""
        self._beat.__exit__()
        if self.began_to_answer:
            self._record(None)  # the client has seen a status: it counts
        elif not self.recorded:
            self.recorded = True
            give_up(self._store, self.job, self.claim, error)

    def _close_answer(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()

    def _begin(self) -> None:
        if not self.began_to_answer and self._started is not None:
            self.began_to_answer = True
            status, headers = self._started
            if self.rules.settings.expose_cors:
                headers = [*headers, *_texts(self.rules.exposed(()))]
            self._write = self._real_start(status, headers)

    def _finish(self) -> None:
        """The application has said all: record it, then let the last part go."""
        self._record(None if self.parts is None else b"".join(self.parts))
        if self.instead is not None:
            self.began_to_answer = True
            give_answer(self._real_start, self.instead)
        else:
            self._begin()

    def _record(self, body: bytes | None) -> None:
        if self.recorded:
            return
        self._beat.__exit__()
        self.recorded = True
        status, headers = self._started or ("000", [])
        kept = self.rules.kept(self.job, Answer(int(status[:3]), fields_of(headers), body))
        try:
            result = record(self._store, self.job, self.claim, kept)
        except (ClaimLostError, StoreError) as error:
            self.unsettled(error)
        else:
            self.settled(kept, result)


def _texts(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").title(), value.decode("latin-1")) for name, value in fields]


def give_answer(start_response: StartResponse, answer: Answer) -> list[bytes]:
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
