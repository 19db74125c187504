"""Another payload under a key whose first call is in flight."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from oncekey import IdempotencyConflictError, Once, connect

PATIENCE = 60.0


@pytest.fixture(params=["memory", "sqlite", "postgresql", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each kind."""
    if request.param == "memory":
        return "memory://"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/mismatch.db"
    if request.param == "postgresql":
        return str(request.getfixturevalue("own_url"))
    return f"{request.getfixturevalue('redis_server').url}?check=off"


def test_another_payload_is_refused_while_the_first_runs(url: str) -> None:
    """It neither runs nor waits nor disturbs: the first has its answer, and so has its retry."""
    inside, go_on = threading.Event(), threading.Event()
    ran: list[int] = []
    with connect(url) as store:
        once = Once(store, scope="mismatch", wait=PATIENCE)

        @once(key="name", name=None)
        def charge(name: str, cents: int) -> dict[str, Any]:
            ran.append(cents)
            inside.set()
            assert go_on.wait(PATIENCE)
            return {"cents": cents}

        answers: list[Any] = []
        first = threading.Thread(target=lambda: answers.append(charge("k", 1)))
        first.start()
        assert inside.wait(PATIENCE)
        with pytest.raises(IdempotencyConflictError):
            charge("k", 2)
        go_on.set()
        first.join()
        assert answers == [{"cents": 1}] == [charge("k", 1)]
        with pytest.raises(IdempotencyConflictError):
            charge("k", 2)
    assert ran == [1]
