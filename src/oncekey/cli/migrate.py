"""``oncekey migrate URL``: make the tables, or bring them up to date."""

from __future__ import annotations

import argparse
from typing import Any

from oncekey.errors import StoreConfigError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "migrate",
        help="make or update the tables of a PostgreSQL store",
        description="Makes the tables of oncekey in the database at URL, or brings them up to "
        "date. Running it again is harmless. In two steps for an upgrade without a pause: "
        "--step pre before the new code is deployed, --step post once only the new code runs.",
    )
    parser.add_argument("url", metavar="URL", nargs="?", help="postgresql://user@host/database")
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Migrate, check, or print."""
    from oncekey.stores.postgres.schema import printed

    if arguments.sql:
        print(printed(arguments.step, arguments.partitions, arguments.row_security), end="")
        return 0
    if not arguments.url:
        raise StoreConfigError("give the URL of a database, or --sql to print the statements")
    if not arguments.url.startswith("postgres"):
        raise StoreConfigError("only postgresql:// has tables to make beforehand")
    from oncekey.stores.postgres import open_sync

    with open_sync(arguments.url, {}) as store:
        if arguments.check:
            print(f"the schema is as it should be (store {store.store_id})")
            return 0
        done = store.create_schema(
            step=arguments.step,
            partitions=arguments.partitions,
            row_security=arguments.row_security,
        )
    for line in done:
        print(f"done  {line}")
    print(f"{len(done)} migrations applied" if done else "nothing to do: the schema is up to date")
    return 0
