"""A delivery as verifiers see it: method, URL, headers and the raw bytes of the body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Delivery", "Headers", "RawHeaders", "as_delivery"]

RawHeaders = (
    Mapping[str, str] | Mapping[bytes, bytes] | Iterable[tuple[str, str] | tuple[bytes, bytes]]
)


class Headers:
    """Header fields by name in any letter case. A name may come more than once."""

    __slots__ = ("_fields",)

    def __init__(self, raw: RawHeaders = ()) -> None:
        fields: dict[str, list[str]] = {}
        given: Any = raw
        for name, value in given.items() if isinstance(raw, Mapping) else given:
            # Bytes are latin-1 on the wire; anything else is shown as text, never an error.
            name = name.decode("latin-1") if isinstance(name, bytes) else str(name)
            text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
            name = name.lower()
            if name in fields:
                fields[name].append(text)
            else:
                fields[name] = [text]
        self._fields = fields

    def all(self, name: str) -> list[str]:
        """Every value of a field, in the order they came."""
        return self._fields.get(name.lower(), [])

    def one(self, name: str) -> str | None:
        """The value of a field that came exactly once, else ``None``."""
        found = self._fields.get(name.lower(), ())
        return found[0] if len(found) == 1 else None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._fields

    def items(self) -> Iterable[tuple[str, str]]:
        """Names in lower case, and values."""
        return [(name, value) for name, values in self._fields.items() for value in values]


class Delivery(NamedTuple):
    """One request. ``body`` is what came over the wire, not what a framework made of it."""

    method: str
    url: str
    headers: Headers
    body: bytes


def as_delivery(method: str, url: str, headers: RawHeaders | Headers, body: bytes) -> Delivery:
    """Put the parts together.

    Raises:
        TypeError: The body is not bytes: a parsed or decoded body can't be verified.
    """
    if type(body) is not bytes:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"the body must be the raw bytes of the request, got {type(body).__name__}: a "
                "parsed body can't be verified"
            )
        body = bytes(body)
    fields = headers if isinstance(headers, Headers) else Headers(headers)
    return Delivery(method, url, fields, body)
