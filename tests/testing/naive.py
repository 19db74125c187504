"""Receivers as they are often written, each with one fault that the kit must find."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import Any

from oncekey.signatures import Provider
from oncekey.testing import sample_provider

STRIPE = sample_provider("stripe")


class Naive:
    """Verifies, and then does what ``take`` says. ``done`` is what it remembers."""

    def __init__(self, provider: Provider = STRIPE) -> None:
        self.provider_ = provider  # not ``provider``: it is a function, not a receiver of ours
        self.done: set[str] = set()
        self.charged: list[str] = []
        self.between: Callable[[], Any] = lambda: None  # after the look-up

    def __call__(self, method: str, url: str, headers: Any, body: bytes) -> int:
        verdict = self.provider_.verify(method, url, headers, body)
        return self.take(verdict.event_id or "") if verdict.ok else 401

    def take(self, name: str) -> int:
        raise NotImplementedError

    def charge(self, name: str) -> None:
        self.charged.append(name)

    def mark(self, name: str) -> None:
        self.done.add(name)


class Forgetful(Naive):
    """Remembers nothing."""

    def take(self, name: str) -> int:
        self.charge(name)
        return 200


class CheckThenMark(Naive):
    """Looks, does, marks: three steps that others can come between."""

    def take(self, name: str) -> int:
        known = name in self.done
        self.between()
        if not known:
            self.charge(name)
            self.mark(name)
        return 200


class MarkFirst(Naive):
    """Marks before the effect: atomic, but a crash between them loses the event."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    copy_status = 200

    def take(self, name: str) -> int:
        with self._lock:
            known = name in self.done
            self.mark(name)
        if known:
            return self.copy_status
        self.charge(name)
        return 200


class Conflict(MarkFirst):
    """The same with 409 for a duplicate, as if it were an error."""

    copy_status = 409


class Locked(Naive):
    """A lock without an end: whoever dies with it keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: set[str] = set()

    def take(self, name: str) -> int:
        if name in self.done:
            return 200
        if name in self.locked:
            return 503
        self.locked.add(name)
        self.charge(name)
        self.mark(name)
        return 200


class Unique(Naive):
    """A unique constraint whose error nobody catches."""

    def __init__(self) -> None:
        super().__init__()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE TABLE done (name TEXT PRIMARY KEY)")
        self._lock = threading.Lock()

    def take(self, name: str) -> int:
        with self._lock:
            self._database.execute("INSERT INTO done VALUES (?)", (name,))
        self.charge(name)
        return 200

    def close(self) -> None:
        self._database.close()


class AckOnly(Naive):
    """Acknowledges, and never comes to the effect."""

    def take(self, name: str) -> int:
        return 200


class Refuses(Naive):
    """Answers with one status, whatever comes."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    def take(self, name: str) -> int:
        return self.status
