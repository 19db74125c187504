"""Keys that every call has anew: a warning, once for each function, and no false alarms."""

from __future__ import annotations

import itertools
import time
import uuid
import warnings
from typing import Any

import pytest

from oncekey import AsyncOnce, InvalidKeyError, Once, ulid
from oncekey.guard import PerCallKeyWarning


@pytest.fixture
def once() -> Once:
    return Once("memory://", scope="tests")


PER_CALL = [
    "request_id",
    "requestId",
    "req_id",
    "call_id",
    "tool_call_id",
    "toolCallId",
    "tool_use_id",
    "message_id",
    "task_id",
    "trace_id",
    "span_id",
    "invocation_id",
    "progress_token",
]
FINE = [
    "order_id",
    "event_id",
    "idempotency_key",
    "id",
    "key",
    "job_id",
    "delivery_id",
    "payment_id",
    "invoice",
    "callback_id",
    "recall_id",
    "subtask_ids",
    "month",
]


def function_of(name: str) -> Any:
    """A function with one argument of that name."""
    namespace: dict[str, Any] = {}
    exec(f"def work({name}): return 1", namespace)
    return namespace["work"]


@pytest.mark.parametrize("name", PER_CALL)
def test_ids_of_a_call_are_named(once: Once, name: str) -> None:
    """An argument that is named like the id of a call is warned about, at the user's line."""
    with pytest.warns(PerCallKeyWarning, match=name) as told:
        once(key=name)(function_of(name))
    assert [one.filename for one in told] == [__file__]
    assert issubclass(PerCallKeyWarning, UserWarning)


@pytest.mark.parametrize("name", FINE)
def test_ids_of_things_are_not(once: Once, name: str, no_warnings: None) -> None:
    """The ids that an application gives its own things raise no alarm."""
    once(key=name)(function_of(name))
    once(key=[name])(function_of(name))
    assert once(key=lambda *args, **kwargs: "k")(function_of(name))(1) == 1


@pytest.mark.parametrize(
    "path", ["context.request_id", "self.request.id", "message.headers.trace_id"]
)
def test_paths_into_an_argument_are_named(once: Once, path: str) -> None:
    """So are the ends of dotted paths, and the id of a Celery request."""
    with pytest.warns(PerCallKeyWarning, match=path):
        once(key=path)(function_of(path.partition(".")[0]))
    with pytest.warns(PerCallKeyWarning, match=path):
        once(key=["other", path], name="work")(lambda other, context=1, self=2, message=3: 1)


@pytest.mark.parametrize(
    "key",
    [
        lambda self, order: self.request.id,
        lambda self, order: f"{order}-{self.message_id}",
        lambda self, order: str(uuid.uuid4()),
        lambda self, order: ulid(),
    ],
)
def test_functions_that_read_or_make_one_are_named(once: Once, key: Any) -> None:
    """A key function that reads such an id, or makes one, is found out before any call."""
    with pytest.warns(PerCallKeyWarning):
        once(key=key, name="work")(lambda self, order: 1)


@pytest.mark.parametrize("key", [lambda order: time.perf_counter_ns(), itertools.count().__next__])
def test_a_function_that_never_says_the_same_is_found_in_the_first_call(
    once: Once, key: Any
) -> None:
    """A key function is asked twice in the first call; two answers for the same are told once."""
    given = (lambda order: key()) if "next" in key.__name__ else key

    @once(key=given)
    def work(order: str) -> int:
        return 1

    with pytest.warns(PerCallKeyWarning, match="two keys") as told:
        work("o-1")
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert work("o-1") == 1  # still guarded as it was asked for, and told once


def test_a_good_key_function_is_asked_twice_once(once: Once, no_warnings: None) -> None:
    """Only the first call pays for the second look."""
    asked = []

    @once(key=lambda order: asked.append(order) or order)
    def work(order: str) -> int:
        return 1

    for number in range(3):
        work(str(number))
    assert asked == ["0", "0", "1", "2"]


async def test_async_guards_tell_too() -> None:
    """``AsyncOnce`` looks at the same names."""

    async def work(request_id: str) -> int:
        return 1

    with pytest.warns(PerCallKeyWarning, match="request_id") as told:
        AsyncOnce("memory://")(key="request_id")(work)
    assert [one.filename for one in told] == [__file__]


# Keys of several arguments


def test_several_arguments_are_a_key(once: Once) -> None:
    """A list of names or paths is one key; the rest is the payload; types count."""
    runs = []

    @once(key=["year", "order.id"], ignore=["log"])
    def close(year: int, order: dict[str, Any], log: Any = None) -> int:
        runs.append(1)
        return len(runs)

    assert close(2026, {"id": 1}) == close(2026, {"id": 1}, log=print) == 1
    assert close(2027, {"id": 1}) == 2
    assert close(2026, {"id": "1"}) == 3
    with pytest.raises(InvalidKeyError, match="no 'id'"):
        close(2026, {})


def test_a_list_with_a_name_that_is_no_argument_is_refused(once: Once) -> None:
    """A misspelt name is found at once, and so is an empty list."""
    with pytest.raises(InvalidKeyError, match="no argument 'mont'"):
        once(key=["year", "mont"], name="work")(lambda year, month: 1)
    with pytest.raises(InvalidKeyError, match="say which argument"):
        once(key=[])
