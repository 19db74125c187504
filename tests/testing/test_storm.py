"""Storms: many events with copies at once, over networks that fail, and what they find."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter
from typing import Any

import pytest
from tests.testing import apps, naive

from oncekey import connect
from oncekey.errors import PolicyError
from oncekey.testing import (
    Proxy,
    _storm,
    assert_handled_once,
    astorm,
    deliver,
    deliver_twice,
    sample,
    storm,
)

STRIPE = naive.STRIPE


def test_our_receiver_weathers_a_storm() -> None:
    """Every event once, every copy a duplicate, in any order of eight threads."""
    charged: list[str] = []
    report = storm(apps.sync_receiver(STRIPE, charged), events=400, seed=7, effects=charged)

    assert assert_handled_once(report) is report
    assert (report.handled, report.duplicates, report.effects) == (400, 171, 400)
    assert report.outcomes == {"handled": 400, "duplicate": 171}
    assert report.seed == 7
    assert len(charged) == len(set(charged)) == 400
    assert "400 events, 571 deliveries (171 duplicate, 400 handled), 400 effects" in str(report)


async def test_our_async_receiver_weathers_a_storm() -> None:
    """The same as tasks of one loop."""
    charged: list[str] = []
    report = await astorm(
        apps.async_receiver(STRIPE, charged), events=300, duplicates=0.5, effects=charged
    )
    assert (report.check().handled, report.duplicates, report.effects) == (300, 300, 300)


def test_apps_and_servers_weather_a_storm() -> None:
    """A Flask app called directly, and over HTTP."""
    charged: list[str] = []
    app = apps.flask_app(apps.sync_receiver(STRIPE, charged))
    like = sample(STRIPE, url="/hooks/stripe")
    storm(app, like, events=50, effects=charged).check()
    with apps.served(app) as url:
        storm(url, like, events=50, workers=4, effects=charged).check()
    assert len(set(charged)) == len(charged) == 100


def test_the_same_seed_gives_the_same_order() -> None:
    """Ids differ from run to run: a store that remembers them is no trouble."""

    def order(seed: int) -> list[int]:
        seen: list[str] = []

        def receive(method: str, url: str, headers: Any, body: bytes) -> int:
            seen.append(STRIPE.verify(method, url, headers, body).event_id or "")
            return 200

        storm(receive, sample(STRIPE), events=30, workers=1, seed=seed)
        names.append(seen[0])
        return [int(name.rpartition("-")[2]) for name in seen]

    names: list[str] = []
    first = order(1)
    assert first == order(1) != order(2)
    assert len(set(names)) == 3
    assert sum(one == other for one, other in itertools.pairwise(first)) >= 3  # beside


def test_what_is_retryable_is_retried() -> None:
    """A handler that fails now and then is not wrong; the events end up handled."""
    tries: Counter[str] = Counter()
    charged: list[str] = []
    lock = threading.Lock()

    def handle(event: Any) -> None:
        with lock:
            tries[event.id] += 1
            fail = tries[event.id] == 1 and event.id.endswith("0")
        if fail:
            raise ValueError("not now")
        charged.append(event.id)

    receiver = apps.WebhookReceiver(STRIPE, "memory://")
    receiver.on()(handle)
    report = storm(receiver, events=100, duplicates=0, effects=charged).check()

    assert report.retryable == report.outcomes["failed"] == 10
    assert (report.handled, report.effects, report.wrong) == (100, 100, [])


# Faults


def test_a_storm_finds_a_receiver_that_remembers_nothing() -> None:
    """More effects than events."""
    receiver = naive.Forgetful()
    report = storm(receiver, sample(STRIPE), events=70, effects=receiver.charged)

    assert (report.effects, report.ok) == (100, False)
    assert "happened 100 times for 70 events: copies that came at once" in report.problems[0]


def test_a_storm_finds_check_then_mark() -> None:
    """Copies beside each other go ahead together: two threads, and each pair meets."""
    receiver = naive.CheckThenMark()
    receiver.between = threading.Barrier(2).wait
    report = storm(
        receiver, sample(STRIPE), events=1, duplicates=0.5, workers=2, effects=receiver.charged
    )

    assert report.effects == 2
    with pytest.raises(AssertionError, match="must be one atomic step"):
        report.check()


def test_a_storm_finds_409() -> None:
    """The wrong answers are listed, and counted by event."""
    report = storm(naive.Conflict(), sample(STRIPE), events=70, workers=4)

    assert [one.status for one in report.wrong] == [409] * 30
    assert "the duplicate was answered 409: senders treat" in report.problems[0]
    assert "events such as storm-" in report.problems[0]


def test_a_storm_finds_events_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledged without an effect, or refused for ever."""
    monkeypatch.setattr(_storm, "_ROUNDS", 3)
    silent = naive.AckOnly()
    report = storm(silent, sample(STRIPE), events=20, effects=silent.charged)
    assert "never happened, though 20 events were answered 2xx" in report.problems[0]

    busy = storm(naive.Refuses(503), sample(STRIPE), events=5, duplicates=0)
    assert (busy.handled, busy.retryable) == (0, 15)
    assert "answered 503: the handler failed (5 events such as" in busy.problems[0]


