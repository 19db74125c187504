"""Who decided what, and when: entries that are only ever added, each bound to the one before it.

An entry's hash covers the entry and the hash before it, so that whoever changes, removes or moves
one breaks the chain there. The head, kept apart, says how many there are, so that none can be cut
off at the end. With a secret hashes are HMACs, which nobody can make again without it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from oncekey.errors import OncekeyError, PolicyError
from oncekey.instrument.events import Event, EventKind, Subscription, subscribe

__all__ = [
    "DECISIONS",
    "START",
    "AuditEntry",
    "AuditError",
    "AuditFile",
    "AuditReport",
    "AuditSink",
    "Chain",
    "Head",
    "Link",
    "audit_events",
    "read_rows",
    "verify_chain",
    "verify_file",
]

MOST_PROBLEMS: Final = 100
_NOTHING: Final = "0" * 64  # what the first entry follows
_TAIL: Final = 65_536  # bytes: far more than the longest entry

DECISIONS: Final = frozenset(EventKind) - {
    EventKind.WAITED,
    EventKind.SWEPT,
    EventKind.DELIVERY,
    EventKind.EFFECT,
    EventKind.STORE_CALL,
    EventKind.STARTED,
    EventKind.ENDED,
}
"""The events that are decisions: what ``audit_events`` writes, if nothing else is said."""


class AuditError(OncekeyError):
    """An audit trail could not be read or written."""

    code = "AUDIT_ERROR"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One decision. Holds no secret, no payload, and a key only as its hash.

    Attributes:
        at: Seconds since 1970.
        provider: The provider's name, or the operation for what is no webhook.
        sender: The verified sender, empty for what was rejected; a hash of the key's scope for
            what is no webhook.
        key_hash: The first 16 hex digits of the key's SHA-256, empty where none was found; as
            events have it for what is no webhook.
        outcome: ``first``, ``duplicate``, ``in_flight``, ``conflict``, ``late``, ``dead``,
            ``failed``, ``rejected``, ``limited``, ``ignored``, ``unhandled``, ``bypass`` or
            ``unavailable``; or the kind of an event.
        status: The HTTP status that was answered, 0 for what is no webhook.
        code: Why, where there is a reason.
        seconds: How long it took.
    """

    at: float
    provider: str
    sender: str
    key_hash: str
    outcome: str
    status: int
    code: str
    seconds: float


AuditSink = Callable[[AuditEntry], None]


def audit_events(sink: AuditSink, *, kinds: Collection[EventKind] = DECISIONS) -> Subscription:
    """Write every decision of this process to ``sink``, until the result is closed.

    Args:
        sink: An ``AuditFile``, an ``AuditTable``, or any function of an entry.
        kinds: Which events.
    """

    def write(event: Event) -> None:
        if event.kind in kinds:
            what = (event.operation, event.scope, event.key, event.kind.value)
            sink(AuditEntry(time.time(), *what, 0, event.error or event.state, event.duration))

    return subscribe(write)


class Head(NamedTuple):
    """How long a chain is, and the hash that it ends with: as text, ``N:HASH``."""

    number: int
    hash: str

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"

    @classmethod
    def of(cls, text: str) -> Head:
        """Read ``N:HASH``.

        Raises:
            AuditError: It is no such text.
        """
        number, _, digest = text.strip().partition(":")
        if not number.isascii() or not number.isdigit() or len(digest) != 64:
            raise AuditError("a head is written N:HASH, as verifying a chain prints it")
        return cls(int(number), digest)


START: Final = Head(0, _NOTHING)


class Link(NamedTuple):
    """An entry in its chain: ``entry`` is its canonical JSON."""

    number: int
    entry: str
    before: str
    hash: str


class Chain:
    """Makes links, and knows its own. ``secret``: at least 16 bytes, or nothing."""

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is not None and len(secret) < 16:
            raise PolicyError("the secret of an audit chain needs at least 16 bytes")
        self._secret = secret

    def _digest(self, what: str, *parts: object) -> str:
        text = "\n".join((f"oncekey audit {what} 1", *map(str, parts))).encode()
        if self._secret is None:
            return hashlib.sha256(text).hexdigest()
        return hmac.new(self._secret, text, "sha256").hexdigest()

    def link(self, head: Head, entry: AuditEntry) -> Link:
        """The link that comes after ``head``."""
        return self.follow(head, asdict(entry))

    def follow(self, head: Head, entry: Mapping[str, Any]) -> Link:
        """The link of an entry of any kind."""
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        number = head.number + 1
        digest = self._digest("entry", number, head.hash, text)
        return Link(number, text, head.hash, digest)

    def is_own(self, link: Link) -> bool:
        """Whether a link is as it was made."""
        made = self._digest("entry", link.number, link.before, link.entry)
        return hmac.compare_digest(made, link.hash)

    def seal(self, head: Head) -> str:
        """A head as it is kept: nobody without the secret can make one."""
        return f"{head} {self._digest('head', head)}"

    def unseal(self, text: str) -> Head | None:
        """The head that was kept; ``None`` if it is not as it was made."""
        head, _, seal = text.strip().partition(" ")
        try:
            found = Head.of(head)
        except AuditError:
            return None
        return found if hmac.compare_digest(self._digest("head", found), seal) else None


class AuditReport(NamedTuple):
    """What verifying a chain found.

    Attributes:
        head: Its length and last hash. Note it elsewhere: whoever can write the chain and its
            head can put both back to an earlier state.
        problems: What is wrong, in order; empty: nothing is.
    """

    head: Head
    problems: list[str]


