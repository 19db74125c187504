"""What ``on=`` takes for a transaction, so that type checkers know what ``tx.connection`` is.

A connection or session is what it is; of a pool, an engine, a sessionmaker or a function, it is
what they give. The libraries are known by their methods, as none of them need be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

__all__ = ["AsyncSource", "C", "Source"]

if TYPE_CHECKING:  # its default is of Python 3.13: a plain Tx is one of any connection
    from typing_extensions import TypeVar as TypeVarWithDefault

    C = TypeVarWithDefault("C", default=Any)
else:
    C = TypeVar("C")

Given_co = TypeVar("Given_co", covariant=True)


class Pool(Protocol[Given_co]):
    """A pool of psycopg."""

    def getconn(self, timeout: float | None = ...) -> Given_co:
        """Take a connection."""
        ...


class AsyncPool(Protocol[Given_co]):
    """An async pool of psycopg."""

    async def getconn(self, timeout: float | None = ...) -> Given_co:
        """Take a connection."""
        ...


class UntypedPool(Protocol):
    """A pool of asyncpg, which does not say what it gives."""

    def acquire(self, *, timeout: Any = ...) -> Any:
        """Take a connection."""
        ...


class Engine(Protocol[Given_co]):
    """An engine of SQLAlchemy, sync or async. It has a URL, which no connection has."""

    url: Any

    def connect(self) -> Given_co:
        """Take a connection."""
        ...


Source = Callable[[], C] | Pool[C] | Engine[C]
AsyncSource = Callable[[], C] | AsyncPool[C] | Engine[C] | UntypedPool
