"""The Ad Context Protocol (AdCP), all of it: nothing else in oncekey knows the protocol.

What goes over the wire is here. ``oncekey.adcp.mcp`` and ``oncekey.adcp.a2a`` serve it, each with
its SDK; ``oncekey.adcp.signatures`` verifies and signs its webhooks; ``oncekey.IdempotencyStore``
follows its rules for requests in the profile ``adcp-3.2``.
"""

from oncekey.adcp.peer import for_adcp_package
from oncekey.adcp.profile import (
    account_parts,
    field_of,
    is_error,
    is_stored,
    no_error,
    with_envelope,
)
from oncekey.adcp.wire import (
    CLASSIC_ERROR_CODES,
    STANDARD_ERROR_CODES,
    capabilities_response,
    error_envelope,
)

__all__ = [
    "CLASSIC_ERROR_CODES",
    "STANDARD_ERROR_CODES",
    "account_parts",
    "capabilities_response",
    "error_envelope",
    "field_of",
    "for_adcp_package",
    "is_error",
    "is_stored",
    "no_error",
    "with_envelope",
]
