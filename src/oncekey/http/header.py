"""The value of an ``Idempotency-Key`` header: a structured-field string, or the bare text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from oncekey.errors import PolicyError
from oncekey.http.problems import Refusal

__all__ = ["MAX_KEY", "KeyReader", "is_plain_key", "key_format", "read_key"]

MAX_KEY: Final = 255

# Visible ASCII. No comma: a proxy joins two headers with one. No quote, and no backslash.
_BARE: Final = re.compile(r"[!#-+\--\[\]-~]{1,255}\Z").match
_QUOTED: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"\Z')
_ESCAPED: Final = re.compile(r"\\(.)")


is_plain_key: Final = re.compile(rb"[!#-+\--\[\]-~]{1,255}\Z").match
"""Whether a value is a key as it stands."""


_UUID: Final = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def key_format(wanted: str | re.Pattern[str] | None) -> re.Pattern[str] | None:
    """The pattern that keys must match as a whole; ``None``: any does.

    Raises:
        PolicyError: It is no format.
    """
    if wanted is None:
        return None
    if wanted == "uuid":
        return _UUID
    if isinstance(wanted, str) and wanted.isalnum():
        raise PolicyError(
            f"key_format={wanted!r} would take that one key: write 'uuid', or a regular expression "
            "such as r'[0-9A-Z]{26}'"
        )
    try:
        found = re.compile(wanted)
        found.match("")  # one of bytes can't look at text
    except (re.error, TypeError) as error:
        raise PolicyError(
            f"key_format must be 'uuid' or a regular expression for text, got {wanted!r}: {error}"
        ) from None
    return found


class KeyReader:
    """Reads keys that must have a format."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._wanted = (
            "a UUID, such as 8e03978e-40d5-43dd-bc93-6894a57f9324"
            if pattern is _UUID
            else f"of the format {pattern.pattern}"
        )

    def __call__(self, values: Sequence[bytes | str], header: str) -> str | None:
        """See ``read_key``."""
        key = read_key(values, header)
        if key is not None and not self._pattern.fullmatch(key):
            raise Refusal("key-invalid", f"{header} must be {self._wanted}; this key is not.")
        return key


def read_key(values: Sequence[bytes | str], header: str) -> str | None:
    """The key of a request; ``None`` if it has none.

    ``"8e03"`` with its quotes, as the IETF draft writes it, and ``8e03`` without are the same key.

    Raises:
        Refusal: There are two, or it is empty, too long, or holds what a key can't hold.
    """
    if not values:
        return None
    if len(values) > 1:
        raise Refusal("key-invalid", f"Send {header} once; this request has {len(values)}.")
    raw = values[0]
    text = raw.decode("latin-1") if isinstance(raw, bytes) else raw
    if _BARE(text):
        return text  # as nearly all are
    if len(text) > 2 * MAX_KEY + 64:  # no need to look at what can't be a key
        raise Refusal("key-invalid", f"{header} has more than {MAX_KEY} characters.")
    text = text.strip(" \t")
    if text.startswith('"'):
        found = _QUOTED.match(text)
        if found is None:
            raise Refusal(
                "key-invalid",
                f"{header} starts with a quote but is no quoted string: send the key as "
                '"8e03978e-40d5-43dd-bc93-6894a57f9324", printable ASCII with nothing after it.',
            )
        text = _ESCAPED.sub(r"\1", found[1])
    elif text and not _BARE(text[:MAX_KEY]):
        raise Refusal(
            "key-invalid",
            f"{header} holds a space, a comma, a quote, a control character or one that is not "
            "ASCII: send a UUID, or put the key in double quotes.",
        )
    if not text.strip():
        raise Refusal("key-invalid", f"{header} is empty: send a fresh UUID for each operation.")
    if len(text) > MAX_KEY:
        raise Refusal(
            "key-invalid",
            f"{header} has {len(text)} characters, at most {MAX_KEY} are taken: send a UUID.",
        )
    return text
