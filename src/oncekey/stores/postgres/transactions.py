"""The records of a PostgreSQL store on a connection of a caller's, inside its transaction."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from oncekey.abc import TransactionRecords
from oncekey.drivers import ended_refused
from oncekey.errors import StoreError, TransactionRefusedError
from oncekey.models import ClaimReply, Key, Terms
from oncekey.stores.postgres.calls import (
    claim_arguments,
    claim_reply,
    complete_arguments,
    hidden,
)
from oncekey.stores.postgres.errors import named
from oncekey.stores.postgres.statements import Statements

__all__ = ["PgTransactionRecords"]


class PgTransactionRecords(TransactionRecords):
    """What another transaction has in hand is busy, never waited for."""

    flavour = "postgresql"

    def __init__(self, home: Statements, tenant: str, store_id: str) -> None:
        self._home = home
        self._tenant = tenant
        self._store_id = store_id
        self._transaction = ""

    def claim(
        self, on: Any, key: Key, owner: bytes, fingerprint: bytes, terms: Terms
    ) -> Generator[Any, Any, ClaimReply]:
        args = claim_arguments(self._tenant, key, owner, fingerprint, terms)
        joined: bool = on.joined
        rows = yield from on.execute(self._home.claim_in, [*args, self._store_id, joined])
        if not rows:
            raise hidden(key)
        row = rows[0]
        store_id, isolation, transaction = row[10:]
        if store_id != self._store_id:
            raise TransactionRefusedError(
                "this connection is to another database, or another schema, than the store's: the "
                "claim would not protect your writes. Use a store on the same database"
            )
        if row[1] is None and joined and isolation not in ("read committed", "read uncommitted"):
            raise TransactionRefusedError(
                f"this transaction is {isolation}: it can't see what others committed since it "
                "began, and oncekey can't begin it anew. Open it as READ COMMITTED, or let "
                "oncekey open it: pass a connection without an open transaction"
            )
        self._transaction = transaction
        return claim_reply(row, owner, fingerprint, terms)

    def complete(
        self, on: Any, key: Key, owner: bytes, fence: int, answer: bytes, terms: Terms
    ) -> Generator[Any, Any, bool]:
        args = complete_arguments(self._tenant, key, owner, fence, answer, terms)
        rows = yield from on.execute(self._home.complete_in, [*args, self._transaction])
        if rows and rows[0][2] != self._transaction:
            raise ended_refused("connection")
        return bool(rows) and rows[0][1] is True

    def named(self, error: BaseException) -> StoreError:
        return named(error)
