"""Key sets (JSON Web Key Sets), and lists of revoked keys.

A set is a plain mapping, or is fetched by a function that you pass: how, from where and with
which credentials is yours to decide. Fetching is bounded: one refetch for an unknown key id, and
none within the cool-down, so that a stranger's made-up key ids can't make you hammer the signer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any, Final, NamedTuple, cast

from oncekey._core.drive import Op
from oncekey._core.forks import Forking, watch_forks
from oncekey.canonical import parse_json
from oncekey.errors import BackendMismatchError, CanonicalJSONError, PolicyError
from oncekey.signatures.algorithms import SignatureKey, load_key
from oncekey.signatures.keypairs import need_cryptography

__all__ = ["FetchedKeys", "Found", "KeySet", "Revocations", "as_keys"]

logger = logging.getLogger("oncekey")

MAX_DOCUMENT_BYTES: Final = 65_536
MAX_KEYS: Final = 256
COOL_DOWN_SECONDS: Final = 30.0
MAX_AGE_SECONDS: Final = 900.0
POLL_FLOOR_SECONDS: Final = 60.0

Document = Mapping[str, Any] | bytes | str
Fetch = Callable[[], Document] | Callable[[], Awaitable[Document]]
Asking = Generator[Op, Any, Any]


# --- key sets --------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a search for a key gave.

    Attributes:
        key: The key, or ``None``. One that can't be used has no algorithm.
        is_certain: A key that was not found is not published either: the set was read for this
            question. Else it may have been published since, and the sender should try again.
    """

    key: SignatureKey | None
    is_certain: bool = True


class KeySet:
    """Keys that don't change, by key id.

    Args:
        keys: A JSON Web Key Set (``{"keys": [...]}``), or a mapping of key ids to keys as
            ``load_key`` takes them.

    Raises:
        PolicyError: It is neither, is empty or too large, or holds a key that can't be used.
    """

    is_async = False

    def __init__(self, keys: Mapping[str, Any]) -> None:
        try:
            self._keys = _by_id(keys)
            faults = [fault for key_id in self._keys if (fault := self._fault(key_id))]
        except ValueError as error:
            raise PolicyError(f"keys: {error}") from None
        # A published set may hold keys for other uses; what was written by hand may not.
        if faults and ("keys" not in keys or len(faults) == len(self._keys)):
            raise PolicyError(f"keys: {faults[0]}")

    def _fault(self, key_id: str) -> str | None:
        try:
            load_key(self._keys[key_id])
        except ValueError as error:
            return str(error)
        return None

    def find(self, key_id: str) -> Asking:
        """Look a key up; gives a ``Found``."""
        yield from ()
        return Found(_loaded(self._keys, key_id))


def as_keys(keys: object) -> KeySet | FetchedKeys:
    """A key set of a mapping, of a function that fetches one, or as it is.

    Raises:
        PolicyError: It is none of those.
    """
    if isinstance(keys, (KeySet, FetchedKeys)):
        return keys
    if isinstance(keys, Mapping):
        return KeySet(cast("Mapping[str, Any]", keys))
    if callable(keys):
        return FetchedKeys(cast("Fetch", keys))
    raise PolicyError(
        f"keys must be a mapping or a function that fetches a key set, got {type(keys).__name__}"
    )


def _by_id(document: Mapping[str, Any]) -> dict[str, Any]:
    """Keys by id. A key id that comes twice names no key at all: nobody knows which is meant."""
    listed = document.get("keys")
    if isinstance(listed, (list, tuple)):
        entries = cast("Sequence[object]", listed)
        if len(entries) > MAX_KEYS:
            raise ValueError(f"a key set of more than {MAX_KEYS} keys")
        found: dict[str, Any] = {}
        twice: set[str] = set()
        for entry in entries:
            if not isinstance(entry, Mapping):
                raise ValueError("a key set whose keys are no objects")
            key_id = cast("Mapping[str, Any]", entry).get("kid")
            if isinstance(key_id, str) and key_id:
                twice.update({key_id} & found.keys())
                found[key_id] = entry
        return {key_id: entry for key_id, entry in found.items() if key_id not in twice}
    if "keys" in document:
        raise ValueError("a key set has its keys in a list")
    if not document or len(document) > MAX_KEYS:
        raise ValueError(f"a key set holds 1 to {MAX_KEYS} keys")
    return dict(document)


# A key that is published but can't be used is not an unknown one: nobody needs to fetch again.
_UNUSABLE: Final = SignatureKey("", None, {})


