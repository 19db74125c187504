"""``oncekey audit verify FILE|URL``: whether an audit trail is whole, without the application."""

from __future__ import annotations

import argparse
import functools
import os
from importlib import import_module
from typing import Any

from oncekey.cli._inbox import add_inbox, ask, has_inbox
from oncekey.cli._output import Output, add_json_option, counted
from oncekey.cli._stores import add_url_env, from_environment, store_url
from oncekey.errors import PolicyError, StoreConfigError
from oncekey.instrument.audit import AuditError, AuditReport, Head, verify_file

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "audit",
        help="find what was changed, removed, moved or cut off in an audit trail",
        description="Looks at every entry of an audit trail that an AuditFile or an AuditTable "
        "has written, or of that of a gateway's inbox (--config, or --inbox with its URL). Exit 0: "
        "it is whole; 1: it is not, and where; 2: it can't be read.",
    )
    parser.add_argument("action", choices=("verify",), help="what to do")
    parser.add_argument(
        "url", metavar="FILE|URL", nargs="?", help="a file, sqlite:///file.db or postgresql://..."
    )
    add_url_env(parser)
    add_inbox(parser)
    parser.add_argument(
        "--secret-env", metavar="NAME", help="the environment variable that holds the secret"
    )
    parser.add_argument(
        "--expect", metavar="N:HASH", help="a head that you noted before: nothing up to it changed"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify."""
    out = Output(arguments)
    trail = store_url(arguments)
    name = arguments.secret_env
    secret = from_environment("--secret-env", name).encode() if name else None
    expected = Head.of(arguments.expect) if arguments.expect else None
    if has_inbox(arguments):
        if secret is not None:
            raise PolicyError("the audit of an inbox has no secret: leave out --secret-env")
        report = ask(trail, lambda inbox: inbox.verify_audit(expected))
    else:
        report = _verified(trail, secret, expected)
    if out.as_json:
        out.json({"head": str(report.head), "problems": report.problems})
    else:
        for problem in report.problems:
            out.line(problem, "red")
        verdict = f"{counted(report.head.number, 'entry', 'entries')}: " + (
            counted(len(report.problems), "problem") if report.problems else "whole"
        )
        out.line(verdict)
        out.line(f"head {report.head}")
    return 1 if report.problems else 0


def _verified(trail: str, secret: bytes | None, expected: Head | None) -> AuditReport:
    if "://" not in trail:
        return verify_file(trail, secret=secret, expected=expected)
    from oncekey.receiver.audit import AuditTable

    scheme, _, rest = trail.partition("://")
    if scheme == "sqlite":
        path = rest.removeprefix("/")
        if not os.path.exists(path):
            raise AuditError("there is no such SQLite file")
        table = AuditTable(path, secret=secret, create=False)
    elif scheme in ("postgresql", "postgres"):
        try:
            psycopg: Any = import_module("psycopg")
        except ModuleNotFoundError:
            raise AuditError("run pip install 'oncekey[postgres]' to read this trail") from None
        connect = functools.partial(psycopg.connect, trail)
        table = AuditTable(connect, "%s", secret=secret, create=False)
    else:
        raise StoreConfigError("an audit trail is a file, sqlite:///file.db or postgresql://...")
    try:
        return table.verify(expected)
    except Exception as error:
        raise AuditError(f"the audit tables can't be read ({type(error).__name__})") from error
    finally:
        table.close()
