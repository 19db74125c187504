"""``oncekey serve``: the gateway, in one process or several."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
from typing import Any, Final

from oncekey.cli._output import Output, add_json_option, counted
from oncekey.errors import PolicyError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="run the gateway: a durable inbox with an API and a dashboard",
        description="Takes webhooks at /hooks/SOURCE, keeps each event once, and delivers it "
        "to its targets until they have it. The dashboard is at /_oncekey. SIGHUP reads the config "
        "again, SIGTERM ends it in bounded time. Settings come from the file, and from variables "
        "such as ONCEKEY__PORT that stand above it.",
    )
    parser.add_argument("--config", metavar="FILE", help="the config; see: oncekey init stripe")
    parser.add_argument(
        "--host", metavar="H", help="the address to listen on, in place of the config's"
    )
    parser.add_argument("--port", type=int, metavar="N", help="the port; 0 takes a free one")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that share the port and the inbox"
    )
    parser.add_argument(
        "--demo", action="store_true", help="no config: a source, a target and a token made for now"
    )
    parser.add_argument(
        "--check", action="store_true", help="read the config, say what is wrong, end"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    try:
        from oncekey.server.demo import Demo
        from oncekey.server.listening import run_loop
        from oncekey.server.logs import log_to_stderr
        from oncekey.server.serving import serve
        from oncekey.server.workers import serve_with_workers
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("oncekey"):
            raise
        raise PolicyError(f"the gateway needs {error.name}: pip install 'oncekey[serve]'") from None
    log_to_stderr()
    if arguments.demo:
        if arguments.config or arguments.workers:
            raise PolicyError("--demo takes no --config and no --workers")
        with Demo(arguments.host, arguments.port) as demo:
            run_loop(serve(demo.settings, announce=demo.announce, wrap=demo.wrap))
        return 0

    read = _reader(arguments)
    settings = read()[1]
    output = Output(arguments)
    if arguments.check:
        _checked(output, settings)
        return 0

    def announce(address: str) -> None:
        if output.as_json:
            output.json({"address": address, "dashboard": f"{address}/_oncekey"})
        else:
            output.line(f"oncekey serves {address}, dashboard {address}/_oncekey")
        sys.stdout.flush()
        if not settings.users and not settings.tokens:
            _say(_NOBODY)

    if settings.workers == 1:
        run_loop(serve(settings, reload=lambda: read()[1], announce=announce))
        return 0
    if settings.store.startswith("sqlite"):
        _say(
            "the workers share one SQLite file, which has one writer at a time: that is safe, but "
            "hardly faster. PostgreSQL is for more."
        )
    return asyncio.run(serve_with_workers(read, announce))


def _reader(arguments: argparse.Namespace) -> Any:
    """Reads the config, with what the command line puts above it."""
    from oncekey.server.config import read_text, settings_from
    from oncekey.server.workers import Config

    names = ("host", "port", "workers")
    given = {name: getattr(arguments, name) for name in names}
    instead = {name: value for name, value in given.items() if value is not None}

    def read() -> Any:
        text, file = read_text(arguments.config)
        settings = dataclasses.replace(settings_from(text, file, os.environ), **instead)
        if settings.workers < 1:
            raise PolicyError("--workers: give 1 or more")
        return Config(text, file, instead), settings

    return read


_NOBODY: Final = "nobody can sign in: set ONCEKEY_TOKEN, or write [users.NAME]"


def _checked(output: Output, settings: Any) -> None:
    named = {kind: list(getattr(settings, kind)) for kind in ("sources", "targets", "proxies")}
    if output.as_json:
        output.json(named)
    else:
        ones = ("source", "target", "proxy")
        numbers = [
            counted(len(names), one, many)
            for one, (many, names) in zip(ones, named.items(), strict=True)
        ]
        output.line(f"{', '.join(numbers)}: the config is good")
    if not settings.users and not settings.tokens:
        _say(_NOBODY)


def _say(text: str) -> None:
    print(f"oncekey: {text}", file=sys.stderr)
