"""The ``Idempotency-Key`` header of HTTP: what every adapter for a web framework shares."""

from __future__ import annotations

from oncekey.http.answer import Answer
from oncekey.http.callers import by_client_certificate, by_header
from oncekey.http.settings import Settings

__all__ = ["Answer", "Settings", "by_client_certificate", "by_header"]
