"""Django's connections: ``django.db.connection`` or ``connections["name"]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncekey.drivers import (
    Calls,
    DriverConnection,
    aborted_refused,
    ended_refused,
    named_args,
    pyformat,
    wrong_world,
)

__all__ = ["DjangoConnection", "connect"]


def connect(
    on: Any, close: Callable[[Any], Any] | None, timeout: float | None, awaits: bool
) -> Calls[DriverConnection]:
    """The connection itself: Django takes care of the rest."""
    if awaits:
        raise wrong_world(on, awaits)
    return DjangoConnection(on)
    yield  # a generator like the others


class _Undo(Exception):
    """Makes Django's ``atomic`` roll back."""


class DjangoConnection(DriverConnection):
    """One of Django's connections, for as long as a block of ``atomic``."""

    elsewhere = (
        ". Django's tests have a database of their own, for SQLite in memory: give it a file "
        '("TEST": {"NAME": ...}), and open the store by settings.DATABASES["default"]["NAME"], '
        "which names the test database once it is set up"
    )
    begins_to_write = (
        'let Django begin it with BEGIN IMMEDIATE ("OPTIONS": {"transaction_mode": "IMMEDIATE"} in '
        "DATABASES, from Django 5.1 on)"
    )

    def __init__(self, connection: Any) -> None:
        super().__init__(connection, None, False)
        self.flavour = connection.vendor

    @property
    def raw(self) -> Any:
        """Psycopg's own connection: Django may make it at the first statement."""
        return self.target.connection

    def begin(self) -> Calls[None]:
        connection = self.target
        self.joined = connection.in_atomic_block or not connection.get_autocommit()
        if connection.in_atomic_block and connection.needs_rollback:
            raise aborted_refused()
        yield from self.savepoint()
        if self.flavour == "sqlite" and not self.joined:
            yield from self.savepoint()  # if it is gone at the end, somebody else ended it

    def savepoint(self) -> Calls[None]:
        from django.db import transaction

        block: Any = transaction.atomic(using=self.target.alias)
        yield (block.__enter__,)
        self._stack.append(block)

    def execute(self, sql: str, args: list[Any]) -> Calls[list[Any]]:
        return (yield self._rows, sql, args)  # type: ignore[no-any-return]

    def _rows(self, sql: str, args: list[Any]) -> list[Any]:
        with self.target.cursor() as cursor:
            if self.flavour == "sqlite":
                cursor.execute(sql.replace("%", "%%").replace("?", "%s"), args)
            else:
                cursor.execute(pyformat(sql), named_args(args))
            return list(cursor.fetchall()) if cursor.description else []

    def must_be_open(self) -> None:
        if not self.target.in_atomic_block:
            raise ended_refused("connection")

    def undo(self) -> Calls[None]:
        yield self._stack.pop().__exit__, _Undo, _Undo(), None

    def commit(self) -> Calls[None]:
        while self._stack:
            try:
                yield self._stack.pop().__exit__, None, None, None
            except Exception as error:
                if self._stack and self.flavour == "sqlite":
                    raise ended_refused("connection") from error
                raise

    def rollback(self) -> Calls[None]:
        failed: Exception | None = None
        while self._stack:
            try:
                yield from self.undo()
            except Exception as error:  # noqa: BLE001 - the outer ones must be ended too
                failed = error
        if failed is not None:
            raise failed
