"""A guard above the decorator of a route or a task guards nothing: it is refused, or told."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import fastapi
import flask
import pytest
from aiohttp import web
from celery import Celery, shared_task
from dramatiq.brokers.stub import StubBroker
from litestar import post
from mcp.server.mcpserver import MCPServer
from starlette.routing import Route

from oncekey import AsyncOnce, MemoryBackend, MemoryStore, Once, PolicyError
from oncekey.adapters.celery import once_task
from oncekey.adapters.dramatiq import once_actor
from oncekey.adapters.mcp_tools import once_tool
from oncekey.guard import UnguardedWarning


@pytest.fixture(autouse=True)
def _everything_is_seen() -> Iterator[None]:
    """Modules too, which are kept from the garbage collector while tests run."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def once() -> Once:
    return Once(MemoryStore())


@pytest.fixture
def aonce() -> AsyncOnce:
    return AsyncOnce(MemoryBackend())


ROUTES: dict[str, Callable[[], Any]] = {
    "flask": lambda: flask.Flask("x").post("/pay/<order>"),
    "flask-blueprint": lambda: flask.Blueprint("pay", "x").post("/pay/<order>"),
    "fastapi": lambda: fastapi.FastAPI().post("/pay/{order}"),
    "fastapi-router": lambda: fastapi.APIRouter().post("/pay/{order}"),
    "mcp": lambda: MCPServer("shop").tool(),
}


@pytest.mark.parametrize("kind", ROUTES)
def test_a_guard_above_a_route_is_refused(once: Once, kind: str) -> None:
    """The route has the unguarded function: the error says where the guard belongs."""
    route = ROUTES[kind]()
    with pytest.raises(PolicyError, match=r"put the guard below .*next to the function"):

        @once(key="order")
        @route
        def pay(order: str) -> str:
            return order

    @route
    @once(key="order")
    def paid(order: str) -> str:  # the right way round
        return order

    assert paid("o-1") == "o-1"


@pytest.mark.parametrize("kind", ["aiohttp", "litestar", "starlette", "fastapi"])
def test_a_guard_above_an_async_route_is_refused(aonce: AsyncOnce, kind: str) -> None:
    """The same for coroutine functions, and for handlers that are objects of the framework."""
    routes: list[Route] = []

    def add(endpoint: Any) -> Any:
        routes.append(Route("/pay/{order}", endpoint))
        return endpoint

    table, app = web.RouteTableDef(), fastapi.FastAPI()
    route: Any = {
        "aiohttp": table.post("/pay/{order}"),
        "litestar": post("/pay/{order:str}"),
        "starlette": add,
        "fastapi": app.post("/pay/{order}"),
    }[kind]
    with pytest.raises(PolicyError, match="put the guard below"):

        @aonce(key="order")
        @route
        async def pay(order: str) -> str:
            return order


# Celery shares the tasks of all apps of a process: those of the documentation's snippets too.
@pytest.mark.filterwarnings("ignore::celery.exceptions.DuplicateTaskNameWarning")
def test_a_guard_above_a_task_is_refused(once: Once) -> None:
    """Tasks of Celery and actors of Dramatiq are objects, which workers call unguarded."""
    with Celery("here", set_as_current=False) as app:
        for task in (app.task, app.task(bind=True, lazy=False), shared_task):
            for guard in (once(key="order"), once_task(once, key="order")):
                with pytest.raises(PolicyError, match="put the guard below"):
                    guard(task(refund))

    for guard in (once(key="order"), once_actor(once, key="order")):
        actor: Any = dramatiq.actor(broker=StubBroker())
        with pytest.raises(PolicyError, match="put the guard below"):

            @guard
            @actor
            def pay(order: str) -> str:
                return order


def test_a_tools_guard_above_the_server_is_refused(aonce: AsyncOnce) -> None:
    """``once_tool`` above ``@server.tool()``, the other way round than it must be."""
    server = MCPServer("shop")
    with pytest.raises(PolicyError, match="registered with mcp"):

        @once_tool(aonce, key="order")
        @server.tool()
        async def pay(order: str) -> str:
            return order


def test_what_is_no_function_is_refused(once: Once) -> None:
    """Classes, static and class methods, properties: the error says what to do instead."""
    for wrong in (
        staticmethod(len),
        classmethod(lambda cls, order: order),
        property(lambda self: 1),
        functools.cached_property(lambda self: 1),
    ):
        with pytest.raises(PolicyError, match=f"put @{type(wrong).__name__} above the guard"):
            once(key="order")(wrong)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="is a class"):
        once(key="order")(Once)
    with pytest.raises(PolicyError, match="can't be guarded"):
        once(key="order")(5)  # type: ignore[arg-type]

    class Till:
        @staticmethod
        @once(key="order")
        def pay(order: str) -> str:
            return order

    assert Till.pay("o-1") == "o-1"


def test_other_registries_are_warned_about(once: Once) -> None:
    """What keeps the function and is not known may call it unguarded: that is told, at the line."""
    handlers: dict[str, Any] = {}
    listeners: list[Any] = []

    def on(event: str) -> Any:
        def register(function: Any) -> Any:
            handlers[event] = function
            return function

        return register

    def listen(function: Any) -> Any:
        listeners.append(function)
        return function

    for register in (on("paid"), listen):
        with pytest.warns(UnguardedWarning, match="not guarded") as told:

            @once(key="order")
            @register
            def pay(order: str) -> str:
                return order

        assert [one.filename for one in told] == [__file__]


def refund(order: str) -> str:
    return order


MODULE_LEVEL = []


def charge(order: str) -> str:
    return order


MODULE_LEVEL.append(charge)


def test_a_function_that_was_there_before_is_guarded_as_asked(
    once: Once, no_warnings: None
) -> None:
    """A plain call on a function that has a name, here or elsewhere, is no mistake of order."""

    def local(order: str) -> str:
        return order

    kept = [local, charge]

    class Till:
        def pay(self, order: str) -> str:
            return order

    assert once(key="order")(charge)("o-1") == "o-1"
    assert once(key="order")(local)("o-1") == "o-1"
    assert once(key=["order"], ignore=["self"])(Till.pay)(Till(), "o-1") == "o-1"
    assert len(kept) == 2


def test_other_decorators_below_are_fine(once: Once, no_warnings: None) -> None:
    """Wrappers, also with attributes and closures that lead back to them, keep nothing."""

    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            wrapper.calls += 1
            return function(*args)

        wrapper.calls = 0
        wrapper.itself = wrapper
        return wrapper

    @once(key="order")
    @logged
    @functools.lru_cache
    def pay(order: str) -> str:
        return order

    assert pay("o-1") == pay("o-1") == "o-1"


def test_a_new_function_costs_no_search(once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody else has the function, the garbage collector is not asked."""
    searched = []
    monkeypatch.setattr(gc, "get_referrers", lambda *some: searched.append(some) or [])

    @once(key="order")
    def pay(order: str) -> str:
        return order

    @once_task(once, key="order")
    def queued(order: str) -> str:
        return order

    def known(order: str) -> str:
        return order

    assert not searched
    once(key="order")(known)
    assert searched


def test_a_function_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To guard one function again and again does not go over all of memory each time."""

    def work(order: str) -> str:
        return order

    looked: list[object] = []
    real = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *what: looked.append(what) or real(*what))
    once = Once("memory://", scope="orders")
    guarded = [once(key="order", name=f"work-{number}")(work) for number in range(20)]
    assert guarded[19]("o-1") == "o-1"
    assert len(looked) <= 10  # as many as one look takes
