"""The rules of the ``Idempotency-Key`` header, made ready: what no framework changes.

An adapter asks in this order: is this request guarded, what is its key, who calls, what is to be
done once (a ``Job``); then it runs the job, and asks what of the answer is kept, or how a failure
is worded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

from oncekey._core.at_hand import LocalAnswers
from oncekey._core.call import Job, Result
from oncekey._core.codec import DONE
from oncekey._core.flows import Claim, Plan
from oncekey.canonical import FAST
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
from oncekey.http.answer import KEPT, Answer, AnswerCodec, Fields
from oncekey.http.body import declared_length
from oncekey.http.callers import Callers, Limits, header_of
from oncekey.http.coding import accepts, coding_of, plain
from oncekey.http.facts import Facts, is_plain_path
from oncekey.http.fingerprint import fingerprint, json_head
from oncekey.http.header import KeyReader, is_plain_key, key_format, read_key
from oncekey.http.problems import Refusal, problem
from oncekey.http.settings import NEVER_STORED, STORED_HEADERS, Settings
from oncekey.instrument import events
from oncekey.instrument.events import EventKind, emit
from oncekey.models import ClaimReply, Key, Scope
from oncekey.policy import check_names

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

__all__ = ["Rules", "settings_of"]

logger = logging.getLogger("oncekey")

EXPOSED: Final = b"access-control-expose-headers"
# How long a key is remembered that has no answer: the application refused the request, or died.
# Whoever is not logged in can leave as many of them behind as it sends requests.
UNSETTLED_MS: Final = 600_000
UNAVAILABLE_RETRY: Final = 5  # seconds
# What is made once for many requests: for at most so many, each of at most so many bytes.
KNOWN: Final = 1024
SHORT: Final = 512
_new = tuple.__new__  # named tuples without their keyword machinery, for each request


def settings_of(settings: Settings | None, options: SettingsOptions) -> Settings:
    """A ``Settings`` from what an adapter was given.

    Raises:
        PolicyError: There is no such option, or its value can't work.
    """
    if settings is not None and options:
        raise PolicyError("give a Settings or single options, not both")
    check_names(options, (one.name for one in fields(Settings)), "the Idempotency-Key header")
    return settings or Settings(**options)


def _never(raw: bytes) -> None:
    """No key is known at sight where it must have a format."""


class Rules:
    """Settings, compiled."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.header = settings.header
        self.header_name = settings.header.lower().encode()
        self.methods = frozenset(method.upper() for method in settings.methods)
        pattern = key_format(settings.key_format)
        self._read_key = read_key if pattern is None else KeyReader(pattern)
        shown = settings.replay_header
        self._replayed = () if shown is None else ((shown.lower().encode(), b"true"),)
        self._exposed = b"Retry-After" if shown is None else f"{shown}, Retry-After".encode()
        self.local: LocalAnswers[Answer] | None = None
        if settings.cache_entries:
            self.local = LocalAnswers(settings.cache_entries, settings.cache_seconds, settings.ttl)
        plan = Plan.of(settings.policy())
        unsettled = plan.terms._replace(ttl_ms=min(plan.terms.ttl_ms, UNSETTLED_MS))
        self.plan = replace(plan, claiming=unsettled)
        self._codec = AnswerCodec()
        # What is looked at by nobody else of the owner's.
        self._plain = FAST and settings.fingerprint == "auto" and settings.applies is None
        self._plain = self._plain and pattern is None and settings.scope is None
        self._plain_key = is_plain_key if pattern is None else _never
        self._heads: dict[Any, bytes] = {}
        self._replays: dict[bytes, tuple[int, Fields]] = {}
        self.most = settings.max_body_bytes
        self._digits = len(str(settings.max_body_bytes))
        self.body_seconds = settings.body_seconds
        self.callers = Callers(settings)
        self.limits = Limits(settings)
        names = {name.lower() for name in settings.stored_headers} | STORED_HEADERS
        done = range(200, 400) if settings.store_status is None else ()
        self._done = frozenset(done)  # no need to ask settings.stores
        self._stored = frozenset(name.encode() for name in names - NEVER_STORED)

    # Before the handler

    def key(self, facts: Facts) -> str | None:
        """The key of a request; ``None``: pass it on unguarded.

        Raises:
            Refusal: There is no key where one is required, it can't be used, or the body is too
                large. The body need not be read.
        """
        settings = self.settings
        if facts.method not in self.methods:
            return None
        if settings.applies is not None:
            path = facts.path.decode("utf-8", "replace")
            if not settings.applies(facts.method, path):
                return None
        keys = facts.keys
        if len(keys) == 1 and type(raw := keys[0]) is bytes and self._plain_key(raw):
            name: str | None = raw.decode("ascii")  # as nearly all are
        else:
            name = self._read_key(keys, self.header)
        if name is None:
            if not settings.required:
                return None
            raise Refusal(
                "key-missing",
                f"Send {self.header} with a fresh UUID for each operation, and the same one when "
                "you retry it.",
            )
        length = facts.length
        if length is not None and len(length) >= self._digits:
            self.check_length(declared_length(length) or 0)
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

    def job(self, name: str, scope: Scope, facts: Facts, body: bytes) -> Job:
        """What is to be done once.

        Raises:
            Refusal: The body is too large, or can't be compared.
        """
        settings = self.settings
        if len(body) > settings.max_body_bytes:
            self.check_length(len(body))
        method, kind = facts.method, facts.content_type
        mark = fingerprint(settings.fingerprint, method, facts.target, kind, facts.encoding, body)
        return self.made(Key(scope, name), mark, method)

    def made(self, key: Key, mark: bytes, method: str) -> Job:
        """A job, of all that it is made of."""
        strict = self.settings.raise_on_persist_error
        return _new(Job, (key, mark, self.plan, self._codec, method, bool, strict, None))

    def at_sight(self, scope: Mapping[str, Any]) -> tuple[Key, bytes] | None:
        """The key of an ASGI request and how its fingerprint begins, where both are plain to see.

        As of nearly every request: each header came once, the key needs no reading, its caller was
        here before, and the body is JSON. ``None``: facts must be made, which decide the same.
        """
        headers = scope["headers"]
        if not self._plain or type(headers) is not list:
            return None
        fields: dict[bytes, bytes] = dict(headers)
        key = fields.get(self.header_name)
        if (
            key is None
            or len(fields) != len(headers)
            or fields.get(b"content-type") != b"application/json"
            or b"content-encoding" in fields
            or len(fields.get(b"content-length", b"")) >= self._digits
            or not is_plain_key(key)
        ):
            return None
        caller = self.callers.at_hand(fields.get(b"authorization"))
        if caller is None:
            return None
        get = scope.get
        place = (scope["method"], get("raw_path"), get("query_string"), get("root_path"))
        head = self._heads.get(place) or self._head(place)
        return None if head is None else (Key(caller, key.decode("ascii")), head)

    def _head(self, place: tuple[str, bytes | None, bytes | None, str | None]) -> bytes | None:
        """How the fingerprint of a request begins; ``None``: its path must be looked at."""
        method, path, query, root = place
        if not path or root or not is_plain_path(path):
            return None
        head = json_head(method, b"%b?%b" % (path, query) if query else path)
        if len(head) <= SHORT:
            if len(self._heads) >= KNOWN:
                self._heads.clear()
            self._heads[place] = head
        return head

    def at_hand(self, key: Key, mark: bytes, operation: str, source: Any) -> Answer | None:
        """The answer to a retry, where this process has it."""
        found = None if self.local is None else self.local.get(key, mark)
        if found is None:
            return None
        self.tell(key, operation)
        return self.replay(found, source)

    def tell(self, key: Key, operation: str) -> None:
        """Tell of a replay that the store knows nothing of, as of any other."""
        if events._listeners:
            emit(EventKind.REPLAY, key, operation)

    def opened(self, job: Job, claim: Claim | ClaimReply, source: Any) -> Claim | Answer:
        """The right to run, or what to answer instead to the framework's request.

        Raises:
            IdempotencyError: Neither: a conflict, or another worker has the key.
        """
        if type(claim) is Claim:
            self.limits.count(claim)
            return claim
        return self.replay(job.replay(claim), source)  # type: ignore[arg-type]

    # After it

    def kept(self, job: Job, answer: Answer | tuple[int, Any, bytes | None]) -> Answer | None:
        """What of an answer is stored; ``None``: nothing, the key stays free for a retry."""
        settings, stored = self.settings, self._stored
        status, headers, body = answer
        if status not in self._done and not settings.stores(status):
            return None
        fit = [
            (low, value)
            for name, value in headers
            # What holds a line end no server would send as one field.
            if (low := name.lower()) in stored and b"\n" not in value and b"\r" not in value
        ]
        if settings.honor_no_store and b"cache-control" in dict(fit):
            for low, value in fit:
                if low == b"cache-control" and b"no-store" in value.lower():
                    body = None
        if body is not None and len(body) > settings.max_answer_bytes:
            body = None
        if settings.redact is not None:
            status, fit, body = self._redacted(settings.redact, Answer(status, tuple(fit), body))
        if body and not self.limits.fits(job, len(body)):
            body = None
        return _new(Answer, (status, tuple(fit), body))

    def _redacted(
        self, redact: Callable[[Answer], Answer], answer: Answer
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes | None]:
        try:
            status, headers, body = redact(answer)
        except Exception:
            # The request was done. What can't be made fit to keep is not kept.
            logger.exception("redact failed: only the status of this answer is stored")
            return answer.status, [], None
        fields = [(name, value) for name, value in headers if name in self._stored]
        return status, [one for one in fields if not re.search(rb"[\r\n]", one[1])], body

    def recorded(
        self,
        job: Job,
        kept: Answer | None,
        result: Result,
        source: Any,
        claim: Claim | None = None,
    ) -> Answer | None:
        """What to answer instead, once the outcome is recorded; ``None``: what was kept."""
        if result.replayed:  # another worker's outcome counts
            return self.replay(result.value, source)
        if kept is not None and self.local is not None:
            size = sum(len(name) + len(value) for name, value in kept.headers)
            self.local.put(job, kept, size + len(kept.body or b""), claim)
        return None

    def replayed(self, raw: bytes | None, source: Any) -> Answer:
        """A stored answer, as the store has it, as it goes to a retry.

        Raises:
            OncekeyError: It was not kept, or can't be read.
        """
        raw = raw or DONE
        end = raw.find(b"\n\n")
        if end > 0:
            known = self._replays.get(raw[:end])
            if known is not None:
                return _new(Answer, (*known, raw[end + 2 :]))
        answer = self._codec.decode(raw)
        told = self.replay(answer, source)
        if raw[:1] == KEPT and end <= SHORT and b"content-encoding" not in dict(answer.headers):
            if len(self._replays) >= KNOWN:
                self._replays.clear()
            self._replays[raw[:end]] = (told.status, told.headers)
        return told

    def replay(self, answer: Answer, source: Any) -> Answer:
        """A stored answer as it goes to a retry, in a coding that the client reads."""
        status, headers, body = answer
        why = "was too large to keep, or was not to be kept"
        if body and b"content-encoding" in dict(headers):
            coding = coding_of(answer)
            if coding and not accepts(header_of(source, "accept-encoding"), coding):
                why = (
                    f"is stored in {coding[:40]}, which Accept-Encoding of this request leaves out"
                )
                status, headers, body = plain(answer, coding) or answer._replace(body=None)
        if body is None:
            headers, body = self._gone(status, headers, why)
        headers = (*headers, *self._replayed)
        if self.settings.expose_cors:
            headers = self.exposed(headers)
        return _new(Answer, (status, headers, body))

    def _gone(self, status: int, headers: Fields, why: str) -> tuple[Fields, bytes]:
        """What stands for a body that can't be replayed."""
        told = Refusal(
            "body-unavailable",
            f"The first request with this {self.header} was answered with {status}. Its body "
            f"{why}; the request is not run again.",
            status=status,
        )
        _, fields, body = self.refusal(told) if status not in (204, 304) else (0, (), b"")
        names = {name for name, _ in fields} | {b"content-encoding", b"etag"}
        return (*fields, *(field for field in headers if field[0] not in names)), body or b""

    def exposed(self, headers: Any) -> Any:
        """Header fields with leave for scripts of other origins to see ours."""
        said = [value for name, value in headers if name.lower() == EXPOSED]
        others = [field for field in headers if field[0].lower() != EXPOSED]
        return (*others, (EXPOSED, b", ".join([*said, self._exposed])))

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
        if isinstance(error, (BackendMismatchError, StoreError)):
            # The first is the owner's affair, which a client can't mend.
            level = logging.ERROR if isinstance(error, BackendMismatchError) else logging.WARNING
            logger.log(level, "a keyed request could not be checked, it was refused: %s", error)
            return Refusal(
                "store-unavailable",
                "Nothing was done. Send the same request again later.",
                retry_after=UNAVAILABLE_RETRY,
            )
        return Refusal("key-invalid", str(error))
