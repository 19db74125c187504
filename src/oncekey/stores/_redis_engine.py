"""A batch of calls from end to end: packed, routed, sent, retried, confirmed, answered.

Written once as a generator that yields what is to be sent; threads and event loops drive it. Every
operation can be repeated: a claim by its owner, a mark by its token, so that a connection that
broke before the reply costs a repetition and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from oncekey.errors import StoreConfigError, StoreError, StoreReadOnlyError, StoreUnavailableError
from oncekey.instrument.events import EventKind, emit
from oncekey.stores._batching import Job
from oncekey.stores._redis_batch import Call, Memory, Round
from oncekey.stores._redis_check import QUESTIONS, faults
from oncekey.stores._redis_errors import code_of, named, unreachable
from oncekey.stores._redis_layout import Address, Asks, Layout, Replies, Send, redirect, shown
from oncekey.stores._redis_ops import (
    CLEAR,
    CLOSE,
    MARK,
    RELEASE,
    Scripted,
    command,
)

__all__ = ["Engine", "Options"]

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


class Engine:
    """Runs batches for one set of connections."""

    def __init__(self, layout: Layout, options: Options) -> None:
        self.layout = layout
        self.options = options
        self._key_length = len(options.prefix) + 32
        self._key_head = b"$%d\r\n%b" % (self._key_length, options.prefix)
        self._trusted: set[Address] = set()  # servers that were looked at
        self._wait = command(b"WAIT", b"%d" % options.min_replicas, b"%d" % options.replica_ms)

    # The batch

    def batch(self, jobs: Sequence[Job]) -> Asks:
        """Run ``jobs`` and fill in each one's result or error."""
        waiting = []
        for job in jobs:
            if job.method is CLEAR:
                yield from self._clear(job)
            elif job.method is not CLOSE:
                waiting.append(job)
        state = Memory(waiting)
        for _ in range(ROUNDS):
            if not waiting:
                return
            try:
                if not self.layout.located():
                    yield from self.layout.locate()
                round_ = self._plan(waiting, state)
                if not self._trusted.issuperset(round_.calls):
                    yield from self._look(round_)
            except StoreError as error:
                self._fail(waiting, error)
                return
            sends = [self._pack(address, calls, state) for address, calls in round_.calls.items()]
            loads = len(state.missing)
            outcomes = yield sends
            for (address, calls), outcome in zip(round_.calls.items(), outcomes, strict=True):
                self._take(address, calls, outcome, loads, round_, state)
            if round_.unconfirmed:
                yield from self._refuse(round_.unconfirmed)
            if round_.doubtful:
                yield from self._ask_why(round_, state)
            state.drops += round_.dropped
            waiting = round_.again
        self._fail(
            waiting, StoreUnavailableError("Redis kept sending this call elsewhere: try again")
        )

    def lane(self, digest: bytes) -> Address | None:
        """Whose calls this one may wait for: a server that hangs holds up its own keys alone."""
        return self.layout.lane(self.options.prefix + digest) if self.layout.sharded else None

    def _key(self, job: Job) -> bytes:
        key: bytes = self.options.prefix + job.args[0]
        return key

    def _plan(self, jobs: Sequence[Job], state: Memory) -> Round:
        """Put the jobs into calls, and the calls to the servers that they are for."""
        round_ = Round()
        if self.layout.sharded:
            for job in jobs:
                asking = job in state.asked
                address = state.asked.pop(job) if asking else self.layout.route(self._key(job))
                call = self._call(job, state, asking)
                round_.calls.setdefault(address, []).append(call)
            return round_
        calls = round_.calls[self.layout.masters()[0]] = []
        if len(jobs) == 1:
            calls.append(self._call(jobs[0], state))
            return round_
        groups: dict[tuple[Any, ...], list[Job]] = {}
        if not state.alone and not state.turns:
            for job in jobs:  # terms live as long as their job, so that the id is theirs alone
                groups.setdefault((job.method, id(job.args[1])), []).append(job)
        else:
            for job in jobs:
                alone = job if job in state.alone else None
                group = (job.method, id(job.args[1]), state.token(job), alone)
                groups.setdefault(group, []).append(job)
        for (op, *_), members in groups.items():
            if len(members) > 1 and isinstance(op, Scripted):
                calls.append(Call(op, members, state.token(members[0])))
            else:
                calls += [self._call(job, state) for job in members]
        return round_

    def _call(self, job: Job, state: Memory, asking: bool = False) -> Call:
        """A call for one job. A mark goes without a script, as long as that can decide.

        Not where replicas must confirm: a repetition has to write for that, and would not.
        """
        plain = (
            job.method is MARK
            and not asking
            and not self.options.min_replicas
            and job not in state.scripted
        )
        return Call(job.method, [job], state.token(job), asking, plain)

    def _pack(self, address: Address, calls: list[Call], state: Memory) -> Send:
        expect = len(calls) + len(state.missing)
        pieces = [command(b"SCRIPT", b"LOAD", source) for source in state.missing.values()]
        for call in calls:
            if call.asking:
                pieces.append(command(b"ASKING"))
                expect += 1
            op = call.op
            if call.plain:
                job = call.jobs[0]
                pieces.append(MARK.plain(self._key(job), job, call.token))
                expect += 3
            elif isinstance(op, Scripted):
                again = state.drops > 0
                pieces.append(op.call(self._key_head, call.jobs, call.token, again))
            else:
                pieces.append(b"*1\r\n$4\r\nTIME\r\n")
        if self.options.min_replicas and any(isinstance(call.op, Scripted) for call in calls):
            pieces.append(self._wait)
            expect += 1
        return Send(address, [b"".join(pieces)], expect)

    # What came back

    def _take(
        self,
        address: Address,
        calls: list[Call],
        outcome: Replies,
        loads: int,
        round_: Round,
        state: Memory,
    ) -> None:
        if isinstance(outcome, BaseException):
            self.layout.failed(address)
            jobs = [job for call in calls for job in call.jobs]
            error = unreachable(outcome, shown(address))
            # A server that is slow gets no second helping; a connection that broke is made anew.
            if state.drops < DROPS and error.retryable and not isinstance(outcome, TimeoutError):
                round_.dropped = True
                round_.again += jobs
            else:
                self._fail(jobs, error, outcome)
            return
        replies = iter(outcome)
        for _ in range(loads):
            loaded = next(replies)
            if isinstance(loaded, BaseException):
                state.refused = loaded  # by permission: the calls after it say NOSCRIPT
        changed: list[tuple[Job, Address, bytes]] = []
        for call in calls:
            if call.asking:
                next(replies)
            reply = next(replies)
            if call.plain:
                told = [reply, next(replies), next(replies), next(replies)]
                if not self._take_plain(address, call, told, round_, state):
                    continue
            elif isinstance(reply, BaseException):
                self._take_error(address, call, reply, round_, state)
                continue
            else:
                self._answer(call, reply)
            if self.options.min_replicas:
                changed += [
                    (job, address, call.token)
                    for job in call.jobs
                    if job.error is None and call.op.changed(job)
                ]
        if changed:
            confirmed = next(replies)
            if isinstance(confirmed, BaseException) or confirmed < self.options.min_replicas:
                round_.unconfirmed += changed

    def _take_plain(
        self,
        address: Address,
        call: Call,
        replies: list[Any],
        round_: Round,
        state: Memory,
    ) -> bool:
        """Take the replies to a mark without a script. False: it has no result yet."""
        job = call.jobs[0]
        try:
            if MARK.decide(job, call.token, replies):
                return True
        except StoreError as error:
            job.error = error
            return True
        state.scripted.add(job)
        refused = next((reply for reply in replies if isinstance(reply, BaseException)), None)
        if refused is None:
            round_.again.append(job)
        else:
            self._take_error(address, call, refused, round_, state)
        return False

    @staticmethod
    def _answer(call: Call, reply: Any) -> None:
        op: Any = call.op
        if isinstance(op, Scripted):
            op.results(call.jobs, reply)
            return
        op.result(call.jobs[0], reply)

    def _take_error(
        self,
        address: Address,
        call: Call,
        error: BaseException,
        round_: Round,
        state: Memory,
    ) -> None:
        jobs = call.jobs
        code = code_of(error)
        if code == "NOSCRIPT" and isinstance(call.op, Scripted):
            script = call.op.script
            if script.sha not in state.missing:
                state.missing[script.sha] = script.source
                round_.again += jobs
            elif state.refused is not None:
                self._fail(jobs, _known(state.refused, address), state.refused)
            else:
                # Flushed again between our loading and the call, or another node has it not.
                round_.again += jobs
            return
        where = redirect(error, address)
        if where is not None:
            for_good, number, named_address = where
            found = self.layout.seen(named_address)
            if for_good:
                self.layout.moved(number, found)
            else:
                state.asked.update(dict.fromkeys(jobs, found))
            round_.again += jobs
        elif len(jobs) > 1:
            state.alone.update(jobs)  # one bad key must not take its neighbours down
            round_.again += jobs
        else:
            known = named(error, shown(address))
            if known is None:
                round_.doubtful.append((jobs[0], address, error))
            else:
                self._refused(jobs[0], address, known, error, round_, state)

    def _refused(
        self,
        job: Job,
        address: Address,
        known: StoreError,
        cause: BaseException,
        round_: Round,
        state: Memory,
    ) -> None:
        if known.retryable:
            self.layout.failed(address)  # what we know of a Cluster that is down may be old
        if isinstance(known, StoreReadOnlyError):
            # Behind Sentinel the master may have become a replica: look anew, once.
            self.layout.failed(address)
            if not self.layout.located() and job not in state.relocated:
                state.relocated.add(job)
                round_.again.append(job)
                return
        self._fail([job], known, cause)

    def _ask_why(self, round_: Round, state: Memory) -> Asks:
        """Find the code of errors that older servers wrap in prose when a script meets them.

        A write of nothing is refused for the same reason, with its code as the first word.
        """
        sends = [
            Send(address, [command(b"SETRANGE", self._key(job), b"0", b"")], 1)
            for job, address, _ in round_.doubtful
        ]
        outcomes = yield sends
        for (job, address, error), outcome in zip(round_.doubtful, outcomes, strict=True):
            reply = outcome if isinstance(outcome, BaseException) else outcome[0]
            if not isinstance(reply, BaseException):
                if job not in state.doubted:  # it is over already
                    state.doubted.add(job)
                    round_.again.append(job)
                    continue
                reply = error
            self._refused(job, address, _known(reply, address), reply, round_, state)

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

    def _refuse(self, unconfirmed: list[tuple[Job, Address, bytes]]) -> Asks:
        """Fail what too few replicas confirmed, and try to free the keys that nobody will use."""
        undo: dict[Address, list[Job]] = {}
        for job, address, token in unconfirmed:
            held = job.method.undo(job, token)
            if held is not None:
                undo.setdefault(address, []).append(Job(RELEASE, (held[0], None, held[1], None)))
        self._fail(
            [job for job, _, _ in unconfirmed],
            StoreUnavailableError(
                f"fewer than min_replicas={self.options.min_replicas} replicas confirmed within "
                f"{self.options.replica_ms / 1000:g} s, so that a fail-over could forget this: "
                "start or repair the replicas, then try again"
            ),
        )
        sends = []
        for address, jobs in undo.items():
            calls = [[job] for job in jobs] if self.layout.sharded else [jobs]
            pieces = [command(b"SCRIPT", b"LOAD", RELEASE.script.source)]
            pieces += [RELEASE.call(self._key_head, each, b"", True) for each in calls]
            sends.append(Send(address, [b"".join(pieces)], len(pieces)))
        if sends:
            yield sends  # as well as can be: what is left is freed by its lease

    # The look at a server before it is trusted

    def _look(self, round_: Round) -> Asks:
        options = self.options
        unknown = [address for address in round_.calls if address not in options.checked]
        if unknown and options.check != "off":
            asks = b"".join(QUESTIONS)
            outcomes = yield [Send(address, [asks], len(QUESTIONS)) for address in unknown]
            for address, replies in zip(unknown, outcomes, strict=True):
                if isinstance(replies, BaseException):
                    return  # the batch will find that out too
                found = faults(replies, shown(address))
                if found and options.check == "refuse":
                    raise StoreConfigError("; ".join(found))
                options.checked.add(address)
                for fault in found:
                    warnings.warn(fault, UserWarning, stacklevel=2)
        self._trusted.update(round_.calls)

    # Tests

    def _clear(self, job: Job) -> Asks:
        """Remove every record under the prefix, on every server."""
        try:
            if not self.layout.located():
                yield from self.layout.locate()
            for address in self.layout.masters():
                yield from self._clear_server(address)
            job.result = None
        except StoreError as error:
            job.error = error

    def _clear_server(self, address: Address) -> Asks:
        pattern = _literally(self.options.prefix) + b"*"
        cursor = b"0"
        while True:
            scan = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
            cursor, found = yield from self._ask(address, scan)
            # The prefix of another store may start with ours: its keys are longer.
            keys = [key for key in found if len(key) == self._key_length]
            removals = (
                [command(b"UNLINK", key) for key in keys]
                if self.layout.sharded
                else [command(b"UNLINK", *keys)] * bool(keys)
            )
            for removal in removals:
                yield from self._ask(address, removal)
            if cursor == b"0":
                return

    def _ask(self, address: Address, ask: bytes) -> Asks:
        (outcome,) = yield [Send(address, [ask], 1)]
        if isinstance(outcome, BaseException):
            self.layout.failed(address)
            raise unreachable(outcome, shown(address)) from outcome
        reply = outcome[0]
        if isinstance(reply, BaseException):
            raise _known(reply, address) from reply
        return reply


def _known(error: BaseException, address: Address) -> StoreError:
    return named(error, shown(address)) or StoreError(
        f"{shown(address)} refused: {str(error)[:200]}. Look at its log"
    )


def _literally(text: bytes) -> bytes:
    """``text`` as a pattern that matches only itself."""
    return b"".join(b"\\%c" % byte if byte in b"\\*?[]^-" else b"%c" % byte for byte in text)
