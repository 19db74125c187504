"""Recorded deliveries: kept whole but for secrets, and made again in any order."""

from __future__ import annotations

import argparse
import base64
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.testing import apps, naive

from oncekey.cli import replay as command
from oncekey.errors import PolicyError
from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver
from oncekey.signatures import providers
from oncekey.testing import (
    ManualClock,
    Recorder,
    SignedDelivery,
    adeliver,
    areplay,
    assert_handled_once,
    deliver,
    recorded,
    replay,
    sample,
)

pytest.importorskip("cryptography")

STRIPE = naive.STRIPE
PATH = "/hooks/stripe"
DAY = 86_400


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "deliveries.jsonl"


def record(file: Path, *deliveries: SignedDelivery, clock: Any = None) -> None:
    """Write them as a recorder does when they come to a receiver."""
    with Recorder(file, **({"clock": clock} if clock else {})) as recorder:
        for one in deliveries:
            recorder.add(*one)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# Recording


def test_a_line_holds_the_whole_delivery_and_no_secret(file: Path, clock: ManualClock) -> None:
    """Method, URL, headers, body and time; credentials that are not the sender's are left out."""
    delivery = sample(
        STRIPE,
        id="evt_1",
        url="/hooks?a=b",
        headers={
            "Authorization": "Bearer s3cret",
            "Cookie": "session=s3cret",
            "Proxy-Authorization": "Basic s3cret",
            "X-Other": "kept",
        },
    )
    with Recorder(file, clock=clock) as recorder:
        receiver = recorder.wrap(apps.sync_receiver(STRIPE, []))
        assert isinstance(receiver, WebhookReceiver)
        assert receiver.receive(*delivery).outcome == "handled"

    [row] = rows(file)
    assert row["method"] == "POST"
    assert row["url"] == "https://testserver/hooks?a=b"
    assert base64.b64decode(row["body"]) == delivery.body
    assert row["received"] == clock()
    names = {name for name, _ in row["headers"]}
    assert {"stripe-signature", "content-type", "x-other"} == names
    assert "s3cret" not in file.read_text()
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


def test_credentials_by_any_name_are_left_out(file: Path) -> None:
    """API keys, tokens and sessions, in headers and in the query; those asked for are kept."""
    hidden = [
        "X-Api-Key",
        "apikey",
        "X-Auth-Token",
        "X-Session-Id",
        "X-Client-Secret",
        "X-Goog-Jwt",
    ]
    headers = dict.fromkeys(hidden, "s3cret") | {"X-Gitlab-Token": "asked for", "X-Other": "kept"}
    query = "a=b&token=s3cret&access_token=s3cret&api%5Fkey=s3cret&password=s3cret&page=2"
    with Recorder(file, keep=["X-GitLab-Token"]) as recorder:
        recorder.add("POST", f"https://me:s3cret@host/hooks?{query}", headers, b"{}")
    [row] = rows(file)
    assert {name for name, _ in row["headers"]} == {"x-gitlab-token", "x-other"}
    assert row["url"].startswith("https://host/hooks?a=b&token=left-out&")
    assert row["url"].endswith("&page=2")
    assert "s3cret" not in file.read_text()


# What is sent is the secret itself, or good for a while: it is kept only if that is asked for.
TOKENS = {
    "gitlab": "x-gitlab-token",
    "google-pubsub": "authorization",
    "telegram": "x-telegram-bot-api-secret-token",
}


@pytest.mark.parametrize("name", list(providers()))
def test_what_a_signature_needs_is_kept(name: str, file: Path) -> None:
    """A recorded delivery of any provider has all of the headers that it was signed with."""
    if name.startswith(("adcp", "rfc9421", "custom")):
        wanted = {"signature", "signature-input", "content-digest"}
        delivery = [("Signature", "x"), ("Signature-Input", "y"), ("Content-Digest", "z")]
        with Recorder(file) as recorder:
            recorder.add("POST", "https://host/", delivery, b"")
    else:
        sent = sample(name)
        wanted = {field.lower() for field in dict(sent.headers)} - {TOKENS.get(name)}
        with Recorder(file) as recorder:
            recorder.add(*sent)
    assert {field for field, _ in rows(file)[0]["headers"]} == wanted


def test_a_recording_is_its_owners_alone(tmp_path: Path) -> None:
    """A file that others could read no longer is; a link is refused, wherever it leads."""
    readable = tmp_path / "old.jsonl"
    readable.touch(0o644)
    Recorder(readable).close()
    assert stat.S_IMODE(os.stat(readable).st_mode) == 0o600
    victim, link = tmp_path / "victim", tmp_path / "link.jsonl"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(PolicyError, match="is a link"):
        Recorder(link)
    assert victim.read_text() == "mine"


