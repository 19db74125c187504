"""``oncekey doctor``: look for what is set up wrongly in a store, a receiver or an app."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncekey.cli._format import duration
from oncekey.cli._output import Output, add_json_option, counted, printable
from oncekey.cli._stores import add_store, redacted, store_url
from oncekey.cli.sign import add_secret_options, make_provider
from oncekey.errors import PolicyError

if TYPE_CHECKING:
    from oncekey.doctor import Report

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="look for what is set up wrongly",
        description="Looks at a store (URL), at a gateway (--config: its config, its store and its "
        "inbox), at a webhook receiver (--url with --provider), or at "
        "an app with the Idempotency-Key header (--app), for what is set up wrongly. Each finding "
        "has its evidence and a fix. Exits with 1 if there is any, with 2 if it could not look.",
    )
    add_store(parser)
    parser.add_argument("--config", metavar="FILE", help="the config of a gateway")
    parser.add_argument(
        "--read-only", action="store_true", help="no race, which leaves records for a minute"
    )
    parser.add_argument(
        "--snapshot",
        type=duration,
        default=300.0,
        metavar="TIME",
        help="how long a transaction may be open in PostgreSQL; 5m",
    )
    _add_receiver(parser)
    _add_app(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def _add_receiver(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        dest="receiver",
        metavar="URL",
        help="a receiver to send signed probes to; handlers of their type run",
    )
    parser.add_argument("--provider", metavar="NAME", help="whose webhooks it takes")
    add_secret_options(parser)
    parser.add_argument("--type", metavar="TYPE", help="the type of the events that are sent")


def _add_app(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--app", metavar="MODULE:NAME", help="an ASGI or WSGI app, imported here")
    parser.add_argument("--path", default="/", help="a route of the app that does no harm")
    parser.add_argument("--method", default="POST", help="its method; POST")
    parser.add_argument("--body-file", metavar="FILE", help="a JSON body that the route takes")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="a header to send along (may be given again)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, and print the findings."""
    out = Output(arguments)
    has_store = bool(arguments.url or arguments.url_env or arguments.config)
    if not (has_store or arguments.receiver or arguments.app):
        raise PolicyError(
            "what is to be looked at? Give a store's URL (or --url-env), a gateway's --config, a "
            "receiver's --url with --provider, or an --app"
        )
    reports: list[Report] = []
    if arguments.config:
        reports.append(_gateway(arguments, out))
    if has_store and not (reports and "inbox" in reports[0].skipped):
        reports.append(_store(arguments, out))
    if arguments.receiver:
        reports.append(_receiver(arguments, out))
    if arguments.app:
        reports.append(_app(arguments, out))
    if out.as_json:
        out.json([{**dataclasses.asdict(one), "ok": one.ok} for one in reports])
    else:
        for report in reports:
            _print(out, report)
    return 0 if all(report.ok for report in reports) else 1


def _store(arguments: argparse.Namespace, out: Output) -> Report:
    from oncekey.doctor import check_store

    url = store_url(arguments)
    with out.progress("looking at the store"):
        return check_store(
            url,
            read_only=arguments.read_only,
            snapshot_seconds=arguments.snapshot,
            shown=redacted(url),
        )


def _gateway(arguments: argparse.Namespace, out: Output) -> Report:
    from oncekey.server.checkup import check_gateway

    with out.progress("looking at the gateway"):
        return check_gateway(arguments.config)


def _receiver(arguments: argparse.Namespace, out: Output) -> Report:
    from oncekey.doctor import check_receiver
    from oncekey.stores.urls import connect

    if not arguments.provider:
        raise PolicyError("whose webhooks does it take? Give --provider NAME and --secret-env")
    maker = make_provider(arguments)
    with out.progress("sending probes"):
        if not (arguments.url or arguments.url_env or arguments.config):
            return check_receiver(arguments.receiver, maker, type=arguments.type)
        with connect(store_url(arguments)) as store:
            return check_receiver(arguments.receiver, maker, type=arguments.type, store=store)


def _app(arguments: argparse.Namespace, out: Output) -> Report:
    from oncekey.doctor import check_app

    module, colon, name = arguments.app.partition(":")
    if not colon:
        raise PolicyError("--app: write it as MODULE:NAME, such as shop.main:app")
    sys.path.insert(0, "")  # as servers do: what lies in this directory can be imported
    try:
        app = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"--app {arguments.app} can't be imported: {error}") from error
    headers = {}
    for one in arguments.header:
        field, mark, value = one.partition(":")
        if not mark or not field.strip():
            raise PolicyError("--header: write it as 'NAME: VALUE'")
        headers[field.strip()] = value.strip()
    options: dict[str, Any] = {}
    if arguments.body_file:
        try:
            options["body"] = Path(arguments.body_file).read_bytes()
        except OSError as error:
            raise PolicyError(f"{arguments.body_file} can't be read: {error.strerror}") from None
    return check_app(
        app,
        path=arguments.path,
        method=arguments.method,
        headers=headers,
        shown=arguments.app,
        **options,
    )


def _print(out: Output, report: Report) -> None:
    out.line(printable(report.target))
    for finding in report.findings:
        colour = "red" if finding.severity == "error" else "yellow"
        out.line(f"  {finding.severity:<8} {finding.check}: {printable(finding.evidence)}", colour)
        out.line(f"           fix: {printable(finding.fix)}")
    if report.passed:
        out.line(f"  fine     {', '.join(report.passed)}", "green")
    for check, why in report.skipped.items():
        out.line(f"  skipped  {check}: {printable(why)}")
    out.line(
        f"  {counted(len(report.findings), 'finding')}" if report.findings else "  nothing found"
    )
