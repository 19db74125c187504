"""Which operation of AdCP a request asks for: the one that its signature may be required for.

The same body must mean the same to whoever checks the signature and to whoever carries it out, so
one that could be read in two ways is refused here, signed or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

from oncekey.adcp.signing_profiles import REQUESTS
from oncekey.canonical import parse_json
from oncekey.errors import CanonicalJSONError

__all__ = ["MUTATING", "UNREADABLE", "Operation", "operation_of"]

_MESSAGES: Final = ("SendMessage", "SendStreamingMessage", "message/send", "message/stream")
_REST_MESSAGES: Final = ("message:send", "message:stream")
_RPC: Final = frozenset({"jsonrpc", "method", "message"})
UNREADABLE: Final = object()
"""The arguments of a body that parsers may read differently."""
# As the manifest of AdCP 3.2 has them, with creative_approval of 3.1. Those whose key is optional
# there, such as get_products, are left out.
# fmt: off
MUTATING: Final = frozenset((
    "accept_proposal", "acquire_rights", "activate_signal", "build_creative", "buy_products",
    "calibrate_content", "control_media_buy", "create_collection_list",
    "create_content_standards", "create_media_buy", "create_property_list", "creative_approval",
    "decline_proposals", "delete_collection_list", "delete_property_list", "log_event",
    "provide_performance_feedback", "refine_proposals", "report_plan_adjustment",
    "report_plan_outcome", "report_usage", "request_proposals", "si_initiate_session",
    "si_send_message", "sync_accounts", "sync_agent_notification_configs", "sync_audiences",
    "sync_catalogs", "sync_creatives", "sync_event_sources", "sync_governance", "sync_plans",
    "sync_principal", "sync_reporting_receipts", "sync_reporting_status",
    "update_collection_list", "update_content_standards", "update_media_buy",
    "update_property_list", "update_rights",
))
# fmt: on
"""The operations that change something, whose requests must carry an ``idempotency_key``."""
_CONTENTS: Final = ("text", "data", "file", "url", "raw")


class Operation(NamedTuple):
    """What a request asks for.

    Attributes:
        name: The operation of AdCP, such as ``create_media_buy``; ``None`` where there is none.
        method: The JSON-RPC method, such as ``tasks/cancel``, if it is JSON-RPC.
        arguments: What the operation is given.
    """

    name: str | None
    method: str | None = None
    arguments: Any = None


def operation_of(url: str, body: bytes) -> Operation:
    """The operation of a request by MCP, A2A or a path that ends with its name.

    Raises:
        Rejection: ``request_body_malformed``: the body could be read in two ways, or as none.
    """
    last = url.partition("?")[0].partition("#")[0].rpartition("/")[2]
    payload = _parsed(body)
    if last in _REST_MESSAGES:
        return _message(_object(payload), None)
    if isinstance(payload, list):
        REQUESTS.reject("body_malformed")  # a batch: several operations, one signature
    if not isinstance(payload, dict) or not {"jsonrpc", "method"} & _folded(payload):
        return Operation(last or None, None, payload)
    call = _object(payload)
    method, params = call.get("method"), call.get("params")
    if not isinstance(method, str):
        REQUESTS.reject("body_malformed")
    if method in _MESSAGES:
        return _message(_object(params), method)
    if method != "tools/call":
        return Operation(None, method, params)
    tool = _object(params)
    if not isinstance(tool.get("name"), str):
        REQUESTS.reject("body_malformed")
    return Operation(tool["name"], method, tool.get("arguments"))


def _parsed(body: bytes) -> Any:
    """The body; ``UNREADABLE`` if parsers may differ about it, and refused if it is JSON-RPC.

    A name that is there twice, or text that is not UTF-8, would else hide from these checks what
    the app reads.
    """
    if not body.strip(b" \t\r\n"):
        return None
    try:
        return parse_json(body)
    except CanonicalJSONError:
        try:
            found = json.loads(body)
        except RecursionError:
            return UNREADABLE
        except ValueError:
            return None  # no JSON at all: the checks of the signature refuse it, if it has one
        if isinstance(found, list) or (isinstance(found, dict) and _folded(found) & _RPC):
            REQUESTS.reject("body_malformed")
        return UNREADABLE if isinstance(found, dict) else None


def _folded(found: Mapping[str, Any]) -> set[str]:
    """The names as a parser has them that ignores letter case."""
    return {name.casefold() for name in found}


def _object(value: Any) -> dict[str, Any]:
    """A JSON object whose names differ by more than their letter case: some parsers ignore that."""
    if not isinstance(value, dict):
        REQUESTS.reject("body_malformed")
    found = cast("dict[str, Any]", value)
    if len({name.casefold() for name in found}) != len(found):
        REQUESTS.reject("body_malformed")
    return found


def _message(params: dict[str, Any], method: str | None) -> Operation:
    """The one invocation in a message of A2A: the skill of its only part with data."""
    parts = _object(params.get("message")).get("parts")
    if not isinstance(parts, list):
        REQUESTS.reject("body_malformed")
    calls: list[Any] = []
    for one in parts:
        part = _object(one)
        held = [name for name in _CONTENTS if name in part]
        older = method is not None and "/" in method
        if len(held) != 1 or (older and part.get("kind") != held[0]):
            REQUESTS.reject("body_malformed")
        if held == ["data"]:
            calls.append(part["data"])
        elif held != ["text"]:
            REQUESTS.reject("body_malformed")
    if len(calls) != 1:
        REQUESTS.reject("body_malformed")
    call = _object(calls[0])
    skill = call.get("skill")
    if not isinstance(skill, str) or not skill:
        REQUESTS.reject("body_malformed")
    return Operation(skill, method, call.get("input", call.get("parameters")))
