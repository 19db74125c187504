"""The values that pass between the engine and the stores. Nothing here does I/O."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from oncekey.errors import InvalidKeyError

if TYPE_CHECKING:
    from oncekey._cached import CachedResponse

__all__ = [
    "MAX_KEY_LENGTH",
    "CachedResponse",
    "ClaimReply",
    "ClaimVerdict",
    "Entry",
    "Key",
    "Page",
    "Record",
    "Scope",
    "State",
    "Terms",
    "Verdict",
    "check_text",
    "identity_text",
]

MAX_KEY_LENGTH = 1024
"""The longest key, sender or scope part, in characters. Hash longer ids before you pass them."""


def _first_digest(data: bytes) -> Any:
    """Load SHA-256 with the first digest: it brings OpenSSL, which not every process needs."""
    global _sha256
    from hashlib import sha256

    _sha256 = sha256
    return sha256(data)


_sha256: Callable[[bytes], Any] = _first_digest


def check_text(value: str, what: str, limit: int = MAX_KEY_LENGTH) -> str:
    """Return ``value`` if it can be part of a key.

    Raises:
        InvalidKeyError: It is not a string, is empty or too long, holds a NUL, or is not
            valid Unicode.
    """
    if not isinstance(value, str):
        raise InvalidKeyError(
            f"{what} must be a string, got {type(value).__name__}: pass str(...) of an id"
        )
    if not value:
        raise InvalidKeyError(f"{what} must be a non-empty string")
    if len(value) > limit:
        raise InvalidKeyError(
            f"{what} has {len(value)} characters, at most {limit} are allowed: "
            "pass a digest of it instead"
        )
    if "\0" in value:
        raise InvalidKeyError(f"{what} holds a NUL character: remove it or pass a digest")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidKeyError(
                f"{what} holds half of a surrogate pair, which is not valid Unicode: "
                "decode it properly or pass a digest"
            ) from None
    return value


def identity_text(value: object, what: str) -> str:
    """Who somebody is, as text that no other identity has: ``1``, ``"1"`` and ``b"1"`` differ.

    Text stands for itself, unless it looks like one of the others; those begin with their type.

    Raises:
        InvalidKeyError: It is no text, integer, UUID or bytes, is empty or too long, holds a NUL,
            or is not valid Unicode.
    """
    if isinstance(value, str):
        text = str.__str__(value)  # what an enum of strings holds, not its name
        typed = text.startswith(("str:", "int:", "uuid:", "bytes:"))
        return check_text(f"str:{text}" if typed else text, what)
    uuid = sys.modules.get("uuid")  # nothing is a UUID before that is imported
    if uuid is not None and isinstance(value, uuid.UUID):
        return f"uuid:{value}"
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > 1024:
            raise InvalidKeyError(f"{what} is a number of more than 1024 bits: pass an id")
        return f"int:{int(value)}"
    if isinstance(value, bytes) and value:
        return check_text(f"bytes:{value.hex()}", what)
    shown = "empty bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"
    raise InvalidKeyError(
        f"{what} must be a non-empty str, an int, a UUID or bytes, got {shown}: pass the id of "
        "the user, not the object"
    )


class State(IntEnum):
    """What a stored record can be. The numbers are what the stores write."""

    PENDING = 0
    COMPLETED = 1
    RELEASED = 2


class ClaimVerdict(StrEnum):
    """How a store answers a claim."""

    WON = "won"
    REPLAY = "replay"
    IN_FLIGHT = "in_flight"
    CONFLICT = "conflict"
    EXPIRED = "expired"


Verdict = ClaimVerdict
"""The name of ``ClaimVerdict`` in earlier versions; ``oncekey.signatures.Verdict`` is another."""


class Scope:
    """Who a key belongs to: a kind of use, then the parts that name the owner.

    Parts are joined with their lengths, never with a separator, so that no two different
    lists of parts can ever name the same scope.

    Attributes:
        kind: ``request``, ``webhook`` or ``once``.
        label: A readable form for a scope column. Labels that are long or hard to print are
            replaced by their hash; the label never decides identity, the digest does.
        prefix: The exact parts as bytes, from which digests are made.
    """

    __slots__ = ("kind", "label", "parts", "prefix")

    def __init__(self, kind: str, *parts: str) -> None:
        self.kind = kind
        self.parts = parts
        encoded = [part.encode() for part in (kind, *parts)]
        self.prefix = b"%d" % len(encoded) + b"".join(b":%d:%b" % (len(p), p) for p in encoded)
        label = ":".join((kind, *parts))
        if len(label) > 200 or not label.isprintable() or label.startswith("sha256:"):
            label = "sha256:" + _sha256(self.prefix).hexdigest()
        self.label = label

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and other.prefix == self.prefix

    def __hash__(self) -> int:
        return hash(self.prefix)

    def __repr__(self) -> str:
        return f"Scope({self.hash!r})"

    @property
    def hash(self) -> str:
        """Twelve hex digits that stand for the scope in logs and events."""
        return str(_sha256(self.prefix).hexdigest())[:12]


class Key:
    """One idempotency key in its scope. What is stored is its digest, never the name."""

    __slots__ = ("_digest", "name", "scope")

    def __init__(self, scope: Scope, name: str) -> None:
        self.scope = scope
        self.name = name
        self._digest: bytes | None = None

    @classmethod
    def stored(cls, digest: bytes, label: str = "") -> Key:
        """A key as a store has it: by its digest. Its name and the parts of its scope are unknown.

        The methods of a store take it; ``label`` is what the store says of its scope.
        """
        scope = Scope("stored", digest.hex())
        scope.label = label
        key = cls(scope, digest.hex())
        key._digest = digest
        return key

    @property
    def digest(self) -> bytes:
        """SHA-256 over the length-prefixed scope and the name: 32 bytes, computed once."""
        digest = self._digest
        if digest is None:
            digest = _sha256(self.scope.prefix + b"|" + self.name.encode()).digest()
            self._digest = digest
        return digest

    @property
    def shown(self) -> str:
        """What stands for the key in logs: the first twelve hex digits of its digest.

        Nothing of the name, which its sender chose: it may be short, private, or hold a line end.
        """
        return self.digest.hex()[:12]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.name == self.name and other.scope == self.scope

    def __hash__(self) -> int:
        return hash((self.scope, self.name))

    def __repr__(self) -> str:
        return f"Key({self.scope.hash!r}, {self.shown + '…'!r})"


class Terms(NamedTuple):
    """The durations of one policy, in whole milliseconds, as stores need them.

    Attributes:
        lease_ms: How long a claim holds without being renewed.
        ttl_ms: How long a record counts: from completion, or with ``sticky`` from the first claim.
        skew_ms: How far past its end a completed record still replays.
        remember_ms: How long an expired key is remembered as expired. 0: not at all.
        sticky: The first payload stays bound to the key after a release, and the time to live
            runs from the first claim.
    """

    lease_ms: int
    ttl_ms: int
    skew_ms: int = 0
    remember_ms: int = 0
    sticky: bool = False


class Record(NamedTuple):
    """Everything a store keeps of one key. Times are milliseconds on the store's clock."""

    state: State
    owner: bytes
    fence: int
    fingerprint: bytes
    lease_until: int
    expires_at: int
    purge_at: int
    attempts: int
    answer: bytes | None


