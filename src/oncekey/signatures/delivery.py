"""A delivery as verifiers see it: method, URL, headers and the raw bytes of the body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Delivery", "Headers", "RawHeaders", "SignedRequest", "as_delivery", "put_header"]

RawHeaders = (
    Mapping[str, str] | Mapping[bytes, bytes] | Iterable[tuple[str, str] | tuple[bytes, bytes]]
)


class Headers:
    """Header fields by name in any letter case. A name may come more than once."""

    __slots__ = ("_pairs", "_repeated", "_single")

    def __init__(self, raw: RawHeaders = ()) -> None:
        given: Any = raw
        listed = list(given.items() if isinstance(raw, Mapping) else given)
        try:  # as servers have them: bytes, which are latin-1 on the wire
            pairs = [(name.decode("latin-1").lower(), at.decode("latin-1")) for name, at in listed]
        except AttributeError:
            pairs = [(_text(name).lower(), _text(value)) for name, value in listed]
        self._pairs = pairs
        self._single: dict[str, str] = dict(pairs)
        self._repeated: dict[str, list[str]] = {}
        if len(self._single) < len(pairs):
            for name, value in pairs:
                self._repeated.setdefault(name, []).append(value)
            for name, values in list(self._repeated.items()):
                del (self._single if len(values) > 1 else self._repeated)[name]

    def all(self, name: str) -> list[str]:
        """Every value of a field, in the order they came."""
        name = name.lower()
        value = self._single.get(name)
        return self._repeated.get(name, []) if value is None else [value]

    def one(self, name: str) -> str | None:
        """The value of a field that came exactly once, else ``None``."""
        return self._single.get(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.all(name))

    def items(self) -> Iterable[tuple[str, str]]:
        """Names in lower case, and values."""
        return list(self._pairs)


def _text(value: str | bytes) -> str:
    """Whatever is no text is shown as text, never an error."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


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


class SignedRequest(NamedTuple):
    """A request ready to send. ``provider.verify(*request)`` takes it as it is."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes


def put_header(fields: dict[str, str], name: str, value: str) -> None:
    """Set a header, in place of one of the same name in any letter case."""
    for there in [key for key in fields if key.lower() == name.lower()]:
        del fields[there]
    fields[name] = value
