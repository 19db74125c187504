"""What events are delivered to: one file a kind of target."""

from __future__ import annotations

from oncekey.inbox.targets.base import Answer, Target
from oncekey.inbox.targets.callable import CallableTarget
from oncekey.inbox.targets.command import CommandTarget
from oncekey.inbox.targets.http import HttpTarget

__all__ = ["Answer", "CallableTarget", "CommandTarget", "HttpTarget", "Target"]
