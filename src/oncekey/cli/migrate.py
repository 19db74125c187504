"""``oncekey migrate URL``: make the tables, or bring them up to date."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from oncekey.cli._output import Output, add_json_option
from oncekey.cli._stores import add_store, store_url
from oncekey.errors import StoreConfigError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "migrate",
        help="make or update the tables of a store",
        description="Makes the tables of oncekey in the database at URL, or brings them up to "
        "date; for dynamodb:// the table and its TTL. Running it again is harmless. In two steps "
        "for an upgrade of PostgreSQL without a pause: "
        "--step pre before the new code is deployed, --step post once only the new code runs.",
    )
    add_store(parser)
    parser.add_argument("--step", choices=("pre", "post"), help="one step only")
    parser.add_argument(
        "--partitions", type=int, default=0, metavar="N", help="make the table in N hash partitions"
    )
    parser.add_argument(
        "--row-security", action="store_true", help="let each role see its own tenant's rows only"
    )
    parser.add_argument(
        "--sql", action="store_true", help="print the SQL, for Alembic or a review, and change none"
    )
    parser.add_argument("--check", action="store_true", help="only look: exit 2 names any drift")
    parser.add_argument("--inbox", action="store_true", help="the tables of an inbox, too")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Migrate, check, or print."""
    from oncekey.stores.postgres.schema import printed

    out = Output(arguments)
    if arguments.sql:
        sql = printed(arguments.step, arguments.partitions, arguments.row_security)
        out.json({"sql": sql}) if out.as_json else print(sql, end="")
        return 0
    url = store_url(arguments)
    if url.startswith("dynamodb:"):
        return _migrate_dynamodb(url, arguments, out)
    if arguments.inbox:
        return asyncio.run(_migrate_inbox(url, arguments.check, out))
    if not url.startswith("postgres"):
        raise StoreConfigError(
            "only postgresql:// and dynamodb:// have tables to make beforehand; an inbox in a file "
            "is brought up to date with --inbox"
        )
    from oncekey.stores.postgres import open_sync

    with open_sync(url, {}) as store:
        if arguments.check:
            if out.as_json:
                out.json({"store": store.store_id})
            else:
                out.line(f"the schema is as it should be (store {store.store_id})")
            return 0
        done = store.create_schema(
            step=arguments.step,
            partitions=arguments.partitions,
            row_security=arguments.row_security,
        )
    return _told(done, out)


def _told(done: list[str], out: Output) -> int:
    if out.as_json:
        out.json({"applied": done})
        return 0
    for line in done:
        out.line(f"done  {line}", "green")
    applied = f"{len(done)} migrations applied"
    out.line(applied if done else "nothing to do: the schema is up to date")
    return 0


def _migrate_dynamodb(url: str, arguments: argparse.Namespace, out: Output) -> int:
    """Make the table. It has no versions to check, and no partitions of ours."""
    from oncekey.stores.dynamodb import open_sync

    for name in ("step", "partitions", "row_security", "check", "inbox"):
        if getattr(arguments, name):
            flag = "--" + name.replace("_", "-")
            raise StoreConfigError(f"{flag} is for postgresql:// only: leave it out")
    with open_sync(url, {}) as store:
        return _told(store.create_schema(), out)


async def _migrate_inbox(url: str, check: bool, out: Output) -> int:
    """Make the tables of keys and of the inbox, or only look."""
    from oncekey.inbox import open_inbox

    options = {} if check else {"create": True}
    async with await open_inbox(url, **options) as inbox:
        if out.as_json:
            out.json({"inbox": inbox.url})
        else:
            out.line("the tables of the inbox are as they should be", "green")
    return 0
