"""Both middlewares, to be tested alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.http.doors import AsgiDoor, Door, Handled, WsgiDoor

from oncekey import MemoryBackend, MemoryStore
from oncekey.testing import ManualClock

Make = Callable[..., Door]


@pytest.fixture(params=["asgi", "wsgi"])
def side(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(side: str) -> Make:
    """A guarded application from a handler and options."""

    def build(handler: Callable[[bytes], Handled], store: Any = None, **options: Any) -> Door:
        kind = AsgiDoor if side == "asgi" else WsgiDoor
        return Door(kind(handler, store, **options))

    return build


@pytest.fixture
def store(side: str, clock: ManualClock) -> Any:
    return MemoryBackend(clock=clock) if side == "asgi" else MemoryStore(clock=clock)
