"""``oncekey.models.CachedResponse``, apart: dataclasses take longer to import than all the models.

Whoever calls ``dataclasses.asdict`` on one, as backends do, must be able to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CachedResponse"]


@dataclass(frozen=True)
class CachedResponse:
    """A stored answer as ``get`` and ``put`` of a backend see it.

    Attributes:
        payload_hash: The fingerprint of the request that was answered.
        response: The answer.
        expires_at_epoch: When it stops being replayed, in seconds since 1970.
    """

    payload_hash: str
    response: dict[str, Any]
    expires_at_epoch: float


CachedResponse.__module__ = "oncekey.models"  # where everybody finds it
