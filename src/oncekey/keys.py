"""Key strategies: plain functions that turn a delivery into its idempotency key.

A key names *what happened*, so that every retry of it carries the same one. Never derive a key
from a timestamp, an attempt number or anything else that changes between two deliveries of one
event: each retry would look new, and the work would run again.

==========================  ==============================================================
``event_id``                the provider gives every event an id (most do)
``payload_hash``            the payload carries a hash of its own
``json_path``               the id is somewhere else in the body
``hmac_key``                ids can be guessed or reused, and you share a secret
``signature_bound``         there is no id, and each retry is the same signed message
``ulid``                    you are the *producer*, and make the key yourself
==========================  ==============================================================

Every function returns a ``str`` of 1 to 255 characters without NUL.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, Protocol

from oncekey.canonical import canonicalize, canonicalize_json
from oncekey.errors import InvalidKeyError, PolicyError

__all__ = [
    "MAX_KEY_LENGTH",
    "Ulid",
    "event_id",
    "hmac_key",
    "json_path",
    "payload_hash",
    "signature_bound",
    "ulid",
]

MAX_KEY_LENGTH: Final = 255
"""The longest key, in characters, that every store takes."""


def json_path(payload: Mapping[str, Any], path: str) -> str:
    """Return the string or integer at ``path``, as a key.

    Args:
        payload: The parsed body.
        path: Names with dots between, list indices in brackets, and names that hold dots or
            brackets quoted: ``data.items[0].id``, ``$.data["a.b"]``. A leading ``$.`` is
            optional.

    Example:
        >>> json_path({"data": {"items": [{"id": 7}]}}, "data.items[0].id")
        '7'

    Raises:
        InvalidKeyError: If nothing stands there, or something that can't be a key: null, a
            boolean, a float, an object or a list, an empty string, more than 255 characters.
        PolicyError: If ``path`` is not such a path.
    """
    _must_be_parsed(payload)
    value = at_path(payload, path_steps(path))
    if value is NOTHING:
        raise InvalidKeyError(f"nothing at {path}; check the path, or that the sender fills it")
    return as_key(value, path)


def event_id(payload: Mapping[str, Any], path: str = "id") -> str:
    """Return the provider's event id, from the body or from the headers.

    Args:
        payload: The parsed body, or a mapping of header names to values.
        path: Where the id is, as in ``json_path``. A single name with a hyphen, such as
            ``webhook-id`` or ``X-GitHub-Delivery``, also matches in other letter case, as
            header names do.

    Raises:
        InvalidKeyError: If there is no usable id, or two headers differ in letter case only.
        PolicyError: If ``path`` is not a path.
    """
    _must_be_parsed(payload)
    steps = path_steps(path)
    name = steps[0]
    if len(steps) == 1 and isinstance(name, str) and "-" in name and name not in payload:
        found = [value for key, value in payload.items() if str(key).lower() == name.lower()]
        if len(found) > 1:
            raise InvalidKeyError(f"{path} is there {len(found)} times; send that header once")
        if found:
            return as_key(found[0], path)
    return json_path(payload, path)


def payload_hash(payload: Mapping[str, Any], field: str = "hash") -> str:
    """Return the hash that the payload carries itself, such as Sports Stack's ``event.hash``.

    Args:
        payload: The parsed body.
        field: Where the hash is, as in ``json_path``.

    Raises:
        InvalidKeyError: If there is no usable hash.
        PolicyError: If ``field`` is not a path.
    """
    return json_path(payload, field)


def hmac_key(event_id: str, payload: object, secret: bytes | str) -> str:
    """Return HMAC-SHA256 over the event id and the canonical payload, as 64 hex digits.

    Whoever does not hold the secret can't make a key that collides with a given event's; the
    same id with another payload is another key. The id is length-prefixed (8 bytes, big-endian),
    so that no part of it can be moved into the payload.

    Args:
        event_id: The provider's id of the event, for example from the function ``event_id``.
        payload: A JSON value, or its text as ``bytes``; both give the same key.
        secret: The shared secret; text is encoded as UTF-8.

    Raises:
        InvalidKeyError: If ``event_id`` is empty or not encodable.
        PolicyError: If ``secret`` is empty.
        CanonicalJSONError: If ``payload`` has no canonical form.
    """
    if not secret:
        raise PolicyError("the secret is empty; set the one that you share with the sender")
    if not event_id:
        raise InvalidKeyError("the event id is empty; take it from the provider's event")
    body = canonicalize_json(payload) if isinstance(payload, bytes) else canonicalize(payload)
    message = _prefixed(_utf8(event_id, "the event id")) + body
    return hmac.digest(_utf8(secret, "the secret"), message, "sha256").hex()


class _Proven(Protocol):
    @property
    def message_digest(self) -> str: ...


def signature_bound(payload: object, signature: bytes | str | _Proven) -> str:
    """Return SHA-256 over what was *verified* and the payload, as 64 hex digits.

    The same body under another signed message is another key. That fits schemes whose signature
    depends on the body alone, like GitHub's. Where a timestamp is signed too (Stripe, Slack,
    Standard Webhooks), each retry is signed anew and would get a new key: use ``event_id``.

    Args:
        payload: The raw body as ``bytes``, taken as it is, or a JSON value, canonicalised.
        signature: The verdict, or its ``message_digest``; from a verifier of your own the
            signature that was verified, if one message has only one: an ECDSA signature has a
            second form that is right too, and of two signatures one can be left out.

    Raises:
        InvalidKeyError: If ``signature`` is empty or not encodable.
        CanonicalJSONError: If ``payload`` is a value without a canonical form.
    """
    if not isinstance(signature, (bytes, str)):
        signature = signature.message_digest
    if not signature:
        raise InvalidKeyError("the signature is empty; verify the delivery first and pass it on")
    body = payload if isinstance(payload, bytes) else canonicalize(payload)
    return hashlib.sha256(_prefixed(_utf8(signature, "the signature")) + body).hexdigest()


def _prefixed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


def _utf8(text: bytes | str, what: str) -> bytes:
    if not isinstance(text, str):
        return bytes(text)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidKeyError(f"{what} holds a lone surrogate; send valid text") from None


_PLAIN: Final = re.compile(r"[!-~]+").fullmatch
NOTHING: Final = object()  # what is nowhere; null is something
_PLACE = re.compile(
    r'\[(?P<index>\d{1,9})\]|\[(?P<quoted>"(?:[^"\\]|\\.)*")\]|\.(?P<name>[^.\[\]]+)'
)


@lru_cache(maxsize=256)
def path_steps(path: str) -> tuple[str | int, ...]:
    """The names and indices that a path goes through, one after another.

    Raises:
        PolicyError: It is no path.
    """
    # A path that starts with a name gets the dot that every later name has.
    rest = path[1:] if path == "$" or path.startswith(("$.", "$[")) else path
    rest = rest if rest.startswith((".", "[")) else f".{rest}"
    steps: list[str | int] = []
    at = 0
    while at < len(rest):
        found = _PLACE.match(rest, at)
        if found is None:
            raise PolicyError(f"{path!r} is not a path; write it like data.items[0].id")
        if found["index"] is not None:
            steps.append(int(found["index"]))
        elif found["quoted"] is not None:
            steps.append(_unquote(found["quoted"], path))
        else:
            steps.append(found["name"])
        at = found.end()
    return tuple(steps)


def _unquote(quoted: str, path: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        raise PolicyError(f"{path!r} has a bad quoted name; write it as a JSON string") from None


def _must_be_parsed(payload: object) -> None:
    if isinstance(payload, (str, bytes, bytearray, memoryview)):
        raise InvalidKeyError(
            f"a key is looked up in a parsed body or in headers, got {type(payload).__name__}: "
            "parse it first, with json.loads or oncekey.canonical.parse_json"
        )


def at_path(value: Any, steps: tuple[str | int, ...]) -> Any:
    """What stands at the end of a path, or ``NOTHING``."""
    for step in steps:
        if isinstance(step, int):
            if not isinstance(value, (list, tuple)) or step >= len(value):
                return NOTHING
            value = value[step]
        elif isinstance(value, (dict, Mapping)) and step in value:
            value = value[step]
        else:
            return NOTHING
    return value


def as_key(value: object, path: str) -> str:
    """What was found at ``path``, as a key.

    Raises:
        InvalidKeyError: It can't be one.
    """
    if type(value) is str and len(value) <= MAX_KEY_LENGTH and _PLAIN(value):
        return value  # as nearly all are
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        kind = "null" if value is None else type(value).__name__
        raise InvalidKeyError(f"{path} is {kind}; a key must be a string or an integer")
    # 255 digits have fewer bits than that; str() of a much longer integer would raise.
    if isinstance(value, int) and value.bit_length() > 4 * MAX_KEY_LENGTH:
        raise InvalidKeyError(f"{path} is too long; a key has at most {MAX_KEY_LENGTH} characters")
    # Not str(): for a member of an Enum that would be its name.
    key = int.__repr__(value) if isinstance(value, int) else str.__str__(value)
    if not key.strip():
        raise InvalidKeyError(f"{path} is empty; the sender must fill it, or use another path")
    if len(key) > MAX_KEY_LENGTH:
        raise InvalidKeyError(f"{path} is too long; a key has at most {MAX_KEY_LENGTH} characters")
    if "\0" in key:
        raise InvalidKeyError(f"{path} holds a NUL character; send it without")
    _utf8(key, path)
    return key


# --- ULID ------------------------------------------------------------------------------------

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS = 80
_MAX_MS = 2**48 - 1


class _Process:
    """What all generators of a process share, and a forked child must not inherit."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0

    def forked(self) -> None:
        # Another thread of the parent may have held the lock, and no one here would release it.
        self.lock = threading.Lock()
        self.generation += 1


