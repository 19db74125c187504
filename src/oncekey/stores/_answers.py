"""``get``, ``put``, ``delete_expired`` and ``clear`` on the records of a full store."""

from __future__ import annotations

from oncekey._core.codec import decode_json, exact_end, json_answer
from oncekey.errors import AnswerOmittedError
from oncekey.models import CachedResponse, Key, Scope, State
from oncekey.stores._holds import Holds

__all__ = ["Answers", "request_key"]


def request_key(scope_key: str, key: str) -> Key:
    """The record that request-side answers of ``scope_key`` are kept under."""
    return Key(Scope("request", scope_key), key)


class Answers(Holds):
    """The small backend contract, for stores that have the large one."""

    async def get(
        self,
        scope_key: str | None = None,
        key: str | None = None,
        *,
        principal_id: str | None = None,
    ) -> CachedResponse | None:
        """The live entry, or ``None``: missing, expired, pending, or its body was omitted.

        ``principal_id`` is another name for ``scope_key``.
        """
        record = await self.read(_named(scope_key, key, principal_id))
        if record is None or record.state is not State.COMPLETED or record.answer is None:
            return None
        if record.expires_at <= await self.now():
            return None
        try:
            response = decode_json(record.answer)
        except AnswerOmittedError:
            return None
        ends = exact_end(record.answer)
        return CachedResponse(
            record.fingerprint.decode(),
            response,
            record.expires_at / 1000 if ends is None else ends,
        )

    async def put(
        self,
        scope_key: str | None = None,
        key: str | None = None,
        entry: CachedResponse | None = None,
        *,
        principal_id: str | None = None,
    ) -> None:
        """Store ``entry``, over any entry that is there.

        ``principal_id`` is another name for ``scope_key``.

        Raises:
            UnsupportedAnswerError: ``entry.response`` is not made of JSON values.
        """
        name = _named(scope_key, key, principal_id)
        if entry is None:
            raise TypeError("put needs an entry: pass a CachedResponse")
        ends = entry.expires_at_epoch
        expires_at = round(ends * 1000)
        # Records end at a millisecond. What else the entry's time says stands with its answer.
        answer = json_answer(entry.response, None if expires_at / 1000 == ends else ends)
        await self.write(name, entry.payload_hash.encode(), answer, expires_at)


def _named(scope_key: str | None, key: str | None, principal_id: str | None) -> Key:
    """The record that is meant, by either name of its owner."""
    scope = scope_key if principal_id is None else principal_id
    if scope is None or key is None or None not in (scope_key, principal_id):
        raise TypeError("pass a key and either scope_key or principal_id")
    return request_key(scope, key)
