"""A worker that is killed at a chosen step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

from oncekey.abc import AsyncStore, Store
from oncekey.errors import PolicyError
from oncekey.testing._targets import Destination, WorkerKilled, store_of

__all__ = ["At", "Kill", "die", "killed_at", "put_kill"]

At = Store | AsyncStore | tuple[object, str]
"""Where a worker dies: when a store is told of the outcome, or when a method is called."""


@contextlib.contextmanager
def killed_at(owner: object, name: str) -> Iterator[Kill]:
    """Kill the worker that next calls ``owner.name``: it raises ``WorkerKilled`` instead.

    Once: later calls are as before. For experiments of your own; ``deliver`` answers 0 for it.

    Args:
        owner: An object, a class or a module.
        name: Its method or function, also an async one.

    Raises:
        PolicyError: There is no such method, or it can't be replaced.

    Example:
        >>> class Bank:
        ...     def charge(self):
        ...         return "charged"
        >>> bank = Bank()
        >>> with killed_at(bank, "charge") as kill:
        ...     try:
        ...         bank.charge()
        ...     except WorkerKilled:
        ...         print("dead")
        dead
        >>> kill.happened
        True
    """
    kill = Kill(die)
    kill.put(owner, name)
    try:
        yield kill
    finally:
        kill.undo()


def die() -> NoReturn:
    """End the worker that runs here."""
    raise WorkerKilled("the worker was killed here, by oncekey.testing")


class Kill:
    """A trap at one or several methods, which strikes once.

    Attributes:
        happened: Whether it struck.
    """

    def __init__(self, strike: Callable[[], Any]) -> None:
        self.happened = False
        self._strike = strike
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str) -> None:
        """Set the trap at ``owner.name``."""
        found = getattr(owner, name, None)
        if not callable(found):
            raise PolicyError(f"{type(owner).__name__} has no method {name!r} to be killed at")
        original: Callable[..., Any] = found

        def trapped(*args: Any, **kwargs: Any) -> Any:
            self._reached()
            return original(*args, **kwargs)

        async def trapped_async(*args: Any, **kwargs: Any) -> Any:
            self._reached()
            return await original(*args, **kwargs)

        is_async = inspect.iscoroutinefunction(original)
        self._replace(owner, name, trapped_async if is_async else trapped)

    def put_at_completion(self, store: Any) -> None:
        """Set the trap where ``store`` is told of an outcome, in a transaction or not."""
        self.put(store, "complete")
        if getattr(store, "at_once", None) is not None:
            self._replace(store, "at_once", None)  # a way around the trap
        make = getattr(store, "records", None)  # what is told of it inside a transaction
        if make is None:
            return

        def trapped(made: Any) -> Any:
            if not self.happened:
                self.put(made, "complete")
            return made

        async def later(made: Any) -> Any:
            return trapped(await made)

        def records() -> Any:
            made = make()
            return later(made) if inspect.isawaitable(made) else trapped(made)

        self._replace(store, "records", records)

    def undo(self) -> None:
        """Take the traps away."""
        while self._undo:
            self._undo.pop()()

    def _reached(self) -> None:
        if not self.happened:
            self.happened = True
            self._strike()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
        try:
            setattr(owner, name, value)
        except (AttributeError, TypeError) as error:
            raise PolicyError(f"{type(owner).__name__}.{name} can't be replaced: {error}") from None
        self._undo.append(
            (lambda: delattr(owner, name))
            if own is _MISSING
            else (lambda: setattr(owner, name, own))
        )


_MISSING: Final = object()


def put_kill(kill: Kill, at: At | None, target: Destination) -> Any:
    """Set the trap where ``at`` says; gives the store, if it is one's.

    Raises:
        PolicyError: There is nothing to be killed at.
    """
    if isinstance(at, tuple):
        kill.put(*at)
        return None
    where = store_of(target) if at is None else at
    if not isinstance(where, (Store, AsyncStore)):
        raise PolicyError(
            "say where the worker dies: at=store, when that is told of the outcome; or "
            "at=(object, 'method'), when that is called"
        )
    kill.put_at_completion(where)
    return where
