"""Key strategies: where a delivery's idempotency key comes from."""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncekey import keys
from oncekey.errors import CanonicalJSONError, InvalidKeyError, PolicyError
from oncekey.keys import (
    Ulid,
    event_id,
    hmac_key,
    json_path,
    payload_hash,
    signature_bound,
    ulid,
)

EVENT: dict[str, Any] = {
    "id": "evt_1",
    "n": 42,
    "data": {"items": [{"id": "a"}, {"id": 7}], "a.b": {"c d": "x"}, 'q"[': "y", "0": "zero"},
    "zero": 0,
    "none": None,
    "yes": True,
    "float": 1.5,
    "empty": "",
    "blank": " \t",
    "nul": "a\0b",
    "surrogate": "\ud800",
    "long": "x" * 256,
    "longest": "x" * 255,
    "huge": 10**5000,
    "hash": "5f3c",
    "event": {"hash": "9b1d"},
}


@pytest.mark.parametrize(
    "path, key",
    [
        ("id", "evt_1"),
        ("$.id", "evt_1"),
        ("n", "42"),
        ("zero", "0"),
        ("data.items[0].id", "a"),
        ("$.data.items[1].id", "7"),
        ('data["a.b"]["c d"]', "x"),
        ('$["data"]["a.b"].c d', "x"),
        ('data["q\\"["]', "y"),
        ("data.0", "zero"),
        ("longest", "x" * 255),
    ],
)
def test_json_path_finds_the_value(path: str, key: str) -> None:
    """Names, indices and quoted names lead to a string or an integer."""
    assert json_path(EVENT, path) == key
    assert event_id(EVENT, path) == key


@pytest.mark.parametrize(
    "path, reason",
    [
        ("missing", "nothing at missing"),
        ("data.items[2].id", r"nothing at data\.items\[2\]\.id"),
        ("data[0]", r"nothing at data\[0\]"),
        ("data.items.id", "nothing at"),
        ("id.deeper", "nothing at"),
        ("id[0]", "nothing at"),
        ("none", "none is null"),
        ("none.deeper", "nothing at"),
        ("yes", "yes is bool"),
        ("float", "float is float"),
        ("data", "data is dict"),
        ("data.items", "is list"),
        ("empty", "empty is empty"),
        ("blank", "blank is empty"),
        ("nul", "NUL"),
        ("surrogate", "lone surrogate"),
        ("long", "at most 255"),
        ("huge", "at most 255"),
    ],
)
def test_what_can_not_be_a_key_is_refused(path: str, reason: str) -> None:
    """A missing or unfit value is an error that names the path."""
    for strategy in (json_path, event_id, payload_hash):
        with pytest.raises(InvalidKeyError, match=reason) as caught:
            strategy(EVENT, path)
        assert path in str(caught.value)


@pytest.mark.parametrize(
    "path", ["", "$", ".", "a..b", "a[", "a[x]", "a[-1]", "a]", 'a["\\x"]', "a."]
)
def test_a_malformed_path_is_a_policy_error(path: str) -> None:
    """A path that is none is the programmer's mistake, not the sender's."""
    with pytest.raises(PolicyError, match=r"write it"):
        json_path(EVENT, path)


def test_integers_at_the_length_limit() -> None:
    """255 digits are a key, 256 are not."""
    assert json_path({"n": 10**254}, "n") == "1" + "0" * 254
    with pytest.raises(InvalidKeyError, match="at most 255"):
        json_path({"n": 10**255}, "n")


def test_enum_members_give_their_value() -> None:
    """A string or integer Enum member is its value, not its name."""

    class Name(str, enum.Enum):  # noqa: UP042 - its str() is the name, unlike a StrEnum's
        A = "value"

    class Number(enum.IntEnum):
        B = 5

    assert json_path({"a": Name.A}, "a") == "value"
    assert type(json_path({"a": Name.A}, "a")) is str
    assert json_path({"a": Number.B}, "a") == "5"


def test_event_id_is_at_id_by_default() -> None:
    """Most providers call it ``id``."""
    assert event_id(EVENT) == "evt_1"


def test_event_id_from_headers_ignores_letter_case() -> None:
    """A header is found however the framework spells it; body fields are not."""
    headers = {"content-type": "application/json", "X-Github-Delivery": "72d3162e"}
    assert event_id(headers, "X-GitHub-Delivery") == "72d3162e"
    assert event_id(headers, "x-github-delivery") == "72d3162e"
    with pytest.raises(InvalidKeyError, match="nothing at webhook-id"):
        event_id(headers, "webhook-id")
    with pytest.raises(InvalidKeyError, match="nothing at ID"):
        event_id(EVENT, "ID")


