"""The Ad Context Protocol (AdCP) on the wire: error codes, error envelopes, capabilities.

No transport is needed here; ``oncekey.adcp.mcp`` and ``oncekey.adcp.a2a`` build on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncekey.errors import (
    AnswerOmittedError,
    CanonicalJSONError,
    ClaimLostError,
    IdempotencyError,
    InvalidKeyError,
    InvalidRequestError,
    OncekeyError,
    StoreConfigError,
    StoreError,
)

__all__ = [
    "CLASSIC_ERROR_CODES",
    "STANDARD_ERROR_CODES",
    "capabilities_response",
    "error_envelope",
]

MAX_RETRY_AFTER = 3600

_TRANSIENT = """
    CAMPAIGN_SUSPENDED CONFLICT GOVERNANCE_UNAVAILABLE IDEMPOTENCY_IN_FLIGHT RATE_LIMITED
    SERVICE_UNAVAILABLE SIGNED_RESPONSE_ENVELOPE_EXPIRED STALE_RESPONSE
"""
_TERMINAL = """
    ACCOUNT_NOT_FOUND ACCOUNT_PAYMENT_REQUIRED ACCOUNT_SUSPENDED AGENT_BLOCKED AGENT_SUSPENDED
    AUTH_INVALID BILLING_OUT_OF_BAND BUDGET_EXHAUSTED COMMITTED_RESOURCE_PURGED CONFIGURATION_ERROR
    CREDENTIAL_IN_ARGS
"""
_CORRECTABLE = """
    ACCOUNT_AMBIGUOUS ACCOUNT_IDENTITY_CONFLICT ACCOUNT_MOVED ACCOUNT_REQUIRED
    ACCOUNT_SETUP_REQUIRED ACTION_NOT_ALLOWED AMBIGUOUS_BIDDING_POLICY AUDIENCE_TOO_SMALL
    AUTHORIZATION_REQUIRED AUTH_MISSING AUTH_REQUIRED BIDDING_PLACEMENT_CONFLICT
    BILLING_NOT_PERMITTED_FOR_AGENT BILLING_NOT_SUPPORTED BRAND_REQUIRED BUDGET_CAP_REACHED
    BUDGET_EXCEEDED BUDGET_TOO_LOW CATALOG_LIMIT_EXCEEDED COMPLIANCE_UNSATISFIED
    CONFLICTING_SELECTORS CREATIVE_DEADLINE_EXCEEDED CREATIVE_INACCESSIBLE
    CREATIVE_LOCALE_NOT_ACCEPTED CREATIVE_MISSING_CLICK_URL CREATIVE_NOT_FOUND CREATIVE_REJECTED
    CREATIVE_REPRESENTATION_UNRESOLVED CREATIVE_REVISION_CONTENT_MISMATCH CREATIVE_SIZE_MISMATCH
    CREATIVE_VALIDATION_FAILED_GENERIC CREATIVE_VALUE_NOT_ALLOWED CURSOR_EXPIRED
    EVALUATOR_AGENT_NOT_ACCEPTED FEED_FETCH_FAILED FIELD_NOT_PERMITTED
    FORMAT_DECLARATION_DIVERGENT FORMAT_DECLARATION_V1_AMBIGUOUS
    FORMAT_DECLARATION_V1_LOSSY_MULTI_SIZE FORMAT_NOT_SUPPORTED FORMAT_OPTION_UNRESOLVED
    FORMAT_PROJECTION_FAILED FORMAT_SHAPE_PROMOTED GOVERNANCE_AGENT_NOT_ACCEPTED GOVERNANCE_DENIED
    IDEMPOTENCY_CONFLICT IDEMPOTENCY_EXPIRED INVALID_FEED_FORMAT INVALID_PRICING_OPTION
    INVALID_REQUEST INVALID_STATE INVALID_USAGE_DATA IO_REQUIRED ITEM_VALIDATION_FAILED
    MACRO_RESOLUTION_FAILED MEDIA_BUY_NOT_FOUND MULTI_FINALIZE_UNSUPPORTED NOT_CANCELLABLE
    PACKAGE_NOT_FOUND PAYMENT_TERMS_NOT_SUPPORTED PERMISSION_DENIED PIXEL_TRACKER_LOSSY_DOWNGRADE
    PIXEL_TRACKER_UPGRADE_INFERRED PLACE_TARGET_UNAVAILABLE PLAN_NOT_FOUND POLICY_VIOLATION
    PRIVATE_FIELD_IN_PUBLIC_PLACEMENT PRODUCT_EXPIRED PRODUCT_NOT_FOUND PRODUCT_UNAVAILABLE
    PROPOSAL_EXPIRED PROPOSAL_NOT_COMMITTED PROPOSAL_NOT_FOUND PROVENANCE_CLAIM_CONTRADICTED
    PROVENANCE_DIGITAL_SOURCE_TYPE_MISSING PROVENANCE_DISCLOSURE_MISSING
    PROVENANCE_EMBEDDED_MISSING PROVENANCE_REQUIRED PROVENANCE_SYNTHETIC_DEPICTION_MISSING
    PROVENANCE_VERIFIER_NOT_ACCEPTED READ_ONLY_SCOPE REFERENCE_NOT_FOUND REQUOTE_REQUIRED
    SCOPE_INSUFFICIENT SESSION_NOT_FOUND SESSION_TERMINATED SIGNAL_NOT_FOUND
    SIGNAL_TARGETING_INCOMPATIBLE SIGNED_RESPONSE_REQUEST_HASH_MISMATCH
    SIGNED_RESPONSE_TENANT_MISMATCH SOURCE_ACCESS_FAILED TERMS_REJECTED UNPRICEABLE_OUTPUT
    UNSUPPORTED_FEATURE UNSUPPORTED_GRANULARITY UNSUPPORTED_PROVISIONING VALIDATION_ERROR
    VAST_PARSE_FAILED VAST_VERSION_MISMATCH VAST_WRAPPER_DEPTH_EXCEEDED VERSION_UNSUPPORTED
