"""oncekey: retries made safe. Delivered twice, sent twice, run twice: one recorded outcome."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oncekey._version import __version__

if TYPE_CHECKING:
    from oncekey._core.transact import Tx, current_transaction
    from oncekey.abc import AsyncStore, IdempotencyBackend, Store
    from oncekey.adcp import STANDARD_ERROR_CODES, capabilities_response
    from oncekey.canonical import (
        EXCLUDED_FIELDS,
        canonical_json_sha256,
        canonicalize,
        strip_excluded_fields,
    )
    from oncekey.errors import (
        AnswerOmittedError,
        BackendMismatchError,
        CanonicalJSONError,
        ClaimLostError,
        IdempotencyConflictError,
        IdempotencyError,
        IdempotencyExpiredError,
        IdempotencyInFlightError,
        IdempotencyRateLimitedError,
        IdempotencyRecursionError,
        IdempotencyScopeError,
        InvalidKeyError,
        InvalidRequestError,
        OncekeyError,
        PermanentError,
        PolicyError,
        StoreClosedError,
        StoreConfigError,
        StoreCorruptError,
        StoreError,
        StoreFullError,
        StoreReadOnlyError,
        StoreTimeoutError,
        StoreUnavailableError,
        TransactionRefusedError,
        UnsupportedAnswerError,
        WebhookDedupOwnershipError,
    )
    from oncekey.guard import AsyncOnce, Once, current_claim
    from oncekey.keys import event_id, hmac_key, json_path, payload_hash, signature_bound, ulid
    from oncekey.models import CachedResponse
    from oncekey.policy import Policy
    from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
    from oncekey.request import IdempotencyStore, ToolContext
    from oncekey.stores.memory import MemoryBackend, MemoryStore
    from oncekey.stores.postgres import AsyncPostgresStore, PgBackend, PgStore, PostgresStore
    from oncekey.stores.redis import AsyncRedisStore, RedisBackend, RedisStore
    from oncekey.stores.sqlite import SQLiteBackend, SQLiteStore
    from oncekey.stores.urls import aconnect, connect
    from oncekey.webhook import (
        AsyncWebhookDedup,
        SyncWebhookDedupStore,
        WebhookDedup,
        WebhookDedupClaim,
        WebhookDedupStore,
    )

__all__ = [
    "EXCLUDED_FIELDS",
    "STANDARD_ERROR_CODES",
    "AnswerOmittedError",
    "AsyncOnce",
    "AsyncPostgresStore",
    "AsyncRedisStore",
    "AsyncStore",
    "AsyncWebhookDedup",
    "AsyncWebhookReceiver",
    "BackendMismatchError",
    "CachedResponse",
    "CanonicalJSONError",
    "ClaimLostError",
    "IdempotencyBackend",
    "IdempotencyConflictError",
    "IdempotencyError",
    "IdempotencyExpiredError",
    "IdempotencyInFlightError",
    "IdempotencyRateLimitedError",
    "IdempotencyRecursionError",
    "IdempotencyScopeError",
    "IdempotencyStore",
    "InvalidKeyError",
    "InvalidRequestError",
    "MemoryBackend",
    "MemoryStore",
    "Once",
    "OncekeyError",
    "PermanentError",
    "PgBackend",
    "PgStore",
    "Policy",
    "PolicyError",
    "PostgresStore",
    "RedisBackend",
    "RedisStore",
    "SQLiteBackend",
    "SQLiteStore",
    "Store",
    "StoreClosedError",
    "StoreConfigError",
    "StoreCorruptError",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "SyncWebhookDedupStore",
    "ToolContext",
    "TransactionRefusedError",
    "Tx",
    "UnsupportedAnswerError",
    "WebhookDedup",
    "WebhookDedupClaim",
    "WebhookDedupOwnershipError",
    "WebhookDedupStore",
    "WebhookReceiver",
    "__version__",
    "aconnect",
    "canonical_json_sha256",
    "canonicalize",
    "capabilities_response",
    "connect",
    "current_claim",
    "current_transaction",
    "event_id",
    "hmac_key",
    "json_path",
    "payload_hash",
    "signature_bound",
    "strip_excluded_fields",
    "ulid",
]

# Where each public name lives. Loaded when it is first used: importing oncekey stays cheap.
_HOMES = {
    "oncekey.abc": ("AsyncStore", "IdempotencyBackend", "Store"),
    "oncekey.adcp": ("STANDARD_ERROR_CODES", "capabilities_response"),
    "oncekey.canonical": (
        "EXCLUDED_FIELDS",
        "canonical_json_sha256",
        "canonicalize",
        "strip_excluded_fields",
    ),
    "oncekey.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "oncekey.guard": ("AsyncOnce", "Once", "current_claim"),
    "oncekey.keys": (
        "event_id",
        "hmac_key",
        "json_path",
        "payload_hash",
        "signature_bound",
        "ulid",
    ),
    "oncekey.models": ("CachedResponse",),
    "oncekey.policy": ("Policy",),
    "oncekey.receiver": ("AsyncWebhookReceiver", "WebhookReceiver"),
    "oncekey.request": ("IdempotencyStore", "ToolContext"),
    "oncekey._core.transact": ("Tx", "current_transaction"),
    "oncekey.stores.postgres": ("AsyncPostgresStore", "PgBackend", "PgStore", "PostgresStore"),
    "oncekey.stores.redis": ("AsyncRedisStore", "RedisBackend", "RedisStore"),
    "oncekey.stores.memory": ("MemoryBackend", "MemoryStore"),
    "oncekey.stores.sqlite": ("SQLiteBackend", "SQLiteStore"),
    "oncekey.stores.urls": ("aconnect", "connect"),
    "oncekey.webhook": (
        "AsyncWebhookDedup",
        "SyncWebhookDedupStore",
        "WebhookDedup",
        "WebhookDedupClaim",
        "WebhookDedupStore",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'oncekey' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