def test_two_spellings_of_a_header_are_refused() -> None:
    """Which of two ids counts must not be left to chance."""
    with pytest.raises(InvalidKeyError, match="2 times"):
        event_id({"Webhook-Id": "a", "webhook-id": "b"}, "WEBHOOK-ID")
    with pytest.raises(InvalidKeyError, match="WEBHOOK-ID is empty"):
        event_id({"webhook-id": ""}, "WEBHOOK-ID")


def test_payload_hash_is_the_payloads_own() -> None:
    """The field is ``hash`` unless another path is given."""
    assert payload_hash(EVENT) == "5f3c"
    assert payload_hash(EVENT, "event.hash") == "9b1d"


def test_hmac_key_is_what_it_says() -> None:
    """HMAC-SHA256 over the length-prefixed id and the canonical payload."""
    message = (5).to_bytes(8, "big") + b"evt_1" + b'{"a":1,"b":"\xc3\xa9"}'
    expected = hmac.new(b"secret", message, hashlib.sha256).hexdigest()
    payload = {"b": "\u00e9", "a": 1.0}
    assert hmac_key("evt_1", payload, "secret") == expected
    assert hmac_key("evt_1", payload, b"secret") == expected
    assert hmac_key("evt_1", b' {"b": "\\u00e9", "a": 1}', b"secret") == expected


def test_hmac_key_changes_with_each_part() -> None:
    """Another id, payload or secret is another key, and no part can move into the next."""
    made = {
        hmac_key("e", 1, "s"),
        hmac_key("e2", 1, "s"),
        hmac_key("e", 2, "s"),
        hmac_key("e", 1, "s2"),
        hmac_key("e1", 1, "s"),
        hmac_key("e", 11, "s"),
    }
    assert len(made) == 6


def test_hmac_key_needs_a_secret_and_an_id() -> None:
    """Without a secret anybody could make the key; without an id all events would share one."""
    for secret in ("", b""):
        with pytest.raises(PolicyError, match="secret is empty"):
            hmac_key("e", {}, secret)
    with pytest.raises(InvalidKeyError, match="event id is empty"):
        hmac_key("", {}, "s")
    with pytest.raises(InvalidKeyError, match="lone surrogate"):
        hmac_key("\ud800", {}, "s")
    with pytest.raises(CanonicalJSONError, match="more than once"):
        hmac_key("e", b'{"a":1,"a":2}', "s")


def test_signature_bound_is_what_it_says() -> None:
    """SHA-256 over the length-prefixed signature and the raw or canonical body."""
    expected = hashlib.sha256((3).to_bytes(8, "big") + b"sig" + b'{"a":1}').hexdigest()
    assert signature_bound(b'{"a":1}', "sig") == expected
    assert signature_bound({"a": 1.0}, b"sig") == expected
    assert signature_bound(b'{"a": 1}', "sig") != expected  # raw bytes are taken as they are


def test_the_same_body_under_another_signature_is_another_key() -> None:
    """The key is bound to the signature, byte for byte."""
    assert signature_bound(b"body", "s1") != signature_bound(b"body", "s2")
    assert signature_bound(b"1body", "s") != signature_bound(b"body", "s1")


def test_signature_bound_needs_a_signature() -> None:
    """An empty signature was never verified."""
    for signature in ("", b""):
        with pytest.raises(InvalidKeyError, match="signature is empty"):
            signature_bound(b"body", signature)
    with pytest.raises(CanonicalJSONError):
        signature_bound({"a": object()}, "s")


# --- ULID --------------------------------------------------------------------------------------


def counting(values: list[int]) -> Callable[[], int]:
    steps: Iterator[int] = iter(values)
    return lambda: next(steps)


def test_ulid_layout() -> None:
    """48 bits of milliseconds and 80 random bits in Crockford's base 32."""
    made = Ulid(clock=lambda: 1469918176385, randbytes=lambda _: bytes(range(10)))()
    assert made == "01ARYZ6S41" + "000G40R40M30E209"
    lowest = Ulid(clock=lambda: 0, randbytes=bytes)
    assert lowest() == "0" * 26
    highest = Ulid(clock=lambda: 2**48 - 1, randbytes=lambda n: b"\xff" * n)
    assert highest() == "7" + "Z" * 25


def test_ulids_increase_while_the_clock_stands_still_or_goes_back() -> None:
    """Order holds whatever the clock does."""
    clock = counting([1000, 1000, 999, 5, 1000, 1001, 0, 1002])
    generate = Ulid(clock=clock)
    made = [generate() for _ in range(8)]
    assert made == sorted(set(made))


