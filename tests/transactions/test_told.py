"""What is told of a caller's own transaction that can't be used, or that its handler has ended."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from tests.transactions.routes import Place, Route

from oncekey import (
    PgStore,
    SQLiteStore,
    StoreTimeoutError,
    StoreUnavailableError,
    TransactionRefusedError,
)
from oncekey.errors import StoreError
from oncekey.receiver import WebhookReceiver
from oncekey.signatures import provider
from oncekey.testing import sample

STRIPE = provider("stripe", secret="whsec_test")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A store's file with a table of a caller's."""
    path = str(tmp_path / "shop.db")
    SQLiteStore(path).close()
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE t (x)")
    made.close()
    return path


@pytest.fixture
def writer(file: str) -> Iterator[sqlite3.Connection]:
    """Another connection, which writes."""
    made = sqlite3.connect(file, isolation_level=None)
    yield made
    made.close()


def refused(store: Any, on: Any, error: type[StoreError]) -> str:
    """What a block is told that can't begin."""
    with pytest.raises(error) as caught, store.transaction("k", on=on, wait=0):
        pytest.fail("ran")
    return str(caught.value)


@pytest.mark.parametrize("finished", [False, True])
def test_a_reader_that_can_not_become_a_writer_is_told_so(
    file: str, writer: sqlite3.Connection, finished: bool
) -> None:
    """At once, whatever the timeouts: by one that writes, or has written since it read."""
    mine = sqlite3.connect(file, isolation_level=None, timeout=50)
    with SQLiteStore(file, busy_timeout=60) as store:
        mine.execute("BEGIN")
        mine.execute("SELECT * FROM t").fetchall()
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO t VALUES (1)")
        if finished:
            writer.execute("COMMIT")
        told = refused(store, mine, StoreUnavailableError)
        assert "begins by reading" in told
        assert "BEGIN IMMEDIATE" in told
        assert "60 s" not in told
        assert "busy_timeout" not in told
        assert mine.in_transaction
        mine.execute("ROLLBACK")
        if not finished:
            writer.execute("ROLLBACK")
        mine.execute("BEGIN IMMEDIATE")
        with store.transaction("k", on=mine) as tx:
            assert not tx.replayed
    mine.close()


def test_the_timeout_of_a_connection_of_the_callers_is_its_own(
    file: str, writer: sqlite3.Connection
) -> None:
    """A file that is locked for longer than the connection waits, not the store."""
    mine = sqlite3.connect(file, timeout=0)
    with SQLiteStore(file, busy_timeout=60) as store:
        writer.execute("BEGIN IMMEDIATE")
        told = refused(store, mine, StoreTimeoutError)
    assert "your connection waits" in told
    assert "60 s" not in told
    mine.close()


def test_a_reader_of_sqlalchemy_and_django_is_told_how_to_begin(
    file: str, writer: sqlite3.Connection
) -> None:
    """Each in the words of its library."""
    from tests.transactions.django_setup import connection_for

    engine = sa.create_engine(f"sqlite:///{file}", connect_args={"isolation_level": None})
    sa.event.listen(engine, "begin", lambda mine: mine.exec_driver_sql("BEGIN"))
    django = connection_for(Route("sqlite", "sync", "django", "connection"), Place("", file))
    from django.db import transaction

    with SQLiteStore(file) as store, Session(engine) as session:
        session.execute(sa.text("SELECT * FROM t")).all()
        writer.execute("INSERT INTO t VALUES (1)")
        assert "SQLAlchemy begin it" in refused(store, session, StoreUnavailableError)
        session.rollback()
        with transaction.atomic(django.alias):
            with django.cursor() as cursor:
                cursor.execute("SELECT * FROM t")
                cursor.fetchall()
            writer.execute("INSERT INTO t VALUES (1)")
            told = refused(store, django, StoreUnavailableError)
            assert '"OPTIONS": {"transaction_mode": "IMMEDIATE"}' in told
    django.close()
    engine.dispose()


def test_a_handler_that_commits_is_told_at_error_that_its_writes_are_there(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each retry writes again: no warning among others."""
    engine = sa.create_engine(f"sqlite:///{file}")
    receiver = WebhookReceiver(
        STRIPE, f"sqlite:///{file}", transactional=True, on=lambda: Session(engine), wait=0
    )

    @receiver.on("invoice.paid")
    def commits(event: Any, tx: Any) -> None:
        tx.session.execute(sa.text("INSERT INTO t VALUES (1)"))
        tx.session.commit()

    answer = receiver.receive(*sample(STRIPE, type="invoice.paid"))
    assert (answer.status, answer.code) == (503, "TRANSACTION_REFUSED")
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert len(told) == 1
    assert "its writes are there, and the next retry makes them again" in told[0]
    assert "leave commit and rollback to oncekey" in told[0]
    receiver.close()
    engine.dispose()


@pytest.mark.parametrize("rolls_back", [False, True])
def test_a_swallowed_error_of_postgresql_is_told_what_to_do(place: Place, rolls_back: bool) -> None:
    """The same advice to one who swallows it and to one who rolls back for it."""
    engine = sa.create_engine(place.url.replace("postgresql:", "postgresql+psycopg:"))
    name = f"swallowed {rolls_back}"
    with PgStore(place.url) as store, Session(engine) as session:

        def swallow() -> None:
            with store.transaction(name, on=session) as tx:
                assert not tx.replayed
                with contextlib.suppress(sa.exc.DataError):
                    session.execute(sa.text("SELECT 1/0"))
                if rolls_back:
                    session.rollback()

        with pytest.raises(TransactionRefusedError, match=r"session\.begin_nested\(\)") as caught:
            swallow()
        assert "let its error out" in str(caught.value)
        with store.transaction(name, on=session) as tx:
            assert not tx.replayed
            with contextlib.suppress(sa.exc.DataError), session.begin_nested():
                session.execute(sa.text("SELECT 1/0"))
    engine.dispose()


def test_a_handler_that_is_locked_out_by_its_own_transaction_is_told_so(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Django's connection, say, on a receiver that was not given it."""
    receiver = WebhookReceiver(STRIPE, f"sqlite:///{file}", transactional=True)
    other = sqlite3.connect(file, timeout=0)

    @receiver.on("invoice.paid")
    def writes_elsewhere(event: Any, tx: Any) -> None:
        other.execute("INSERT INTO t VALUES (1)")

    answer = receiver.receive(*sample(STRIPE, type="invoice.paid"))
    assert answer.status == 500
    assert "write on tx.connection, or pass your own connection" in caplog.text
    other.close()
    receiver.close()


@pytest.mark.parametrize("named", [False, True])
def test_the_test_database_of_django(tmp_path: Path, named: bool) -> None:
    """In memory no store can share it, which is told; a file of its own works in a TestCase."""
    script = Path(__file__).with_name("in_django_tests.py")
    files = [str(tmp_path / name) for name in (("shop.db", "test.db") if named else ("shop.db",))]
    done = subprocess.run(
        [sys.executable, str(script), *files], capture_output=True, text=True, check=False
    )
    if named:
        twice = [(200, "handled"), (200, "duplicate")]
        assert (done.returncode, done.stdout.strip()) == (0, f"{twice} {twice}"), done.stderr
    else:
        assert "(503, 'unavailable')" in done.stdout
        assert "Django's tests have a database of their own" in done.stderr
