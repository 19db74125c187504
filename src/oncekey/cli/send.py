"""``oncekey send PROVIDER TYPE [URL]``: sign a sample, or bodies of your own, and send them."""

from __future__ import annotations

import argparse
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from oncekey.cli._output import Output, add_json_option, counted
from oncekey.cli._sending import LOCAL_GATEWAY, Answer, check_url, deliver, with_one_id
from oncekey.cli.sign import add_signing_options, bodies, make_provider, sign_body
from oncekey.errors import PolicyError

if TYPE_CHECKING:
    from oncekey.signatures import Provider, SignedRequest

__all__ = ["add_to"]

MOST_COPIES = 10_000
_SHOWN = ("status", "milliseconds", "text")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "send",
        help="sign webhook bodies and send them to an endpoint",
        description="send PROVIDER [TYPE] [URL] signs a sample as the provider would and sends it, "
        "to the gateway on this machine if no URL is given. send URL PROVIDER FILE... sends bodies "
        "of your own. With --times, each copy is signed anew under the same event id, as a "
        "provider's retries are: a receiver must handle the event once. Exits with 1 if an answer "
        "is not 2xx.",
    )
    parser.add_argument(
        "words",
        metavar="PROVIDER|URL",
        nargs="+",
        help="such as: stripe invoice.paid; or: http://localhost:8000/hooks stripe event.json",
    )
    add_signing_options(parser, files=False)
    parser.add_argument("--times", type=int, default=1, metavar="N", help="copies of each body")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="how many to send at the same time"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10,
        metavar="SECONDS",
        help="how long to wait for an answer",
    )
    parser.add_argument(
        "--curl", action="store_true", help="send nothing: print the command that would"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Send, and print a line for each answer."""
    _sort_out(arguments)
    _check(arguments)
    maker = make_provider(arguments)
    out = Output(arguments)
    rows: list[Answer] = []
    for body in bodies(maker, arguments):
        requests = _copies(maker, arguments, body)
        if arguments.curl:
            out.line(_curl(requests[0]))
            continue
        with ThreadPoolExecutor(min(arguments.at_once, len(requests))) as pool:
            answers = list(pool.map(lambda one: deliver(one, arguments.timeout), requests))
        rows += answers
        for answer in () if out.as_json else answers:
            status = str(answer.status or "none")
            out.line(f"{status:<5} {answer.milliseconds:7.1f} ms  {answer.text}")
    if arguments.curl:
        return 0
    failed = sum(not one.taken for one in rows)
    if out.as_json:
        out.json([dict(zip(_SHOWN, one, strict=False)) for one in rows])
    else:
        out.line(
            f"{counted(failed, 'answer was', 'answers were')} not 2xx"
            if failed
            else "all answers were 2xx"
        )
    return 1 if failed else 0


def _sort_out(arguments: argparse.Namespace) -> None:
    """Tell the words apart: with the URL first, files follow the provider; else a type does."""
    first, *others = arguments.words
    arguments.files = []
    if "://" in first:
        if not others:
            raise PolicyError("whose webhook? Write send URL PROVIDER, or send PROVIDER TYPE URL")
        arguments.url, arguments.provider, arguments.files = first, others[0], others[1:]
        return
    urls = [one for one in others if "://" in one]
    types = [one for one in others if "://" not in one]
    if len(urls) > 1 or len(types) > 1 or any(one == "-" or Path(one).is_file() for one in types):
        raise PolicyError(
            "write send PROVIDER [TYPE] [URL] for a sample, or send URL PROVIDER FILE... for "
            "bodies of your own; a URL has :// in it"
        )
    if types and arguments.type:
        raise PolicyError("the type is there twice: leave out --type")
    arguments.provider = first
    arguments.type = types[0] if types else arguments.type
    arguments.url = urls[0] if urls else f"{LOCAL_GATEWAY}/hooks/{quote(first, safe='')}"


def _curl(request: SignedRequest) -> str:
    """A line for a shell. Its signature is good for as long as the provider's clocks may differ."""
    words = ["curl", "-X", request.method, request.url]
    for name, value in request.headers.items():
        words += ["-H", f"{name}: {value}"]
    words += ["--data-binary", request.body.decode("utf-8", "surrogateescape")]
    return shlex.join(words)


def _check(arguments: argparse.Namespace) -> None:
    check_url(arguments.url)
    if not 1 <= arguments.times <= MOST_COPIES or not 1 <= arguments.at_once <= 256:
        raise PolicyError(f"--times must be 1 to {MOST_COPIES}, and --at-once 1 to 256")
    if not arguments.timeout > 0:
        raise PolicyError("--timeout must be more than 0 seconds")


def _copies(maker: Provider, arguments: argparse.Namespace, body: bytes) -> list[SignedRequest]:
    arguments = with_one_id(maker, arguments)
    return [sign_body(maker, arguments, arguments.url, body) for _ in range(arguments.times)]
