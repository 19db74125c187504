"""A provider's own tests of an endpoint, which carry no event: how to know and answer them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from oncekey.signatures.event_fields import value_at

__all__ = ["Ack", "answer_to"]

# What is sent back is bounded, and nothing that a browser or a log could trip over.
_ECHO: Final = re.compile(r"[A-Za-z0-9._~:+/=-]{1,512}")


class Ack(NamedTuple):
    """What to answer when a delivery was taken."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


def answer_to(payload: Any, rules: Sequence[Mapping[str, Any]]) -> Ack | None:
    """The answer to a body that is such a test by one of the rules; else ``None``.

    A rule has a ``path`` that ``equals`` something, and perhaps another that must be ``absent``.
    The answer has its ``status``, and its ``json``; or what stands at ``echo``, as it is or in the
    ``form`` of a JSON object.
    """
    for rule in rules:
        found, wanted = value_at(payload, rule["path"]), rule["equals"]
        if type(found) is not type(wanted) or found != wanted:
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
            told = {rule["echo"]: echo}
        return Ack(status) if told is None else _as_json(status, told)
    return None


def _as_json(status: int, told: Mapping[str, Any]) -> Ack:
    return Ack(status, json.dumps(told).encode(), "application/json")
