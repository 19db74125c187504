"""Structured header fields (RFC 8941), as far as HTTP Message Signatures need them.

The grammar is taken strictly: a name that comes twice is refused where other parsers keep the
first or the last, as two readers of one message must not disagree about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, NoReturn, TypeVar

from oncekey.signatures.parsing import MAX_HEADER

__all__ = [
    "Component",
    "HeaderError",
    "Raw",
    "SignatureInput",
    "Value",
    "parse_bytes",
    "parse_signature_input",
]

MAX_LABELS: Final = 8
MAX_COMPONENTS: Final = 32
MAX_PARAMS: Final = 16

T = TypeVar("T")


class HeaderError(ValueError):
    """A header, or a covered part of the message, that can't be used. Never leaves a verifier."""


class Raw(str):
    """A token, a byte sequence or a decimal, as it was written."""

    __slots__ = ()


Value = str | int | bool | Raw

_NAME: Final = re.compile(r"[a-z*][a-z0-9_\-.*]{0,63}")
_STRING: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_ESCAPED: Final = re.compile(r'\\(["\\])')
_INTEGER: Final = re.compile(r"-?[0-9]{1,15}(?![0-9.])")
_OTHER: Final = re.compile(
    r":[A-Za-z0-9+/=_-]*:|-?[0-9]{1,12}\.[0-9]{1,3}|[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*"
)
_BOOLEAN: Final = re.compile(r"\?([01])")
_COMMA: Final = re.compile(r"[ \t]*,[ \t]*")
_SPACES: Final = re.compile(r" *")


class _Reader:
    """Reads one header from left to right. Every step is bounded and none goes back."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_HEADER:
            raise HeaderError("the header is too long")
        self.text = text.strip(" \t")
        self.at = 0

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def skip(self, char: str) -> bool:
        if self.text.startswith(char, self.at):
            self.at += 1
            return True
        return False

    def fail(self) -> NoReturn:
        raise HeaderError(f"the header can't be read from character {self.at + 1} on")

    def name(self) -> str:
        found = self.take(_NAME)
        return found[0] if found else self.fail()

    def value(self) -> Value:
        if found := self.take(_STRING):
            return _ESCAPED.sub(r"\1", found[1])
        if found := self.take(_INTEGER):
            return int(found[0])
        if found := self.take(_BOOLEAN):
            return found[1] == "1"
        if found := self.take(_OTHER):
            return Raw(found[0])
        self.fail()

    def params(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        while self.skip(";"):
            self.take(_SPACES)
            name = self.name()
            if name in found or len(found) >= MAX_PARAMS:
                self.fail()
            found[name] = self.value() if self.skip("=") else True
        return found

    def dictionary(self, member: Callable[[], T]) -> dict[str, T]:
        found: dict[str, T] = {}
        while True:
            name = self.name()
            if name in found or len(found) >= MAX_LABELS or not self.skip("="):
                self.fail()
            found[name] = member()
            if self.at == len(self.text):
                return found
            if self.take(_COMMA) is None:
                self.fail()

    def inner_list(self) -> SignatureInput:
        if not self.skip("("):
            self.fail()
        components: list[Component] = []
        self.take(_SPACES)
        while not self.skip(")"):
            found = self.take(_STRING)
            if found is None or len(components) >= MAX_COMPONENTS:
                self.fail()
            component = Component(_ESCAPED.sub(r"\1", found[1]), tuple(self.params().items()))
            if component in components or component.name != component.name.lower():
                self.fail()
            components.append(component)
            if not self.skip(" ") and not self.text.startswith(")", self.at):
                self.fail()
            self.take(_SPACES)
        return SignatureInput(tuple(components), self.params())

    def byte_sequence(self) -> str:
        found = self.value()
        if not isinstance(found, Raw) or not found.startswith(":"):
            self.fail()
        self.params()
        return found[1:-1]


def _written(params: Iterable[tuple[str, Value]]) -> str:
    return "".join(f";{name}" + ("" if v is True else f"={_text(v)}") for name, v in params)


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "?1" if value else "?0"
    if isinstance(value, (int, Raw)):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    if not _STRING.fullmatch(f'"{escaped}"'):
        raise HeaderError("only printable ASCII can stand in a header")
    return f'"{escaped}"'


class Component(NamedTuple):
    """A covered part of a message, such as ``@method`` or ``content-type``."""

    name: str
    params: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        """As it is written in ``Signature-Input`` and in the signature base."""
        return _text(self.name) + _written(self.params)


class SignatureInput(NamedTuple):
    """One label of ``Signature-Input``: what is covered, and the parameters."""

    components: tuple[Component, ...]
    params: dict[str, Value]

    def __str__(self) -> str:
        """The one canonical form, which is also what is signed."""
        return f"({' '.join(map(str, self.components))})" + _written(self.params.items())


def parse_signature_input(text: str) -> dict[str, SignatureInput]:
    """The labels of a ``Signature-Input`` header.

    Raises:
        HeaderError: It can't be read, or is out of bounds.
    """
    reader = _Reader(text)
    return reader.dictionary(reader.inner_list)


def parse_bytes(text: str) -> dict[str, str]:
    """The labels of a ``Signature`` header, or of ``Content-Digest``, with base64 not decoded yet.

    Raises:
        HeaderError: It can't be read, or is out of bounds.
    """
    reader = _Reader(text)
    return reader.dictionary(reader.byte_sequence)