def _loaded(keys: dict[str, Any], key_id: str) -> SignatureKey | None:
    key = keys.get(key_id)
    if key is not None and not isinstance(key, SignatureKey):
        try:
            key = keys[key_id] = load_key(key)  # once: making a key object costs more than its use
        except ValueError:
            key = keys[key_id] = _UNUSABLE
    return key


class _UnfitError(ValueError):
    """What was fetched can't be used."""


class _Fetched(Forking):
    """A document that is fetched, one caller at a time, and not again within the cool-down.

    ``is_down``: the last fetch brought nothing, so what is not known here may yet be published.
    """

    def __init__(
        self, fetch: Fetch, is_async: bool | None, cool_down: float, clock: Callable[[], float]
    ) -> None:
        self._fetch = fetch
        self.is_async = (
            inspect.iscoroutinefunction(fetch)
            or inspect.iscoroutinefunction(getattr(fetch, "__call__", None))  # noqa: B004
            if is_async is None
            else is_async
        )
        self._cool_down = cool_down
        self._clock = clock
        self._tried_at: float | None = None
        self._loaded_at: float | None = None
        self.is_down = False
        self._loads = 0
        self.after_fork_in_child()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        """Fresh locks: another thread of the parent may have held the old ones."""
        self._lock = threading.Lock()
        self._loops: weakref.WeakKeyDictionary[Any, asyncio.Lock] = weakref.WeakKeyDictionary()

    def _age(self) -> float:
        return float("inf") if self._loaded_at is None else self._clock() - self._loaded_at

    def _may_fetch(self) -> bool:
        return self._tried_at is None or self._clock() - self._tried_at >= self._cool_down

    def refresh(self) -> Awaitable[None] | None:
        """Fetch, or wait for whoever is doing so; to be awaited if async."""
        if self.is_async:
            return self._arefresh()
        with self._lock:
            if self._may_fetch():  # else somebody did while this one waited
                try:
                    document = self._fetch()
                    if inspect.isawaitable(document):
                        if inspect.iscoroutine(document):
                            document.close()
                        raise BackendMismatchError(
                            "the function that fetches gave an awaitable: pass is_async=True, "
                            "and use averify"
                        )
                    self._take(document)
                except BackendMismatchError:
                    raise
                except Exception as error:  # noqa: BLE001 - what was fetched before stays in use
                    self._failed(error)
                finally:
                    self._tried_at = self._clock()
        return None

    async def _arefresh(self) -> None:
        loop = asyncio.get_running_loop()
        lock = self._loops.get(loop) or self._loops.setdefault(loop, asyncio.Lock())
        async with lock:
            if self._may_fetch():
                try:
                    document: Any = self._fetch()
                    self._take(await document if inspect.isawaitable(document) else document)
                except Exception as error:  # noqa: BLE001 - what was fetched before stays in use
                    self._failed(error)
                except asyncio.CancelledError:
                    # One client that hangs up must not leave everybody without keys.
                    if self._loaded_at is not None:
                        self._tried_at = self._clock()
                    self.is_down = True
                    raise
                self._tried_at = self._clock()

    def _take(self, document: Document) -> None:
        try:
            if isinstance(document, (bytes, bytearray, str)):
                if len(document) > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"more than {MAX_DOCUMENT_BYTES} bytes")
                document = parse_json(document if isinstance(document, str) else bytes(document))
            if not isinstance(document, Mapping):
                raise ValueError("it must be a JSON object")
            self._use(document)
        except CanonicalJSONError:
            raise _UnfitError("it is not JSON that every parser reads alike") from None
        except (ValueError, OverflowError) as error:
            raise _UnfitError(str(error)) from None
        self._loaded_at = self._clock()
        self._loads += 1
        self.is_down = False

    def _use(self, document: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _failed(self, error: Exception) -> None:
        # Only what we wrote ourselves: a URL with a token may stand in the text of another error.
        self.is_down = True
        reason = str(error) if isinstance(error, _UnfitError) else type(error).__name__
        logger.warning("%s: nothing new could be fetched: %s", type(self).__name__, reason)


class FetchedKeys(_Fetched):
    """Keys that a function fetches: at first use, when they are old, and for an unknown key id.

    Args:
        fetch: Gives the JSON Web Key Set, as an object, bytes or text. It decides where from;
            give it a timeout and a limit on what it reads.
        is_async: Whether ``fetch`` must be awaited. Found out for ``async def`` functions.
        cool_down: Seconds between two fetches at least.
        max_age: Seconds after which the set is fetched again. For as long once more, the old set
            stays in use if that fails.
        clock: Seconds, any origin.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        is_async: bool | None = None,
        cool_down: float = COOL_DOWN_SECONDS,
        max_age: float = MAX_AGE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if cool_down <= 0 or max_age < cool_down:
            raise PolicyError("cool_down must be positive, and max_age at least as long")
        need_cryptography()  # else every key that is fetched would be an unknown one
        super().__init__(fetch, is_async, cool_down, clock)
        self._max_age = max_age
        self._keys: dict[str, Any] = {}

    def find(self, key_id: str) -> Asking:
        """Look a key up, with one refetch at most; gives a ``Found``.

        Within the cool-down of a fetch, which a made-up key id may have caused, a key can have been
        published since: nothing is certain then, or a stranger could turn a rotation into refusals.
        """
        loads = self._loads
        if self._age() >= self._max_age and self._may_fetch():
            yield Op("refresh", (), self)
        found = self._current(key_id)
        if found is None and self._may_fetch():
            yield Op("refresh", (), self)
            found = self._current(key_id)
        return Found(found, self._loads != loads and not self.is_down)

    def _current(self, key_id: str) -> SignatureKey | None:
        return _loaded(self._keys, key_id) if self._age() < 2 * self._max_age else None

    def _use(self, document: Mapping[str, Any]) -> None:
        if not isinstance(document.get("keys"), (list, tuple)):
            raise ValueError("a key set has its keys in a list")
        keys = _by_id(document)
        # A shared secret in a set that anybody can fetch is shared with everybody.
        self._keys = {one: key for one, key in keys.items() if key.get("kty") != "oct"}


# --- revocation ------------------------------------------------------------------------------


class Revocations(_Fetched):
    """Key ids that must not be accepted any more, and how fresh that knowledge is.

    Args:
        source: The list (``{"revoked_kids": [...], "next_update": "2026-01-01T00:00:00Z"}``), or
            a function that fetches it. It is asked again when ``next_update`` is over, at most
            once a minute and at least every quarter of an hour.
        grace: Seconds after ``next_update`` for which an old list is still trusted. Then every
            key is refused until a new one comes.
        is_async: Whether the function must be awaited.
        clock: Seconds, any origin.

    Raises:
        PolicyError: ``source`` is neither, or not such a list.
    """

    def __init__(
        self,
        source: Mapping[str, Any] | Fetch,
        *,
        grace: float = MAX_AGE_SECONDS,
        is_async: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(source, Mapping) and not callable(source):
            raise PolicyError("revocations must be a mapping or a function that fetches one")
        self._fixed = isinstance(source, Mapping)
        fetch = (lambda: source) if isinstance(source, Mapping) else source
        super().__init__(fetch, is_async, POLL_FLOOR_SECONDS, clock)
        self._grace = grace
        self._revoked: frozenset[str] = frozenset()
        self._next_update: float | None = None
        if isinstance(source, Mapping):
            try:
                self._take(source)
            except _UnfitError as error:
                raise PolicyError(f"revocations: {error}") from None

    def check(self, key_id: str, now: float) -> Asking:
        """``revoked``, ``stale`` if nobody can tell, or ``None``."""
        old = self._age() >= MAX_AGE_SECONDS or self._is_past(now, 0)
        if not self._fixed and old and self._may_fetch():
            yield Op("refresh", (), self)
        if key_id in self._revoked:
            return "revoked"
        return "stale" if self._loaded_at is None or self._is_past(now, self._grace) else None

    def _is_past(self, now: float, grace: float) -> bool:
        return self._next_update is not None and now > self._next_update + grace

    def _use(self, document: Mapping[str, Any]) -> None:
        revoked = document.get("revoked_kids", [])
        if not isinstance(revoked, (list, tuple, set, frozenset)):
            raise ValueError("revoked_kids must be a list of key ids")
        ids = cast("Sequence[object]", revoked)
        if not all(isinstance(key_id, str) for key_id in ids):
            raise ValueError("revoked_kids must be a list of key ids")
        next_update = document.get("next_update")
        if next_update is None and not self._fixed:
            raise ValueError("a list that is fetched needs next_update")
        self._next_update = None if next_update is None else _moment(next_update)
        self._revoked = frozenset(cast("Sequence[str]", ids))


def _moment(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
        return float(value)
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise ValueError("next_update must be an ISO 8601 time or seconds since 1970")
