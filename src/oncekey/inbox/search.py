"""The statements for a search, made of a filter. Both databases read them alike.

A page looks at a bounded number of rows, however rare the matches are: then it is short, and says
where the next one goes on.
"""

from __future__ import annotations

from typing import Any, Final

from oncekey.errors import PolicyError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import DeliveryState

__all__ = ["PARKED", "SCAN", "Query", "dead_query", "delivered_query", "event_query"]

PARKED: Final = 9_000_000_000_000_000
"""The due time of a delivery that waits for an earlier one of its entity."""

SCAN: Final = 20_000
"""How many rows one page looks at."""

_OPEN: Final = (DeliveryState.WAITING, DeliveryState.RUNNING, DeliveryState.PARKED)

_FIRST: Final = (
    "NOT EXISTS (SELECT 1 FROM oncekey_inbox_attempt b WHERE b.event = a.event "
    "AND b.target = a.target AND b.outcome = a.outcome AND b.number < a.number)"
)
_NOT_OPEN: Final = (
    "NOT EXISTS (SELECT 1 FROM oncekey_inbox_delivery d "
    "WHERE d.id = a.event AND d.target = a.target)"
)

_ROWS: Final = """
SELECT e.id, e.source, e.type, e.key, e.size,
    (SELECT count(*) FROM oncekey_inbox_delivery d WHERE d.id = e.id),
    (SELECT count(*) FROM oncekey_inbox_delivery d
        WHERE d.id = e.id AND d.held_by <> '' AND d.due_at > {now}),
    (SELECT count(*) FROM oncekey_inbox_delivery d WHERE d.id = e.id AND d.due_at = {parked}),
    (SELECT count(*) FROM oncekey_inbox_dead x WHERE x.id = e.id),
    (SELECT count(*) FROM oncekey_inbox_attempt a
        WHERE a.event = e.id AND a.outcome <> 'discarded'),
    (SELECT count(DISTINCT a.target) FROM oncekey_inbox_attempt a
        WHERE a.event = e.id AND a.outcome = 'delivered'
        AND NOT EXISTS (SELECT 1 FROM oncekey_inbox_delivery d
            WHERE d.id = e.id AND d.target = a.target)),
    (SELECT count(DISTINCT a.target) FROM oncekey_inbox_attempt a
        WHERE a.event = e.id AND a.outcome = 'discarded'
        AND NOT EXISTS (SELECT 1 FROM oncekey_inbox_delivery d
            WHERE d.id = e.id AND d.target = a.target)),
    (SELECT count(*) FROM oncekey_inbox_duplicate c WHERE c.event = e.id)
FROM (
    SELECT v.id, v.source, v.type, v.key, length(v.body) AS size
    FROM ({ids}) AS i JOIN oncekey_inbox_event v ON v.id = i.id
    {where} ORDER BY v.id DESC LIMIT {limit}
) AS e ORDER BY e.id DESC
"""


class Query:
    """A statement under construction: each value gets a mark, and is never part of the text."""

    def __init__(self) -> None:
        self.args: list[Any] = []

    def mark(self, value: Any) -> str:
        """Take a value; gives what stands for it in the text."""
        self.args.append(value)
        kind = "bigint" if isinstance(value, int) else "text"
        return f"CAST(${len(self.args)} AS {kind})"


def _where(conditions: list[str]) -> str:
    return "WHERE " + " AND ".join(conditions) if conditions else ""


def _about_event(query: Query, wanted: Filter) -> list[str]:
    conditions = []
    if wanted.source is not None:
        conditions.append(f"v.source = {query.mark(wanted.source)}")
    if wanted.type is not None and wanted.type.endswith("*"):
        prefix = wanted.type[:-1]
        if prefix:
            conditions.append(f"substr(v.type, 1, {len(prefix)}) = {query.mark(prefix)}")
    elif wanted.type is not None:
        conditions.append(f"v.type = {query.mark(wanted.type)}")
    if wanted.key is not None:
        conditions.append(f"v.key = {query.mark(wanted.key)}")
    return conditions


def _about_failure(query: Query, wanted: Filter, table: str) -> list[str]:
    conditions = []
    if wanted.target is not None:
        conditions.append(f"{table}.target = {query.mark(wanted.target)}")
    if wanted.status is not None:
        conditions.append(f"{table}.status = {query.mark(wanted.status)}")
    if wanted.error is not None:
        conditions.append(f"{table}.error = {query.mark(wanted.error)}")
    return conditions


def _standing(query: Query, state: DeliveryState, now: int) -> str:
    """How an unfinished delivery of this state looks."""
    if state is DeliveryState.PARKED:
        return f"d.due_at = {query.mark(PARKED)}"
    if state is DeliveryState.RUNNING:
        return f"d.held_by <> '' AND d.due_at > {query.mark(now)}"
    return f"d.due_at < {query.mark(PARKED)} AND (d.held_by = '' OR d.due_at <= {query.mark(now)})"


def _candidates(query: Query, wanted: Filter, span: str, now: int) -> tuple[str, str, list[str]]:
    """The table whose rows are looked at, its column of ids, and conditions on it."""
    if wanted.state is DeliveryState.DEAD:
        return (
            "oncekey_inbox_dead x",
            "x.id",
            [span.format("x.id"), *_about_failure(query, wanted, "x")],
        )
    if wanted.state is not None and wanted.state in _OPEN:
        standing = [span.format("d.id"), _standing(query, wanted.state, now)]
        return (
            "oncekey_inbox_delivery d",
            "d.id",
            [*standing, *_about_failure(query, wanted, "d")],
        )
    return "oncekey_inbox_event s", "s.id", [span.format("s.id")]


