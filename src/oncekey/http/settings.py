"""The options of the ``Idempotency-Key`` header, the same for every framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from oncekey.errors import PolicyError
from oncekey.http.answer import Answer
from oncekey.http.fingerprint import Fingerprint
from oncekey.http.header import key_format
from oncekey.http.problems import Profile
from oncekey.models import check_text
from oncekey.policy import (
    Duration,
    JournalPath,
    OnOutage,
    Policy,
    check_on_outage,
    check_seconds,
    milliseconds,
)

__all__ = ["GUARDED", "NEVER_STORED", "STORED_HEADERS", "Anonymous", "Settings"]

# Known by identity: who names the same methods has thought of the others. A constant that is
# written elsewhere must not be this very object.
GUARDED: Final[tuple[str, ...]] = tuple(iter(("POST", "PATCH")))

DRAFT: Final = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"

_HEADER_NAME: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}"

# fmt: off
STORED_HEADERS: Final = frozenset((
    "cache-control", "content-disposition", "content-encoding", "content-language",
    "content-location", "content-type", "etag", "last-modified", "link", "location", "vary",
    # What makes an answer safe to look at: a replay must be no less so.
    "access-control-allow-credentials", "access-control-allow-origin",
    "access-control-expose-headers", "content-security-policy",
    "content-security-policy-report-only", "cross-origin-embedder-policy",
    "cross-origin-embedder-policy-report-only", "cross-origin-opener-policy",
    "cross-origin-opener-policy-report-only", "cross-origin-resource-policy",
    "origin-agent-cluster", "permissions-policy", "referrer-policy",
    "strict-transport-security", "timing-allow-origin", "x-content-type-options",
    "x-download-options", "x-frame-options", "x-permitted-cross-domain-policies",
    "x-robots-tag", "x-xss-protection",
))
"""What is kept of an answer's headers, unless more is asked for."""

NEVER_STORED: Final = frozenset(
    {"authorization", "cookie", "proxy-authorization", "set-cookie", "set-cookie2"}
)
"""What belongs to one caller at one time: never kept, even if asked for."""

FRAMING: Final = frozenset((
    "connection", "content-length", "content-range", "keep-alive", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
))
# fmt: on
"""What says how one message is sent: a replay is sent in its own way."""

# What means "finally refused", beside "done" (2xx and 3xx). Of the others, 401, 404 or 422 may be
# another answer tomorrow, and cost nothing to make: whoever has no login yet can ask for them.
FINAL: Final = frozenset({402, 409, 410})

