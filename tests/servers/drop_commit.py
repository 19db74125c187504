"""A proxy before PostgreSQL that loses a COMMIT, or the reply to one."""

from __future__ import annotations

from tests.servers.wire import Carrier, Hangup, Line

__all__ = ["CommitDropper"]


class CommitDropper(Carrier):
    """Passes everything on, but hangs up at the next COMMIT when it is told to."""

    def __init__(self, url: str) -> None:
        self.dropped = 0
        self._drop = ""
        super().__init__(url)

    def drop_next(self, what: str) -> None:
        """Lose the next COMMIT: the ``request``, so that it does not happen, or the ``reply``."""

        def arm() -> None:
            self._drop = what

        self.call(arm)

    def _strikes(self, kind: bytes, data: bytes) -> str:
        text = data[5:].lstrip(b"\0").upper()  # a Query, or a Parse of a nameless statement
        if not self._drop or kind not in (b"Q", b"P") or not text.startswith(b"COMMIT"):
            return ""
        drop, self._drop = self._drop, ""
        self.dropped += 1
        return drop

    def asked(self, line: Line, kind: bytes, data: bytes) -> None:
        """Lose the request, or what comes of it."""
        drop = self._strikes(kind, data)
        if drop == "request":
            raise Hangup
        line.doomed = line.doomed or bool(drop)
