"""The rules of the ``Idempotency-Key`` header, made ready: what no framework changes.

An adapter asks in this order: is this request guarded, what is its key, who calls, what is to be
done once (a ``Job``); then it runs the job, and asks what of the answer is kept, or how a failure
is worded.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final

from oncekey._core.call import Job, refusal
from oncekey._core.flows import Plan
from oncekey.errors import (
    AnswerOmittedError,
    BackendMismatchError,
    ClaimLostError,
    IdempotencyConflictError,
    IdempotencyInFlightError,
    OncekeyError,
    PolicyError,
    StoreError,
)
from oncekey.http.answer import Answer, AnswerCodec, Fields
from oncekey.http.body import declared_length
from oncekey.http.callers import Callers, header_of
from oncekey.http.coding import accepts, coding_of, plain
from oncekey.http.facts import Facts
from oncekey.http.fingerprint import fingerprint
from oncekey.http.header import read_key
from oncekey.http.limits import Limits
from oncekey.http.problems import Refusal, problem
from oncekey.http.settings import NEVER_STORED, STORED_HEADERS, Settings
from oncekey.models import ClaimReply, Key, Scope, Verdict
from oncekey.policy import milliseconds

__all__ = ["REPLAYED", "LocalAnswers", "Rules", "settings_of"]

logger = logging.getLogger("oncekey")

REPLAYED: Final = (b"idempotent-replayed", b"true")
EXPOSED: Final = (b"access-control-expose-headers", b"Idempotent-Replayed, Retry-After")
MAX_SCOPES: Final = 10_000
MAX_HOST: Final = 262  # characters of a name and its port
# How long a key is remembered that has no answer: the application refused the request, or died.
# Whoever is not logged in can leave as many of them behind as it sends requests.
UNSETTLED_MS: Final = 600_000
UNAVAILABLE_RETRY: Final = 5  # seconds


def settings_of(settings: Settings | None, options: dict[str, Any]) -> Settings:
    """A ``Settings`` from what an adapter was given.

    Raises:
        PolicyError: There is no such option, or its value can't work.
    """
    if settings is not None and options:
        raise PolicyError("give a Settings or single options, not both")
    try:
        return settings or Settings(**options)
    except TypeError as error:
        raise PolicyError(f"there is no such option: {error}") from None


class Rules:
    """Settings, compiled."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.header = settings.header
        self.header_name = settings.header.lower().encode()
        self.methods = frozenset(method.upper() for method in settings.methods)
        self.local = LocalAnswers(settings) if settings.cache_entries else None
        plan = Plan.of(settings.policy())
        unsettled = replace(plan.terms, ttl_ms=min(plan.terms.ttl_ms, UNSETTLED_MS))
        self._plan = replace(plan, claiming=unsettled)
        self._codec = AnswerCodec()
        self.body_seconds = settings.body_seconds
        self.callers = Callers(settings)
        self.limits = Limits(settings)
        self._scopes: dict[tuple[str, ...], Scope] = {}
        names = {name.lower() for name in settings.stored_headers} | STORED_HEADERS
        self._stored = frozenset(name.encode() for name in names - NEVER_STORED)

    # Before the handler

    def guards(self, method: str, path: str) -> bool:
        """Whether requests like this are guarded."""
        applies = self.settings.applies
        return method in self.methods and (applies is None or applies(method, path))

    def key(self, facts: Facts) -> str | None:
        """The key of a request; ``None``: pass it on unguarded.

        Raises:
            Refusal: There is no key where one is required, it can't be used, or the body is too
                large. The body need not be read.
        """
        if not self.guards(facts.method, facts.path):
            return None
        values = facts.keys
        if not values and not self.settings.required:
            return None
        name = read_key(values, self.header)
        if name is None:
            raise Refusal(
                "key-missing",
                f"Send {self.header} with a fresh UUID for each operation, and the same one when "
                "you retry it.",
            )
        if facts.length is not None:
            self.check_length(declared_length(facts.length) or 0)
        return name

    def check_length(self, length: int) -> None:
        """Refuse a body that is too large.

        Raises:
            Refusal: It is.
        """
        most = self.settings.max_body_bytes
        if length > most:
            raise Refusal(
                "body-too-large",
                f"At most {most} bytes are taken with {self.header}; the server's owner can raise "
                "max_body_bytes.",
            )

    def job(self, name: str, caller: tuple[str, str], facts: Facts, body: bytes) -> Job:
        """What is to be done once.

        Raises:
            Refusal: The body is too large, or can't be compared.
        """
        settings = self.settings
        self.check_length(len(body))
        mark = fingerprint(
            settings.fingerprint,
            facts.method,
            facts.target,
            facts.content_type,
            facts.encoding,
            body,
        )
        who: tuple[str, ...] = caller
        if settings.per_host:
            who = (*caller, "host", facts.host[:MAX_HOST] or "-")
        scope = self._scopes.get(who)
        if scope is None:
            if len(self._scopes) >= MAX_SCOPES:
                self._scopes.clear()
            scope = self._scopes[who] = Scope("http", settings.namespace, *who)
        return Job(
            Key(scope, name),
            mark,
            self._plan,
            self._codec,
            facts.method,
            _is_kept,
            settings.raise_on_persist_error,
        )

    # After it

    @staticmethod
    def stored(job: Job, reply: ClaimReply) -> Answer:
        """The answer that a store gave to a claim.

        Raises:
            IdempotencyError: It gave none: a conflict, or another worker has the key.
        """
        if reply.verdict is not Verdict.REPLAY:
            raise refusal(reply, job.operation, job.plan.terms)
        answer: Answer = job.codec.decode(reply.answer or b"")
        return answer

    def kept(self, job: Job, answer: Answer) -> Answer | None:
        """What of an answer is stored; ``None``: nothing, the key stays free for a retry."""
        kept = self._fit_to_keep(answer)
        if kept is not None and kept.body and not self.limits.fits(job, len(kept.body)):
            return kept._replace(body=None)
        return kept

    def _fit_to_keep(self, answer: Answer) -> Answer | None:
        settings = self.settings
        if not settings.stores(answer.status):
            return None
        body = answer.body
        stored = self._stored
        headers = tuple([field for field in answer.headers if field[0] in stored])
        if body is not None and len(body) > settings.max_answer_bytes:
            body = None
        for name, value in headers:
            if (
                name == b"cache-control"
                and settings.honor_no_store
                and b"no-store" in value.lower()
            ):
                body = None
        kept = Answer(answer.status, _one_line_each(headers), body)
        if settings.redact is None:
            return kept
        try:
            status, headers, body = settings.redact(kept)
        except Exception:
            # The request was done. What can't be made fit to keep is not kept.
            logger.exception("redact failed: only the status of this answer is stored")
            return Answer(answer.status, (), None)
        headers = tuple([field for field in headers if field[0] in stored])
        return Answer(status, _one_line_each(headers), body)

    def replay(self, answer: Answer, facts: Facts) -> Answer:
        """A stored answer as it goes to a retry, in a coding that the client reads."""
        why = "was too large to keep, or was not to be kept"
        coding = coding_of(answer) if answer.body else ""
        if coding and not accepts(header_of(facts.source, "accept-encoding"), coding):
            why = f"is stored in {coding[:40]}, which Accept-Encoding of this request leaves out"
            answer = plain(answer, coding) or answer._replace(body=None)
        status, headers, body = answer
        if body is None:
            gone = self.refusal(
                Refusal(
                    "body-unavailable",
                    f"The first request with this {self.header} was answered with {status}. Its "
                    f"body {why}; the request is not run again.",
                    status=status,
                )
            )
            if status in (204, 304):
                gone = gone._replace(body=b"", headers=())
            names = {name for name, _ in gone.headers} | {b"content-encoding", b"etag"}
            headers = (*gone.headers, *(field for field in headers if field[0] not in names))
            body = gone.body
        headers = (*headers, REPLAYED)
        return Answer(status, self.exposed(headers) if self.settings.expose_cors else headers, body)

    @staticmethod
    def exposed(headers: Any) -> Any:
        """Header fields with leave for scripts of other origins to see ours."""
        said = [value for name, value in headers if name.lower() == EXPOSED[0]]
        others = [field for field in headers if field[0].lower() != EXPOSED[0]]
        return (*others, (EXPOSED[0], b", ".join([*said, EXPOSED[1]])))

    def refusal(self, refusal: Refusal) -> Answer:
        """The answer to a refused request."""
        settings = self.settings
        answer = problem(refusal, settings.profile, settings.docs_url, settings.challenge)
        if settings.expose_cors:
            return answer._replace(headers=self.exposed(answer.headers))
        return answer

    def failure(self, error: OncekeyError) -> Refusal:
        """How an error of the engine is worded for a client."""
        settings = self.settings
        if isinstance(error, IdempotencyConflictError):
            return Refusal(
                "key-reused",
                f"This {self.header} belongs to a request with another method, URL or body. Send a "
                "fresh key for another request, and the same bytes when you retry one.",
            )
        if isinstance(error, IdempotencyInFlightError):
            seconds = max(1, min(error.retry_after or 1, settings.retry_after))
            return Refusal(
                "in-flight",
                "The first request with this key has not been answered yet. Send the same request "
                "again to get its answer.",
                retry_after=seconds,
            )
        if isinstance(error, AnswerOmittedError):
            return Refusal(
                "body-unavailable",
                "The request was done before. Its answer was not kept, and it is not run again.",
            )
        if isinstance(error, ClaimLostError):
            return Refusal(
                "in-flight",
                "Another server has taken this request over. Send it again to get its answer.",
                retry_after=settings.retry_after,
            )
        if isinstance(error, BackendMismatchError):  # the owner's affair, which a client can't mend
            logger.error("a keyed request could not be checked, it was refused: %s", error)
            return Refusal(
                "store-unavailable",
                "Nothing was done. Send the same request again later.",
                retry_after=UNAVAILABLE_RETRY,
            )
        if isinstance(error, StoreError):
            logger.warning("a keyed request could not be checked, it was refused: %s", error)
            return Refusal(
                "store-unavailable",
                "Nothing was done. Send the same request again later.",
                retry_after=UNAVAILABLE_RETRY,
            )
        return Refusal("key-invalid", str(error))


