"""The SQL of the store, made ready: for one call or many, for one schema, proof against shadows."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from oncekey.stores._sql import load_statements

__all__ = ["SQL", "Statements", "statements_in"]

# Exact to the microsecond for a century, and many times cheaper than the numeric of extract().
_US: Final = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint"
_ASKED: Final = re.compile(r"\{asked: ([^}]*)\}")
_COMMENT: Final = re.compile(r"^\s*--.*\n", re.MULTILINE)


def _for_many(match: re.Match[str]) -> str:
    """What is asked, as arrays.

    The LIMIT lets the planner expect one row, however many there are: it then makes one plan, by
    the index, and keeps it, where else it would plan every call anew.
    """
    columns = [column.split() for column in match[1].split(", ")]
    arrays = ", ".join(
        f"unnest(${number}::{kind}[])" for number, (_, kind) in enumerate(columns, 2)
    )
    names = ", ".join(name for name, _ in columns)
    return (
        f"MATERIALIZED (SELECT * FROM ROWS FROM ({arrays}) AS a ({names}) "
        "LIMIT cardinality($2::bytea[]))"
    )


def _for_one(match: re.Match[str]) -> str:
    """What is asked, as plain values: the server is ready to run that a good deal sooner."""
    columns = [column.split() for column in match[1].split(", ")]
    values = ", ".join(
        f"${number}::{kind} AS {name}" for number, (name, kind) in enumerate(columns, 2)
    )
    return f"NOT MATERIALIZED (SELECT {values})"


_STATEMENTS: Final = load_statements("statements.sql", "oncekey.stores.postgres")
_PARTS: Final = {
    name: _COMMENT.sub("", sql) for name, sql in _STATEMENTS.items() if name.startswith("part_")
}
# How what is asked is met, by its form.
_MET: Final[dict[Callable[[re.Match[str]], str], dict[str, str]]] = {
    _for_one: {
        "unseen": "NOT EXISTS (SELECT FROM seen)",
        "held": "",
        "of_mine": "asked a WHERE {part_mine}",
    },
    _for_many: {
        "unseen": "o.key NOT IN (SELECT seen.key FROM seen)",  # hashed, where EXISTS were a loop
        "held": _PARTS["part_held"],
        "of_mine": "{part_at_place}",
    },
}


def _filled(sql: str, parts: dict[str, str]) -> str:
    """A statement with its parts put in, which may have parts too.

    Nothing is told but where ``told`` says so: then that goes with the comma before it.
    """
    for name, text in [*parts.items(), *_PARTS.items(), *_PARTS.items(), *parts.items()]:
        sql = sql.replace(f"{{{name}}}", text)
    sql = _COMMENT.sub("", sql)
    sql = sql.replace(", {told}", "").replace("{guard}", "true").replace("{from}", "asked")
    return sql.replace("{now}", f"{_US} / 1000").replace("{us}", _US)


_TABLE: Final = re.compile(r"(')?\b(oncekey_(?:records|waiters|state|schema))\b")
_FUNCTION: Final = re.compile(
    r"(?<![\w.])(array_agg|bool_or|cardinality|clock_timestamp|count|current_schemas?|"
    r"current_setting|date_part|format|format_type|max|min|pg_\w+|to_regclass|unnest)\("
)
_TYPE: Final = re.compile(r"::(bytea|regclass|text|tid|uuid)\b")


def _sure(sql: str) -> str:
    """A statement whose functions and types no schema or temporary table can shadow."""
    return _TYPE.sub(r"::pg_catalog.\1", _FUNCTION.sub(r"pg_catalog.\1(", sql))


def _located(sql: str, schema: str) -> str:
    """A statement on the tables of one schema, whatever the search_path is."""
    quoted = '"' + schema.replace('"', '""') + '".'
    text = quoted.replace("'", "''")
    return _TABLE.sub(lambda at: f"'{text}{at[2]}" if at[1] else quoted + at[2], sql)


_CALLS: Final = {name: sql for name, sql in _STATEMENTS.items() if "{asked" in sql}
_CLAIM_IN: Final = _CALLS.pop("claim_in")
_CLAIM_IN_NEW: Final = _CALLS.pop("claim_in_new")
# What one call may ask by itself.
_ALONE: Final = {name: _CALLS.pop(name) for name in ("claim_fresh", "claim_known")}
_COMPLETE: Final = _CALLS.pop("complete_alone")
_OF_TRANSACTION: Final = {  # $11: the transaction that claimed
    "guard": "pg_current_xact_id()::text = $11::text",
    "told": "pg_current_xact_id()::text",
}
# As they are before the schema is known: to make it, and to look at it.
SQL: Final = {
    name: _sure(_filled(sql, {}))
    for name, sql in _STATEMENTS.items()
    if "{asked" not in sql and name not in _PARTS
}


class Statements(NamedTuple):
    """Every statement on the tables of one schema."""

    one: dict[str, str]  # for one call
    many: dict[str, str]  # for calls that share a round trip
    sql: dict[str, str]
    claim_in: str
    claim_in_new: str
    complete_in: str


@functools.lru_cache(maxsize=64)
def statements_in(schema: str) -> Statements:
    """The statements for the tables of ``schema``."""

    def ready(sql: str, asked: Callable[[re.Match[str]], str], **parts: str) -> str:
        sql = _filled(sql, {**_MET[asked], **parts})
        return _located(_sure(_ASKED.sub(asked, sql)), schema)

    return Statements(
        {
            name: ready(sql, _for_one)
            for name, sql in {**_CALLS, **_ALONE, "complete": _COMPLETE}.items()
        },
        {name: ready(sql, _for_many) for name, sql in _CALLS.items()},
        {name: _located(sql, schema) for name, sql in SQL.items()},
        ready(_CLAIM_IN, _for_one, **{"from": "open"}),
        ready(_CLAIM_IN_NEW, _for_one),
        ready(_COMPLETE, _for_one, **_OF_TRANSACTION),
    )