def test_a_recorded_receiver_is_the_same_receiver(file: Path) -> None:
    """Handlers that are added later count for both; the first one is not recorded."""
    charged: list[str] = []
    plain = WebhookReceiver(STRIPE, "memory://")
    with Recorder(file) as recorder:
        receiver = recorder.wrap(plain)
        receiver.on()(lambda event: charged.append(event.id))
        assert receiver.receive(*sample(STRIPE)).outcome == "handled"
        assert plain.receive(*sample(STRIPE)).outcome == "handled"
    assert (len(charged), len(rows(file))) == (2, 1)


async def test_async_receivers_and_functions_are_recorded(file: Path) -> None:
    """Both kinds of each."""

    async def asynchronous(method: str, url: str, headers: Any, body: bytes) -> int:
        return 200

    def synchronous(method: str, url: str, headers: Any, body: bytes) -> int:
        return 200

    with Recorder(file) as recorder:
        receiver = recorder.wrap(apps.async_receiver(STRIPE, []))
        assert isinstance(receiver, AsyncWebhookReceiver)
        for target in (receiver, recorder.wrap(asynchronous), recorder.wrap(synchronous)):
            assert (await adeliver(target, sample(STRIPE))).status == 200
    assert len(rows(file)) == 3


@pytest.mark.parametrize("name", providers())
def test_what_an_app_gets_is_recorded_so_that_it_verifies(name: str, file: Path) -> None:
    """Through Flask and Starlette: the same bytes, the same URL, every header that is signed."""
    delivery = sample(name, url="/hooks/a%20b?x=1&y=%C3%A9")
    assert delivery.provider is not None
    charged: list[str] = []
    with Recorder(file, keep=[TOKENS[name]] if name in TOKENS else []) as recorder:
        wsgi = recorder.wrap(apps.flask_app(apps.sync_receiver(delivery.provider, charged)))
        asgi = recorder.wrap(apps.starlette_app(apps.async_receiver(delivery.provider, charged)))
        assert deliver(wsgi, delivery).ok
        assert deliver(asgi, delivery.again()).ok
    found = recorded(file)

    assert len(found) == len(charged) == 2
    for one in found:
        assert delivery.provider.verify(*one, now=one.now).ok
    assert found[0].body == delivery.body


def test_requests_that_change_nothing_are_not_recorded(file: Path) -> None:
    """Health checks and preflights pass by; so do websockets and lifespans."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    with Recorder(file) as recorder:
        deliver(recorder.wrap(apps.flask_app(apps.sync_receiver(STRIPE, []))), _get())
        deliver(recorder.wrap(apps.starlette_app(apps.async_receiver(STRIPE, []))), _get())
        coroutine = recorder.wrap(app)({"type": "lifespan"}, None, None)
        with pytest.raises(StopIteration):
            coroutine.send(None)
    assert (rows(file), seen) == ([], ["lifespan"])


def _get() -> SignedDelivery:
    return SignedDelivery("GET", "https://testserver/health", {}, b"")


def test_a_body_in_pieces_is_recorded_whole(file: Path) -> None:
    """An ASGI app that reads as it likes; what it gets is what the server gave."""
    pieces = [
        {"type": "http.request", "body": b"a", "more_body": True},
        {"type": "http.request", "body": b"b"},
        {"type": "http.disconnect"},
    ]
    got: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while len(got) < 3:
            got.append(await receive())

    async def receive() -> Any:
        return pieces[len(got)]

    scope = {"type": "http", "method": "POST", "path": "/a b", "headers": []}
    with Recorder(file) as recorder:
        coroutine = recorder.wrap(app)(scope, receive, None)
        with pytest.raises(StopIteration):
            coroutine.send(None)
    assert got == pieces
    assert [(one.url, one.body) for one in recorded(file)] == [("http://localhost/a%20b", b"ab")]


def test_a_chunked_wsgi_body_is_recorded_where_its_end_is_known(file: Path) -> None:
    """Without a length it is read only if the server ends the stream."""
    import io

    bodies: list[bytes] = []

    def app(environ: Any, start_response: Any) -> Any:
        bodies.append(environ["wsgi.input"].read())
        return []

    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/hooks",
        "QUERY_STRING": "a=b",
        "SERVER_NAME": "shop.example",
        "SERVER_PORT": "8000",
        "wsgi.url_scheme": "http",
    }
    with Recorder(file) as recorder:
        for ended in (True, False):
            stream = io.BytesIO(b"chunks")
            recorder.wrap(app)(
                {**environ, "wsgi.input": stream, "wsgi.input_terminated": ended}, None
            )
    assert bodies == [b"chunks", b""]
    assert recorded(file)[0].url == "http://shop.example:8000/hooks?a=b"


def test_a_header_that_came_twice_comes_twice_again(file: Path) -> None:
    """Receivers refuse it, and a replay must show that."""
    delivery = sample(STRIPE)
    twice = [*delivery.headers.items(), ("Stripe-Signature", "t=1,v1=2")]  # type: ignore[union-attr]
    record(file, SignedDelivery("POST", delivery.url, twice, delivery.body))

    [found] = recorded(file)
    assert isinstance(found.headers, list)
    assert replay(apps.sync_receiver(STRIPE, []), [found]).answers[0].code == "header_malformed"


def test_a_full_disk_does_not_stop_deliveries(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What can't be written is logged, and handled."""
    recorder = Recorder(file)
    receiver = recorder.wrap(apps.sync_receiver(STRIPE, []))
    recorder.close()

    assert receiver.receive(*sample(STRIPE)).outcome == "handled"
    assert "could not be recorded" in caplog.text


