"""Whose key it is: no caller ever gets what was answered to another."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest
from tests.http.conftest import Make
from tests.http.doors import Calls

from oncekey import PolicyError


def test_an_unknown_caller_is_refused(make: Make) -> None:
    """Without a login a key is taken by nobody's name: 401, the option is named, nothing runs."""
    calls = Calls()
    door = make(calls, anonymous="refuse")
    for headers in ([("Cookie", "session=a")], [("X-API-Key", "a")], []):
        reply = door.post(headers=headers)
        assert (reply.status, reply.problem) == (401, "caller-unknown")
        assert b"scope=" in reply.body
    assert calls.count == 0
    assert door.post(None).status == 201  # without a key it is the application's affair


def test_refusing_is_the_default(make: Make, side: str) -> None:
    """Nobody has to ask for it; sharing is a word that is written, and no other word is one."""
    from oncekey.http import Settings

    door = make(Calls(), settings=Settings())
    assert door.post().problem == "caller-unknown"
    assert make(Calls(), anonymous="shared").post().status == 201
    with pytest.raises(PolicyError, match="anonymous"):
        Settings(anonymous="yes")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="has no option"):
        make(Calls(), strict=True)


def test_an_anonymous_refusal_is_not_replayed_to_a_user(make: Make) -> None:
    """Where unknown callers share their keys, those who signed in have their own."""
    door = make(lambda _: (410, [], b"no"), anonymous="shared")
    assert not door.post().replayed
    assert not door.post(headers=[("Authorization", "Bearer a")]).replayed


def test_identities_of_different_types_are_different_callers(make: Make) -> None:
    """1 and "1", bytes and their repr, a UUID and its text: none gets another's answer."""
    one = uuid.UUID(int=1)
    callers = iter([1, "1", b"1", "b'1'", one, str(one), "int:1", 1])
    calls = Calls()
    door = make(calls, scope=lambda _: next(callers))
    assert [door.post().replayed for _ in range(8)] == [False] * 7 + [True]


class AnonymousUser:
    """What frameworks put in the place of a user."""

    def __str__(self) -> str:
        return "AnonymousUser"


@pytest.mark.parametrize(
    "named",
    [AnonymousUser(), True, "", b"", 1.5, ["a"], "a\0b", "x" * 10_000, "\ud800"],
    ids=lambda named: type(named).__name__,
)
@pytest.mark.parametrize("anonymous", ["refuse", "shared"])
def test_a_scope_that_names_nobody_is_an_error(
    make: Make, caplog: pytest.LogCaptureFixture, named: Any, anonymous: str
) -> None:
    """A 500 that says so, an error in the log, and never a shared space; nothing runs."""
    calls = Calls()
    with caplog.at_level(logging.ERROR, "oncekey"):
        reply = make(calls, scope=lambda _: named, anonymous=anonymous).post()
    assert (reply.status, reply.problem, calls.count) == (500, "scope-invalid", 0)
    assert "scope=" in caplog.text
    assert "xxxx" not in caplog.text
    assert b"Traceback" not in reply.body


def test_a_scope_that_fails_is_told_in_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A look for what is not there: refused like a scope that names nobody, nothing runs."""
    calls = Calls()

    def scope(_: Any) -> str:
        found: dict[str, str] = {}
        return found["user"]

    with caplog.at_level(logging.ERROR, "oncekey"):
        reply = make(calls, scope=scope).post()
    assert (reply.status, reply.problem, calls.count) == (500, "scope-invalid", 0)
    assert "scope= failed" in caplog.text
    assert "KeyError: 'user'" in caplog.text


@pytest.mark.parametrize("value", ["Bearer", "bearer ", "Basic", "Token"])
def test_a_scheme_without_credentials_is_nobody(make: Make, value: str) -> None:
    """Clients that were given no token must not find each other's answers."""
    door = make(Calls(), anonymous="refuse")
    refused = door.post(headers=[("Authorization", value)])
    assert (refused.status, refused.problem) == (401, "caller-unknown")