def _one_line_each(headers: Fields) -> Fields:
    """Without fields that no server would send, and that would be several when they are read."""
    if any(b"\n" in value or b"\r" in value for _, value in headers):
        return tuple([one for one in headers if not (b"\n" in one[1] or b"\r" in one[1])])
    return headers


def _is_kept(value: Any) -> bool:
    return value is not None


class LocalAnswers:
    """Answers that this process has seen, to replay without asking the store.

    A stored answer never changes before it ends, so that a copy of it is as good, for a short
    while. Only the same key with the same fingerprint finds one; everything else asks the store.
    """

    def __init__(self, settings: Settings) -> None:
        self._most = settings.cache_entries
        seconds = milliseconds(settings.cache_seconds, "cache_seconds") / 1000
        # The store's clock and ours may run apart by a little.
        self._lasts = min(seconds, milliseconds(settings.ttl, "ttl") / 1000 / 2)
        self._found: OrderedDict[tuple[bytes, bytes], tuple[float, Answer]] = OrderedDict()

    def get(self, job: Job) -> Answer | None:
        """The answer, if it is at hand."""
        name = (job.key.digest, job.fingerprint)
        found = self._found.get(name)
        if found is None:
            return None
        if found[0] <= time.monotonic():
            self._found.pop(name, None)
            return None
        return found[1]

    def put(self, job: Job, answer: Answer) -> None:
        """Keep a recorded answer at hand."""
        while len(self._found) >= self._most:
            try:
                self._found.popitem(last=False)
            except KeyError:  # another thread was faster
                break
        name = (job.key.digest, job.fingerprint)
        self._found[name] = (time.monotonic() + self._lasts, answer)
