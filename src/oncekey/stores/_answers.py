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

    async def get(self, scope_key: str, key: str) -> CachedResponse | None:
        """The live entry, or ``None``: missing, expired, pending, or its body was omitted."""
        record = await self.read(request_key(scope_key, key))
        if record is None or record.state is not State.COMPLETED or record.answer is None:
            return None
        if record.expires_at <= await self.now():
            return None
        try:
            response = decode_json(record.answer)
        except AnswerOmittedError:
            return None
        return CachedResponse(record.fingerprint.decode(), response, record.expires_at / 1000)

    async def put(self, scope_key: str, key: str, entry: CachedResponse) -> None:
        """Store ``entry``, over any entry that is there.

        Raises:
            UnsupportedAnswerError: ``entry.response`` is not made of JSON values.
        """
        answer = b"j" + encode_json(entry.response)
        expires_at = round(entry.expires_at_epoch * 1000)
        name = request_key(scope_key, key)
        await self.write(name, entry.payload_hash.encode(), answer, expires_at)
