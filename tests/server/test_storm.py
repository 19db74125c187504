"""Gateways killed with -9 under load: the short form of ``make storm-gateway``."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from tests.scale import LONG
from tests.server.storm import Counted, storm
from tests.servers.fixtures_pg import sql

from oncekey.inbox import open_inbox


def judged(counted: Counted) -> None:
    """All that was acknowledged had its effect, once."""
    assert counted.faults == [], str(counted)
    assert counted.acknowledged > 0
    assert counted.effects == counted.distinct_effects == counted.events == counted.acknowledged


async def test_a_gateway_killed_under_load_on_sqlite(tmp_path: Path) -> None:
    """One node and a consumer on one file, killed: nothing is lost, no effect is doubled."""
    file = tmp_path / "inbox.db"
    with contextlib.closing(sqlite3.connect(file)) as made:
        made.execute("CREATE TABLE effects (name text NOT NULL)")
    judged(await storm(tmp_path, f"sqlite:///{file}", str(file), 1, 50 if LONG else 1))


async def test_gateways_killed_under_load_on_postgres(tmp_path: Path, pg_url: str) -> None:
    """Nodes and consumers on one server, killed: nothing is lost, no effect is doubled."""
    sql(pg_url, "CREATE TABLE effects (name text NOT NULL)")
    await (await open_inbox(pg_url, create=True)).aclose()
    nodes, kills = (3, 50) if LONG else (2, 1)
    judged(await storm(tmp_path, pg_url, pg_url, nodes, kills))
