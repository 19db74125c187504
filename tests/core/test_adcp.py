"""AdCP on the wire: error codes, envelopes, what counts as a success, capabilities."""

from __future__ import annotations

import enum
from typing import Any

import pydantic
import pytest

from oncekey import (
    AnswerOmittedError,
    BackendMismatchError,
    ClaimLostError,
    IdempotencyConflictError,
    IdempotencyExpiredError,
    IdempotencyInFlightError,
    IdempotencyRateLimitedError,
    IdempotencyScopeError,
    IdempotencyStore,
    InvalidKeyError,
    InvalidRequestError,
    MemoryBackend,
    StoreUnavailableError,
    canonicalize,
)
from oncekey.adcp import (
    CLASSIC_ERROR_CODES,
    STANDARD_ERROR_CODES,
    capabilities_response,
    error_envelope,
    is_error,
    is_stored,
    with_envelope,
)

CONTEXT = {"correlation_id": "c-1"}


def test_recovery_classes_are_those_of_adcp_3_2() -> None:
    """Conflict and expired are correctable, in flight is transient; once the two were terminal."""
    assert {
        code: STANDARD_ERROR_CODES[f"IDEMPOTENCY_{code}"]["recovery"]
        for code in ("CONFLICT", "EXPIRED", "IN_FLIGHT")
    } == {"CONFLICT": "correctable", "EXPIRED": "correctable", "IN_FLIGHT": "transient"}
    changed = {
        code: CLASSIC_ERROR_CODES[code]["recovery"]
        for code in STANDARD_ERROR_CODES
        if STANDARD_ERROR_CODES[code] != CLASSIC_ERROR_CODES[code]
    }
    assert changed == {"IDEMPOTENCY_CONFLICT": "terminal", "IDEMPOTENCY_EXPIRED": "terminal"}


def test_error_classes_agree_with_the_table() -> None:
    """Every error says the recovery class that its code has in the table."""
    for error in (
        IdempotencyConflictError("op"),
        IdempotencyExpiredError("op"),
        IdempotencyInFlightError("op", 1),
        IdempotencyRateLimitedError("op", 1),
        IdempotencyScopeError("op"),
    ):
        assert error.recovery == STANDARD_ERROR_CODES[error.code]["recovery"]


def test_a_conflict_tells_code_message_and_recovery_and_no_more() -> None:
    """Nothing of the stored side, no field, no suggestion: whoever has the key learns nothing."""
    envelope = error_envelope(IdempotencyConflictError("op"), CONTEXT)
    told = {
        "code": "IDEMPOTENCY_CONFLICT",
        "message": "idempotency_key reused with a different payload",
        "recovery": "correctable",
    }
    assert envelope == {
        "status": "failed",
        "adcp_error": told,
        "errors": [told],
        "context": CONTEXT,
    }


