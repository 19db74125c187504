"""Names that live elsewhere, or have a newer name: type checkers find them in oncekey too."""

from __future__ import annotations

from typing import assert_type

import oncekey
from oncekey.adapters.a2a import SkillExecutor
from oncekey.adapters.mcp import call_tool
from oncekey.adcp import a2a, mcp, signatures
from oncekey.signatures.adcp import adcp_provider

OTHER = (
    oncekey.EXCLUDED_FIELDS,
    oncekey.STANDARD_ERROR_CODES,
    oncekey.AnswerOmittedError,
    oncekey.BackendMismatchError,
    oncekey.CachedResponse,
    oncekey.CanonicalJSONError,
    oncekey.ClaimLostError,
    oncekey.IdempotencyBackend,
    oncekey.IdempotencyError,
    oncekey.IdempotencyRateLimitedError,
    oncekey.IdempotencyRecursionError,
    oncekey.IdempotencyScopeError,
    oncekey.InvalidKeyError,
    oncekey.InvalidRequestError,
    oncekey.MemoryBackend,
    oncekey.PgBackend,
    oncekey.PgStore,
    oncekey.PolicyError,
    oncekey.RedisBackend,
    oncekey.SQLiteBackend,
    oncekey.StoreCircuitOpenError,
    oncekey.StoreClosedError,
    oncekey.StoreConfigError,
    oncekey.StoreCorruptError,
    oncekey.StoreFullError,
    oncekey.StoreReadOnlyError,
    oncekey.StoreTimeoutError,
    oncekey.StoreUnavailableError,
    oncekey.SyncWebhookDedupStore,
    oncekey.TransactionRefusedError,
    oncekey.UnsupportedAnswerError,
    oncekey.WebhookDedupClaim,
    oncekey.WebhookDedupOwnershipError,
    oncekey.WebhookDedupStore,
    oncekey.canonical_json_sha256,
    oncekey.canonicalize,
    oncekey.capabilities_response,
    oncekey.event_id,
    oncekey.hmac_key,
    oncekey.json_path,
    oncekey.payload_hash,
    oncekey.signature_bound,
    oncekey.strip_excluded_fields,
    oncekey.ulid,
)


def older(dedup: oncekey.WebhookDedupStore, store: oncekey.PgBackend) -> None:
    assert_type(dedup, oncekey.AsyncWebhookDedup)
    assert_type(store, oncekey.AsyncPostgresStore)


assert_type(SkillExecutor({}), a2a.SkillExecutor)
assert_type(call_tool({}), mcp.OnCallTool)
assert_type(adcp_provider(), signatures.AdcpProvider)
