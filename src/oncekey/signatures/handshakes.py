"""A provider's own tests of an endpoint, which carry no event: how to know and answer them."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from oncekey.signatures.event_fields import value_at

__all__ = ["Ack", "answer_to", "greeting_to"]

# What is sent back is bounded, and nothing that a browser or a log could trip over.
_ECHO: Final = re.compile(r"[A-Za-z0-9._~:+/=-]{1,512}")
_MOST_FIELDS: Final = 16


class Ack(NamedTuple):
    """What to answer when a delivery was taken."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


def answer_to(
    payload: Any,
    rules: Sequence[Mapping[str, Any]],
    keyed_hash: Callable[[str], str] | None = None,
) -> Ack | None:
    """The answer to a body that is such a test by one of the rules; else ``None``.

    A rule has a ``path`` that ``equals`` something, and perhaps another that must be ``absent``.
    The answer has its ``status``, and its ``json``; or what stands at ``echo``, as it is or in the
    ``form`` of a JSON object, with its hash under the secret by the name that ``hmac`` says.
    """
    for rule in rules:
        found, wanted = value_at(payload, rule["path"]), rule["equals"]
        if found != wanted or type(found) is not type(wanted):
            continue
        if "absent" in rule and value_at(payload, rule["absent"]) is not None:
            continue
        status, told = rule.get("status", 200), rule.get("json")
        if "echo" in rule:
            echo = value_at(payload, rule["echo"])
            if not isinstance(echo, str) or not _ECHO.fullmatch(echo):
                continue
            if rule.get("form") != "json":
                return Ack(status, echo.encode())
            told = {rule["echo"].rpartition(".")[2]: echo}
            if "hmac" in rule and keyed_hash is not None:
                told[rule["hmac"]] = keyed_hash(echo)
        return Ack(status) if told is None else _as_json(status, told)
    return None


def greeting_to(url: str, rule: Mapping[str, Any], token: str) -> Ack | None:
    """The answer to a GET request that is such a test by the rule; else ``None``.

    The parameter ``echo`` is sent back if each of ``equals`` is as it says, and the parameter
    ``token``, where the rule has one, is the one that was agreed.
    """
    if not rule or ("token" in rule and not token):
        return None
    try:
        pairs = parse_qsl(urlsplit(url).query, max_num_fields=_MOST_FIELDS)
    except ValueError:
        return None
    given = dict(pairs)
    if len(given) != len(pairs):
        return None  # a name twice: two readers would see two requests
    if any(given.get(name) != wanted for name, wanted in rule.get("equals", {}).items()):
        return None
    if "token" in rule:
        said = given.get(rule["token"], "").encode("utf-8", "replace")
        if not hmac.compare_digest(said, token.encode()):
            return None
    echo = given.get(rule["echo"], "")
    return Ack(200, echo.encode()) if _ECHO.fullmatch(echo) else None


def _as_json(status: int, told: Mapping[str, Any]) -> Ack:
    return Ack(status, json.dumps(told).encode(), "application/json")