def test_long_storms_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line now and then, to standard error or to whom it is wanted by."""
    lines: list[str] = []
    receiver = apps.sync_receiver(STRIPE, [])
    storm(receiver, events=5, progress=lines.append)
    assert lines == []
    monkeypatch.setattr(_storm, "_QUIET", 0.0)
    storm(receiver, events=5, duplicates=0, progress=lines.append)
    assert len(lines) == 5
    assert lines[-1].startswith("storm: 5 of 5 deliveries, ")
    assert lines[-1].endswith(" a second, 0 wrong answers")
    storm(receiver, events=2)
    assert "storm: 1 of 3 deliveries" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [{"events": 0}, {"workers": 0}, {"duplicates": 1}, {"duplicates": -0.1}]
)
def test_storms_that_can_not_be_are_refused(options: dict[str, Any]) -> None:
    """With the bounds."""
    with pytest.raises(PolicyError, match="events and workers must be 1 or more"):
        storm(apps.sync_receiver(STRIPE, []), **options)
    with pytest.raises(PolicyError, match="pass a delivery"):
        storm(naive.Forgetful())


# Networks


def test_a_lost_reply_is_retried_and_the_copy_is_a_duplicate() -> None:
    """The receiver handled it, the sender never heard of it: one effect."""
    charged: list[str] = []
    app = apps.flask_app(apps.sync_receiver(STRIPE, charged))
    with apps.served(app) as url, Proxy(url) as proxy:
        proxy.lose_replies(1)
        delivery = sample(STRIPE, url="/hooks/stripe")
        report = deliver_twice(proxy.url, delivery, effects=charged)

    assert [one.status for one in report.answers] == [0, 200]
    assert (proxy.lost, assert_handled_once(report).effects) == (1, 1)


def test_a_storm_with_lost_replies_ends_with_each_event_once() -> None:
    """Senders that hear nothing send again."""
    charged: list[str] = []
    app = apps.flask_app(apps.sync_receiver(STRIPE, charged))
    with apps.served(app) as url, Proxy(url) as proxy:
        proxy.lose_replies(15)
        like = sample(STRIPE, url="/hooks/stripe")
        report = storm(proxy.url, like, events=60, workers=4, effects=charged)

    assert proxy.lost == 15
    assert (report.check().handled, report.effects, report.retryable) == (60, 60, 15)


def test_a_lost_reply_shows_a_receiver_that_remembers_nothing() -> None:
    """The same experiment, another end."""
    receiver = naive.Forgetful()

    def app(environ: Any, start_response: Any) -> Any:
        headers = {
            name[5:].replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        status = receiver("POST", "", headers, body)
        start_response(f"{status} x", [])
        return []

    with apps.served(app) as url, Proxy(url) as proxy:
        proxy.lose_replies()
        report = deliver_twice(proxy.url, sample(STRIPE), effects=receiver.charged)
    assert (proxy.lost, report.effects) == (1, 2)
    with pytest.raises(AssertionError, match="copies are not recognised"):
        report.check()


def test_a_receiver_whose_store_loses_replies_handles_each_event_once(redis_url: str) -> None:
    """The proxy stands before a real Redis: what its store can't know for sure is retried."""
    charged: list[str] = []
    with Proxy(redis_url) as proxy, connect(proxy.url) as store:
        receiver = apps.sync_receiver(STRIPE, charged, store, lease=0.5)
        assert deliver(receiver, sample(STRIPE)).outcome == "handled"
        proxy.lose_replies(4)
        report = storm(receiver, events=40, workers=4, effects=charged)

        assert proxy.lost == 4
        assert report.handled == 40
        assert report.wrong == []
        assert set(report.outcomes) <= {"handled", "duplicate", "unavailable", "in_flight"}
        with proxy.partition():
            proxy.cut()
    assert len(set(charged)) == 41


def test_a_partition_holds_everything_back() -> None:
    """Nothing passes while it lasts; then all of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with Proxy(f"{host}:{port}") as proxy:
            assert proxy.url == f"127.0.0.1:{proxy.port}"
            client = socket.create_connection(("127.0.0.1", proxy.port), timeout=30)
            there = server.accept()[0]
            client.sendall(b"before")
            assert there.recv(99) == b"before"
            with proxy.partition():
                client.sendall(b"during")
                there.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    there.recv(99)
                there.settimeout(30)
            assert there.recv(99) == b"during"
            there.sendall(b"back")
            assert client.recv(99) == b"back"
            proxy.cut()
            assert client.recv(99) == b""
            assert there.recv(99) == b""
            client.close()
            there.close()


def test_a_proxy_keeps_what_else_a_url_says() -> None:
    """User, password, path and options stay; the default port is known."""
    with Proxy("postgresql+psycopg://ada:s3cret@localhost/shop?sslmode=disable") as proxy:
        assert proxy.url == (
            f"postgresql+psycopg://ada:s3cret@127.0.0.1:{proxy.port}/shop?sslmode=disable"
        )
    for bad in ("nowhere", "tcp://host", "http://:80", "http://host:port"):
        with pytest.raises(PolicyError, match="names no server: write it like"):
            Proxy(bad)


def test_a_proxy_before_nobody_hangs_up() -> None:
    """As a network does where the server is gone; and so does one that is closed."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with Proxy(f"http://127.0.0.1:{port}") as proxy:
        assert deliver(proxy.url, sample(STRIPE)).status == 0
    proxy.close()
    assert "ConnectionRefusedError" in deliver(proxy.url, sample(STRIPE)).error
