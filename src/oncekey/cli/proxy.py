"""``oncekey proxy``: the ``Idempotency-Key`` header for a service in any language."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from oncekey.cli._format import duration
from oncekey.cli._output import Output, add_json_option
from oncekey.cli._stores import store_url
from oncekey.errors import PolicyError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "proxy",
        help="put the Idempotency-Key rules in front of any service",
        description="Passes requests on to the upstream, streaming both ways, WebSockets and event "
        "streams too. A POST or PATCH with an Idempotency-Key is passed on once: a retry gets the "
        "recorded answer. Keys belong to the caller, who is known by the Authorization header.",
    )
    parser.add_argument("--upstream", required=True, metavar="URL", help="where requests go")
    parser.add_argument("--store", dest="url", metavar="URL", help="where keys are kept")
    parser.add_argument(
        "--store-env",
        dest="url_env",
        metavar="NAME",
        help="the environment variable that holds the store's URL",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="where to listen")
    parser.add_argument(
        "--port", type=int, default=8081, metavar="N", help="the port; 0 takes a free one"
    )
    parser.add_argument(
        "--scope-header", metavar="NAME", help="who calls, if not said by Authorization"
    )
    parser.add_argument(
        "--anonymous",
        choices=("refuse", "shared"),
        default="refuse",
        help="keyed requests of unknown callers: refuse them, or let all share one space of keys",
    )
    parser.add_argument(
        "--require-key", action="store_true", help="refuse a POST or PATCH without a key"
    )
    parser.add_argument(
        "--ttl", type=duration, default=86_400.0, help="how long an answer is replayed; 24h"
    )
    parser.add_argument(
        "--max-body", type=int, default=1_048_576, metavar="BYTES", help="of a request with a key"
    )
    parser.add_argument(
        "--timeout", type=duration, default=60.0, help="how long the upstream may be silent; 60s"
    )
    parser.add_argument(
        "--connect-timeout", type=duration, default=10.0, help="how long connecting may take; 10s"
    )
    parser.add_argument(
        "--stop-timeout", type=duration, default=20.0, help="what requests have to end in; 20s"
    )
    parser.add_argument(
        "--keep-host", action="store_true", help="the upstream sees the client's Host, not its own"
    )
    parser.add_argument(
        "--trust-forwarded",
        action="store_true",
        help="believe X-Forwarded-* of the client: only behind a proxy of yours",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    try:
        from oncekey.server.listening import run_loop
        from oncekey.server.logs import log_to_stderr
        from oncekey.server.proxy import serve_proxy
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("oncekey"):
            raise
        raise PolicyError(f"the proxy needs {error.name}: pip install 'oncekey[serve]'") from None
    log_to_stderr()
    settings = _settings(arguments)
    output = Output(arguments)

    def announce(address: str) -> None:
        if output.as_json:
            output.json({"address": address, "upstream": arguments.upstream})
        else:
            output.line(f"oncekey guards {address}, before {arguments.upstream}")
        sys.stdout.flush()

    run_loop(serve_proxy(settings, announce))
    return 0


def _settings(arguments: argparse.Namespace) -> Any:
    from oncekey.server.forwarding import ProxyRules, header_settings, upstream_at
    from oncekey.server.proxy import ProxySettings

    times = (arguments.timeout, arguments.connect_timeout, arguments.stop_timeout)
    if not all(0 < one < float("inf") for one in times):
        raise PolicyError("--timeout, --connect-timeout and --stop-timeout must be more than 0")
    rules = ProxyRules(
        upstream=upstream_at(
            arguments.upstream,
            keep_host=arguments.keep_host,
            trust_forwarded=arguments.trust_forwarded,
            given_by="--upstream",
        ),
        header=header_settings(
            namespace="proxy",
            scope_header=arguments.scope_header or "",
            keep_host=arguments.keep_host,
            anonymous=arguments.anonymous,
            required=arguments.require_key,
            ttl=arguments.ttl,
            max_body_bytes=arguments.max_body,
        ),
        answer_seconds=arguments.timeout,
        connect_seconds=arguments.connect_timeout,
    )
    return ProxySettings(
        rules=rules,
        store=store_url(arguments),
        host=arguments.host,
        port=arguments.port,
        stop_seconds=arguments.stop_timeout,
    )