def verify_chain(
    links: Iterable[Link | str],
    chain: Chain,
    kept: str | None,
    expected: Head | None = None,
) -> AuditReport:
    """Look at every link of a chain.

    Args:
        links: In their order; text for one that can't be read, which says why.
        chain: With the secret that they were made with.
        kept: The sealed head, ``None`` if there is none.
        expected: A head that was noted elsewhere.
    """
    problems: list[str] = []
    head, noted = START, None
    for link in links:
        if isinstance(link, str):
            problems.append(link)
            continue
        problems += _wrong(link, head, chain)
        head = Head(link.number, link.hash)
        if expected is not None and expected.number == head.number:
            noted = head
    sealed = chain.unseal(kept) if kept is not None else None
    if kept is None and head.number:
        problems.append("the head is missing: whether entries were cut off can't be seen")
    elif kept is not None and sealed is None:
        problems.append("the head was changed, or made with another secret")
    elif sealed is not None and sealed.number > head.number:
        problems.append(f"entries {head.number + 1} to {sealed.number} were cut off at the end")
    if expected is not None and expected.number and noted != expected:
        problems.append(f"entry {expected.number} is not the one that was noted")
    return AuditReport(head, problems[:MOST_PROBLEMS])


def _wrong(link: Link, head: Head, chain: Chain) -> list[str]:
    """What is wrong with a link that stands after ``head``."""
    number, due = link.number, head.number + 1
    if not chain.is_own(link):
        return [f"entry {number} was changed, or made with another secret"]
    if number > due:
        return [f"entry {due} is missing" + (f", up to {number - 1}" if number - 1 > due else "")]
    if number < due:
        return [f"entry {number} stands after entry {head.number}: out of order, or a copy"]
    if link.before != head.hash:
        return [f"entry {number} does not follow the entry before it, which was replaced"]
    return []


class AuditFile:
    """Adds entries to a file, one line of JSON each; several processes and threads may.

    The head is kept beside it, in a file whose name ends in ``.head``. Both are made for their
    owner only. Nothing is kept open, so that it works after a fork.

    Args:
        path: The file.
        secret: Makes hashes that nobody can make without it. At least 16 bytes.
        sync: Have the disk confirm each entry, so that it also survives a crash of the machine.

    Raises:
        PolicyError: The secret is too short.
        AuditError: The system has no locks for files.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, secret: bytes | None = None, sync: bool = False
    ) -> None:
        self._path = os.fspath(path)
        self._chain = Chain(secret)
        self._sync = sync
        try:
            import fcntl
        except ImportError:  # pragma: no cover - Windows
            raise AuditError("audit files need a POSIX system: use an AuditTable") from None
        self._lock = fcntl.flock
        self._exclusive = fcntl.LOCK_EX

    def __call__(self, entry: AuditEntry) -> None:
        """Add one entry.

        Raises:
            AuditError: The file does not end with an entry, so that none can follow.
            OSError: It could not be written; nothing was added.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        file = os.open(self._path, flags, 0o600)
        try:
            self._lock(file, self._exclusive)  # until it is closed
            size = os.fstat(file).st_size
            link = self._chain.link(self._last(file, size), entry)
            line = b"%b\n" % json.dumps(link).encode()
            try:
                written = os.write(file, line)
                if self._sync:
                    os.fsync(file)
            except OSError:
                os.ftruncate(file, size)
                raise
            if written != len(line):
                os.ftruncate(file, size)
                raise OSError("the disk took a part of an audit entry only: is it full?")
            self._keep(Head(link.number, link.hash))
        finally:
            os.close(file)

    def _last(self, file: int, size: int) -> Head:
        """The head that the next entry follows."""
        if not size:
            return START
        start = max(0, size - _TAIL)
        tail = os.pread(file, size - start, start)
        link = _read(tail.rstrip(b"\n").rpartition(b"\n")[2])
        if isinstance(link, str) or not tail.endswith(b"\n"):
            raise AuditError(
                "the audit file does not end with an entry: verify it with oncekey audit verify, "
                "then begin another"
            )
        return Head(link.number, link.hash)

    def _keep(self, head: Head) -> None:
        beside = f"{self._path}.head.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        file = os.open(beside, flags, 0o600)
        try:
            os.write(file, f"{self._chain.seal(head)}\n".encode())
            if self._sync:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(beside, f"{self._path}.head")


def verify_file(
    path: str | os.PathLike[str], *, secret: bytes | None = None, expected: Head | None = None
) -> AuditReport:
    """Look at every entry of an ``AuditFile``, which nobody need have open.

    Raises:
        AuditError: It can't be read.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            try:
                with open(f"{path}.head", encoding="ascii", errors="replace") as beside:
                    kept: str | None = beside.read()
            except FileNotFoundError:
                kept = None
            links = (_read(line.rstrip(b"\n"), number) for number, line in enumerate(file, 1))
            return verify_chain(links, Chain(secret), kept, expected)
    except OSError as error:
        raise AuditError(f"the audit file can't be read: {error.strerror}") from error


def _read(line: bytes, number: int = 0) -> Link | str:
    """A line as a link, or why it is none."""
    try:
        link = Link(*json.loads(line))
        if type(link.number) is int and all(type(part) is str for part in link[1:]):
            return link
    except (ValueError, TypeError):
        pass
    return f"line {number} is no entry"


def read_rows(rows: Iterable[Any]) -> Iterable[Link | str]:
    """The rows of a table as links."""
    for row in rows:
        yield Link(int(row[0]), *map(str, row[1:]))
