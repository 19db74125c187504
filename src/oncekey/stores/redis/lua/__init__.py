"""Lua in its own files, one script a file.

``_clock.lua`` stands before each script. ``_record.lua`` follows, or stands where a script says
``-- record``: what comes before that line is the path of most calls, and costs the less for it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Script", "load_script"]


class Script(NamedTuple):
    """A script as Redis knows it: by the hash of its text."""

    name: str
    source: bytes
    sha: bytes


def load_script(name: str) -> Script:
    """The script of a file, with what all scripts share."""
    quick, marker, rest = _text(name).partition("-- record\n")
    if not marker:
        quick, rest = "", quick
    source = "".join((_text("_clock"), quick, _text("_record"), rest)).encode()
    # Redis names scripts by SHA-1; nothing here relies on it being hard to forge.
    return Script(name, source, hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())


def _text(name: str) -> str:
    return files("oncekey.stores.redis.lua").joinpath(f"{name}.lua").read_text("utf-8")
