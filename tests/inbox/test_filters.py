"""Searches as people write them, and which targets an event goes to."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.errors import InvalidKeyError, PolicyError
from oncekey.inbox import DeliveryState, Filter, Route, TargetPolicy
from oncekey.inbox.models import bucket_ms, bucket_of, event_id, event_number, event_time
from oncekey.inbox.routing import Router


def test_a_search_is_read_and_written_back() -> None:
    """Every qualifier is read, and the text of a filter reads as the same filter."""
    text = 'source:stripe type:invoice.* state:dead target:app status:500 error:"no route" age:>1h'
    found = Filter.parse(text + " age:<2d msg_00")
    assert found == Filter(
        source="stripe",
        type="invoice.*",
        state=DeliveryState.DEAD,
        target="app",
        status=500,
        error="no route",
        older_ms=3_600_000,
        newer_ms=172_800_000,
        text="msg_00",
    )
    assert Filter.parse(str(found)) == found
    assert Filter.parse("") == Filter()


@given(
    st.sampled_from(["", "error:", "type:"]),
    st.text(st.sampled_from('ab:" \\\t*'), max_size=8),
    st.text(st.sampled_from('ab:" \\'), min_size=1, max_size=8),
)
def test_whatever_a_search_says_it_says_again(name: str, one: str, other: str) -> None:
    """A bulk replay reads its search back from text: it must never mean more than was counted."""
    meant = [Filter(error=one, target=other), Filter(text=one), Filter(text=other, type=one)]
    with contextlib.suppress(PolicyError):
        meant.append(Filter.parse(f"{name}{one} {other}"))
    for found in meant:
        assert Filter.parse(str(found)) == found


@pytest.mark.parametrize(
    "text, told",
    [
        ('error:"no route', "not closed"),
        ("state:gone", "waiting, running"),
        ("age:1h", "age:>1h"),
        ("status:5xx", "status:500"),
        ("sauce:stripe", "source:, type:"),
        ("one two", "one id at a time"),
    ],
)
def test_what_cannot_be_meant_is_told(text: str, told: str) -> None:
    """A search that can't be read is refused with what can be written."""
    with pytest.raises(PolicyError, match=told):
        Filter.parse(text)


def test_ids_are_in_the_order_of_arrival() -> None:
    """An id holds its time, sorts as text, is found by a beginning of it; others are refused."""
    number = 1_795_000_000_123 << 20 | 77
    assert event_number(event_id(number)) == number
    assert event_time(number) == 1_795_000_000_123
    assert event_id(number) < event_id(number + 1)
    least, most = Filter(text=event_id(number)[:10]).numbers(0)
    assert least <= number <= most
    assert Filter(text=event_id(number)).numbers(0) == (number, number)
    assert Filter(text="evt_1").key == "evt_1"
    assert Filter(text=event_id(number)).key is None
    for bad in ("", "msg_", "msg_123", "evt_0000000000000000", "msg_ffffffffffffffff", "msg_0x00"):
        with pytest.raises(InvalidKeyError):
            event_number(bad)


def test_a_bucket_is_near_what_fell_in_it() -> None:
    """Histograms are right to a tenth."""
    for ms in (0, 1, 7, 40, 100, 999, 30_000, 600_000):
        assert abs(bucket_ms(bucket_of(ms)) - ms) <= 1 + ms * 0.1


def test_routes_follow_type_and_body() -> None:
    """A target gets what its types and rules let through, with the key that orders it."""
    router = Router(
        {
            "all": TargetPolicy(),
            "bills": TargetPolicy(types=("invoice.*", "charge.paid")),
            "live": TargetPolicy(where=("$.livemode == true", '$.data.kind != "test"')),
            "entity": TargetPolicy(order_by='$.data["the id"]'),
            "first": TargetPolicy(where=("$.lines[0].n == 1.0",)),
        }
    )
    body = json.dumps({"livemode": True, "data": {"the id": 7}, "lines": [{"n": 1.0}]}).encode()
    names = ("all", "bills", "live", "entity", "first")
    assert router.routes(names, "invoice.paid", body) == (
        Route("all"),
        Route("bills"),
        Route("live"),
        Route("entity", "7"),
        Route("first"),
    )
    assert router.routes(names, "charge.failed", b'{"livemode": 1}') == (
        Route("all"),
        Route("entity"),
    )
    assert router.routes(("live", "all"), "x", b"\xff no json") == (Route("all"),)
    with pytest.raises(PolicyError, match="no target 'gone'"):
        router.routes(("gone",), "x", b"")


@pytest.mark.parametrize(
    "policy",
    [
        TargetPolicy(where=("livemode",)),
        TargetPolicy(where=("$.a == b",)),
        TargetPolicy(where=("$..a == 1",)),
        TargetPolicy(order_by="a.b"),
    ],
)
def test_a_rule_that_cannot_be_read_names_its_target(policy: TargetPolicy) -> None:
    """A path or rule is checked when the router is made."""
    with pytest.raises(PolicyError, match="target 'app'"):
        Router({"app": policy})


def test_delays_grow_and_honour_the_target() -> None:
    """Delays grow by the factor up to the longest; what the target asked for is not shortened."""
    policy = TargetPolicy(first_delay=1, factor=2, max_delay=60, jitter=0.5)
    assert [policy.delay_ms(attempt, chance=0.5) for attempt in (1, 2, 3, 99)] == [
        1000,
        2000,
        4000,
        60_000,
    ]
    assert policy.delay_ms(1, chance=0) == 500
    assert policy.delay_ms(1, chance=1) == 1500
    assert policy.delay_ms(1, retry_after_ms=30_000, chance=0) == 30_000
    assert policy.delay_ms(1, retry_after_ms=10**9, chance=0) == 60_000


@pytest.mark.parametrize(
    "options",
    [{"tries": 0}, {"concurrency": 0}, {"factor": 0.5}, {"jitter": 2}, {"rate": 0}, {"timeout": 0}],
)
def test_a_policy_that_cannot_work_is_refused(options: dict[str, int]) -> None:
    """Bounds are checked when a policy is made."""
    with pytest.raises(PolicyError):
        TargetPolicy(**options)  # type: ignore[arg-type]
