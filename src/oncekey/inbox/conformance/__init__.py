"""What every inbox must do, as checks: run them on yours with ``conform``.

Each check gets an empty storage and may open several inboxes on it, as several nodes do.
"""

from __future__ import annotations

from oncekey.inbox.conformance import delivering, people
from oncekey.inbox.conformance.base import CHECKS, Nodes, conform

__all__ = ["CHECKS", "Nodes", "conform", "delivering", "people"]
