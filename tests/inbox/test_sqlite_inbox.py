"""An inbox in a file: what is only true of files."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from oncekey import SQLiteStore
from oncekey.cli import main
from oncekey.errors import (
    StoreClosedError,
    StoreConfigError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)
from oncekey.inbox import Arrival, AsyncInbox, Filter, Outcome, Result, Route, event_key, open_inbox
from oncekey.models import State


def url(path: Path) -> str:
    return f"sqlite:///{path / 'inbox.db'}"


def arrival(key: str, body: bytes = b"{}") -> Arrival:
    return Arrival("shop", key, "paid", body, routes=(Route("app"),))


async def test_old_events_go_in_small_steps(tmp_path: Path) -> None:
    """Finished events past their time go with their history, and ingest goes on meanwhile."""
    now = {"s": 1_700_000_000.0}
    inbox = await open_inbox(url(tmp_path), clock=lambda: now["s"], remember=3600)
    try:
        for n in range(450):
            await inbox.ingest(arrival(f"k{n}"))
        found = await inbox.fetch({"app": 448}, 60_000)
        await inbox.finish([Result(one, Outcome.DELIVERED) for one in found])
        await inbox.ingest(arrival("k0"))
        now["s"] += 86_400
        fresh, removed = await asyncio.gather(inbox.ingest(arrival("new")), inbox.prune(3_600_000))
        assert removed == 448
        rows = await inbox.search(Filter())
        assert [row.key for row in rows] == ["new", "k449", "k448"]
        assert fresh.id == rows.items[0].id
        again = await inbox.ingest(arrival("k0"))
        assert again.new  # its key was remembered for an hour
    finally:
        await inbox.aclose()
    with contextlib.closing(sqlite3.connect(tmp_path / "inbox.db")) as file:
        for table in ("attempt", "duplicate"):
            assert file.execute(f"SELECT count(*) FROM oncekey_inbox_{table}").fetchone() == (0,)


async def test_its_keys_can_be_seen_and_taken_back(tmp_path: Path) -> None:
    """One space of keys: a store on the file reads an event's key; without it a copy is new."""
    async with await open_inbox(url(tmp_path)) as inbox:
        kept = await inbox.ingest(arrival("k"))
        key = event_key("shop", "k")
        with SQLiteStore(str(tmp_path / "inbox.db")) as store:
            record = store.read(key)
            assert record is not None
            assert record.state is State.COMPLETED
            assert record.answer == f'j"{kept.id}"'.encode()
            store.clear()
        again = await inbox.ingest(arrival("k"))
        assert (again.new, again.id != kept.id) == (True, True)


async def test_a_key_that_was_given_back_is_free(tmp_path: Path) -> None:
    """A released or foreign record in the way of a key does not swallow its event."""
    async with await open_inbox(url(tmp_path)) as inbox:
        await inbox.ingest(arrival("k"))
        with contextlib.closing(sqlite3.connect(tmp_path / "inbox.db")) as file:
            file.execute("UPDATE oncekey_records SET state = 2, owner = x'01', answer = NULL")
            file.commit()
        assert (await inbox.ingest(arrival("k"))).new


async def test_concurrent_events_share_a_commit(tmp_path: Path) -> None:
    """Callers that come while a commit is under way are taken along by the next."""
    async with await open_inbox(url(tmp_path)) as inbox:
        await inbox.ingest(arrival("first"))
        commits = []
        database = inbox._database  # type: ignore[attr-defined]
        made = database.commit

        def counted(jobs: Any) -> None:
            commits.append(len(jobs))
            made(jobs)

        database.commit = counted
        await asyncio.gather(*(inbox.ingest(arrival(f"k{n}")) for n in range(200)))
    assert sum(commits[:20]) >= 200
    assert len(commits) <= 20


async def test_a_newer_or_broken_inbox_is_refused(tmp_path: Path) -> None:
    """Refused with what to do, and nothing is changed."""
    await (await open_inbox(url(tmp_path))).aclose()
    file = tmp_path / "inbox.db"
    with contextlib.closing(sqlite3.connect(file)) as opened:
        opened.execute("INSERT INTO oncekey_inbox_schema VALUES (99, 0)")
        opened.commit()
    with pytest.raises(StoreConfigError, match=r"schema version 99.*upgrade oncekey"):
        await open_inbox(url(tmp_path))
    with contextlib.closing(sqlite3.connect(file)) as opened:
        opened.execute("DELETE FROM oncekey_inbox_schema WHERE version = 99")
        opened.execute("DROP TABLE oncekey_inbox_dead")
        opened.commit()
    with pytest.raises(StoreConfigError, match=r"lacks oncekey_inbox_dead.*backup"):
        await open_inbox(url(tmp_path))
    with contextlib.closing(sqlite3.connect(file)) as opened:
        opened.execute("DROP TABLE oncekey_inbox_schema")
        opened.commit()
    with pytest.raises(StoreConfigError, match="no oncekey_inbox_schema"):
        await open_inbox(url(tmp_path))


