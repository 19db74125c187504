"""``Lab``: what is tested, and the experiments that can be done with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from oncekey.errors import OncekeyError, PolicyError
from oncekey.lab._command import Command
from oncekey.lab._findings import Finding, LabReport
from oncekey.testing import Proxy, SignedDelivery

if TYPE_CHECKING:
    from oncekey.testing._run import Effects

__all__ = ["Bench", "Experiment", "Lab"]

NETWORKED = ("postgresql", "postgres", "redis", "rediss")


class Experiment:
    """One fault: its name, what it breaks, what it needs, and how it is done."""

    def __init__(
        self, name: str, fault: str, needs: Sequence[str], do: Callable[[Bench], Any]
    ) -> None:
        self.name = name
        self.fault = fault
        self.needs = needs
        self.do = do


class Bench:
    """What is on the table while experiments are done.

    Attributes:
        url: Where deliveries go; through ``network`` where that is there.
        network: Stands before the receiver.
        command: The receiver's process, if we started it.
        store_network: Stands between the receiver and its store, if we could put it there.
        store_url: The store.
        effects: Counts effects, or ``None``.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.delivery = lab.delivery
        self.effects = lab.effects
        self.store_url = lab.store
        self.network: Proxy | None = None
        self.command: Command | None = None
        self.store_network: Proxy | None = None
        self.url = lab.receiver or ""
        self._ends = ExitStack()

    def __enter__(self) -> Bench:
        try:
            self._set_up()
        except BaseException:
            self._ends.close()
            raise
        return self

    def _set_up(self) -> None:
        lab = self.lab
        env = dict(lab.env)
        if lab.command and lab.store and lab.store_env:
            place = lab.store
            if _scheme(lab.store) in NETWORKED:
                self.store_network = self._ends.enter_context(Proxy(lab.store))
                place = self.store_network.url
            env[lab.store_env] = place
        if lab.command and lab.receiver:
            self.command = Command(lab.command, lab.receiver, env, lab.patience)
            self._ends.callback(self.command.close)
            self.command.start()
        if lab.receiver:
            self.network = self._ends.enter_context(Proxy(lab.receiver))
            self.url = self.network.url

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def lacks(self, need: str) -> str:
        """Why an experiment that needs this can't be done; empty if it can."""
        command = self.command
        there = {
            "receiver": (bool(self.lab.receiver), "needs a receiver: pass its URL"),
            "command": (command is not None, "needs the command that starts the receiver"),
            "clock": (
                command is not None and command.has_clock,
                "needs the command that starts the receiver, and the package libfaketime",
            ),
            "store network": (
                self.store_network is not None,
                "needs the command, a store on a network, and the variable that names it",
            ),
            "store": (bool(self.store_url), "needs the URL of a store"),
            "networked store": (
                bool(self.store_url) and _scheme(self.store_url or "") in NETWORKED,
                "needs a store on a network",
            ),
            "recording": (bool(self.lab.recording), "needs a recording"),
        }
        found, reason = there[need]
        return "" if found else reason


