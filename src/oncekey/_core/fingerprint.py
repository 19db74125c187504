"""Arguments as a fingerprint. One way, so that more types are welcome than in an answer."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import hashlib
import pathlib
import uuid
from typing import Any

from oncekey._core.whole import is_secret, whole
from oncekey._jcs.fast import FAST, attempt
from oncekey.canonical import canonicalize
from oncekey.errors import CanonicalJSONError

__all__ = ["fingerprint", "form", "jsonable"]

_EXACT = 2**53 - 1


def fingerprint(payload: object) -> bytes:
    """SHA-256 of the payload's canonical JSON, as hex.

    Raises:
        CanonicalJSONError: Part of it has no JSON form.
    """
    return hashlib.sha256(form(payload)).hexdigest().encode()


def form(payload: object) -> bytes:
    """The payload's canonical JSON, of which the fingerprint is made.

    Raises:
        CanonicalJSONError: Part of it has no JSON form.
    """
    # What is proved to be plain JSON is its own form.
    text = attempt(payload) if FAST else None
    return canonicalize(jsonable(payload, "$")) if text is None else text


def jsonable(value: Any, path: str = "$") -> Any:
    """``value`` as JSON values. Types that JSON lacks are tagged, so that 1 and "1" stay apart."""
    kind = type(value)
    if kind is str or kind is bool or value is None or kind is float:
        return value
    if kind is int:
        return value if -_EXACT <= value <= _EXACT else {"$int": str(value)}
    if isinstance(value, dict):
        return {
            k if type(k) is str else _refuse(k, path): jsonable(v, f"{path}.{k}")
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [jsonable(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "model_dump") and not isinstance(value, type):
        dumped = whole(value, _sealed)
        return _refuse(value, path) if hasattr(dumped, "model_dump") else jsonable(dumped, path)
    if is_secret(value):
        return _sealed(value.get_secret_value())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: jsonable(getattr(value, f.name), f"{path}.{f.name}")
            for f in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return jsonable(value.value, path)
    if isinstance(value, (dt.datetime, dt.date, dt.time)):
        return {"$time": value.isoformat()}
    if isinstance(value, (uuid.UUID, decimal.Decimal, pathlib.PurePath, dt.timedelta)):
        return {"$" + kind.__name__.lower(): str(value)}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return jsonable(int(value) if isinstance(value, int) else float(value), path)
    return _refuse(value, path)


def _sealed(value: Any) -> dict[str, str]:
    """What stands for a secret: payloads that were seen lately are remembered, and it is not."""
    return {"$secret": hashlib.sha256(canonicalize(jsonable(value))).hexdigest()}


def _refuse(value: object, path: str) -> Any:
    raise CanonicalJSONError(
        f"a value of type {type(value).__name__} has no fingerprint: pass plain values, or leave "
        "the argument out of the comparison with ignore=",
        path,
    )