async def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Damage is found when the inbox is opened, and named."""
    inbox = await open_inbox(url(tmp_path))
    for n in range(200):
        await inbox.ingest(arrival(f"k{n}", b"x" * 500))
    await inbox.aclose()
    file = tmp_path / "inbox.db"
    raw = bytearray(file.read_bytes())
    for place in range(8192, len(raw) - 4096, 4096):
        raw[place : place + 64] = b"\xff" * 64
    file.write_bytes(raw)
    with pytest.raises((StoreCorruptError, StoreConfigError, StoreError)) as caught:
        await open_inbox(url(tmp_path))
    assert "backup" in str(caught.value)


async def test_a_full_disk_acknowledges_nothing(tmp_path: Path) -> None:
    """What can't be kept is refused, nobody's event with it; there is room again, it goes on."""
    async with await open_inbox(url(tmp_path)) as inbox:
        await inbox.ingest(arrival("first"))
        writer = inbox._database.writer()  # type: ignore[attr-defined]
        pages = writer.execute("PRAGMA page_count").fetchone()[0]
        writer.execute(f"PRAGMA max_page_count={pages + 2}")
        results = await asyncio.gather(
            *(inbox.ingest(arrival(f"k{n}", b"x" * 20_000)) for n in range(5)),
            return_exceptions=True,
        )
        assert any(isinstance(one, StoreFullError) for one in results)
        kept = {one.id for one in results if not isinstance(one, BaseException)}
        assert {row.id for row in await inbox.search(Filter()) if row.key != "first"} == kept
        writer.execute("PRAGMA max_page_count=1073741823")
        # The sender's retry is new: no key was burnt by what was refused.
        again = [await inbox.ingest(arrival(f"k{n}", b"x" * 20_000)) for n in range(5)]
        assert [one.new for one in again] == [isinstance(one, BaseException) for one in results]


async def test_a_closed_inbox_says_so(tmp_path: Path) -> None:
    """Every call after closing is refused, and closing twice does nothing."""
    inbox: AsyncInbox = await open_inbox(url(tmp_path))
    await inbox.aclose()
    await inbox.aclose()
    for call in (inbox.ingest(arrival("k")), inbox.search(Filter()), inbox.check()):
        with pytest.raises(StoreClosedError):
            await call


@pytest.mark.parametrize("bad", ["", "inbox.db", "sqlite:///", "redis://x", "sqlite://x/y.db"])
async def test_a_url_that_is_none_is_refused(bad: str) -> None:
    """The error says how to write one."""
    with pytest.raises(StoreConfigError, match=r"sqlite:///inbox.db"):
        await open_inbox(bad)


async def test_a_wrong_option_is_refused(tmp_path: Path) -> None:
    """An option that there is not is named."""
    with pytest.raises(StoreConfigError, match="colour"):
        await open_inbox(url(tmp_path), colour="red")


async def test_an_older_inbox_is_refused_then_brought_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older oncekey may still run on it. What was done before the audit was a chain stays."""
    path = tmp_path / "inbox.db"
    await (await open_inbox(f"sqlite:///{path}")).aclose()
    with contextlib.closing(sqlite3.connect(path)) as old:
        for column in ("number", "before", "hash"):
            old.execute(f"ALTER TABLE oncekey_inbox_audit DROP COLUMN {column}")
        old.execute("DROP TABLE oncekey_inbox_head")
        old.execute("DELETE FROM oncekey_inbox_schema WHERE version > 1")
        old.execute(
            "INSERT INTO oncekey_inbox_audit (at, actor, action, subject, detail) "
            "VALUES (1, 'anna', 'look', 'x', '')"
        )
        old.commit()
    with pytest.raises(StoreConfigError, match=r"version 1, .* run 'oncekey migrate --inbox"):
        await open_inbox(f"sqlite:///{path}")
    command = ["migrate", "--inbox", f"sqlite:///{path}"]
    assert await asyncio.to_thread(main, [*command, "--check"]) == 2
    assert "version 1" in capsys.readouterr().err
    assert await asyncio.to_thread(main, command) == 0
    async with await open_inbox(f"sqlite:///{path}") as inbox:
        await inbox.record("look", "y", actor="anna")
        assert [one.subject for one in (await inbox.audit()).items] == ["y", "x"]
        found = await inbox.verify_audit()
        assert (found.head.number, found.problems) == (1, [])