class Lab:
    """Experiments on a receiver, a store, or both.

    Args:
        receiver: Its URL, such as ``http://localhost:8000/hooks``.
        delivery: What a delivery to it looks like: from ``sample`` or ``signed``.
        command: What starts it, for faults that kill or stop it. Without one, it runs already.
        store: The URL of its store. By itself, the store is tested; with ``command`` and
            ``store_env``, so is what the receiver makes of a store that fails.
        store_env: The environment variable that the receiver finds its store by: it gets an address
            that leads through a network which fails.
        env: More environment variables for the command.
        effects: Counts what must happen once: a function that gives a number or a collection.
            Without it, only answers are judged.
        exactly_once: Whether a worker that dies may not repeat an effect either, as in
            transactions. Else a crash may: at least once.
        recording: A file of a ``Recorder``, to be made again.
        events: How many events each experiment delivers.
        workers: How many deliveries are made at the same time.
        seed: The same seed gives the same order.
        patience: Seconds for the command to start, and for events to be taken in the end: longer
            than a lease of the receiver's.

    Raises:
        PolicyError: There is nothing to test, or an option can't work.

    Example:
        >>> from oncekey.lab import Lab
        >>> report = Lab(store="memory://").run()
        >>> report.ok
        True
    """

    def __init__(
        self,
        receiver: str | None = None,
        delivery: SignedDelivery | None = None,
        *,
        command: str | Sequence[str] | None = None,
        store: str | None = None,
        store_env: str | None = None,
        env: Mapping[str, str] | None = None,
        effects: Effects | None = None,
        exactly_once: bool = False,
        recording: str | os.PathLike[str] | None = None,
        events: int = 40,
        workers: int = 8,
        seed: int = 0,
        patience: float = 60.0,
    ) -> None:
        if not receiver and not store:
            raise PolicyError("there is nothing to test: pass a receiver's URL, or a store's")
        if receiver and delivery is None:
            raise PolicyError("pass a delivery, such as sample(your_provider, url='/hooks')")
        if command and not receiver:
            raise PolicyError("pass the URL that the command serves at")
        if events < 1 or workers < 1 or patience <= 0:
            raise PolicyError("events and workers must be 1 or more, and patience more than 0")
        self.receiver = receiver
        self.delivery = delivery
        self.command = command
        self.store = store
        self.store_env = store_env
        self.env = dict(env or {})
        self.effects = effects
        self.exactly_once = exactly_once
        self.recording = recording
        self.events = events
        self.workers = workers
        self.seed = seed
        self.patience = patience

    @staticmethod
    def experiments() -> dict[str, str]:
        """The names of all experiments, and what each breaks."""
        return {one.name: one.fault for one in _all()}

    def run(
        self,
        only: Sequence[str] = (),
        *,
        tell: Callable[[Finding], object] | None = None,
    ) -> LabReport:
        """Do the experiments.

        Args:
            only: Their names; all of them if none is given.
            tell: Hears each finding when it is there.

        Raises:
            PolicyError: There is no experiment of that name, or the receiver did not start.
        """
        chosen = _all()
        unknown = set(only) - {one.name for one in chosen}
        if unknown:
            names = ", ".join(one.name for one in chosen)
            raise PolicyError(f"no experiment {', '.join(sorted(unknown))}; there are {names}")
        findings: list[Finding] = []
        with Bench(self) as bench:
            for one in chosen:
                if only and one.name not in only:
                    continue
                findings.append(_done(one, bench))
                if tell is not None:
                    tell(findings[-1])
        return LabReport(self._shown(), findings, self.seed)

    def _shown(self) -> str:
        """What is tested: no password, no key of somebody's."""
        told = []
        if self.receiver:
            parts = urlsplit(self.receiver)
            told.append(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
        if self.store:
            told.append(f"a store at {_scheme(self.store)}://")
        return " on ".join(told)


def _all() -> list[Experiment]:
    from oncekey.lab._receiver import RECEIVER
    from oncekey.lab._store import STORE

    return [*RECEIVER, *STORE]


def _scheme(url: str) -> str:
    return url.partition("://")[0].partition("+")[0]


def _done(experiment: Experiment, bench: Bench) -> Finding:
    """Do one, or say why not."""
    name, fault = experiment.name, experiment.fault
    lacking = next(filter(None, map(bench.lacks, experiment.needs)), "")
    if lacking:
        return Finding(name, fault, skipped=lacking)
    begun = time.monotonic()
    try:
        invariants, answers = experiment.do(bench)
    except (OncekeyError, OSError) as error:
        seconds = time.monotonic() - begun
        return Finding(name, fault, seconds=seconds, error=f"{type(error).__name__}: {error}")
    return Finding(name, fault, invariants, answers, time.monotonic() - begun)
