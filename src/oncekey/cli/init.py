"""``oncekey init PROVIDER``: a config for the gateway, with a word about each line."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oncekey.cli._output import CommandError, Output, add_json_option
from oncekey.errors import PolicyError

if TYPE_CHECKING:
    from oncekey.signatures import Facts

__all__ = ["add_to", "config_for"]

_CONFIG: Final = """\
# The gateway's config. Check it with: oncekey serve --config {file} --check
# Start it with: {variable}ONCEKEY_TOKEN=... oncekey serve --config {file}

store = "sqlite:///inbox.db"            # one machine; for several: postgresql://user@host/database
# host = "127.0.0.1"                    # 0.0.0.0 takes requests from other machines
# port = 8080
# public_url = "https://hooks.example.com"   # what {title} and browsers call, behind a proxy
# retention = 2592000                   # seconds that delivered events are kept

[sources.{name}]                        # taken at /hooks/{name}
provider = "{provider}"
{secret}targets = ["app"]
{options}
[targets.app]
url = "http://127.0.0.1:9000/events"    # gets each event by POST, until it answers 2xx
allow_private = true                    # loopback and private addresses are refused otherwise
# secret_env = "APP_SECRET"             # signs deliveries; echo whsec_$(openssl rand -base64 32)
# types = ["{type}"]                    # only these; * at the end stands for anything
# concurrency = 16
# tries = 12

# Who may sign in to the dashboard at /_oncekey. ONCEKEY_TOKEN is an admin's token.
# [users.you]
# password_hash = "..."                 # what `oncekey password` prints
# role = "admin"                        # or operate, or read
"""

_NOT_SECRET: Final = ("jwt", "sns", "paypal")  # schemes
_FETCHED: Final = ("plaid", "adcp")
"""Providers whose keys a function of the user's fetches, which no config can hold."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "init",
        help="write a config for the gateway",
        description="Writes a config for the gateway with one source, and a word about each line. "
        "An existing file is left alone.",
    )
    parser.add_argument("provider", metavar="PROVIDER", help="such as stripe")
    parser.add_argument(
        "--output", default="oncekey.toml", metavar="FILE", help="where; - prints it"
    )
    parser.add_argument("--name", metavar="NAME", help="the source's name, if not the provider's")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write it."""
    from oncekey.signatures.table import known_provider

    facts = known_provider(arguments.provider)
    name = arguments.name or arguments.provider
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", name):
        raise PolicyError("--name: use small letters, digits, - and _, at most 63")
    if facts.name in _FETCHED:
        raise CommandError(
            f"{facts.title} is not for a config: its keys are fetched by a function of yours. Take "
            f"its webhooks with a receiver in Python; see `oncekey providers {facts.name}`"
        )
    text = config_for(facts, name, arguments.output)
    output = Output(arguments)
    if arguments.output == "-":
        output.json({"config": text}) if output.as_json else output.line(text.rstrip("\n"))
        return 0
    try:
        with os.fdopen(
            os.open(arguments.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w"
        ) as file:
            file.write(text)
    except FileExistsError:
        raise CommandError(f"{arguments.output} is there already: give --output FILE") from None
    except OSError as error:
        raise PolicyError(f"{arguments.output} can't be written: {error.strerror}") from None
    variable = _variable(facts)
    start = f"start: oncekey serve --config {Path(arguments.output)}"
    if output.as_json:
        output.json({"file": arguments.output, "secret_env": variable or None})
    elif variable:
        output.line(f"wrote {arguments.output}. Put {facts.secret} into")
        output.line(f"{variable}, and {start}")
    else:
        output.line(f"wrote {arguments.output}. Fill in [sources.{name}.options],")
        output.line(f"and {start}")
    return 0


def config_for(facts: Facts, name: str, file: str) -> str:
    """The text of a config with one source."""
    variable, secret = _variable(facts), ""
    if variable:
        secret = f'secret_env = "{variable}"'
        secret = f"{secret:<40}# {facts.secret}; or secret_file\n"
    return _CONFIG.format(
        file="oncekey.toml" if file == "-" else file,
        variable=f"{variable}=... " if variable else "",
        title=facts.title,
        name=name,
        provider=facts.name,
        secret=secret,
        options=_options(facts, name),
        type="*",
    )


def _options(facts: Facts, name: str) -> str:
    """What some providers want besides a secret, or in its place."""
    lines = []
    if facts.unsigned:
        lines.append(f'accept_unsigned = "{facts.unsigned["what"]}"   # {facts.unsigned["why"]}')
    if facts.scheme == "paypal":
        lines.append('webhook_id = "..."                      # of this webhook, at PayPal')
    if facts.scheme == "sns":
        lines.append('topics = ["arn:aws:sns:..."]            # the ARNs of your topics')
    if facts.settings.get("audience"):
        lines.append('audience = "https://..."                # as the subscription says it')
    if facts.settings.get("email"):
        lines.append('email = "...@....iam.gserviceaccount.com"  # the account that signs')
    return "\n".join([f"[sources.{name}.options]", *lines, ""]) if lines else ""


def _variable(facts: Facts) -> str:
    """The variable for its secret; empty if it has none."""
    if facts.scheme in _NOT_SECRET:
        return ""
    return re.sub(r"[^A-Z0-9]", "_", facts.name.upper()) + "_SECRET"
