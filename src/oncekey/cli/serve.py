"""``oncekey serve``: the gateway, in one process."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import sys
from typing import Any

from oncekey.cli._output import Output, add_json_option
from oncekey.errors import PolicyError

__all__ = ["add_to", "run_loop"]


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
        from oncekey.server.config import read_config
        from oncekey.server.demo import Demo
        from oncekey.server.serving import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("oncekey"):
            raise
        raise PolicyError(f"the gateway needs {error.name}: pip install 'oncekey[serve]'") from None
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    if arguments.demo:
        if arguments.config:
            raise PolicyError("--demo takes no --config")
        with Demo(arguments.host, arguments.port) as demo:
            run_loop(serve(demo.settings, announce=demo.announce, wrap=demo.wrap))
        return 0

    def read() -> Any:
        given = {"host": arguments.host, "port": arguments.port}
        settings = read_config(arguments.config)
        return dataclasses.replace(
            settings, **{name: value for name, value in given.items() if value is not None}
        )

    settings = read()
    output = Output(arguments)
    if arguments.check:
        if output.as_json:
            output.json({"sources": list(settings.sources), "targets": list(settings.targets)})
        else:
            numbers = f"{len(settings.sources)} sources, {len(settings.targets)} targets"
            output.line(f"{numbers}: the config is good")
        return 0

    def announce(address: str) -> None:
        if output.as_json:
            output.json({"address": address, "dashboard": f"{address}/_oncekey"})
        else:
            output.line(f"oncekey serves {address}, dashboard {address}/_oncekey")
        sys.stdout.flush()
        if not settings.users and not settings.tokens:
            print(
                "oncekey: nobody can sign in: set ONCEKEY_TOKEN, or write [users.NAME]",
                file=sys.stderr,
            )

    run_loop(serve(settings, reload=read, announce=announce))
    return 0


def run_loop(work: Any) -> None:
    """Run a coroutine, on uvloop where it is there."""
    try:
        import uvloop
    except ImportError:  # it is not on every platform, and only makes it faster
        asyncio.run(work)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
