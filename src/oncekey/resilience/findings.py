"""The queue of what somebody has to look at: duplicates that slipped, late arrivals, losses.

A table of a database: of a SQLite file, or of any database with a DB-API driver. Each finding has
an id that is made of what it is about, so that finding it again adds nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from oncekey._core.forks import Forking, watch_forks
from oncekey.errors import StoreClosedError
from oncekey.stores.sqlite.files import create_private

__all__ = ["Finding", "Findings", "Side", "finding_id"]

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS oncekey_findings (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, key_digest TEXT NOT NULL, scope TEXT NOT NULL,
    found_at DOUBLE PRECISION NOT NULL, sides TEXT NOT NULL, same_payload TEXT NOT NULL,
    settled_at DOUBLE PRECISION, note TEXT NOT NULL
)
"""
_ADD: Final = """
INSERT INTO oncekey_findings VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?) ON CONFLICT (id) DO NOTHING
"""
_LIST: Final = "SELECT * FROM oncekey_findings ORDER BY found_at, id"
_LIST_OPEN: Final = "SELECT * FROM oncekey_findings WHERE settled_at IS NULL ORDER BY found_at, id"
_SETTLE: Final = (
    "UPDATE oncekey_findings SET settled_at = ?, note = ? WHERE id = ? AND settled_at IS NULL"
)
_SAME: Final[dict[bool | None, str]] = {True: "yes", False: "no", None: "unknown"}
_SAID: Final = {said: same for same, said in _SAME.items()}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the times that the work of a key was done.

    Attributes:
        where: ``journal``, ``store`` or ``receiver``.
        process: Its machine and number, empty where that is not known.
        state: ``completed``, ``running``, ``unfinished`` or ``expired``.
        began: Seconds since 1970, 0 where that is not known.
        ended: The same.
        owner: The first twelve hex digits of the claim's owner.
    """

    where: str
    process: str
    state: str
    began: float
    ended: float
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that somebody has to look at. Holds no key, no payload and no answer.

    Attributes:
        id: Stands for it in ``settle``.
        kind: ``duplicate``: the work of one key was done more than once. ``unfinished``: it was
            begun without the store, and its process died or the call was cut off, so that it may
            have taken effect.
            ``late``: an event came after its window and was handled as new. ``damaged``: lines of a
            journal can't be read.
        key: The key's digest, in hex, as the store has it.
        scope: A hash of its scope.
        found_at: Seconds since 1970.
        sides: Each time that it was done, as far as is known.
        same_payload: Whether all sides had the same payload; ``None``: not known.
        settled_at: When somebody settled it.
        note: What they said, or more about it.
    """

    id: str
    kind: str
    key: str
    scope: str
    found_at: float
    sides: tuple[Side, ...] = ()
    same_payload: bool | None = None
    settled_at: float | None = None
    note: str = field(default="")


def finding_id(kind: str, *parts: bytes | str) -> str:
    """The id of what is found: the same whoever finds it, and however often."""
    whole = b"".join(
        len(raw).to_bytes(8, "big") + raw
        for raw in (part.encode() if isinstance(part, str) else part for part in (kind, *parts))
    )
    return hashlib.sha256(whole).hexdigest()[:16]


class Findings(Forking):
    """A table ``oncekey_findings``, made if it is not there. Works in threads and after a fork.

    Args:
        connect: The path of a SQLite file, made for its owner only; or gives a new DB-API
            connection each time it is called, to a database that several machines share.
        placeholder: How that driver marks arguments: ``?``, or ``%s`` for psycopg.

    Example:
        >>> import tempfile
        >>> from oncekey.resilience import Findings
        >>> findings = Findings(tempfile.mkdtemp() + "/findings.db")
        >>> findings.list()
        []
    """

    def __init__(self, connect: Callable[[], Any] | str, placeholder: str = "?") -> None:
        self._connect = functools.partial(_sqlite, connect) if isinstance(connect, str) else connect
        self._placeholder = placeholder
        self._connection: Any = None
        self._lock = threading.Lock()
        watch_forks(self)

    def __del__(self) -> None:
        # The queue of a directory is made where it is needed, and goes with what needed it.
        if hasattr(self, "_connection"):
            self._drop()

    def before_fork(self) -> None:
        """Let a statement under way be done, then close: no child may inherit the connection."""
        self._lock.acquire()
        self._drop()

    def after_fork_in_parent(self) -> None:
        """Connect again when there is something to say."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Connect then too, with a lock of our own."""
        self._lock = threading.Lock()

    def add(self, finding: Finding) -> bool:
        """Put a finding into the queue. False: it is there already, settled or not."""
        sides = json.dumps([asdict(side) for side in finding.sides])
        values = (
            finding.id,
            finding.kind,
            finding.key,
            finding.scope,
            finding.found_at,
            sides,
            _SAME[finding.same_payload],
            finding.note,
        )
        return self._do(_ADD, values)[1] > 0

    def list(self, *, settled: bool = False) -> list[Finding]:
        """What is in the queue, oldest first.

        Args:
            settled: Also what somebody has settled.
        """
        rows = self._do(_LIST if settled else _LIST_OPEN, (), rows=True)[0]
        return [_finding(row) for row in rows]

    def settle(self, ids: Iterable[str], note: str = "") -> int:
        """Say that somebody has dealt with these. Gives how many were open."""
        now = time.time()
        return sum(self._do(_SETTLE, (now, note[:1000], one))[1] for one in ids)

    def close(self) -> None:
        """Close the connection. What comes after is refused."""
        with self._lock:
            self._connect = _refuse
            self._drop()

    def _do(
        self, sql: str, values: tuple[Any, ...], *, rows: bool = False
    ) -> tuple[tuple[Any, ...], int]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                    self._connection.cursor().execute(_TABLE)
                    self._connection.commit()
                cursor = self._connection.cursor()
                cursor.execute(sql.replace("?", self._placeholder), values)
                found = tuple(cursor.fetchall()) if rows else ()
                changed = cursor.rowcount
                self._connection.commit()
            except BaseException:
                self._drop()  # the next one connects anew
                raise
        return found, changed

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()


def _finding(row: tuple[Any, ...]) -> Finding:
    name, kind, key, scope, found_at, sides, same, settled_at, note = row
    told = tuple(Side(**side) for side in json.loads(sides))
    return Finding(name, kind, key, scope, found_at, told, _SAID[same], settled_at, note)


def _sqlite(path: str) -> sqlite3.Connection:
    if path != ":memory:":
        create_private(path)
    return sqlite3.connect(path, timeout=60, check_same_thread=False)


def _refuse() -> Any:
    raise StoreClosedError("this queue of findings is closed: make another Findings")
