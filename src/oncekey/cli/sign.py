"""``oncekey sign PROVIDER FILE...``: sign bodies as a provider would, and print the requests."""

from __future__ import annotations

import argparse
import base64
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncekey.cli._stores import from_environment
from oncekey.errors import PolicyError
from oncekey.signatures.delivery import Headers

if TYPE_CHECKING:
    from oncekey.signatures import Provider, SignedRequest

_SECRET_OPTIONS = {
    "secret": "--secret-env",
    "previous": "--secret-env",  # the one to sign with is enough
    "signing_key": "--signing-key-env",
}

__all__ = [
    "add_secret_options",
    "add_signing_options",
    "add_to",
    "bodies",
    "make_provider",
    "sign_body",
]


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "sign",
        help="sign a webhook body as a provider would",
        description="Prints the signed request: its headers, an empty line, and the body. Secrets "
        "are read from variables or files only, so that they stay out of the shell's history.",
    )
    parser.add_argument("provider", metavar="PROVIDER", help="such as stripe")
    add_signing_options(parser)
    parser.add_argument("--url", default="https://example.com/webhooks", help="where it would go")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each body")
    parser.set_defaults(run=run)


def add_signing_options(parser: argparse.ArgumentParser, *, files: bool = True) -> None:
    """What ``sign``, ``send`` and ``simulate`` have in common; ``files`` adds the bodies."""
    if files:
        parser.add_argument(
            "files",
            metavar="FILE",
            nargs="*",
            help="a body each; - is standard input. Without one, a sample is made",
        )
    parser.add_argument("--type", metavar="TYPE", help="of the sample, such as invoice.paid")
    add_secret_options(parser)
    parser.add_argument("--secret-file", metavar="FILE", help="a file that holds it, instead")
    parser.add_argument("--method", default="POST", help="the method, POST by default")
    parser.add_argument("--event-id", metavar="ID", help="for providers that put it in a header")
    parser.add_argument("--now", type=float, metavar="SECONDS", help="the time to sign for")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="a header to send along (may be given again)",
    )


def add_secret_options(parser: argparse.ArgumentParser) -> None:
    """What a provider needs to sign: its secret or key, and options of its own."""
    parser.add_argument(
        "--secret-env", metavar="NAME", help="the environment variable that holds the secret"
    )
    parser.add_argument(
        "--signing-key-env",
        metavar="NAME",
        help="the variable with the private key, for providers that sign with a key pair",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the provider, such as webhook_id=... (may be given again)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print each request."""
    maker = make_provider(arguments)
    for body in bodies(maker, arguments):
        request = sign_body(maker, arguments, arguments.url, body)
        if arguments.json:
            fields = request._replace(body=base64.b64encode(request.body))._asdict()
            fields["body_base64"] = fields.pop("body").decode("ascii")
            print(json.dumps(fields), flush=True)
            continue
        print(f"{request.method} {request.url}")
        for name, value in request.headers.items():
            print(f"{name}: {value}")
        print(flush=True)
        sys.stdout.buffer.write(request.body + b"\n")
        sys.stdout.buffer.flush()
    return 0


def make_provider(arguments: argparse.Namespace) -> Provider:
    """The provider that the arguments describe.

    Raises:
        PolicyError: A variable is not set, or the provider refuses what it got.
    """
    from oncekey.signatures import UnpinnedHostWarning, provider, providers

    options: dict[str, Any] = {}
    for one in arguments.option:
        name, equals, value = one.partition("=")
        if not equals:
            raise PolicyError("--option: write it as NAME=VALUE")
        if name in _SECRET_OPTIONS:
            raise PolicyError(
                f"--option {name}=: a secret in a command can be read by all of this machine. "
                f"Put it into an environment variable, and give that one's name: "
                f"{_SECRET_OPTIONS[name]} NAME"
            )
        options[name] = _typed(name, value)
    if secret := _secret(arguments):
        options["secret"] = secret
    if arguments.signing_key_env:
        options["signing_key"] = from_environment("--signing-key-env", arguments.signing_key_env)
    unsigned = facts.unsigned if (facts := providers().get(arguments.provider)) else {}
    if unsigned:
        options.setdefault("accept_unsigned", unsigned["what"])  # nothing is accepted here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnpinnedHostWarning)  # for those who verify
        return provider(arguments.provider, **options)


def _typed(name: str, value: str) -> Any:
    """An option's value as the provider wants it: a command line has nothing but text."""
    if name == "sha1":
        if value not in ("true", "false"):
            raise PolicyError("--option sha1=: write true or false")
        return value == "true"
    if name != "tolerance":
        return value
    try:
        return float(value)
    except ValueError:
        raise PolicyError("--option tolerance=: write a number of seconds") from None


def _secret(arguments: argparse.Namespace) -> str:
    file = getattr(arguments, "secret_file", None)  # some commands have the other only
    if not file:
        named = arguments.secret_env
        return from_environment("--secret-env", named) if named else ""
    if arguments.secret_env:
        raise PolicyError("give --secret-env or --secret-file, not both")
    try:
        found = Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise PolicyError("--secret-file takes a file, and the one given can't be read") from None
    if not found:
        raise PolicyError("--secret-file: the file is empty")
    return found


def sign_body(
    maker: Provider, arguments: argparse.Namespace, url: str, body: bytes
) -> SignedRequest:
    """Sign one body.

    Raises:
        PolicyError: A header is not written as one, or the provider can't sign this.
    """
    headers = {"Content-Type": "application/json"}
    for one in arguments.header:
        name, colon, value = one.partition(":")
        if not colon or not name.strip():
            raise PolicyError("--header: write it as 'NAME: VALUE'")
        headers = {key: kept for key, kept in headers.items() if key.lower() != name.lower()}
        headers[name.strip()] = value.strip()
    return maker.sign(
        arguments.method, url, headers, body, now=arguments.now, event_id=arguments.event_id
    )


def bodies(maker: Provider, arguments: argparse.Namespace) -> Iterator[bytes]:
    """The bytes of each file; without one, those of a sample.

    Raises:
        PolicyError: A file can't be read, or there is no sample of that type.
    """
    if not arguments.files:
        yield _sample(maker, arguments)
    elif arguments.type:
        raise PolicyError("--type is for a sample: leave out the files, or --type")
    for name in arguments.files:
        try:
            yield sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        except OSError as error:
            raise PolicyError(f"{name} can't be read: {error.strerror}") from None


def _sample(maker: Provider, arguments: argparse.Namespace) -> bytes:
    """A body such as the provider sends; what it says in headers is sent along."""
    from oncekey.signatures.event_fields import event_field
    from oncekey.testing import sample

    made = sample(maker, type=arguments.type, url="https://example.com/")
    told = event_field(maker.event_type).headers if maker.event_type else ()
    for name, value in Headers(made.headers).items():
        if name in told:
            arguments.header = [*arguments.header, f"{name}: {value}"]
    return made.body
