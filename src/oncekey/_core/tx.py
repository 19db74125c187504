"""``Tx``: what a transaction hands out to its block or handler."""

from __future__ import annotations

from typing import Any, Final, Generic

from oncekey._core.flows import Claim
from oncekey._core.sources import C
from oncekey.errors import TransactionRefusedError

__all__ = ["UNDONE", "UNSEEN", "Tx"]

_DONE_BEFORE: Final = (
    "this key was done before, and nothing is to be done again. Put the work of the block under "
    "'if not tx.replayed:', and read tx.answer after it"
)
_UNSEEN: Final = (
    "its block ran once more for a key that was done before, and never looked at tx.replayed. Put "
    "its work under 'if not tx.replayed:'"
)
UNDONE: Final = f"{_UNSEEN}. What it wrote on its connection was rolled back"
UNSEEN: Final = f"{_UNSEEN}. What it wrote stays, unless a transaction around it is rolled back"


class Tx(Generic[C]):
    """What a transaction hands out: where to write, and the answer if the work was done before.

    A block has to look at ``replayed``, or at ``answer``: one that is left on a replay without a
    look did its work twice, and is told so by a ``TransactionRefusedError``.
    """

    def __init__(self, connection: C, claim: Claim | None, answer: Any = None) -> None:
        self._connection = connection
        self._claim = claim
        self._answer = answer
        self.seen = False  # whether anybody looked

    @property
    def replayed(self) -> bool:
        """The work was done before; ``answer`` is what it gave, and nothing is to be done."""
        self.seen = True
        return self._claim is None

    @property
    def claim(self) -> Claim | None:
        """The claim, for its fence and attempts. ``None`` on a replay."""
        self.seen = True
        return self._claim

    @property
    def connection(self) -> C:
        """What to write on: the connection or session that was passed, or one of the store's own.

        Raises:
            TransactionRefusedError: The work was done before: look at ``replayed`` first.
        """
        if self._claim is None:
            self.seen = True  # and told
            raise TransactionRefusedError(f"there is nothing to write on: {_DONE_BEFORE}")
        return self._connection

    @property
    def answer(self) -> Any:
        """The stored answer, or what was set in this block.

        Raises:
            TransactionRefusedError: It is set on a replay: look at ``replayed`` first.
        """
        self.seen = True
        return self._answer

    @answer.setter
    def answer(self, value: Any) -> None:
        if self._claim is None and value is not self._answer:
            self.seen = True
            raise TransactionRefusedError(f"there is an answer already: {_DONE_BEFORE}")
        self._answer = value

    @property
    def session(self) -> C:
        """The same as ``connection``, where that is a session."""
        return self.connection