class Entry(NamedTuple):
    """A record in a listing, without its answer.

    Attributes:
        key: The key as its store has it, usable with that store's methods.
        record: The record; its answer is left out.
        answer_bytes: How long the answer is. ``None``: there is none.
    """

    key: Key
    record: Record
    answer_bytes: int | None


class Page(NamedTuple):
    """A part of a listing.

    Attributes:
        entries: The records.
        cursor: Where the next page starts. ``None``: this was the last.
        share: How much of all records this page and those before it cover, from 0 to 1.
    """

    entries: list[Entry]
    cursor: str | None
    share: float


class ClaimReply(NamedTuple):
    """A store's answer to a claim.

    ``fence`` is this claim's own when it was won, else the holder's. ``lease_ms`` is what is
    left of the holder's lease. ``attempts`` counts claims won. ``answer`` is there on a replay.
    ``takeover``: the claim was won from an owner whose lease had run out. ``own`` is the engine's:
    the holder is the very code that asks, further out.
    """

    verdict: ClaimVerdict
    fence: int
    lease_ms: int
    attempts: int
    answer: bytes | None
    takeover: bool = False
    own: bool = False


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """``CachedResponse``, once somebody asks for it: the others need no dataclasses."""
        if name != "CachedResponse":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from oncekey._cached import CachedResponse

        return CachedResponse
