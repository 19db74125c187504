"""The key that a command is about: its name with its scope, or its digest."""

from __future__ import annotations

import argparse
import json

from oncekey._core.fingerprint import fingerprint
from oncekey.errors import PolicyError
from oncekey.models import Key, Scope, check_text

__all__ = ["add_key", "key_of"]


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add ``KEY`` and what says where it belongs."""
    parser.add_argument("key", metavar="KEY", help="the key as callers gave it; or its digest")
    parser.add_argument(
        "--scope",
        metavar="LABEL",
        help="the key's scope as listings show it, such as once:orders",
    )
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="PART",
        help="one part of the scope (may be given again), where a part has a colon in it",
    )
    parser.add_argument(
        "--arguments",
        action="store_true",
        help="""KEY is a JSON object of the arguments that key=[...] names: '{"year": 2026}'""",
    )
    parser.add_argument(
        "--digest", action="store_true", help="KEY is a digest, 64 hex digits as listings show it"
    )


def key_of(arguments: argparse.Namespace) -> Key | bytes:
    """The key, or its digest.

    Raises:
        PolicyError: There is no scope, or that is no digest.
        InvalidKeyError: That can't be a key.
    """
    if arguments.digest:
        try:
            digest = bytes.fromhex(arguments.key)
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise PolicyError("a digest is 64 hex digits: `oncekey stuck` and --json show them")
        return digest
    parts = arguments.part or (arguments.scope or "").split(":")
    if not parts[0] or (arguments.part and arguments.scope):
        raise PolicyError(
            "whose key is it? Give --scope LABEL, such as once:orders for Once(scope='orders'), or "
            "each --part of it, or --digest with the digest instead of the key"
        )
    name = _of_arguments(arguments.key) if arguments.arguments else arguments.key
    return Key(Scope(*parts), check_text(name, "KEY"))


def _of_arguments(text: str) -> str:
    """The name that ``key=[...]`` makes of arguments."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PolicyError("""--arguments: write KEY as a JSON object, such as '{"year": 2026}'""")
    return fingerprint(value).decode()