Anonymous = Literal["refuse", "shared"]
"""What becomes of keyed requests whose caller is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How keyed requests are treated.

    Attributes:
        header: The name of the header.
        methods: Which methods are guarded. Others pass, with a key or without; a guard at a single
            route that lets a PUT or DELETE pass says so, unless this is given.
        key_format: What keys must look like: ``"uuid"`` (any version), or a regular expression for
            the whole key, as text or compiled. Another key gets a 400 that names the format.
            ``None``: 1 to 255 printable ASCII characters.
        required: A guarded request without a key is refused, instead of passing unguarded.
        applies: Which requests are guarded, by method and path. ``None``: all of those methods.
        scope: Who is calling: a function of the framework's request, that gives the authenticated
            user's id (text, an integer, a UUID or bytes), or ``None`` for nobody that is known.
            Without one, the ``Authorization`` header stands for the caller.
        anonymous: ``refuse`` keyed requests of unknown callers, or let all of them share one space
            of keys: ``shared``. Then each gets the stored answers of the others.
        secret: With which callers are hashed into the store, at least 16 bytes; the same in every
            process. ``None``: a random one that the store itself keeps.
        per_host: Keys of one ``Host`` mean nothing at another, for an app that serves several.
        namespace: Sets applications that share a store apart.
        profile: ``ietf``, as the header's draft says, or ``stripe``: 400 for a reused key, answers
            of 500 and above are replayed too.
        fingerprint: How bodies are compared: ``auto``, ``raw``, or a function of the body and its
            content type.
        ttl: How long an answer is replayed.
        lease: How long a key is held for a worker that died. A live one renews it.
        wait: How long a copy waits for the first one's answer before it is told 409.
        max_waiters: How many copies of one request wait at a time in a process. One more is told
            409 at once.
        max_run: How long a live worker may keep its key: a handler that hangs must not keep it for
            ever. ``None``: as long as it runs.
        body_timeout: How long a body may take to come in before its client gets a 408. ``None``: as
            long as the server lets it.
        disconnect_grace: How long an ASGI application is not told that its client has hung up, so
            that its answer can be completed for the retry. 0: it is told at once. ``None``: not
            before its answer is complete.
        retry_after: What a copy is told to wait, in seconds; less if the lease ends earlier.
        max_body_bytes: Larger requests with a key are refused.
        max_new_keys: At most so many new keys of one caller in so many seconds; more get a 429.
            ``None``: any number.
        limits: Where these are counted: in each ``process`` by itself; or ``shared``, by the store
            for all that use it, which costs two round trips for a new key and one for a retry.
            PostgreSQL and Redis can.
        max_caller_bytes: How much of the answers to one caller is stored within ``ttl``, counted in
            each process. Of more, only status and headers are kept. ``None``: all.
        max_total_bytes: The same for all callers together.
        max_answer_bytes: Of larger answers only status and headers are kept.
        compress_above: Longer answers are compressed with zlib in the store, where that makes them
            shorter. ``None``: none is.
        store_server_errors: Replay answers of 500 and above too. ``None``: as the profile says.
        store_status: Which statuses are stored, instead of the usual ones: 2xx, 3xx, 402, 409, 410.
        stored_headers: Names of more headers to keep.
        honor_no_store: Keep only status and headers of an answer with ``Cache-Control: no-store``.
        redact: Called with an answer, gives the one to store in its place.
        cache_entries: How many answers this process keeps at hand to replay without asking the
            store, of those that it recorded and that have at most 64 KiB. 0: none.
        cache_seconds: How long it keeps them.
        replay_header: The name of the header, with the value ``true``, that tells a replay from a
            first answer. ``None``: replays look like first answers.
        expose_cors: Let scripts of other origins see ``replay_header`` and ``Retry-After``.
        docs_url: Where clients can read about keys. It is linked from every refusal.
        challenge: The ``WWW-Authenticate`` header for callers that are not known.
        raise_on_persist_error: Answer 503 if the outcome could not be recorded. Off, the answer
            is given, with a warning in the log: a retry may then run the request again.
        on_outage: What becomes of a keyed request while the store can't answer. ``closed``: it is
            refused with a 503. ``open``: it is handled without the store, which is made whole from
            the journal later; that needs ``secret``, as the store can't be asked for its own.
            ``None``: as the store says, which is ``closed`` unless ``resilient`` was told
            otherwise.
        journal: The journal's directory, for ``open``.
    """

    header: str = "Idempotency-Key"
    key_format: str | re.Pattern[str] | None = None
    methods: Collection[str] = GUARDED
    required: bool = False
    applies: Callable[[str, str], bool] | None = None
    scope: Callable[[Any], Any] | None = None
    anonymous: Anonymous = "refuse"
    secret: bytes | str | None = field(default=None, repr=False)
    per_host: bool = False
    namespace: str = "http"
    profile: Profile = "ietf"
    fingerprint: Fingerprint = "auto"
    ttl: Duration = 86_400
    lease: Duration = 30
    wait: Duration = 0
    max_waiters: int = 32
    max_run: Duration | None = 900
    body_timeout: Duration | None = 30
    disconnect_grace: Duration | None = 10
    retry_after: int = 1
    max_body_bytes: int = 1_048_576
    max_new_keys: tuple[int, int] | None = (3600, 60)
    limits: Literal["process", "shared"] = "process"
    max_caller_bytes: int | None = 1_073_741_824
    max_total_bytes: int | None = 17_179_869_184
    max_answer_bytes: int = 1_048_576
    compress_above: int | None = None
    store_server_errors: bool | None = None
    store_status: Callable[[int], bool] | None = None
    stored_headers: Collection[str] = ()
    honor_no_store: bool = True
    redact: Callable[[Answer], Answer] | None = None
    cache_entries: int = 0
    cache_seconds: Duration = 60
    replay_header: str | None = "Idempotent-Replayed"
    expose_cors: bool = False
    docs_url: str = DRAFT
    challenge: str = "Bearer"
    raise_on_persist_error: bool = False
    on_outage: OnOutage | None = None
    journal: JournalPath | None = None

    def __post_init__(self) -> None:
        for header in (self.header, self.replay_header):
            if header is not None and not re.fullmatch(_HEADER_NAME, header):
                raise PolicyError(f"{header!r} can't be the name of a header")
        key_format(self.key_format)
        self._check_kinds()
        if isinstance(self.methods, str) or not self.methods:
            raise PolicyError("methods must be a list of methods, such as ['POST', 'PATCH']")
        if isinstance(self.stored_headers, str):
            raise PolicyError("stored_headers must be a list of names")
        more = {name.lower() for name in self.stored_headers}
        if never := ", ".join(sorted(more & NEVER_STORED)):
            raise PolicyError(
                f"{never} must not be replayed to a retry: set it outside of the guarded handler"
            )
        if self.replay_header is not None and self.replay_header.lower() in STORED_HEADERS | more:
            raise PolicyError(
                f"replay_header={self.replay_header!r} is a header that answers have of their own: "
                "give it a name that the application never sends"
            )
        if framing := ", ".join(sorted(more & FRAMING)):
            raise PolicyError(f"{framing} can't be stored: the server says it of each answer")
        if self.profile not in ("ietf", "stripe"):
            raise PolicyError(f"profile must be 'ietf' or 'stripe', got {self.profile!r}")
        if self.anonymous not in ("refuse", "shared"):
            raise PolicyError(f"anonymous must be 'refuse' or 'shared', got {self.anonymous!r}")
        if not callable(self.fingerprint) and self.fingerprint not in ("auto", "raw"):
            raise PolicyError(
                f"fingerprint must be 'auto', 'raw' or a function, got {self.fingerprint!r}"
            )
        for name in ("max_body_bytes", "max_answer_bytes", "retry_after"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_caller_bytes", "max_total_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise PolicyError(f"{name} can't be negative, got {getattr(self, name)}")
        rate = self.max_new_keys
        if rate is not None and (len(rate) != 2 or min(rate) < 1):
            raise PolicyError("max_new_keys must be (how many, in how many seconds), or None")
        if self.secret is not None and len(self.secret) < 16:
            raise PolicyError("secret is too short: pass at least 16 random bytes")
        check_on_outage(self.on_outage)
        if self.on_outage == "open" and self.secret is None:
            raise PolicyError(
                "on_outage='open' needs secret=, at least 16 random bytes that are the same in "
                "every process: in an outage the store can't be asked for the one that it keeps"
            )
        if self.cache_entries < 0:
            raise PolicyError(f"cache_entries can't be negative, got {self.cache_entries}")
        if re.search(r"[\r\n<>]", self.docs_url + self.challenge):
            raise PolicyError("docs_url and challenge go into headers: no line ends, no < or >")
        check_text(self.namespace, "namespace")
        milliseconds(self.cache_seconds, "cache_seconds")
        if self.body_timeout is not None:
            milliseconds(self.body_timeout, "body_timeout", least=1)
        if self.disconnect_grace is not None:
            milliseconds(self.disconnect_grace, "disconnect_grace")
        self.policy()

    def _check_kinds(self) -> None:
        """Find now what would otherwise fail at the first request, with its work done."""
        for name in ("applies", "store_status", "redact"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise PolicyError(f"{name} must be a function, got {getattr(self, name)!r}")
        scope: Any = self.scope
        if scope is not None and not callable(scope):
            raise PolicyError(
                f"scope must be a function that names the caller, got {scope!r}: for a header "
                "write scope=by_header('X-API-Key'), from oncekey.http"
            )
        if getattr(scope, "__name__", "") == "by_header":
            raise PolicyError("scope=by_header lacks its header: write by_header('X-API-Key')")
        for name in ("required", "per_host", "honor_no_store", "expose_cors"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"{name} must be True or False, got {getattr(self, name)!r}")
        check_seconds(retry_after=self.retry_after)

    @property
    def body_seconds(self) -> float | None:
        """``body_timeout`` in seconds."""
        if self.body_timeout is None:
            return None
        return milliseconds(self.body_timeout, "body_timeout") / 1000

    def policy(self) -> Policy:
        """What the engine is told."""
        return Policy(
            ttl=self.ttl,
            lease=self.lease,
            wait=self.wait,
            max_waiters=self.max_waiters,
            max_run=self.max_run,
            # The body has a limit of its own; headers come on top.
            max_answer_bytes=self.max_answer_bytes + 65_536,
            compress_above=self.compress_above,
        )

    def stores(self, status: int) -> bool:
        """Whether an answer with this status is the outcome, and so is stored."""
        if self.store_status is not None:
            return self.store_status(status)
        if status >= 500:
            wanted = self.store_server_errors
            return self.profile == "stripe" if wanted is None else wanted
        return 200 <= status < 400 or status in FINAL
