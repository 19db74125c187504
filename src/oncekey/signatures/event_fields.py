"""Where a delivery carries its event id or type, written as a short text.

==================================  =============================================================
``id``, ``data.items[0].id``        in the JSON body, as in ``oncekey.keys.json_path``
``header:X-GitHub-Delivery``        in a header
``header:X-New-Id|X-Old-Id``        in the first of these headers that is there
``task_type|notification_type``     at the first of these paths where something is
``id+type``                         both, joined with a colon (a colon inside is escaped)
``id+type?``                        the type too, where there is one
``sha256:event.type+event.data``    SHA-256 of the canonical JSON of these values
==================================  =============================================================
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from oncekey.canonical import canonicalize
from oncekey.errors import CanonicalJSONError, InvalidKeyError, PolicyError
from oncekey.keys import MAX_KEY_LENGTH, NOTHING, as_key, at_path, path_steps
from oncekey.signatures.delivery import Headers
from oncekey.signatures.parsing import one_header

__all__ = ["EventField", "event_field", "value_at"]

_HASHED: Final = "sha256:"
_HEADER: Final = "header:"


@dataclass(frozen=True, slots=True)
class _Part:
    """One value: ``names`` of headers, or else ``paths`` in the body."""

    names: tuple[str, ...]
    paths: tuple[str, ...]
    optional: bool

    def read(self, headers: Headers, payload: Any) -> Any:
        """What stands there, or ``None``."""
        if not self.names:
            for path in self.paths:
                value = at_path(payload, path_steps(path))
                if value is not None and value is not NOTHING:
                    return value
            return None
        if not any(name in headers for name in self.names):
            return None
        # White space around a value is none of it: nobody signs it.
        found = one_header(headers, *self.names).strip(" \t")
        # An id that is not plain text is none: two servers would decode it to two ids.
        return found if found.isascii() and found.isprintable() and found else None


@dataclass(frozen=True)
class EventField:
    """Where one field of an event is. ``text`` is how it was written."""

    text: str
    parts: tuple[_Part, ...]
    hashed: bool

    @functools.cached_property
    def in_body(self) -> bool:
        """Whether the body must be parsed to read it."""
        return any(not part.names for part in self.parts)

    @property
    def headers(self) -> tuple[str, ...]:
        """The headers it is read from, in lower case."""
        return tuple(name.lower() for part in self.parts for name in part.names)

    def read(self, headers: Headers, payload: Any) -> str | None:
        """What stands there, as text of 1 to 255 characters, or ``None``.

        Args:
            headers: The delivery's headers.
            payload: The parsed body; anything, if no part is in the body.

        Raises:
            Rejection: A header came twice, or is too long.
        """
        try:
            if self.steps is None:
                return self._joined([part.read(headers, payload) for part in self.parts])
            value = at_path(payload, self.steps)
            return None if value is None or value is NOTHING else as_key(value, self.text)
        except (CanonicalJSONError, InvalidKeyError):
            return None

    @functools.cached_property
    def steps(self) -> tuple[str | int, ...] | None:
        """The way to the one value in the body that it is, as most are; else ``None``."""
        part = self.parts[0]
        if self.hashed or len(self.parts) > 1 or len(part.paths) != 1:
            return None
        return path_steps(part.paths[0])

    def _joined(self, values: list[Any]) -> str | None:
        if any(
            value is None and not part.optional
            for part, value in zip(self.parts, values, strict=True)
        ):
            return None
        if self.hashed:
            return hashlib.sha256(canonicalize(values)).hexdigest()
        if len(values) == 1:
            return as_key(values[0], self.text)
        texts = ["" if value is None else _text(value, self.text) for value in values]
        joined = ":".join(text.replace("%", "%25").replace(":", "%3A") for text in texts)
        joined = joined.rstrip(":")
        return joined if len(joined) <= MAX_KEY_LENGTH else None


def _text(value: Any, path: str) -> str:
    # Adyen's "success" is true or "true"; both mean the same event.
    if isinstance(value, bool):
        return "true" if value else "false"
    return as_key(value, path)


def value_at(payload: Any, path: str) -> Any:
    """What stands at ``path`` in a parsed body, or ``None``. ``$`` is the body itself."""
    found = payload if path == "$" else at_path(payload, path_steps(path))
    return None if found is NOTHING else found


@lru_cache(maxsize=256)
def event_field(text: str) -> EventField:
    """Parse what is written so.

    Raises:
        PolicyError: If it is not one.
    """
    rest = text.removeprefix(_HASHED)
    parts: list[_Part] = []
    for one in rest.split("+"):
        optional = one.endswith("?")
        one = one.removesuffix("?")
        in_header = one.startswith(_HEADER)
        choices = tuple(one.removeprefix(_HEADER).split("|"))
        if not all(choices):
            raise PolicyError(
                f"{text!r} is no place for an id; write it like data.id, or header:X-Event-Id"
            )
        for path in () if in_header else choices:
            path_steps(path)
        parts.append(_Part(choices if in_header else (), () if in_header else choices, optional))
    if all(part.optional for part in parts):
        raise PolicyError(f"{text!r} is all optional; at least one part must be there")
    return EventField(text, tuple(parts), rest != text)