def test_a_used_up_random_part_moves_the_milliseconds() -> None:
    """After the last random value of a millisecond comes the next millisecond, freshly random."""
    noise = iter([b"\xff" * 10, b"\x01" * 10])
    generate = Ulid(clock=lambda: 7, randbytes=lambda _: next(noise))
    first, second = generate(), generate()
    assert first == "0000000007" + "Z" * 16
    assert second == "0000000008" + "040G2081040G2081"
    assert generate() > second


def test_a_new_millisecond_has_new_randomness() -> None:
    """The sequence is not guessable from its past."""
    asked: list[int] = []

    def randbytes(count: int) -> bytes:
        asked.append(count)
        return os.urandom(count)

    generate = Ulid(clock=counting([1, 1, 2]), randbytes=randbytes)
    made = [generate() for _ in range(3)]
    assert asked == [10, 10]
    assert made[0][10:] != made[2][10:]


@pytest.mark.parametrize("now", [-1, 2**48])
def test_a_clock_out_of_range_is_an_error(now: int) -> None:
    """A time that 48 bits can't hold is refused, not cut off."""
    with pytest.raises(PolicyError, match="clock"):
        Ulid(clock=lambda: now)()


def test_the_last_ulid_of_all_is_not_followed_by_a_smaller_one() -> None:
    """At the very end of the range the generator raises."""
    generate = Ulid(clock=lambda: 2**48 - 1, randbytes=lambda n: b"\xff" * n)
    generate()
    for _ in range(2):
        with pytest.raises(PolicyError, match="clock"):
            generate()


def test_randbytes_must_return_ten_bytes() -> None:
    """Too little randomness is an error."""
    with pytest.raises(PolicyError, match="9 bytes"):
        Ulid(randbytes=lambda _: b"123456789")()


def test_ulids_are_unique_and_ordered_across_threads() -> None:
    """Threads share one sequence without a repeat, each seeing it rise."""
    made: list[list[str]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def work(out: list[str]) -> None:
        start.wait()
        out.extend(ulid() for _ in range(2000))

    threads = [threading.Thread(target=work, args=(out,)) for out in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out == sorted(out) for out in made)
    assert len({key for out in made for key in out}) == 16_000
    assert all(len(key) == 26 for out in made for key in out)


def test_one_thread_at_a_time_makes_the_next_ulid() -> None:
    """A second thread waits, so that it can't start from the same last value."""
    asked: list[int] = []
    inside, go_on = threading.Event(), threading.Event()

    def clock() -> int:
        asked.append(1)
        return 1000

    def randbytes(count: int) -> bytes:
        inside.set()
        go_on.wait(20)
        return bytes(count)

    generate = Ulid(clock=clock, randbytes=randbytes)
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(generate())) for _ in range(2)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    threads[1].join(0.1)
    alone = len(asked) == 1
    go_on.set()
    for thread in threads:
        thread.join()
    assert alone
    assert sorted(made) == ["00000000Z8" + "0" * 16, "00000000Z8" + "0" * 15 + "1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_sequence_of_its_own() -> None:
    """Parent and child never make the same ULID, even when a thread held the lock at the fork."""
    program = """
        import os, signal
        from oncekey import keys
        generate = keys.Ulid(clock=lambda: 1000)
        first = generate()
        reader, writer = os.pipe()
        keys._process.lock.acquire()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os.write(writer, generate().encode())
            os._exit(0)
        keys._process.lock.release()
        assert os.waitpid(pid, 0)[1] == 0, "the child hung or failed"
        print(first, generate(), os.read(reader, 26).decode())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, parents, childs = done.stdout.split()
    assert parents > first
    assert parents[:10] == childs[:10] == first[:10]
    # A continued sequence would differ from the first in the last few bits only.
    assert parents[:22] == first[:22]
    assert childs[:22] != first[:22]


def test_every_key_fits_the_stores() -> None:
    """Keys have at most 255 characters."""
    assert keys.MAX_KEY_LENGTH == 255
    assert len(hmac_key("e", {}, "s")) == len(signature_bound(b"", "s")) == 64


@pytest.mark.parametrize("raw", [b'{"id": 1}', '{"id": 1}'])
def test_a_body_that_was_not_parsed_is_named(raw: Any) -> None:
    """Raw bytes or text where a parsed body belongs says to parse it first."""
    with pytest.raises(InvalidKeyError, match="parse it first"):
        event_id(raw)
