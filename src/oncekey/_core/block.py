"""A guarded block: what ``with once.guard(...)`` and ``async with`` enter and leave."""

from __future__ import annotations

import weakref
from contextvars import Token
from types import TracebackType
from typing import Any, NoReturn

from oncekey._core import call as engine
from oncekey._core.flows import Claim
from oncekey._core.heartbeat import Beat
from oncekey._core.notes import PendingCall
from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError, ClaimLostError
from oncekey.policy import Duration

__all__ = ["AsyncBlock", "Block", "OpenClaim"]


class OpenClaim:
    """What ``guard()`` hands out: the claim, or the answer that is already there.

    A block has to look at ``replayed``, or at ``answer``: one that is left on a replay without a
    look did its work twice, and is told so by a ``LookupError``.
    """

    def __init__(self, claim: Claim | None, answer: Any = None) -> None:
        self.claim = claim
        self._replayed = claim is None
        self._answer = answer
        self.seen = False  # whether anybody looked

    @property
    def replayed(self) -> bool:
        """The work was done before; ``answer`` is what it gave.

        After the block also: a worker that took the key over was done first, and its outcome
        counts.
        """
        self.seen = True
        return self._replayed

    @property
    def answer(self) -> Any:
        """The stored answer, or what was set in this block.

        Raises:
            LookupError: It is set on a replay: look at ``replayed`` first.
        """
        self.seen = True
        return self._answer

    @answer.setter
    def answer(self, value: Any) -> None:
        if self.claim is None and value is not self._answer:
            self.seen = True  # and told
            raise LookupError(
                "there is an answer already: this key was done before, and nothing is to be done "
                "again. Put the work of the block under 'if not claim.replayed:', and read "
                "claim.answer after it"
            )
        self._answer = value

    @property
    def fence(self) -> int:
        """Rises with every claim of the key. 0 on a replay."""
        return self.claim.fence if self.claim is not None else 0

    @property
    def attempts(self) -> int:
        """How many claims of the key were won so far. 0 on a replay."""
        return self.claim.attempts if self.claim is not None else 0

    @property
    def takeover(self) -> bool:
        """Whether an earlier worker died or hung with this key in hand."""
        return self.claim is not None and self.claim.takeover

    @property
    def lost(self) -> bool:
        """Whether another worker has taken the key over."""
        return self.claim is not None and self.claim.lost

    @property
    def ttl(self) -> float:
        """How long this answer is replayed, in seconds. Set it in the block: see ``Claim.ttl``."""
        return self._held().ttl

    @ttl.setter
    def ttl(self, value: Duration) -> None:
        self._held().ttl = value

    def check(self) -> None:
        """Raise ``ClaimLostError`` if another worker has taken the key over."""
        if self.claim is not None:
            self.claim.check()

    def downstream_key(self, provider: str, secret: bytes | str | None = None) -> str:
        """See ``Claim.downstream_key``."""
        return self._held().downstream_key(provider, secret)

    def before_call(self, provider: str, request_id: str) -> None:
        """See ``Claim.before_call``."""
        self._held().before_call(provider, request_id)

    async def abefore_call(self, provider: str, request_id: str) -> None:
        """See ``Claim.abefore_call``."""
        await self._held().abefore_call(provider, request_id)

    def pending_calls(self) -> list[PendingCall]:
        """See ``Claim.pending_calls``."""
        return self._held().pending_calls()

    async def apending_calls(self) -> list[PendingCall]:
        """See ``Claim.apending_calls``."""
        return await self._held().apending_calls()

    def _settle(self, result: engine.Result) -> None:
        """Take the official outcome: another worker's, if this one was fenced off."""
        self._answer, self._replayed = result

    def _left(self, exc: BaseException | None, operation: str) -> None:
        """Tell of a block that ran for a key that was done before, and never looked."""
        if exc is None and not self.seen:
            raise LookupError(
                f"{operation}: its block ran once more for a key that was done before, and never "
                "looked at claim.replayed. Put its work under 'if not claim.replayed:'"
            )

    def _settle_failed(self, instead: engine.Result | None, error: BaseException) -> None:
        """An error that is the outcome is none where another worker's answer is recorded."""
        if instead is not None:
            self._settle(instead)
            raise ClaimLostError(
                "the block failed after another worker had taken its key over, and that one's "
                "answer counts. If blocks often outlive their lease, raise the lease"
            ) from error

    def _held(self) -> Claim:
        if self.claim is None:
            self.seen = True
            raise LookupError(
                "the work was done before, so there is no call to make: look at "
                "claim.replayed first"
            )
        return self.claim