"""

# What is said where an error has no words of its own for the wire. Those of a store can hold
# paths and host names, so they never leave the process.
_MESSAGES: Final = {
    "CONFIGURATION_ERROR": "this agent is not set up to answer the request; tell its operator",
    "IDEMPOTENCY_CONFLICT": "idempotency_key reused with a different payload",
    "IDEMPOTENCY_EXPIRED": "the answer to this idempotency_key is no longer there; look up whether "
    "the first request took effect before you use a fresh key",
    "IDEMPOTENCY_IN_FLIGHT": "a request with this idempotency_key is still running",
    "INVALID_REQUEST": "the request is malformed",
    "RATE_LIMITED": "too many requests",
    "SERVICE_UNAVAILABLE": "the request could not be carried out; retry with the same "
    "idempotency_key",
}


def _codes(**other: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for recovery, names in (
        ("transient", _TRANSIENT),
        ("terminal", _TERMINAL),
        ("correctable", _CORRECTABLE),
    ):
        for code in names.split():
            found[code] = {"recovery": other.get(code, recovery)}
            if code in _MESSAGES:
                found[code]["message"] = _MESSAGES[code]
    return found


STANDARD_ERROR_CODES: Final[Mapping[str, Mapping[str, str]]] = _codes()
"""The error codes of AdCP 3.2, each with its ``recovery`` class and some with a ``message``."""

CLASSIC_ERROR_CODES: Final[Mapping[str, Mapping[str, str]]] = _codes(
    IDEMPOTENCY_CONFLICT="terminal", IDEMPOTENCY_EXPIRED="terminal"
)
"""The same with the recovery classes of before AdCP 3.2."""


def error_envelope(
    error: BaseException,
    context: Any = None,
    *,
    codes: Mapping[str, Mapping[str, str]] = STANDARD_ERROR_CODES,
) -> dict[str, Any]:
    """An error as AdCP answers it, in both of the places where it is looked for.

    Of a conflict it tells the code, a message and the recovery class, and nothing of what is
    stored. Of an error that is not oncekey's, or that is about the store, it tells no details.

    Args:
        error: What was raised.
        context: The ``context`` of the request that failed. Default: that of the error.
        codes: Whose recovery classes count.

    Example:
        >>> from oncekey import IdempotencyConflictError
        >>> error = IdempotencyConflictError("create_media_buy")
        >>> envelope = error_envelope(error, {"correlation_id": "c-1"})
        >>> envelope["adcp_error"]["code"], envelope["adcp_error"]["recovery"]
        ('IDEMPOTENCY_CONFLICT', 'correctable')
        >>> envelope["context"]
        {'correlation_id': 'c-1'}
    """
    code, message, retry_after, field = _told(error)
    # One that was raised with another recovery class than its code's keeps it.
    recovery = vars(error).get("recovery") or codes.get(code, {}).get("recovery", "terminal")
    told: dict[str, Any] = {"code": code, "message": message, "recovery": recovery}
    if retry_after is not None:
        told["retry_after"] = min(max(1, retry_after), MAX_RETRY_AFTER)
    if field is not None:
        told["field"] = field
    envelope: dict[str, Any] = {"status": "failed", "adcp_error": told, "errors": [dict(told)]}
    if context is None:
        context = getattr(error, "context", None) if isinstance(error, OncekeyError) else None
    if context is not None:
        envelope["context"] = context
    return envelope


def _told(error: BaseException) -> tuple[str, str, int | None, str | None]:
    """Code, message, seconds to wait and field."""
    if isinstance(error, IdempotencyError):
        return error.code, error.message, error.retry_after, None
    if isinstance(error, (InvalidKeyError, InvalidRequestError)):
        return error.code, str(error), None, error.field
    if isinstance(error, CanonicalJSONError):
        return error.code, str(error), None, error.path.removeprefix("$").lstrip(".") or None
    code, retry_after = "SERVICE_UNAVAILABLE", None
    if isinstance(error, AnswerOmittedError):
        code = "IDEMPOTENCY_EXPIRED"
    elif isinstance(error, ClaimLostError):
        code, retry_after = "IDEMPOTENCY_IN_FLIGHT", 1
    elif isinstance(error, OncekeyError) and (
        isinstance(error, StoreConfigError) or not isinstance(error, StoreError)
    ):
        code = "CONFIGURATION_ERROR"
    return code, _MESSAGES[code], retry_after, None


def capabilities_response(
    domains: Sequence[str],
    idempotency: Any = None,
    *,
    supported_versions: Sequence[str] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """The answer to ``get_adcp_capabilities``.

    Args:
        domains: The protocols that the agent speaks, such as ``media_buy``.
        idempotency: An ``IdempotencyStore``, or what its ``capability()`` gives. ``None``: the
            agent says that it does not deduplicate.
        supported_versions: Releases such as ``3.2``.
        sections: More of the answer: ``account=...``, ``media_buy=...``.

    Example:
        >>> from oncekey import IdempotencyStore, AsyncMemoryStore
        >>> store = IdempotencyStore(AsyncMemoryStore())
        >>> capabilities_response(["media_buy"], idempotency=store)["adcp"]["idempotency"]
        {'supported': True, 'replay_ttl_seconds': 86400}
    """
    declared = idempotency
    if declared is None:
        declared = {"supported": False}
    elif not isinstance(declared, Mapping):
        declared = declared.capability()
    about: dict[str, Any] = {"major_versions": [3], "idempotency": dict(declared)}
    if supported_versions is not None:
        about["supported_versions"] = list(supported_versions)
    return {
        "status": "completed",
        "adcp": about,
        "supported_protocols": list(domains),
        **sections,
    }