def broken_number() -> Exception:
    try:
        canonicalize({"packages": [{"budget": float("nan")}]})
    except ValueError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "error, code, recovery, more",
    [
        (IdempotencyExpiredError("op"), "IDEMPOTENCY_EXPIRED", "correctable", {}),
        (
            IdempotencyInFlightError("op", 7),
            "IDEMPOTENCY_IN_FLIGHT",
            "transient",
            {"retry_after": 7},
        ),
        (
            IdempotencyInFlightError("op", 86_400),
            "IDEMPOTENCY_IN_FLIGHT",
            "transient",
            {"retry_after": 3600},
        ),
        (IdempotencyRateLimitedError("op", 2), "RATE_LIMITED", "transient", {"retry_after": 2}),
        (IdempotencyScopeError("op"), "INVALID_REQUEST", "correctable", {}),
        (
            InvalidKeyError("no", "idempotency_key"),
            "INVALID_REQUEST",
            "correctable",
            {"field": "idempotency_key"},
        ),
        (InvalidRequestError("no", "brand"), "INVALID_REQUEST", "correctable", {"field": "brand"}),
        (broken_number(), "INVALID_REQUEST", "correctable", {"field": "packages[0].budget"}),
        (AnswerOmittedError("gone"), "IDEMPOTENCY_EXPIRED", "correctable", {}),
        (ClaimLostError("taken"), "IDEMPOTENCY_IN_FLIGHT", "transient", {"retry_after": 1}),
        (StoreUnavailableError("db.internal:5432"), "SERVICE_UNAVAILABLE", "transient", {}),
        (BackendMismatchError("sync"), "CONFIGURATION_ERROR", "terminal", {}),
        (RuntimeError("s3cret"), "SERVICE_UNAVAILABLE", "transient", {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_has_a_code_of_the_protocol(
    error: Exception, code: str, recovery: str, more: dict[str, Any]
) -> None:
    """Each error of ours, and any other, is told by a standard code and its recovery class."""
    told = error_envelope(error)["adcp_error"]
    assert told.pop("message")
    assert told == {"code": code, "recovery": recovery, **more}


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("db.internal:5432 s3cret"), RuntimeError("s3cret")]
)
def test_details_of_stores_and_strangers_stay_in_the_process(error: Exception) -> None:
    """The text of an error that is not about the request never reaches the client."""
    assert "s3cret" not in repr(error_envelope(error))


def test_recovery_classes_can_be_the_older_ones() -> None:
    """The older table, or an error raised with a class of its own, decides."""
    error = IdempotencyConflictError("op")
    assert error_envelope(error, codes=CLASSIC_ERROR_CODES)["errors"][0]["recovery"] == "terminal"
    error = IdempotencyConflictError("op", recovery="terminal")
    assert error_envelope(error)["adcp_error"]["recovery"] == "terminal"


def test_the_context_is_the_requests_or_that_of_the_error() -> None:
    """A context that is passed counts first, then the one that came with the error."""
    error = IdempotencyConflictError("op")
    assert "context" not in error_envelope(error)
    error.context = CONTEXT
    assert error_envelope(error)["context"] == CONTEXT
    assert error_envelope(error, {"other": 1})["context"] == {"other": 1}


class Severity(enum.Enum):
    WARNING = "warning"


class Reply(pydantic.BaseModel):
    status: str | None = None
    errors: list[dict[str, Any]] | None = None
    adcp_error: dict[str, Any] | None = None
    is_error: bool = False


WARNING = {"code": "X", "severity": "warning"}
STORED = [
    {},
    {"status": "completed"},
    {"status": "submitted", "task_id": "t"},
    {"status": "submitted", "errors": [{"code": "X"}]},
    {"status": "working", "task_id": "t"},
    {"status": "active"},
    {"status": "completed", "errors": []},
    {"status": "completed", "errors": [WARNING]},
]
ERRORS = [
    {"status": "failed"},
    {"errors": [{"code": "X"}]},
    {"status": "completed", "errors": [{"code": "X"}]},
    {"errors": [WARNING, {"code": "X"}]},
    {"adcp_error": {"code": "X"}},
    {"status": "submitted", "adcp_error": {"code": "X"}},
]
UNFINISHED = [
    {"status": status} for status in ("rejected", "canceled", "input-required", "auth-required")
]


@pytest.mark.parametrize("kind", [dict, Reply])
@pytest.mark.parametrize("answer", STORED, ids=repr)
def test_success_is_stored(kind: Any, answer: dict[str, Any]) -> None:
    """What was done or taken on is stored, also with advice in its ``errors``."""
    assert is_stored(kind(**answer))
    assert not is_error(kind(**answer))


@pytest.mark.parametrize("kind", [dict, Reply])
@pytest.mark.parametrize("answer", ERRORS, ids=repr)
def test_errors_are_never_stored(kind: Any, answer: dict[str, Any]) -> None:
    """Whatever says that the task failed, in any of the ways there are, is an error."""
    assert is_error(kind(**answer))
    assert not is_stored(kind(**answer))


@pytest.mark.parametrize("answer", UNFINISHED, ids=repr)
def test_what_was_not_done_is_not_stored(answer: dict[str, Any]) -> None:
    """A task that was rejected or waits for input is no error, and runs again with its key."""
    assert not is_error(answer)
    assert not is_stored(answer)


def test_odd_answers_are_judged_too() -> None:
    """Tool results, enumerations, and ``errors`` of another kind than a list."""
    assert is_error(Reply(is_error=True))
    assert is_error({"isError": True})
    assert is_error({"errors": "broken"})
    assert is_error({"errors": {"code": "X"}})
    assert is_stored({"errors": [{"severity": Severity.WARNING}]})
    assert is_stored("text")
    assert is_stored(None)


class Context(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")


class Envelope(pydantic.BaseModel):
    id: str
    replayed: bool | None = None
    context: Context | None = None


class Frozen(Envelope, frozen=True):
    pass


class Bare(pydantic.BaseModel):
    id: str


@pytest.mark.parametrize("kind", [Envelope, Frozen])
def test_models_are_marked_with_values_of_their_fields_types(kind: Any) -> None:
    """The context becomes what the field wants, so that the model dumps without a warning."""
    first = kind(id="a", context={"c": 1})
    marked = with_envelope(first, {"c": 2}, replayed=True)
    assert marked.model_dump(mode="json") == {"id": "a", "replayed": True, "context": {"c": 2}}
    assert first.model_dump() == {"id": "a", "replayed": None, "context": {"c": 1}}


def test_models_without_the_fields_stay_as_they_are() -> None:
    """A model that has no room for the marks is given back unmarked."""
    assert with_envelope(Bare(id="a"), {"c": 2}, replayed=True) == Bare(id="a")
    assert with_envelope([1], {"c": 2}, replayed=True) == [1]


def test_capabilities_nest_what_the_store_declares() -> None:
    """A store, or what it declares, stands under ``adcp.idempotency``; nothing is said too."""
    store = IdempotencyStore(MemoryBackend(), ttl_seconds=7200, profile="adcp-3.2")
    declared = {"supported": True, "replay_ttl_seconds": 7200, "in_flight_max_seconds": 3600}
    for idempotency in (store, store.capability()):
        answer = capabilities_response(["media_buy"], idempotency=idempotency)
        assert answer["adcp"]["idempotency"] == declared
    assert answer["supported_protocols"] == ["media_buy"]
    assert answer["adcp"]["major_versions"] == [3]
    assert capabilities_response([])["adcp"]["idempotency"] == {"supported": False}
    more = capabilities_response([], store, supported_versions=["3.2"], account={"a": 1})
    assert more["adcp"]["supported_versions"] == ["3.2"]
    assert more["account"] == {"a": 1}
