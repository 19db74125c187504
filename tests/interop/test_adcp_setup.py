"""What is set up wrongly in an AdCP server: said when it is made, or in its log."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from oncekey import (
    AsyncSQLiteStore,
    IdempotencyScopeError,
    IdempotencyStore,
    MemoryBackend,
    ToolContext,
)
from oncekey.adcp.a2a import SkillExecutor
from oncekey.adcp.mcp import call_tool
from oncekey.adcp.serving import answer_to
from oncekey.errors import PolicyError
from oncekey.guard import UnguardedWarning

DOORS: list[Callable[..., Any]] = [call_tool, SkillExecutor]
KEY = {"idempotency_key": "key-0123456789abcdef"}


async def book(params: Any, context: Any = None) -> dict[str, Any]:
    return {"status": "completed", "media_buy_id": "mb-1"}


def wrapped(**options: Any) -> Any:
    return IdempotencyStore(MemoryBackend(), **options).wrap(book)


@pytest.mark.parametrize("door", DOORS)
def test_an_operation_that_changes_something_must_be_wrapped(door: Any) -> None:
    """AdCP's table says which these are; others may go without."""
    handlers = {"create_media_buy": book, "get_products": book, "of_our_own": book}
    with pytest.warns(UnguardedWarning, match=r"^create_media_buy: AdCP .*\.wrap;") as told:
        door(handlers)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("door", DOORS)
def test_a_classic_store_is_warned_of(door: Any) -> None:
    """It would run a request without a caller unguarded, with a warning at the first alone."""
    with pytest.warns(UnguardedWarning, match=r"^of_our_own: .*profile=\"adcp-3.2\""):
        door({"of_our_own": wrapped()})


class Seller:
    @IdempotencyStore(MemoryBackend(), profile="adcp-3.2").wrap
    async def method(self, params: Any, context: Any = None) -> dict[str, Any]:
        return {}

    __call__ = method


def decorated(handler: Any) -> Any:
    @functools.wraps(handler)
    async def outside(params: Any, context: Any) -> Any:
        return await handler(params, context)

    return outside


@pytest.mark.parametrize("door", DOORS)
def test_handlers_that_are_wrapped_are_taken_silently(door: Any, tmp_path: Any) -> None:
    """Functions, methods, objects, partials, decorated ones and transactions."""
    strict = wrapped(profile="adcp-3.2")
    store = IdempotencyStore(AsyncSQLiteStore(tmp_path / "s.db"), profile="adcp-3.2")

    @store.wrap(transactional=True)
    async def buy(params: Any, context: Any, tx: Any) -> dict[str, Any]:
        return {}

    several = (strict, Seller().method, Seller(), functools.partial(strict), decorated(strict), buy)
    switched = wrapped(require_principal=True, strict_keys=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (*several, switched):
            door({"create_media_buy": one})


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_dict_of_handlers_is_refused(door: Any) -> None:
    """Also by the door for A2A, which would fail at its first request."""
    with pytest.raises(PolicyError, match="handlers is a dict"):
        door([book])
    with pytest.raises(PolicyError, match="caller is a function"):
        door({}, "buyer-acme")


async def asked(caller: Callable[[], Any]) -> dict[str, Any]:
    answer, failed = await answer_to(wrapped(profile="adcp-3.2"), KEY, caller, "create_media_buy")
    assert failed
    error: dict[str, Any] = answer["adcp_error"]
    return error


async def test_a_caller_that_can_not_be_named_is_the_servers_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client can't correct it and learns nothing of it; the log names what was given."""
    with caplog.at_level(logging.ERROR, logger="oncekey"):
        error = await asked(lambda: ToolContext(caller_identity=object()))  # type: ignore[arg-type]
    assert (error["code"], error["recovery"]) == ("CONFIGURATION_ERROR", "terminal")
    assert "caller_identity" not in error["message"]
    assert "what caller= gave can't name anybody: caller_identity must be" in caplog.text


async def test_a_bad_key_is_still_the_clients_fault() -> None:
    """Where the caller is in order, a key that is not is an INVALID_REQUEST with its field."""
    handler = wrapped(profile="adcp-3.2")
    answer, _ = await answer_to(handler, {}, lambda: ToolContext("alice"), "create_media_buy")
    assert answer["adcp_error"]["code"] == "INVALID_REQUEST"
    assert answer["adcp_error"]["field"] == "idempotency_key"


async def test_a_caller_who_is_turned_away_is_not_told_to_retry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``PermissionError`` means credentials that are missing or wrong, not an outage."""

    async def caller() -> ToolContext:
        raise PermissionError("unknown token")

    with caplog.at_level(logging.WARNING, logger="oncekey"):
        error = await asked(caller)
    assert (error["code"], error["recovery"]) == ("AUTH_REQUIRED", "correctable")
    assert "unknown token" not in str(error)
    assert "create_media_buy was refused: caller= raised PermissionError" in caplog.text


@pytest.mark.parametrize("blank", ["", "  ", "\t\n"])
async def test_a_blank_caller_is_nobody(blank: str) -> None:
    """Two callers whose names were not found must not share their keys."""
    with pytest.raises(IdempotencyScopeError):
        await wrapped(profile="adcp-3.2")(KEY, ToolContext(caller_identity=blank))
