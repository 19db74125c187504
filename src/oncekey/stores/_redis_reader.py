"""Replies out of bytes. hiredis does it where it is installed; this stands in for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["ReplyError", "new_reader"]


class ReplyError(Exception):
    """An error that the server replied with. Its first word is the code."""


class _Reader:
    """As much of ``hiredis.Reader`` as is needed: RESP2, bytes in, values out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def gets(self) -> Any:
        """The next reply, or ``False`` if it is not all there yet."""
        try:
            value, end = self._value(0)
        except IndexError:
            return False
        del self._buffer[:end]
        return value

    def _value(self, start: int) -> tuple[Any, int]:
        buffer = self._buffer
        stop = buffer.find(b"\r\n", start)
        if stop < 0:
            raise IndexError
        kind, line, after = buffer[start], bytes(buffer[start + 1 : stop]), stop + 2
        if kind == 36:  # $
            length = int(line)
            if length < 0:
                return None, after
            if len(buffer) < after + length + 2:
                raise IndexError
            return bytes(buffer[after : after + length]), after + length + 2
        if kind == 42:  # *
            count = int(line)
            if count < 0:
                return None, after
            items = []
            for _ in range(count):
                item, after = self._value(after)
                items.append(item)
            return items, after
        if kind == 58:  # :
            return int(line), after
        if kind == 43:  # +
            return line, after
        if kind == 45:  # -
            return ReplyError(line.decode("utf-8", "replace")), after
        raise ValueError("that is not the protocol of Redis")


def new_reader() -> Any:
    """A reader for one connection."""
    try:
        hiredis: Any = import_module("hiredis")
    except ModuleNotFoundError:
        return _Reader()
    return hiredis.Reader(protocolError=ValueError, replyError=ReplyError)