def _history(query: Query, wanted: Filter) -> list[str]:
    """Conditions of an event whose deliveries are looked at only once it is a candidate."""
    conditions = []
    if wanted.state is DeliveryState.DELIVERED or wanted.state is DeliveryState.DISCARDED:
        target = f"AND a.target = {query.mark(wanted.target)}" if wanted.target else ""
        conditions.append(
            "EXISTS (SELECT 1 FROM oncekey_inbox_attempt a WHERE a.event = v.id "
            f"AND a.outcome = {query.mark(wanted.state.value)} {target} "
            "AND NOT EXISTS (SELECT 1 FROM oncekey_inbox_delivery d "
            "WHERE d.id = v.id AND d.target = a.target))"
        )
    elif wanted.target is not None:
        target = query.mark(wanted.target)
        conditions.append(
            "("
            + " OR ".join(
                f"EXISTS (SELECT 1 FROM {table} t WHERE t.{column} = v.id AND t.target = {target})"
                for table, column in (
                    ("oncekey_inbox_delivery", "id"),
                    ("oncekey_inbox_dead", "id"),
                    ("oncekey_inbox_attempt", "event"),
                )
            )
            + ")"
        )
    if wanted.status is not None or wanted.error is not None:
        parts = []
        for table in ("oncekey_inbox_dead", "oncekey_inbox_delivery"):
            failed = " AND ".join(["t.id = v.id", *_about_failure(query, wanted, "t")])
            parts.append(f"EXISTS (SELECT 1 FROM {table} t WHERE {failed})")
        conditions.append(f"({' OR '.join(parts)})")
    return conditions


def event_query(
    wanted: Filter, least: int, most: int, now: int, limit: int
) -> tuple[str, list[Any], str, list[Any]]:
    """A page of events, and the last row that it looks at: none means that it saw all."""
    query = Query()
    span = f"{{0}} >= {query.mark(least)} AND {{0}} <= {query.mark(most)}"
    table, column, conditions = _candidates(query, wanted, span, now)
    plain = table.endswith(" s")
    order = f"FROM {table} {_where(conditions)} ORDER BY {column} DESC"
    distinct = "" if plain else "DISTINCT "
    last = f"SELECT {distinct}{column} {order} LIMIT 1 OFFSET {SCAN - 1}", list(query.args)
    ids = f"SELECT {distinct}{column} AS id {order} LIMIT {SCAN}"
    where = _about_event(query, wanted)
    if plain:
        where += _history(query, wanted)
    text = _ROWS.format(
        ids=ids,
        where=_where(where),
        limit=query.mark(limit),
        now=query.mark(now),
        parked=query.mark(PARKED),
    )
    return text, query.args, *last


def dead_query(
    wanted: Filter, least: int, most: int, after: str, limit: int
) -> tuple[str, list[Any], str, list[Any]]:
    """A page of dead letters after the one of ``most`` and ``after``, and how many there are.

    Raises:
        PolicyError: The filter is of another state.
    """
    if wanted.state not in (None, DeliveryState.DEAD):
        raise PolicyError(
            f"state:{wanted.state} finds no dead letters: write state:dead, or leave it out"
        )
    query = Query()
    conditions = [f"x.id >= {query.mark(least)}"]
    end = query.mark(most)
    conditions.append(f"(x.id < {end} OR (x.id = {end} AND x.target > {query.mark(after)}))")
    conditions += _about_failure(query, wanted, "x")
    conditions += _about_event(query, wanted)
    body = "FROM oncekey_inbox_dead x JOIN oncekey_inbox_event v ON v.id = x.id " + _where(
        conditions
    )
    count = f"SELECT count(*) {body}", list(query.args)
    text = (
        "SELECT x.id, v.source, v.type, x.target, x.tries, x.status, x.error, x.note "
        f"{body} ORDER BY x.id DESC, x.target LIMIT {query.mark(limit)}"
    )
    return text, query.args, *count


def delivered_query(
    wanted: Filter, least: int, most: int, after: str, limit: int
) -> tuple[str, list[Any], str, list[Any]]:
    """Deliveries that were made, as ``dead_query`` gives those that were not.

    The other statement gives the last event that was looked at: none means that all were.

    Raises:
        PolicyError: The filter is about failures.
    """
    if wanted.status is not None or wanted.error is not None:
        raise PolicyError("status: and error: are of failures: leave them out with state:delivered")
    query = Query()
    end = query.mark(most)
    span = f"e.id >= {query.mark(least)} AND e.id <= {end}"
    order = f"FROM oncekey_inbox_event e WHERE {span} ORDER BY e.id DESC"
    last = f"SELECT e.id {order} LIMIT 1 OFFSET {SCAN - 1}", list(query.args)
    conditions = [
        "a.outcome = 'delivered'",
        f"(v.id < {end} OR a.target > {query.mark(after)})",
        # An event that went to a target more than once is one delivery.
        _FIRST,
        _NOT_OPEN,
        *_about_event(query, wanted),
    ]
    if wanted.target is not None:
        conditions.append(f"a.target = {query.mark(wanted.target)}")
    text = (
        f"SELECT v.id, v.source, v.type, a.target FROM (SELECT e.id {order} LIMIT {SCAN}) AS i "
        "JOIN oncekey_inbox_event v ON v.id = i.id JOIN oncekey_inbox_attempt a ON a.event = v.id "
        f"{_where(conditions)} ORDER BY v.id DESC, a.target LIMIT {query.mark(limit)}"
    )
    return text, query.args, *last
