"""oncekey: retries made safe. Delivered twice, sent twice, run twice: one recorded outcome.

``__all__`` is what most programs need. Other public names can be imported from here too, as can the
older ones: ``docs/reference/names.md`` has both, each with its home.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oncekey._version import __version__

if TYPE_CHECKING:  # what is not in __all__ is imported as itself, so that type checkers see it
    from oncekey._core.transact import Tx, current_transaction
    from oncekey.abc import AsyncStore, Store
    from oncekey.abc import IdempotencyBackend as IdempotencyBackend
    from oncekey.adcp import STANDARD_ERROR_CODES as STANDARD_ERROR_CODES
    from oncekey.adcp import capabilities_response as capabilities_response
    from oncekey.canonical import EXCLUDED_FIELDS as EXCLUDED_FIELDS
    from oncekey.canonical import canonical_json_sha256 as canonical_json_sha256
    from oncekey.canonical import canonicalize as canonicalize
    from oncekey.canonical import strip_excluded_fields as strip_excluded_fields
    from oncekey.errors import *  # noqa: F403
    from oncekey.errors import (
        IdempotencyConflictError,
        IdempotencyExpiredError,
        IdempotencyInFlightError,
        OncekeyError,
        PermanentError,
        StoreError,
    )
    from oncekey.guard import AsyncOnce, Once, current_claim
    from oncekey.keys import event_id as event_id
    from oncekey.keys import hmac_key as hmac_key
    from oncekey.keys import json_path as json_path
    from oncekey.keys import payload_hash as payload_hash
    from oncekey.keys import signature_bound as signature_bound
    from oncekey.keys import ulid as ulid
    from oncekey.models import CachedResponse as CachedResponse
    from oncekey.policy import Policy
    from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
    from oncekey.request import IdempotencyStore, ToolContext
    from oncekey.stores.memory import AsyncMemoryStore, MemoryStore
    from oncekey.stores.memory import MemoryBackend as MemoryBackend
    from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore
    from oncekey.stores.postgres import PgBackend as PgBackend
    from oncekey.stores.postgres import PgStore as PgStore
    from oncekey.stores.redis import AsyncRedisStore, RedisStore
    from oncekey.stores.redis import RedisBackend as RedisBackend
    from oncekey.stores.sqlite import AsyncSQLiteStore, SQLiteStore
    from oncekey.stores.sqlite import SQLiteBackend as SQLiteBackend
    from oncekey.stores.urls import aconnect, connect
    from oncekey.webhook import AsyncWebhookDedup, WebhookDedup
    from oncekey.webhook import SyncWebhookDedupStore as SyncWebhookDedupStore
    from oncekey.webhook import WebhookDedupClaim as WebhookDedupClaim
    from oncekey.webhook import WebhookDedupStore as WebhookDedupStore

__all__ = [
    "AsyncMemoryStore",
    "AsyncOnce",
    "AsyncPostgresStore",
    "AsyncRedisStore",
    "AsyncSQLiteStore",
    "AsyncStore",
    "AsyncWebhookDedup",
    "AsyncWebhookReceiver",
    "IdempotencyConflictError",
    "IdempotencyExpiredError",
    "IdempotencyInFlightError",
    "IdempotencyStore",
    "MemoryStore",
    "Once",
    "OncekeyError",
    "PermanentError",
    "Policy",
    "PostgresStore",
    "RedisStore",
    "SQLiteStore",
    "Store",
    "StoreError",
    "ToolContext",
    "Tx",
    "WebhookDedup",
    "WebhookReceiver",
    "__version__",
    "aconnect",
    "connect",
    "current_claim",
    "current_transaction",
]

# Where each name lives; errors are in oncekey.errors. Loaded when it is first used, so that
# importing oncekey stays cheap.
_HOMES = {
    "_core.transact": "Tx current_transaction",
    "abc": "AsyncStore IdempotencyBackend Store",
    "adcp": "STANDARD_ERROR_CODES capabilities_response",
    "canonical": "EXCLUDED_FIELDS canonical_json_sha256 canonicalize strip_excluded_fields",
    "guard": "AsyncOnce Once current_claim",
    "keys": "event_id hmac_key json_path payload_hash signature_bound ulid",
    "models": "CachedResponse",
    "policy": "Policy",
    "receiver": "AsyncWebhookReceiver WebhookReceiver",
    "request": "IdempotencyStore ToolContext",
    "stores.memory": "AsyncMemoryStore MemoryBackend MemoryStore",
    "stores.postgres": "AsyncPostgresStore PgBackend PgStore PostgresStore",
    "stores.redis": "AsyncRedisStore RedisBackend RedisStore",
    "stores.sqlite": "AsyncSQLiteStore SQLiteBackend SQLiteStore",
    "stores.urls": "aconnect connect",
    "webhook": "AsyncWebhookDedup SyncWebhookDedupStore WebhookDedup WebhookDedupClaim "
    "WebhookDedupStore",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = "errors" if name.endswith("Error") else _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'oncekey' has no attribute {name!r}")
    value = getattr(import_module(f"oncekey.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
