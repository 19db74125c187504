"""What events are delivered to: one file a kind of target."""

from __future__ import annotations

from oncekey.inbox.targets.base import Answer, Target

__all__ = ["Answer", "Target"]
