"""``oncekey replay``: deliver events of a gateway again, or make recorded deliveries again."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Final

from oncekey.cli._gateway import add_gateway
from oncekey.cli._output import CommandError, Output, add_json_option
from oncekey.cli._replaying import cancel, replay_event, replay_matching
from oncekey.cli.sign import add_secret_options, make_provider
from oncekey.errors import PolicyError

__all__ = ["add_to"]

_ID: Final = re.compile(r"msg_[0-9a-f]{16}")
_FORMS: Final = {
    # form: the options that are its own
    "one event": ("target",),
    "--search": ("dry_run", "rate"),
    "--cancel": (),
    "a recording": ("provider", "secret_env", "signing_key_env", "option", "seed", "copies",
                    "at_once"),
}  # fmt: skip
_USUAL: Final[dict[str, Any]] = {"copies": 1, "at_once": 1, "option": [], "dry_run": False}
"""What options are if they are not given; else ``None``."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="deliver events of a gateway again, or make recorded deliveries again",
        usage="oncekey replay msg_ID [--target NAME] | --search SEARCH [--dry-run] [--rate N]\n"
        "                      | --cancel NUMBER | URL FILE [--provider NAME ...]",
        description="With the id of an event, a running gateway delivers it again. With --search "
        "it delivers all dead letters that match again, at a rate: deliveries that were given up; "
        "with state:delivered in the search, those that were made; Ctrl-C cancels it, and what "
        "was queued by then stays queued. With URL and FILE, sends the deliveries of a recording "
        "(oncekey.testing.Recorder) to URL. Old signatures are refused by most receivers: with "
        "--provider each delivery is signed anew, under its own id; exits with 1 if an answer is "
        "not as it should be.",
    )
    parser.add_argument(
        "url",
        metavar="ID|URL",
        nargs="?",
        help="an event's id, msg_...; or an endpoint, or only its host, for all paths",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="with URL: the recording")
    parser.add_argument(
        "--target", action="append", metavar="NAME", help="with ID: to this one only; may repeat"
    )
    parser.add_argument(
        "--search",
        metavar="SEARCH",
        help="all dead letters (or state:delivered) that match; '': all",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with --search: only say how many there are"
    )
    parser.add_argument(
        "--rate", type=float, metavar="N", help="with --search: replays a second; 20"
    )
    parser.add_argument("--cancel", type=int, metavar="NUMBER", help="stop a bulk replay")
    add_gateway(parser)
    parser.add_argument("--provider", metavar="NAME", help="sign anew, as this provider would")
    add_secret_options(parser)
    parser.add_argument(
        "--seed", type=int, metavar="N", help="shuffle; the same number gives the same order"
    )
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="copies of each")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="how many to send at the same time"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay, and print what was found."""
    form = _form(arguments)
    if form == "one event":
        return replay_event(arguments, arguments.url)
    if form == "--search":
        return replay_matching(arguments)
    return cancel(arguments) if form == "--cancel" else _play(arguments)


def _form(arguments: argparse.Namespace) -> str:
    """Which of its four forms the call has.

    Raises:
        CommandError: None, or parts of several.
    """
    forms = []
    if arguments.search is not None:
        forms.append("--search")
    if arguments.cancel is not None:
        forms.append("--cancel")
    if arguments.url is not None:
        forms.append("one event" if _ID.fullmatch(arguments.url) else "a recording")
    if len(forms) != 1 or (forms[0] == "a recording") != (arguments.file is not None):
        raise CommandError(
            "what is to be replayed? An event of a gateway: oncekey replay msg_...; dead letters: "
            "--search SEARCH; a recording: oncekey replay URL FILE"
        )
    given = {name for name, value in vars(arguments).items() if value != _USUAL.get(name)}
    for form, names in _FORMS.items():
        if form != forms[0] and (wrong := sorted(given.intersection(names))):
            raise CommandError(f"--{wrong[0].replace('_', '-')} goes with {form}")
    return forms[0]


def _play(arguments: argparse.Namespace) -> int:
    """A recording."""
    from oncekey.testing import replay

    if not Path(arguments.file).is_file():
        raise PolicyError(f"{arguments.file} can't be read: there is no such file")
    report = replay(
        arguments.url,
        arguments.file,
        provider=make_provider(arguments) if arguments.provider else None,
        seed=arguments.seed,
        copies=arguments.copies,
        at_once=arguments.at_once,
    )
    out = Output(arguments)
    if out.as_json:
        statuses = [answer.status for answer in report.answers]
        out.json({"ok": report.ok, "problems": list(report.problems), "statuses": statuses})
    else:
        out.line(str(report))
        for problem in report.problems:
            out.line(f"- {problem}")
    return 0 if report.ok else 1
