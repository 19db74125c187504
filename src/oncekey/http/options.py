"""The options of ``Settings`` for type checkers, where they are given singly."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Literal, TypedDict

from oncekey.http.answer import Answer
from oncekey.http.fingerprint import Fingerprint
from oncekey.http.problems import Profile
from oncekey.http.settings import Anonymous
from oncekey.policy import Duration, JournalPath, OnOutage

__all__ = ["SettingsOptions"]


class SettingsOptions(TypedDict, total=False):
    """What ``IdempotencyMiddleware`` and ``idempotent`` take beside a store."""

    header: str
    key_format: str | re.Pattern[str] | None
    methods: Collection[str]
    required: bool
    applies: Callable[[str, str], bool] | None
    scope: Callable[[Any], Any] | None
    anonymous: Anonymous
    secret: bytes | str | None
    per_host: bool
    namespace: str
    profile: Profile
    fingerprint: Fingerprint
    ttl: Duration
    lease: Duration
    wait: Duration
    max_waiters: int
    max_run: Duration | None
    body_timeout: Duration | None
    disconnect_grace: Duration | None
    retry_after: int
    max_body_bytes: int
    max_new_keys: tuple[int, int] | None
    limits: Literal["process", "shared"]
    max_caller_bytes: int | None
    max_total_bytes: int | None
    max_answer_bytes: int
    compress_above: int | None
    store_server_errors: bool | None
    store_status: Callable[[int], bool] | None
    stored_headers: Collection[str]
    honor_no_store: bool
    redact: Callable[[Answer], Answer] | None
    cache_entries: int
    cache_seconds: Duration
    replay_header: str | None
    expose_cors: bool
    docs_url: str
    challenge: str
    raise_on_persist_error: bool
    on_outage: OnOutage | None
    journal: JournalPath | None
