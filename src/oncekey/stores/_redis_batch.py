"""What a batch is made of: calls, the round they are sent in, and what earlier rounds taught."""

from __future__ import annotations

from collections.abc import Sequence

from oncekey._core.flows import new_owner
from oncekey.stores._batching import Job
from oncekey.stores._redis_layout import Address
from oncekey.stores._redis_ops import MARK, Op

__all__ = ["Call", "Memory", "Round"]


class Call:
    """One use of a script, or a few plain commands, and the jobs that it answers."""

    __slots__ = ("asking", "jobs", "op", "plain", "token")

    def __init__(
        self, op: Op, jobs: list[Job], token: bytes, asking: bool = False, plain: bool = False
    ) -> None:
        self.op = op
        self.jobs = jobs
        self.token = token
        self.asking = asking  # for a node that is about to have the key
        self.plain = plain  # a mark without a script


class Round:
    """One sending: what goes where, and what is to be done afterwards."""

    __slots__ = ("again", "calls", "doubtful", "dropped", "unconfirmed")

    def __init__(self) -> None:
        self.calls: dict[Address, list[Call]] = {}
        self.again: list[Job] = []  # in the next round
        self.doubtful: list[tuple[Job, Address, BaseException]] = []  # errors without a code
        self.unconfirmed: list[tuple[Job, Address, bytes]] = []  # with the call's token
        self.dropped = False


class Memory:
    """What a batch learned in its earlier rounds."""

    __slots__ = (
        *("alone", "asked", "doubted", "drops", "missing", "refused", "relocated", "scripted"),
        *("mark_token", "turns"),
    )

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.missing: dict[bytes, bytes] = {}  # scripts to load: sha, source
        self.refused: BaseException | None = None  # why a script could not be loaded
        self.asked: dict[Job, Address] = {}  # sent elsewhere for once
        self.alone: set[Job] = set()  # to be sent without company
        self.scripted: set[Job] = set()  # marks that a script has to decide
        self.relocated: set[Job] = set()  # sent to what may be the new master
        self.doubted: set[Job] = set()  # failed for no reason that could be found
        self.drops = 0
        self.mark_token = new_owner()
        self.turns: dict[Job, int] = {}
        if len(jobs) > 1:
            self._tell_apart([job for job in jobs if job.method is MARK])

    def _tell_apart(self, marks: list[Job]) -> None:
        """Marks of one key in one batch must not take each other's for their own."""
        if len({job.args[0] for job in marks}) == len(marks):
            return
        seen: dict[bytes, int] = {}
        for job in marks:
            turn = seen[job.args[0]] = seen.get(job.args[0], -1) + 1
            if turn:
                self.turns[job] = turn

    def token(self, job: Job) -> bytes:
        """What a mark of this batch is known by, the same each time it is sent."""
        turn = self.turns.get(job) if self.turns else None
        return self.mark_token if turn is None else self.mark_token[:12] + turn.to_bytes(4)
