"""A batch of calls from end to end: packed, routed, sent, retried, confirmed, answered.

Written once as a generator that yields what is to be sent; threads and event loops drive it. Every
operation can be repeated: a claim by its owner, a mark by its token, so that a connection that
broke before the reply costs a repetition and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from oncekey.errors import StoreConfigError, StoreError, StoreReadOnlyError, StoreUnavailableError
from oncekey.instrument.events import EventKind, emit
from oncekey.stores._batching import Job
from oncekey.stores.redis.browsing import Whole
from oncekey.stores.redis.check import QUESTIONS, faults
from oncekey.stores.redis.errors import code_of, known, unreachable
from oncekey.stores.redis.inbox import AllWaiters
from oncekey.stores.redis.operations import CLEAR, LONE_MARK, MARK, RELEASE, Op, Scripted, command
from oncekey.stores.redis.topology import Address, Asks, Replies, Send, Topology, redirect, shown

__all__ = ["Batch", "Batches", "Options"]

ROUNDS: Final = 16  # sendings of one batch: redirections of a Cluster that is being rebuilt
DROPS: Final = 1  # of those, after connections that broke


@dataclass
class Options:
    """What a store was told, and which servers were looked at already."""

    prefix: bytes = b"oncekey:"
    min_replicas: int = 0
    replica_ms: int = 1000
    check: str = "warn"
    checked: set[Address] = field(default_factory=set)


class _Call(NamedTuple):
    """One use of an operation, and the jobs that it answers."""

    op: Op
    jobs: Sequence[Job]
    asking: bool = False  # for a node that is about to have the key


class Batch:
    """Jobs that go together, and what earlier rounds taught. Most need one: it costs nothing."""

    drops = 0  # rounds in which connections broke
    dropped = False  # in this one
    asked: Mapping[Job, Address] = MappingProxyType({})  # sent elsewhere for once
    alone: frozenset[Job] = frozenset()  # to be sent without company
    scripted: frozenset[Job] = frozenset()  # marks that a script has to decide
    sources: frozenset[Op] = frozenset()  # scripts that a server did not know
    relocated: frozenset[Job] = frozenset()  # sent to what may be the new master
    doubted: frozenset[Job] = frozenset()  # failed for no reason that could be found
    doubtful: tuple[tuple[Job, Address, BaseException], ...] = ()  # errors without a code
    unconfirmed: tuple[tuple[Job, Address], ...] = ()
    sent: tuple[list[Send], list[Replies]] | None = None  # already, and this came of it

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs  # those to send, now or once more


class Batches:
    """Runs batches for one set of connections."""

    def __init__(self, topology: Topology, options: Options, waiters: AllWaiters) -> None:
        self.topology = topology
        self.options = options
        self.waiters = waiters
        self._key_length = len(options.prefix) + 32
        self._key_head = b"$%d\r\n%b" % (self._key_length, options.prefix)
        self._trusted: set[Address] = set()  # servers that were looked at
        self._wait = command(b"WAIT", b"%d" % options.min_replicas, b"%d" % options.replica_ms)

    def run(self, batch: Batch) -> Asks:
        """Run the jobs of a batch and fill in each one's result or error."""
        for job in batch.jobs:
            op = job.method
            if op is CLEAR or isinstance(op, Whole):
                batch.jobs = [other for other in batch.jobs if other is not job]
                yield from op.run(self, job) if isinstance(op, Whole) else self._clear(job)
        for _ in range(ROUNDS):
            if not batch.jobs:
                return
            if batch.sent is None:
                try:
                    if not self.topology.located:
                        yield from self.topology.locate()
                    sends = self._plan(batch)
                    for send in sends:
                        if send.address not in self._trusted:
                            yield from self._look(send.address)
                except StoreError as error:
                    self._fail(batch.jobs, error)
                    return
                outcomes = yield sends
            else:
                (sends, outcomes), batch.sent = batch.sent, None
            batch.jobs = []
            for send, outcome in zip(sends, outcomes, strict=True):
                self._take(send, outcome, batch)
            if batch.unconfirmed:
                yield from self._refuse(batch)
            if batch.doubtful:
                yield from self._ask_why(batch)
            batch.drops, batch.dropped = batch.drops + batch.dropped, False
        lost = StoreUnavailableError("Redis kept sending this call elsewhere: try again")
        self._fail(batch.jobs, lost)

    # One call by itself: the flow begins only where there is more to it than a reply

    def alone(self, job: Job) -> Send | None:
        """What is sent for one call, if nothing is to be found out before or after it."""
        only, op = self.topology.only, job.method
        if only not in self._trusted or op is MARK or self.options.min_replicas:
            return None
        if not isinstance(op, Scripted):
            return None
        assert only is not None  # noqa: S101 - for the type checker: nobody trusts None
        return Send(only, op.pack(self._key_head, (job,), False, False))

    def took(self, job: Job, replies: Replies) -> bool:
        """Take what came back for it. False: no answer, which the flow has to see to."""
        reply = replies if isinstance(replies, BaseException) else replies[0]
        if isinstance(reply, BaseException):
            return False
        op = job.method
        op.take((job,), reply)
        if op.settles and self.waiters.used:
            self.waiters.wake(job.args[0])
        return True

    def go_on(self, batch: Batch, send: Send, replies: Replies) -> Asks:
        """The flow of a call that was sent by itself, from where that came back."""
        call = _Call(batch.jobs[0].method, batch.jobs)
        batch.sent = ([send._replace(calls=[call])], [replies])
        return self.run(batch)

    def lane(self, digest: bytes) -> Address | None:
        """Whose calls this one may wait for: a server that hangs holds up its own keys alone."""
        topology = self.topology
        return topology.lane(self.options.prefix + digest) if topology.sharded else None

    # What is sent

    def _plan(self, batch: Batch) -> list[Send]:
        """Put the jobs into calls, and the calls to the servers that they are for."""
        only, jobs = self.topology.only, batch.jobs
        if only is not None:
            alone = len(jobs) == 1 and jobs[0].method is not MARK
            those = [_Call(jobs[0].method, jobs)] if alone else self._group(batch)
            return [self._pack(only, those, batch)]
        calls: dict[Address, list[_Call]] = {}
        for job in jobs:
            asked = batch.asked.get(job)
            address = asked or self.topology.route(self.options.prefix + job.args[0])
            op = job.method
            if op is MARK and asked is None:
                op = self._mark_op(job, batch)
            calls.setdefault(address, []).append(_Call(op, [job], asked is not None))
        batch.asked = {}
        return [self._pack(address, those, batch) for address, those in calls.items()]

    def _group(self, batch: Batch) -> list[_Call]:
        """One call for all jobs of an operation with the same terms."""
        jobs, alone = batch.jobs, batch.alone
        groups: dict[Any, list[Job]] = {}
        for job in jobs:  # terms live as long as their job, so that the id is theirs alone
            name = (job.method, id(job.args[1]), job if job in alone else None)
            groups.setdefault(name, []).append(job)
        calls = []
        for (op, *_), members in groups.items():
            if op is MARK and len(members) == 1:
                op = self._mark_op(members[0], batch)
            calls.append(_Call(op, members))
        return calls

    def _mark_op(self, job: Job, batch: Batch) -> Op:
        """A lone mark goes without a script, as long as that can decide.

        Not where replicas must confirm: a repetition has to write for that, and would not.
        """
        scripted = self.options.min_replicas or job in batch.scripted
        return MARK if scripted else LONE_MARK

    def _pack(self, address: Address, calls: list[_Call], batch: Batch) -> Send:
        pieces, expect = [], 0
        for op, jobs, asking in calls:
            if asking:
                pieces.append(b"*1\r\n$6\r\nASKING\r\n")
            again, source = batch.drops > 0, op in batch.sources
            pieces.append(op.pack(self._key_head, jobs, again, source))
            expect += op.replies + asking
        if self.options.min_replicas and any(isinstance(call.op, Scripted) for call in calls):
            pieces.append(self._wait)
            expect += 1
        return Send(address, b"".join(pieces), expect, calls)

    # What came back

    def _take(self, send: Send, outcome: Replies, batch: Batch) -> None:
        if isinstance(outcome, BaseException):
            self._lost(send, outcome, batch)
            return
        replies = iter(outcome)
        changed: list[tuple[Job, Address]] = []
        for op, jobs, asking in send.calls:
            if asking:
                next(replies)
            reply = next(replies)
            if op is LONE_MARK:
                reply = self._mark(jobs[0], [reply, *islice(replies, op.replies - 1)], batch)
            elif not isinstance(reply, BaseException):
                op.take(jobs, reply)
            if isinstance(reply, BaseException):
                self._refused(send.address, op, jobs, reply, batch)
                continue
            if op.settles and self.waiters.used:
                for job in jobs:
                    self.waiters.wake(job.args[0])
            if self.options.min_replicas:
                changed += [(job, send.address) for job in jobs if op.changed(job)]
        if changed:
            confirmed = next(replies)
            if isinstance(confirmed, BaseException) or confirmed < self.options.min_replicas:
                batch.unconfirmed += tuple(changed)

    def _lost(self, send: Send, outcome: BaseException, batch: Batch) -> None:
        """A connection could not be made, broke, or took too long."""
        self.topology.failed(send.address)
        jobs = [job for call in send.calls for job in call.jobs]
        error = unreachable(outcome, shown(send.address))
        # A server that is slow gets no second helping; a connection that broke is made anew.
        if batch.drops < DROPS and error.retryable and not isinstance(outcome, TimeoutError):
            batch.dropped = True
            batch.jobs += jobs
        else:
            self._fail(jobs, error, outcome)

    def _mark(self, job: Job, replies: list[Any], batch: Batch) -> Any:
        """Take the replies to a mark without a script. Gives an error that it could not be for."""
        LONE_MARK.take([job], replies)
        if job.result is None and job.error is None:
            batch.scripted |= {job}
            for reply in replies:
                if isinstance(reply, BaseException):
                    return reply
            batch.jobs.append(job)
        return None

    def _refused(
        self,
        address: Address,
        op: Op,
        jobs: Sequence[Job],
        error: BaseException,
        batch: Batch,
    ) -> None:
        """The server replied to a call with an error."""
        where = redirect(error, address)
        if where is not None:
            for_good, number, named = where
            found = self.topology.seen(named)
            if for_good:
                self.topology.moved(number, found)
            else:
                batch.asked = {**batch.asked, **dict.fromkeys(jobs, found)}
        elif code_of(error) == "NOSCRIPT":
            batch.sources |= {op}
        elif len(jobs) > 1:
            batch.alone |= {*jobs}  # one bad key must not take its neighbours down
        else:
            self._refused_alone(jobs[0], address, error, batch)
            return
        batch.jobs += jobs

    def _refused_alone(
        self, job: Job, address: Address, error: BaseException, batch: Batch, told: bool = False
    ) -> None:
        """``told``: what the server was asked for a reason, and this is it."""
        problem = known(error, shown(address))
        if problem is None and not told:
            batch.doubtful += ((job, address, error),)
            return
        problem = problem or _unknown(error, address)
        if problem.retryable or isinstance(problem, StoreReadOnlyError):
            self.topology.failed(address)  # what we know may be old
        gone = isinstance(problem, StoreReadOnlyError) and not self.topology.located
        if gone and job not in batch.relocated:
            # Behind Sentinel the master may have become a replica: look anew, once.
            batch.relocated |= {job}
            batch.jobs.append(job)
        else:
            self._fail([job], problem, error)

    def _ask_why(self, batch: Batch) -> Asks:
        """Find the code of errors that older servers wrap in prose when a script meets them.

        A write of nothing is refused for the same reason, with its code as the first word.
        """
        doubtful, batch.doubtful = batch.doubtful, ()
        outcomes = yield [
            Send(address, command(b"SETRANGE", self.options.prefix + job.args[0], b"0", b""))
            for job, address, _ in doubtful
        ]
        for (job, address, error), outcome in zip(doubtful, outcomes, strict=True):
            reply = outcome if isinstance(outcome, BaseException) else outcome[0]
            if isinstance(reply, BaseException):
                self._refused_alone(job, address, reply, batch, told=True)
            elif job in batch.doubted:
                self._refused_alone(job, address, error, batch, told=True)
            else:  # it is over already
                batch.doubted |= {job}
                batch.jobs.append(job)

    @staticmethod
    def _fail(jobs: Sequence[Job], error: StoreError, cause: BaseException | None = None) -> None:
        if jobs:
            operation = jobs[0].method.name
            emit(EventKind.STORE_ERROR, operation=operation, error=type(error).__name__)
        for job in jobs:
            job.error = type(error)(*error.args)
            job.error.__dict__.update(error.__dict__)
            job.error.__cause__ = cause or error.__cause__

    # Replicas

    def _refuse(self, batch: Batch) -> Asks:
        """Fail what too few replicas confirmed, and try to free the keys that nobody will use."""
        unconfirmed, batch.unconfirmed = batch.unconfirmed, ()
        undo: dict[Address, list[Job]] = {}
        for job, address in unconfirmed:
            owner = job.method.undo(job)
            if owner is not None:
                release = Job(RELEASE, (job.args[0], None, owner, None))
                undo.setdefault(address, []).append(release)
        self._fail(
            [job for job, _ in unconfirmed],
            StoreUnavailableError(
                f"fewer than min_replicas={self.options.min_replicas} replicas confirmed within "
                f"{self.options.replica_ms / 1000:g} s, so that a fail-over could forget this: "
                "start or repair the replicas, then try again"
            ),
        )
        sends = []
        for address, jobs in undo.items():
            packed = [RELEASE.pack(self._key_head, [job], True, True) for job in jobs]
            sends.append(Send(address, b"".join(packed), len(packed)))
        if sends:
            yield sends  # as well as can be: what is left is freed by its lease

    # The look at a server before it is trusted

    def _look(self, address: Address) -> Asks:
        options = self.options
        if address not in options.checked and options.check != "off":
            (replies,) = yield [Send(address, b"".join(QUESTIONS), len(QUESTIONS))]
            if isinstance(replies, BaseException):
                return  # the batch will find that out too
            found = faults(replies, shown(address))
            if found and options.check == "refuse":
                raise StoreConfigError("; ".join(found))
            options.checked.add(address)
            for fault in found:
                warnings.warn(fault, UserWarning, stacklevel=2)
        self._trusted.add(address)

    # Tests

    def _clear(self, job: Job) -> Asks:
        """Remove every record under the prefix, on every server."""
        try:
            if not self.topology.located:
                yield from self.topology.locate()
            for address in self.topology.masters():
                yield from self._clear_server(address)
            job.result = None
        except StoreError as error:
            job.error = error

    def _clear_server(self, address: Address) -> Asks:
        pattern = _literally(self.options.prefix) + b"*"
        cursor = b"0"
        while True:
            scan = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
            cursor, found = (yield from self._ask(address, scan, 1))[0]
            # The prefix of another store may start with ours: its keys are longer.
            keys = [command(b"UNLINK", key) for key in found if len(key) == self._key_length]
            if keys:
                yield from self._ask(address, b"".join(keys), len(keys))
            if cursor == b"0":
                return

    def _ask(self, address: Address, payload: bytes, expect: int) -> Asks:
        (outcome,) = yield [Send(address, payload, expect)]
        if isinstance(outcome, BaseException):
            self.topology.failed(address)
            raise unreachable(outcome, shown(address)) from outcome
        for reply in outcome:
            if isinstance(reply, BaseException):
                problem = known(reply, shown(address)) or _unknown(reply, address)
                raise problem from reply
        return outcome


def _unknown(error: BaseException, address: Address) -> StoreError:
    return StoreError(f"{shown(address)} refused: {str(error)[:200]}. Look at its log")


def _literally(text: bytes) -> bytes:
    """``text`` as a pattern that matches only itself."""
    return b"".join(b"\\%c" % byte if byte in b"\\*?[]^-" else b"%c" % byte for byte in text)
