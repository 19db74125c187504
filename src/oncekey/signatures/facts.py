"""``Facts``: what the table knows of one provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["DAY", "Facts"]

DAY: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a provider: data, with its source and date. See ``providers.toml``."""

    name: str
    title: str
    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    secret: str = "the signing secret"  # noqa: S105 - what to pass, not a secret
    event_id: str | None = None
    event_type: str | None = None
    batch: str | None = None
    repeats: bool = False
    content_types: Sequence[str] = ()
    signed_id: Mapping[str, str] = field(default_factory=dict)
    unsigned: Mapping[str, str] = field(default_factory=dict)
    handshake: Sequence[Mapping[str, Any]] = ()
    greeting: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float | None = None
    max_age: float | None = None
    retry_seconds: int = 0
    retries: str = ""
    retry_schedule: Mapping[str, Any] = field(default_factory=dict)
    retry_status: int = 500
    retry_after_most: int | None = None
    redelivery_seconds: int = 0
    redelivery: str = ""
    timeout_seconds: float | None = None
    retention_seconds: int = 0
    ack: Mapping[str, Any] = field(default_factory=dict)
    factory: str = ""
    documentation: str = ""
    setup: Sequence[str] = ()
    source: str = ""
    checked: str = ""
    notes: str = ""

    @property
    def retention(self) -> int:
        """Seconds to remember an event: a day longer than anybody can have it sent again."""
        longest = max(self.retry_seconds, self.redelivery_seconds)
        return self.retention_seconds or longest + DAY
