"""``get``, ``put``, ``delete_expired`` and ``clear`` on the records of a full store."""

from __future__ import annotations

from oncekey._core.codec import decode_json, encode_json
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
        ends = record.expires_at / 1000
        if record.answer[:1] == b"e":
            ends = float(record.answer[1 : record.answer.index(b"\n")])
        return CachedResponse(record.fingerprint.decode(), response, ends)

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
        answer = encode_json(entry.response)
        expires_at = round(entry.expires_at_epoch * 1000)
        # Records end at a millisecond. What else the entry's time says stands with its answer.
        exact = expires_at / 1000 == entry.expires_at_epoch
        tag = b"j" if exact else b"e%b\n" % repr(float(entry.expires_at_epoch)).encode()
        await self.write(name, entry.payload_hash.encode(), tag + answer, expires_at)


def _named(scope_key: str | None, key: str | None, principal_id: str | None) -> Key:
    """The record that is meant, by either name of its owner."""
    scope = scope_key if principal_id is None else principal_id
    if scope is None or key is None or None not in (scope_key, principal_id):
        raise TypeError("pass a key and either scope_key or principal_id")
    return request_key(scope, key)
