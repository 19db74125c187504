"""Advice in the words of the command line: errors of the library speak of Python's keywords."""

from __future__ import annotations

import argparse
import re
from typing import Final

__all__ = ["ELSEWHERE", "IN_URL", "OPTIONS", "in_flags"]

OPTIONS: Final = {
    "secret": "--secret-env",
    "previous": "--secret-env",
    "signing_key": "--signing-key-env",
    **{
        name: f"--option {name}="
        for name in (
            "accept_unsigned",
            "account",
            "allowed_hosts",
            "audience",
            "batch",
            "cert_url",
            "email",
            "event_id",
            "event_type",
            "key_id",
            "public_url",
            "sha1",
            "tolerance",
            "topics",
            "verify_token",
            "webhook_id",
        )
    },
}
"""Keywords of a provider, and what to give in their place."""

IN_URL: Final = ("check", "min_replicas", "prepare", "ssl_ca_certs", "tenant", "timeout")
"""Keywords of a store that are part of its URL."""

ELSEWHERE: Final = {
    "allow_plain": "a command opens no encrypted store",
    "driver": "a command takes URLs only",
    "fetch": "of the receiver that the signature is for, which is written in Python",
    "is_async": "a command fetches no keys",
    "jwks": "a command signs: see the phrases",
    "key": "part of a connection string, or of a receiver written in Python",
    "keys": "a command signs: see the phrases",
    "nonces": "a command verifies nothing",
    "on": "a command opens no transaction",
    "statement_cache_size": "of a pool, which is made in Python",
    "t": "part of a signature header",
    "v1": "the same",
    "target_session_attrs": "said with the URL already",
    "trust": "a command verifies no certificate",
    "url": "of a delivery made in Python",
}
"""Keywords that no command could take, and why they may stand in an error."""

_PHRASES: Final = (
    (
        re.compile(r"\bsecret= is empty: pass (.*?)\. An environment .*"),
        r"the secret is missing: put \1 into a variable, and give its name: --secret-env NAME",
    ),
    (re.compile(r"\bdon't pass event_id="), "leave --event-id out"),
    (
        re.compile(r"\bpass keys=(?: or jwks=)?[^;]*(?:; there is no secret)?"),
        "a private key of yours signs: give --signing-key-env NAME and --option key_id=ID",
    ),
    (re.compile(r"\bleave secret= and previous= out"), "leave --secret-env out"),
    (re.compile(r"\band no secret="), "and no --secret-env"),
    (re.compile(r", or call create_schema\(\) on the store"), ""),
    (re.compile(r"\bsample\(your_provider, url='/hooks'\)"), "--provider stripe"),
)
_KEYWORD: Final = re.compile(r"(?<!--option )(?<![\w?&/.=-])([a-z_0-9]+)=('[^']*'|\"[^\"]*\"|\w+)?")


def in_flags(text: str, arguments: argparse.Namespace) -> str:
    """The text of an error, with the flags of a command for the keywords in it."""
    for pattern, words in _PHRASES if hasattr(arguments, "option") else _PHRASES[-2:]:
        text = pattern.sub(words, text)

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], (found[2] or "").strip("'\"")
        if name in OPTIONS and hasattr(arguments, "option"):
            option = OPTIONS[name]
            return f"{option}{value or 'VALUE'}" if option.endswith("=") else f"{option} NAME"
        if name in IN_URL and hasattr(arguments, "url"):
            shown = value.lower() if value in ("True", "False") else value or "VALUE"
            return f"?{name}={shown} in the URL"
        return found[0]

    return _KEYWORD.sub(flag, text)