def test_threads_write_whole_lines(file: Path) -> None:
    """Deliveries that come at once do not mix."""
    together = threading.Barrier(8)
    with Recorder(file) as recorder:

        def add() -> None:
            together.wait()
            for _ in range(20):
                recorder.add("POST", "https://x.example/", {}, b"x" * 5000)

        threads = [threading.Thread(target=add) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {one.body for one in recorded(file)} == {b"x" * 5000}
    assert len(recorded(file)) == 160


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "{}",
        "7",
        '{"method": "POST", "url": "u", "headers": [["a"]], "body": "", "received": 1}',
        '{"method": "POST", "url": "u", "headers": [], "body": "%%%", "received": 1}',
        '{"method": "POST", "url": "u", "headers": [], "body": "", "received": "soon"}',
    ],
)
def test_a_line_that_is_no_delivery_is_named(file: Path, line: str) -> None:
    """With its number, and what it should be."""
    record(file, sample(STRIPE))
    with file.open("a") as more:
        more.write(f"\n{line}\n")
    with pytest.raises(PolicyError, match=r"deliveries.jsonl:3 is no recorded delivery"):
        recorded(file)


def test_a_url_can_not_be_recorded(file: Path) -> None:
    """Its app can."""
    with Recorder(file) as recorder, pytest.raises(PolicyError, match="wrap the app or receiver"):
        recorder.wrap("http://localhost:8000/")


# Replaying


def test_a_receiver_gets_old_deliveries_at_their_own_time(file: Path, clock: ManualClock) -> None:
    """Signatures of long ago hold, since the receiver is told when they came."""
    for day in range(3):
        record(file, sample(STRIPE, id=f"evt_{day}", now=clock()), clock=clock)
        clock.advance(DAY)
    charged: list[str] = []
    found = replay(apps.sync_receiver(STRIPE, charged), file, copies=2, effects=charged)

    assert found.check().outcomes == {"handled": 3, "duplicate": 3}
    assert (found.events, found.effects, charged) == (3, 3, ["evt_0", "evt_1", "evt_2"])


def test_a_seed_gives_an_order(file: Path) -> None:
    """Shuffled, and in the same way again; without one, as it was."""
    record(file, *(sample(STRIPE, id=f"evt_{number}") for number in range(20)))

    def order(seed: int | None) -> list[str]:
        charged: list[str] = []
        replay(apps.sync_receiver(STRIPE, charged), file, seed=seed).check()
        return charged

    assert order(None) == [f"evt_{number}" for number in range(20)]
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted(order(None))


def test_an_app_gets_old_deliveries_signed_anew(file: Path, clock: ManualClock) -> None:
    """Without a provider they are refused, and the report says what to pass."""
    old = [sample(STRIPE, id=f"evt_{number}", now=clock(), url=PATH) for number in range(4)]
    record(file, *old, clock=clock)
    charged: list[str] = []
    app = apps.flask_app(apps.sync_receiver(STRIPE, charged))

    stale = replay(app, file)
    assert stale.outcomes == {"401": 4}
    with pytest.raises(
        AssertionError, match=r"too old by now; pass provider= .*\(4 events such as"
    ):
        assert_handled_once(stale)

    fresh = replay(app, file, provider=STRIPE, copies=2, seed=3, at_once=4, effects=charged)
    assert fresh.check().outcomes == {"200": 8}
    assert sorted(charged) == [f"evt_{number}" for number in range(4)]


def test_a_receiver_can_get_them_signed_anew_for_their_own_time(
    file: Path, clock: ManualClock
) -> None:
    """After a change of secrets: the new signature says when the delivery came, not when it is."""
    record(file, sample("stripe", secret="whsec_old", now=clock()), clock=clock)
    seen: list[str | None] = []
    receiver = WebhookReceiver(STRIPE, "memory://")
    receiver.on()(lambda event: seen.append(event.headers.one("stripe-signature")))

    assert replay(receiver, file).answers[0].code == "signature_mismatch"
    replay(receiver, file, provider=STRIPE).check()
    assert [(one or "").split(",")[0] for one in seen] == [f"t={int(clock())}"]


