"""The PostgreSQL server that the whole run shares."""

from __future__ import annotations

from tests.servers.fixtures_pg import _given, _own, own_postgres, postgres

__all__ = ["_given", "_own", "own_postgres", "postgres"]
