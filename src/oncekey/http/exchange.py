"""One guarded request, from its claim to its recorded answer: what ASGI and WSGI share.

The first answer is recorded before its last byte leaves. Until then the key is held: a framework
middleware inside, background work that raises and a client that hangs up don't free it.
"""

from __future__ import annotations

import logging
from typing import Any

from oncekey._core.call import Job, Result
from oncekey._core.flows import Claim
from oncekey.errors import OncekeyError
from oncekey.http.answer import Answer
from oncekey.http.rules import Rules

__all__ = ["Exchange"]

logger = logging.getLogger("oncekey")


class Exchange:
    """Collects what the application answers, and knows what to answer in its place.

    Attributes:
        parts: The body so far. ``None``: too much to keep, status and headers will be.
        began_to_answer: The client has seen the status.
        recorded: The outcome is settled, or as good as.
        instead: What to answer in place of what the application said.
    """

    job: Job  # once it is known what is to be done once
    claim: Claim | None = None
    parts: list[bytes] | None = None
    size = 0
    began_to_answer = False
    recorded = False
    instead: Answer | None = None

    def __init__(self, rules: Rules, source: Any) -> None:
        self.rules = rules
        self.source = source  # the framework's request
        self.parts = []

    def keep(self, part: bytes) -> None:
        """Take note of a part of the answer."""
        if self.parts is not None:
            self.parts.append(part)
            self.size += len(part)
            if self.size > self.rules.settings.max_answer_bytes:
                self.drop()

    def drop(self) -> None:
        """The body is too much to keep: its status and headers will be."""
        self.parts = None

    def settled(self, kept: Answer | None, result: Result) -> None:
        """The outcome is recorded: this one's, or another worker's."""
        if not (result.replayed and self.began_to_answer):
            self.instead = self.rules.recorded(self.job, kept, result, self.source, self.claim)

    def unsettled(self, error: OncekeyError) -> None:
        """The outcome could not be recorded."""
        if self.began_to_answer:
            logger.warning("an answer was sent that could not be recorded: %s", error)
        else:
            self.instead = self.rules.refusal(self.rules.failure(error))