_process = _Process()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_process.forked)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Ulid:
    """A generator of ULIDs that strictly increase, also as text; call it for the next one.

    A ULID has 48 bits of milliseconds and 80 random bits, in 26 characters. Within one
    millisecond, and while the clock stands still or runs behind, the last value plus one is the
    next; past the last random value the milliseconds go up by one. Thread-safe. A forked child
    starts a random sequence of its own.

    For producers: make the key once, store it with the job, and send the stored one on every
    attempt. A receiver that makes a key for a delivery gives each retry a new one.

    Args:
        clock: Milliseconds since 1970.
        randbytes: Called with 10; must return that many unpredictable bytes.
    """

    def __init__(
        self,
        clock: Callable[[], int] = _now_ms,
        randbytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._clock = clock
        self._randbytes = randbytes
        self._last = -1
        self._generation = _process.generation

    def __call__(self) -> str:
        """Return the next ULID.

        Raises:
            PolicyError: If the clock is before 1970 or past the year 10889, or ``randbytes``
                returns another number of bytes.
        """
        with _process.lock:
            if self._generation != _process.generation:
                self._generation = _process.generation
                self._last = -1
            value = self._next()
            self._last = value
        return "".join([_CROCKFORD[value >> shift & 31] for shift in range(125, -1, -5)])

    def _next(self) -> int:
        now = int(self._clock())
        last_ms = self._last >> _RANDOM_BITS
        if self._last >= 0 and now <= last_ms:
            value = self._last + 1
            if value >> _RANDOM_BITS == last_ms:
                return value
            now = last_ms + 1  # the random part is used up
        if not 0 <= now <= _MAX_MS:
            raise PolicyError(f"the clock says {now} ms, which no ULID can hold; set it right")
        noise = self._randbytes(_RANDOM_BITS // 8)
        if len(noise) != _RANDOM_BITS // 8:
            raise PolicyError(f"randbytes returned {len(noise)} bytes; it must return 10")
        return now << _RANDOM_BITS | int.from_bytes(noise, "big")


_default = Ulid()


def ulid() -> str:
    """Return a new ULID: unique, and greater than every one before it in this process.

    For producers that make a key once and store it with the job; see ``Ulid``. Never for
    receivers: a key made on arrival can't recognise a retry.
    """
    return _default()
