"""Puts an event's id and type where its provider reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oncekey.keys import path_steps
from oncekey.signatures.event_fields import event_field, value_at

if TYPE_CHECKING:
    from oncekey.signatures import Provider

__all__ = ["id_goes_to_header", "id_is_in_body", "in_batch", "put_id", "put_type"]


def put_id(provider: Provider, headers: dict[str, str], payload: Any, id: str) -> None:
    """Put ``id`` where the provider reads it: in ``headers``, or in ``payload``."""
    event = _first(provider, payload)
    if not provider.event_id:
        if isinstance(event, dict):
            event["id"] = id  # no id is read, but another body is another event
        return
    where = event_field(provider.event_id)
    for number, part in enumerate(where.parts):
        if where.hashed:
            if number == len(where.parts) - 1:
                _put(event, part.paths[0], {"id": id})
        elif number == 0 and part.names:
            _set(headers, part.names[0], id)
        elif number == 0:
            _put(event, part.paths[0], id)
        elif not part.optional and part.paths and value_at(event, part.paths[0]) is None:
            _put(event, part.paths[0], "1")


def put_type(provider: Provider, headers: dict[str, str], event: dict[str, Any], type: str) -> None:
    part = event_field(provider.event_type or "").parts[0]
    if part.names:
        _set(headers, part.names[0], type)
    else:
        _put(event, part.paths[0], type)


def id_is_in_body(provider: Provider) -> bool:
    return not provider.event_id or event_field(provider.event_id).in_body


def id_goes_to_header(provider: Provider) -> bool:
    """Whether ``put_id`` leaves the body as it is, so that two events would have the same one."""
    where = event_field(provider.event_id) if provider.event_id else None
    return where is not None and not where.hashed and bool(where.parts[0].names)


def in_batch(provider: Provider, event: dict[str, Any], around: Mapping[str, Any]) -> Any:
    if not provider.batch:
        return event
    if provider.batch == "$":
        return [event]
    payload = dict(around)
    _put(payload, provider.batch, [event])
    return payload


def _first(provider: Provider, payload: Any) -> Any:
    events = value_at(payload, provider.batch) if provider.batch else [payload]
    return events[0] if isinstance(events, list) and events else payload


def _put(payload: Any, path: str, value: Any) -> None:
    """Put ``value`` at ``path``, and what is missing on the way."""
    steps = path_steps(path)
    for step, after in zip(steps, (*steps[1:], None), strict=True):
        if isinstance(step, int):
            while len(payload) <= step:
                payload.append(None)
            there = payload[step]
        else:
            there = payload.get(step)
        if after is None:
            payload[step] = value
        elif not isinstance(there, (dict, list)):
            payload[step] = [] if isinstance(after, int) else {}
        payload = payload[step]


def _set(headers: dict[str, str], name: str, value: str) -> None:
    for there in [key for key in headers if key.lower() == name.lower()]:
        del headers[there]
    headers[name] = value