async def test_recordings_are_replayed_in_an_event_loop(file: Path, clock: ManualClock) -> None:
    """At once, on an async receiver and on an ASGI app."""
    record(file, *(sample(STRIPE, now=clock(), url=PATH) for _ in range(5)), clock=clock)
    charged: list[str] = []
    receiver = apps.async_receiver(STRIPE, charged)
    found = await areplay(receiver, file, copies=3, at_once=15, effects=charged)
    assert found.check().outcomes == {"handled": 5, "duplicate": 10}

    app = apps.starlette_app(apps.async_receiver(STRIPE, charged))
    found = await areplay(app, recorded(file), provider=STRIPE, copies=2, at_once=5)
    assert found.check().outcomes == {"200": 10}


@pytest.mark.parametrize("name", providers())
def test_every_provider_signs_recordings_anew(name: str, file: Path, clock: ManualClock) -> None:
    """With the same id, over a real URL."""
    delivery = sample(name, url=PATH, now=clock())
    assert delivery.provider is not None
    record(file, delivery, clock=clock)
    charged: list[str] = []
    app = apps.flask_app(apps.sync_receiver(delivery.provider, charged))
    with apps.served(app) as url:
        found = replay(url, file, provider=delivery.provider, copies=2, effects=charged)

    repeats = providers()[name].repeats  # each delivery is handled
    assert (found if repeats else found.check()).effects == (2 if repeats else 1)
    if delivery.event_id:
        assert charged == [delivery.event_id]


def test_replays_find_faults(file: Path, clock: ManualClock) -> None:
    """Doubled: no memory, and 409; at once: check, then mark."""
    record(file, *(sample(STRIPE) for _ in range(3)))

    forgetful = naive.Forgetful()
    found = replay(forgetful, file, provider=STRIPE, copies=2, effects=forgetful.charged)
    assert found.effects == 6
    assert "happened 6 times for 3 events: copies are not recognised" in found.problems[0]

    found = replay(naive.Conflict(), file, provider=STRIPE, copies=2)
    assert "the duplicate was answered 409" in found.problems[0]
    assert "(3 events such as" in found.problems[0]

    racing = naive.CheckThenMark()
    racing.between = threading.Barrier(2).wait
    found = replay(racing, file, provider=STRIPE, copies=2, at_once=2, effects=racing.charged)
    assert found.effects == 6
    assert "in one atomic step" in found.problems[0]


def test_events_without_a_provider_are_told_apart_by_their_bodies(file: Path) -> None:
    """Good enough to see what a copy is."""
    record(file, *(sample(STRIPE) for _ in range(3)))
    found = replay(lambda m, u, h, b: 200, file, copies=4)

    assert (found.events, found.handled, found.duplicates) == (3, 3, 9)


def test_wrong_replays_are_refused(file: Path) -> None:
    """Nothing to replay, or not so often."""
    file.write_text("")
    with pytest.raises(PolicyError, match="the recording is empty"):
        replay(naive.Forgetful(), file)
    record(file, sample(STRIPE))
    with pytest.raises(PolicyError, match="copies and at_once"):
        replay(naive.Forgetful(), file, copies=0)


# The command


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers())
    parsed = parser.parse_args(["replay", *arguments])
    code: int = parsed.run(parsed)
    return code


def test_the_command_replays_over_http(
    file: Path,
    clock: ManualClock,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 0 and a summary; 1 and what is wrong."""
    stripe = sample("stripe", secret="whsec_mine").provider
    record(
        file,
        *(sample(stripe, now=clock(), url=PATH) for _ in range(3)),
        clock=clock,  # type: ignore[arg-type]
    )
    monkeypatch.setenv("STRIPE_SECRET", "whsec_mine")
    charged: list[str] = []
    with apps.served(apps.flask_app(apps.sync_receiver(stripe, charged))) as url:  # type: ignore[arg-type]
        signing = ("--provider", "stripe", "--secret-env", "STRIPE_SECRET")
        assert run(url, str(file), *signing, "--copies", "2", "--at-once", "3", "--seed", "1") == 0
        assert "3 events, 6 deliveries (6 200)" in capsys.readouterr().out
        assert run(url, str(file)) == 1
        assert "too old by now" in capsys.readouterr().out
    assert len(charged) == 3
    with pytest.raises(PolicyError, match="no such file"):
        run("http://localhost/", "nowhere.jsonl")
