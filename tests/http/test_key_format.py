"""What keys must look like, and how a replay is told, as the owner of the server chooses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.http.conftest import Make
from tests.http.doors import Calls

from oncekey import PolicyError
from oncekey.http import Settings

UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"
LOGIN = (("authorization", "Bearer token"),)


@pytest.mark.parametrize("key", [UUID, UUID.upper(), f'"{UUID}"'])
def test_a_uuid_is_taken(make: Make, key: str) -> None:
    """A UUID of either case, bare or in quotes, is a key where only UUIDs are."""
    calls = Calls()
    door = make(calls, key_format="uuid")
    assert door.post(key=key).status == 201
    assert door.post(key=key).replayed
    assert calls.count == 1


@pytest.mark.parametrize(
    "key", ["k-1", UUID[1:-1] + "x", UUID + "0", UUID + "\n", UUID.replace("-", "")]
)
def test_another_key_is_refused_by_name_of_the_format(make: Make, key: str) -> None:
    """Anything else is a 400 that says UUID, and nothing runs; for known callers too."""
    calls = Calls()
    door = make(calls, key_format="uuid")
    assert door.post(key=UUID, headers=LOGIN).status == 201  # from here its caller is at hand
    for headers in ((), LOGIN):
        reply = door.post(key=key, headers=headers)
        assert (reply.status, reply.problem) == (400, "key-invalid")
        if not key.endswith("\n"):
            assert "must be a UUID" in json.loads(reply.body)["detail"]
            assert key not in reply.body.decode()
    assert calls.count == 1


@pytest.mark.parametrize("wanted", [r"ord_\d+", re.compile(r"ORD_\d+", re.IGNORECASE)])
def test_a_format_of_ones_own(make: Make, wanted: Any) -> None:
    """A regular expression holds for the whole key, and stands in the refusal."""
    door = make(Calls(), key_format=wanted)
    assert door.post(key="ord_17").status == 201
    reply = door.post(key="ord_17x")
    assert reply.status == 400
    assert r"_\d+" in json.loads(reply.body)["detail"]


@pytest.mark.parametrize("wanted", ["[", re.compile(b"x"), 7])
def test_what_is_no_format_is_refused(wanted: Any) -> None:
    """A broken expression, or one for bytes, is told when the guard is made."""
    with pytest.raises(PolicyError, match="key_format must be 'uuid' or a regular expression"):
        Settings(key_format=wanted)


def test_the_replay_header_has_another_name(make: Make) -> None:
    """Replays carry the header that was asked for, and scripts of other origins may see it."""
    door = make(Calls(), replay_header="X-Replayed", expose_cors=True)
    first, again = door.post(), door.post()
    assert first.header("x-replayed") is None
    assert again.header("x-replayed") == "true"
    assert not again.replayed
    for reply in (first, again):
        assert reply.header("access-control-expose-headers") == "X-Replayed, Retry-After"


def test_replays_look_like_first_answers(make: Make) -> None:
    """Without a replay header nothing tells a replay."""
    calls = Calls()
    door = make(calls, replay_header=None, expose_cors=True)
    first, again = door.post(), door.post()
    assert calls.count == 1
    names = {name.lower() for name, _ in again.headers} - {
        name.lower() for name, _ in first.headers
    }
    assert names <= {"content-length"}
    assert again.header("access-control-expose-headers") == "Retry-After"


@pytest.mark.parametrize("name", ["a b", "", "Content-Type", "X-Mine"])
def test_a_replay_header_must_be_free(name: str) -> None:
    """What is no name, or a header that answers keep, is refused."""
    with pytest.raises(PolicyError, match="header"):
        Settings(replay_header=name, stored_headers=["x-mine"])