class OnlyAsync:
    """Says what to write where ``with`` stands in front of something to await."""

    def __enter__(self) -> NoReturn:
        raise BackendMismatchError("this is asynchronous: write 'async with', inside async def")

    def __exit__(self, *_: object) -> None: ...


class OnlySync:
    """Says what to write where ``async with`` stands in front of something that never waits."""

    async def __aenter__(self) -> NoReturn:
        raise BackendMismatchError(
            "this is synchronous, and would block the event loop: write 'with' outside of async "
            "code, or use AsyncOnce and aconnect(url)"
        )

    async def __aexit__(self, *_: object) -> None: ...


class Block(OnlySync):
    """A block on a sync store."""

    def __init__(self, store: Store, job: engine.Job) -> None:
        self._store = store
        self._job = job
        self._open: OpenClaim | None = None
        self._beat: Beat | None = None
        self._token: Token[Claim] | None = None

    def __enter__(self) -> OpenClaim:
        job = self._job
        claim = engine.open_claim(self._store, job)
        if isinstance(claim, Claim):
            try:
                self._beat = Beat(self._store, claim, job.plan)
                self._beat.__enter__()
                claim.block = weakref.ref(self)
                self._token = engine.CURRENT.set(claim)
                self._open = OpenClaim(claim)
                return self._open
            except BaseException as error:  # interrupted: the block will not run
                engine.give_up(self._store, job, claim, error)
                raise
        self._open = OpenClaim(None, job.replay(claim))
        return self._open

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        opened = self._open
        if opened is None or opened.claim is None or self._beat is None:
            if opened is not None:
                opened._left(exc, self._job.operation)
            return
        opened.claim.ended = True
        if self._token is not None:
            engine.CURRENT.reset(self._token)
        if exc is not None:
            instead = engine.give_up(self._store, self._job, opened.claim, exc)
            opened._settle_failed(instead, exc)
        else:
            opened._settle(engine.record(self._store, self._job, opened.claim, opened._answer))


class AsyncBlock(OnlyAsync):
    """A block on an async store."""

    def __init__(self, store: AsyncStore, job: engine.Job) -> None:
        self._store = store
        self._job = job
        self._open: OpenClaim | None = None
        self._guarded: Any = None

    async def __aenter__(self) -> OpenClaim:
        job = self._job
        claim = await engine.aopen_claim(self._store, job)
        if isinstance(claim, Claim):
            self._guarded = engine.guarded(self._store, job, claim)
            await self._guarded.__aenter__()
            self._open = OpenClaim(claim)
            return self._open
        self._open = OpenClaim(None, job.replay(claim))
        return self._open

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        opened = self._open
        if opened is None:
            return
        if opened.claim is None:
            opened._left(exc, self._job.operation)
            return
        if exc is None:
            await self._guarded.__aexit__(None, None, None)
            opened._settle(
                await engine.arecord(self._store, self._job, opened.claim, opened._answer)
            )
            return
        try:
            await self._guarded.__aexit__(exc_type, exc, traceback)
        finally:
            if not isinstance(exc, GeneratorExit):  # then nothing can be awaited any more
                instead = await engine.agive_up(self._store, self._job, opened.claim, exc)
                opened._settle_failed(instead, exc)