async def test_one_lost_delivery_of_many_changes_nothing_for_the_others(tmp_path: Path) -> None:
    """Of results that are finished together, the one with an old fence does not count."""
    async with await open_inbox(url(tmp_path)) as inbox:
        for name in ("a", "b", "c"):
            await inbox.ingest(arrival(name))
        found = await inbox.fetch({"app": 3}, 60_000)
        await inbox.hand_back(found[1:2])
        newer = await inbox.fetch({"app": 3}, 60_000)
        results = [Result(one, Outcome.DELIVERED, 5, 200) for one in found]
        assert await inbox.finish(results) == [True, False, True]
        assert await inbox.finish([Result(newer[0], Outcome.DELIVERED)]) == [True]
        for one in found:
            detail = await inbox.event(one.event.id)
            assert detail is not None
            told = [attempt.outcome for attempt in detail.attempts]
            cut_off = [Outcome.LOST] if one is found[1] else []
            assert told == [*cut_off, Outcome.DELIVERED]
        assert await inbox.finish(results) == [False, False, False]


async def test_a_large_file_is_looked_through_by_the_doctor_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start does not take longer the more there is; a full check finds the damage."""
    async with await open_inbox(url(tmp_path)) as inbox:
        for n in range(200):
            await inbox.ingest(arrival(f"k{n}", b"x" * 2000))
    file = tmp_path / "inbox.db"
    damaged = bytearray(file.read_bytes())
    place = damaged.rfind(b"x" * 1500)
    page = place - place % 4096
    damaged[page : page + 8] = b"\xff" * 8  # the header of a page of bodies
    file.write_bytes(damaged)
    with pytest.raises(StoreCorruptError):
        await open_inbox(url(tmp_path))
    monkeypatch.setattr("oncekey.inbox.sqlite.schema.LOOKED_THROUGH", 1000)
    async with await open_inbox(url(tmp_path)) as inbox:
        await inbox.check(quick=True)
        with pytest.raises(StoreCorruptError, match="backup"):
            await inbox.check()


async def test_a_copy_of_what_is_gone_goes_too(tmp_path: Path) -> None:
    """A key may be known for longer than its event is kept: its copies pile up nowhere."""
    now = {"s": 1_700_000_000.0}
    async with await open_inbox(
        url(tmp_path), clock=lambda: now["s"], remember=10 * 86_400
    ) as inbox:
        kept = await inbox.ingest(arrival("k"))
        await inbox.finish(
            [Result(one, Outcome.DELIVERED) for one in await inbox.fetch({"app": 1}, 9)]
        )
        now["s"] += 2 * 86_400
        await inbox.prune(86_400_000)
        assert await inbox.event(kept.id) is None
        for _ in range(450):
            assert not (await inbox.ingest(arrival("k"))).new
        await inbox.prune(86_400_000)
    with contextlib.closing(sqlite3.connect(tmp_path / "inbox.db")) as file:
        assert file.execute("SELECT count(*) FROM oncekey_inbox_duplicate").fetchone() == (0,)


async def test_a_bulk_replay_of_rare_events_goes_on_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step looks at a bounded number of events, and says where the next one goes on."""
    monkeypatch.setattr("oncekey.inbox.search.SCAN", 2)
    async with await open_inbox(url(tmp_path)) as inbox:
        for n in range(7):
            rare = n in (0, 3)
            kind = "rare" if rare else "paid"
            await inbox.ingest(dataclasses.replace(arrival(f"k{n}"), type=kind))
        found = await inbox.fetch({"app": 9}, 60_000)
        await inbox.finish([Result(one, Outcome.DELIVERED) for one in found])
        wanted = Filter.parse("state:delivered type:rare")
        assert await inbox.count_replays(wanted) == 2
        await inbox.begin_bulk_replay(wanted, rate=100_000, actor="me")
        async with asyncio.timeout(30):
            while (wait := await inbox.advance_bulk_replays()) is not None:
                await asyncio.sleep(wait)
        assert [one.done for one in await inbox.bulk_replays()] == [2]
        assert {one.event.key for one in await inbox.fetch({"app": 9}, 60_000)} == {"k0", "k3"}
