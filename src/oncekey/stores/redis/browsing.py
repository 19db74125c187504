"""Looking through the records on Redis, and at its servers: calls that are about no one key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from oncekey.abc import AsyncBrowsable, Browsable
from oncekey.errors import StoreCorruptError, StoreError
from oncekey.models import Entry, Key, Page
from oncekey.stores._batching import Job
from oncekey.stores._browsing import bounded, wrong_cursor
from oncekey.stores.redis.operations import Op, command
from oncekey.stores.redis.record import GRACE_MS, decode
from oncekey.stores.redis.topology import Address, Asks, Send, shown

__all__ = ["BROWSE", "FIND", "LOOK", "AsyncBrowsing", "Browsing", "Whole"]

_HEAD_BYTES: Final = 512  # of a record: all of it but its answer
_FEW: Final = 100  # keys that are read in one go


class Whole(Op):
    """An operation on the servers and not on a key. ``batches`` is whoever runs it."""

    def run(self, batches: Any, job: Job) -> Asks:
        """Ask, and give the job its result or error."""
        try:
            if not batches.topology.located:
                yield from batches.topology.locate()
            job.result = yield from self.ask(batches, job.args[2:])
        except StoreError as error:
            job.error = error

    def ask(self, batches: Any, args: Sequence[Any]) -> Asks:
        """Ask for the result."""
        raise NotImplementedError


class _Browse(Whole):
    """Arguments: cursor, limit. A cursor is the server's place, Redis's own, and keys passed."""

    def ask(self, batches: Any, args: Sequence[Any]) -> Asks:
        cursor, limit = args
        masters: Sequence[Address] = batches.topology.masters()
        try:
            place, scan, passed = map(int, (cursor or "0:0:0").split(":"))
        except ValueError:
            raise wrong_cursor() from None
        if not 0 <= place < len(masters):
            raise wrong_cursor()
        most, size = bounded(limit), 0
        for address in masters:
            size += (yield from batches._ask(address, command(b"DBSIZE"), 1))[0]
        names: list[bytes] = []
        looked = 0
        address = masters[place]
        while looked < most:
            asked = command(b"SCAN", b"%d" % scan, b"COUNT", b"%d" % min(most - looked, 1000))
            raw, found = (yield from batches._ask(address, asked, 1))[0]
            scan, looked = int(raw), looked + max(len(found), 1)
            passed += len(found)
            names += [name for name in found if _is_ours(batches, name)]
            if scan == 0:
                break
        entries: list[Entry] = []
        for start in range(0, len(names), _FEW):
            entries += yield from _read(batches, address, names[start : start + _FEW])
        if scan == 0:
            place += 1
        if place == len(masters):
            return Page(entries, None, 1.0)
        share = min(passed / size, 1.0) if size else 1.0
        return Page(entries, f"{place}:{scan}:{passed}", share)


class _Find(Whole):
    """Arguments: digest."""

    def ask(self, batches: Any, args: Sequence[Any]) -> Asks:
        name = batches.options.prefix + args[0]
        found = yield from _read(batches, batches.topology.route(name), [name])
        return found[0] if found else None


class _Look(Whole):
    """Arguments: commands. Gives the replies of each server by its name, errors among them."""

    def ask(self, batches: Any, args: Sequence[Any]) -> Asks:
        questions: Sequence[bytes] = args[0]
        told: dict[str, list[Any]] = {}
        for address in batches.topology.masters():
            (replies,) = yield [Send(address, b"".join(questions), len(questions))]
            if isinstance(replies, BaseException):
                yield from batches._ask(address, command(b"PING"), 1)  # which says what is wrong
                replies = [replies] * len(questions)
            told[shown(address)] = replies
        return told


def _is_ours(batches: Any, name: bytes) -> bool:
    prefix: bytes = batches.options.prefix
    return len(name) == len(prefix) + 32 and name.startswith(prefix)


def _read(batches: Any, address: Address, names: Sequence[bytes]) -> Asks:
    """The entries of keys on one server, as far as they are still there, without their answers."""
    asked = [
        part
        for name in names
        for part in (
            command(b"GETRANGE", name, b"0", b"%d" % (_HEAD_BYTES - 1)),
            command(b"STRLEN", name),
            command(b"PTTL", name),
        )
    ]
    replies = yield from batches._ask(address, b"".join([*asked, command(b"TIME")]), len(asked) + 1)
    now = int(replies[-1][0]) * 1000 + int(replies[-1][1]) // 1000
    entries = []
    for number, name in enumerate(names):
        raw, size, left = replies[3 * number : 3 * number + 3]
        if not raw:
            continue  # it ended meanwhile
        try:
            record = decode(raw, now + left - GRACE_MS)
        except StoreCorruptError:
            continue  # said when it is claimed
        answer = record.answer
        length = None if answer is None else size - (len(raw) - len(answer))
        key = Key.stored(name[len(batches.options.prefix) :])
        entries.append(Entry(key, record._replace(answer=None), length))
    return entries


BROWSE: Final = _Browse("browse")
FIND: Final = _Find("find")
LOOK: Final = _Look("look")


class Browsing(Browsable):
    """For the sync store. Redis keeps no scopes: theirs are empty."""

    _do: Any

    def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``Browsable``. In Redis's own order, one server after the other."""
        page: Page = self._do(BROWSE, b"", None, cursor, limit)
        return page

    def find(self, digest: bytes) -> Entry | None:
        """See ``Browsable``."""
        found: Entry | None = self._do(FIND, digest, None, digest)
        return found


class AsyncBrowsing(AsyncBrowsable):
    """For the async store. Redis keeps no scopes: theirs are empty."""

    _do: Any

    async def browse(self, cursor: str = "", limit: int = 1000) -> Page:
        """See ``AsyncBrowsable``. In Redis's own order, one server after the other."""
        page: Page = await self._do(BROWSE, b"", None, cursor, limit)
        return page

    async def find(self, digest: bytes) -> Entry | None:
        """See ``AsyncBrowsable``."""
        found: Entry | None = await self._do(FIND, digest, None, digest)
        return found
