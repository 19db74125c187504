"""Targets: what they send, what they refuse, and what a sick one can do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from tests.inbox.answering import (
    BODY,
    OK,
    SECRET,
    answering,
    delivery,
    read_request,
    serving,
    target_at,
)

from oncekey.errors import PermanentError, PolicyError
from oncekey.inbox import Arrival, Delivery, Route, TargetPolicy, open_inbox
from oncekey.inbox.delivery import DeliveryWorker, Destination
from oncekey.inbox.targets import CallableTarget, CommandTarget, HttpTarget, Target
from oncekey.inbox.targets.addresses import is_public
from oncekey.signatures import provider

MANY = "too many interim answers"


async def test_a_request_carries_the_event_signed_anew() -> None:
    """The body is the original, byte for byte; the signature verifies; ids and counts are there."""
    seen: list[Any] = []
    async with serving(answering(OK, seen)) as port:
        async with target_at(
            port, secret=[SECRET, "whsec_" + "b" * 32], headers={"X-A": "1"}
        ) as to:
            assert isinstance(to, Target)
            answer = await to.send(delivery(content_type="application/x"), 5_000)
    assert (answer.ok, answer.status, answer.note) == (True, 200, "hi")
    line, headers, body = seen[0]
    assert line == "POST /in HTTP/1.1"
    assert body == BODY
    assert headers["content-type"] == "application/x"
    assert headers["webhook-id"] == headers["idempotency-key"] == "msg_00000000000000ab"
    assert (headers["oncekey-attempt"], headers["oncekey-fence"]) == ("3", "7")
    assert headers["x-a"] == "1"
    assert len(headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, "whsec_" + "b" * 32):
        assert provider("standard-webhooks", secret).verify("POST", "", headers, body).ok
    assert "accept-encoding" not in headers


async def test_without_a_secret_nothing_is_signed() -> None:
    """A target without a secret gets the ids and no signature."""
    seen: list[Any] = []
    async with serving(answering(OK, seen)) as port, target_at(port) as to:
        assert (await to.send(delivery(), 5_000)).ok
    assert "webhook-signature" not in seen[0][1]
    assert seen[0][1]["webhook-timestamp"].isdigit()


@pytest.mark.parametrize(
    "status, wanted",
    [
        (204, (True, "", False, True)),
        (400, (False, "HTTP 400", False, False)),
        (408, (False, "HTTP 408", False, True)),
        (410, (False, "HTTP 410", True, False)),
        (429, (False, "HTTP 429", False, True)),
        (500, (False, "HTTP 500", False, True)),
    ],
)
async def test_a_status_says_what_to_do(status: int, wanted: tuple[Any, ...]) -> None:
    """2xx is success, 410 the end; 5xx, 408 and 429 speak against the target as a whole."""
    raw = b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status
    async with serving(answering(raw)) as port, target_at(port) as to:
        answer = await to.send(delivery(), 5_000)
    assert (answer.ok, answer.error, answer.permanent, answer.sick) == wanted


@pytest.mark.parametrize(
    "value, least, most",
    [
        ("7", 7_000, 7_000),
        ("+3600", 3_500_000, 3_601_000),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
    ],
)
async def test_retry_after_is_read(value: str, least: int, most: int) -> None:
    """Seconds and dates are understood."""
    if value.startswith("+"):
        value = formatdate(time.time() + int(value), usegmt=True)
    raw = f"HTTP/1.1 503 X\r\nretry-after: {value}\r\ncontent-length: 0\r\n\r\n".encode()
    async with serving(answering(raw)) as port, target_at(port) as to:
        answer = await to.send(delivery(), 5_000)
    assert answer.retry_after_ms is not None
    assert least <= answer.retry_after_ms <= most


async def test_nonsense_in_retry_after_is_nothing() -> None:
    """What can't be read counts as not said."""
    raw = b"HTTP/1.1 503 X\r\nretry-after: soon\r\ncontent-length: 0\r\n\r\n"
    async with serving(answering(raw)) as port, target_at(port) as to:
        assert (await to.send(delivery(), 5_000)).retry_after_ms is None


async def test_redirects_are_not_followed() -> None:
    """A redirect is a failure, wherever it leads."""
    visits: list[Any] = []
    async with serving(answering(OK, visits)) as inner:
        raw = f"HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:{inner}/\r\ncontent-length: 0\r\n\r\n"
        async with serving(answering(raw.encode())) as port, target_at(port) as to:
            answer = await to.send(delivery(), 5_000)
    assert (answer.ok, answer.status, answer.error) == (False, 302, "redirect not followed")
    assert visits == []


async def test_a_flood_is_read_to_a_bound() -> None:
    """An answer that never ends is cut after a few kilobytes, and its connection closed."""
    sent = 0
    over = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65_536)
                await writer.drain()
                sent += 65_536
        over.set()

    async with serving(flood) as port, target_at(port) as to:
        answer = await to.send(delivery(), 10_000)
        assert answer.ok
        assert len(answer.note) <= 500
        async with asyncio.timeout(10):
            await over.wait()
    assert sent < 50_000_000


@pytest.mark.parametrize("interim, wanted", [(0, (True, "")), (8, (True, "")), (9, (False, MANY))])
async def test_interim_answers_are_bounded(interim: int, wanted: tuple[bool, str]) -> None:
    """Some 1xx are no harm; without end they would hold up the loop, so the attempt ends."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * interim)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with serving(answer) as port:
        target = HttpTarget(f"http://127.0.0.1:{port}/", allow_private=True)
        found = await target.send(delivery(), 60_000)
        await target.aclose()
    assert (found.ok, found.error) == wanted


async def test_what_hangs_or_breaks_off_is_a_failure_in_time() -> None:
    """A target that says nothing, drips, closes or breaks off costs its own deadline at most."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

    for handle in (hang, drip):
        async with serving(handle) as port, target_at(port) as to:
            answer = await to.send(delivery(), 200)
        assert (answer.ok, answer.error) == (False, "timeout")
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
    for raw, cause in ((cut, "answer cut off"), (b"", "connection closed")):
        async with serving(answering(raw)) as port, target_at(port) as to:
            answer = await to.send(delivery(), 5_000)
        assert (answer.ok, answer.error) == (False, cause)
    async with serving(answering(b"\xff\xff not http\r\n\r\n")) as port, target_at(port) as to:
        assert not (await to.send(delivery(), 5_000)).ok


async def test_sick_targets_harm_no_other(tmp_path: Path) -> None:
    """Beside targets that hang, fail, break off, redirect and flood, a healthy one gets all."""
    seen: list[Any] = []
    redirect = b"HTTP/1.1 302 X\r\nlocation: http://10.0.0.1/\r\ncontent-length: 0\r\n\r\n"

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 500 X\r\ncontent-length: 10000000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65_536)
                await writer.drain()

    handlers = {
        "hangs": hang,
        "floods": flood,
        "fails": answering(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"),
        "breaks": answering(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"),
        "redirects": answering(redirect),
        "well": answering(OK, seen),
    }
    policy = TargetPolicy(concurrency=4, timeout=20, tries=2, first_delay=600, breaker_after=0)
    async with contextlib.AsyncExitStack() as stack:
        inbox = await stack.enter_async_context(await open_inbox(f"sqlite:///{tmp_path / 'i.db'}"))
        targets = {}
        for name, handle in handlers.items():
            port = await stack.enter_async_context(serving(handle))
            to = await stack.enter_async_context(target_at(port))
            targets[name] = Destination(to, policy)
        for n in range(30):
            routes = tuple(Route(name) for name in handlers)
            await inbox.ingest(Arrival("shop", f"k{n}", "paid", BODY, routes=routes))
        worker = DeliveryWorker(inbox, targets)
        task = asyncio.create_task(worker.run())
        async with asyncio.timeout(60):
            while len(seen) < 30 or len(await inbox.issues()) < 4:
                await asyncio.sleep(0.05)
        issues = {one.target: one.error for one in await inbox.issues()}
        hanging = next(one.in_flight for one in worker.report() if one.target == "hangs")
        assert await worker.stop(grace=0) >= 4
        await task
    assert hanging == 4  # its own slots, all of them, and nobody else's
    assert issues == {
        "floods": "HTTP 500",
        "fails": "HTTP 500",
        "breaks": "answer cut off",
        "redirects": "redirect not followed",
    }


async def test_nobody_there_is_named() -> None:
    """A closed port and a name that is none each have a cause that groups."""
    async with serving(answering(OK)) as port:
        pass
    async with target_at(port) as to:
        assert (await to.send(delivery(), 5_000)).error == "connection refused"
    to = HttpTarget("http://no-such-host.invalid/")
    try:
        assert (await to.send(delivery(), 20_000)).error == "name not found"
    finally:
        await to.aclose()


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
    *("100.64.0.1", "100.100.100.200", "0.0.0.0", "192.0.0.192", "192.0.2.1"),
    *("192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1"),
    *("240.0.0.1", "255.255.255.255", "::1", "::", "::ffff:10.0.0.1"),
    *("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::"),
    *("2001:0:7f00:1::", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fec0::1"),
    *("ff02::1", "2001:db8::1", "5f00::1", "3fff::1", "100::1"),
    *("nonsense",),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_known(address: str) -> None:
    """Every range that leads inside is refused, and what can't be read too."""
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_known(address: str) -> None:
    """The internet is reachable."""
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "0", "127.1"),
        *("[::1]", "0177.0.0.1", "127.0.0.1."),
    ],
)
async def test_no_spelling_leads_inside(host: str) -> None:
    """However loopback is written, nothing is connected: the socket itself refuses."""
    came: list[Any] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer)
        writer.close()

    async with serving(note) as port:
        to = HttpTarget(f"http://{host}:{port}/")
        try:
            answer = await to.send(delivery(), 10_000)
        finally:
            await to.aclose()
    assert not answer.ok
    assert came == []
    if host in ("127.0.0.1", "localhost"):
        assert answer.error == "private address refused"


async def test_a_name_is_judged_by_what_it_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is rebound, or has a private record beside a public one, reaches no inside."""
    came: list[Any] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer)
        writer.close()

    async with serving(note) as port:
        import socket

        def lookup(host: str, port: Any, flags: int = 0, **_: Any) -> list[Any]:
            if flags:  # no address by itself
                raise socket.gaierror
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
                for address in ("127.0.0.1", "10.0.0.1")
            ]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        to = HttpTarget(f"http://rebound.example:{port}/")
        try:
            answer = await to.send(delivery(), 10_000)
        finally:
            await to.aclose()
    assert answer.error == "private address refused"
    assert came == []


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP_PROXY would take requests past the rules."""
    seen: list[Any] = []
    async with serving(answering(OK, seen)) as proxy, serving(answering(OK)) as port:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
        async with target_at(port) as to:
            assert (await to.send(delivery(), 5_000)).ok
    assert seen == []


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/",
        "http://",
        "h/path",
        "http://user:pw@h/",
        "http://h:99999/",
        "http://h/\r\nx: 1",
        "http://\u2460\u2461\u2466.0.0.1/",
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    """Bad URLs are found when the target is made, and no password is shown."""
    with pytest.raises(PolicyError) as caught:
        HttpTarget(url)
    assert "pw" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize(
    "name, value",
    [("webhook-id", "x"), ("a b", "x"), ("x", "a\r\nb: c"), ("Transfer-Encoding", "chunked")],
)
def test_a_header_that_cannot_be_sent_is_refused(name: str, value: str) -> None:
    """Headers of ours can't be replaced, and none can carry a second."""
    with pytest.raises(PolicyError):
        HttpTarget("https://example.com/", headers={name: value})


async def test_functions_are_targets() -> None:
    """Plain and async functions get the delivery; what they raise is the outcome."""
    seen: list[str] = []

    def plain(one: Delivery) -> None:
        seen.append(one.event.id)

    async def waits(one: Delivery) -> None:
        await asyncio.sleep(60)

    def fails(one: Delivery) -> None:
        raise KeyError("secret")

    def gives_up(one: Delivery) -> None:
        raise PermanentError("never")

    answers = {}
    for function in (plain, waits, fails, gives_up):
        to = CallableTarget(function)
        answers[function.__name__] = await to.send(delivery(), 200 if function is waits else 20_000)
        await to.aclose()
    assert answers["plain"].ok
    assert seen == ["msg_00000000000000ab"]
    assert answers["waits"].error == "timeout"
    assert (answers["fails"].error, answers["fails"].sick) == ("KeyError", False)
    assert "secret" not in answers["fails"].note
    assert answers["gives_up"].permanent


def python(code: str) -> CommandTarget:
    return CommandTarget([sys.executable, "-c", code])


async def test_a_command_gets_the_body_and_answers_by_its_code() -> None:
    """Standard input is the body, the environment names the event, the exit code decides."""
    code = "import os, sys; print(len(sys.stdin.buffer.read()), os.environ['ONCEKEY_ID'])"
    answer = await python(code).send(delivery(), 30_000)
    assert (answer.ok, answer.note.strip()) == (True, f"{len(BODY)} msg_00000000000000ab")
    answer = await python("raise SystemExit(3)").send(delivery(), 30_000)
    assert (answer.ok, answer.status, answer.error) == (False, 3, "exit code 3")
    assert (await python("raise SystemExit(65)").send(delivery(), 30_000)).permanent
    answer = await CommandTarget(["/no/such/program"]).send(delivery(), 30_000)
    assert answer.error == "can't start: FileNotFoundError"
    with pytest.raises(PolicyError):
        CommandTarget("rm -rf /")


async def test_a_command_does_not_see_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets in the environment of the worker stay there."""
    monkeypatch.setenv("SHOP_SECRET", "x")
    answer = await python("import os; print('SHOP_SECRET' in os.environ)").send(delivery(), 30_000)
    assert answer.note.strip() == "False"


async def test_a_child_that_holds_the_pipe_wedges_nobody(tmp_path: Path) -> None:
    """A command that leaves a child behind is over when it is over, and the child goes too."""
    mark = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(mark)!r}, 'w').write(str(child.pid))\n"
        "print('y' * 1000000)\n"
    )
    async with asyncio.timeout(60):
        answer = await python(code).send(delivery(), 50_000)
    assert answer.ok
    assert len(answer.note) <= 500
    await gone(int(mark.read_text()))


async def gone(pid: int) -> None:
    """Wait until a process is no more; somebody else's child may be a zombie for a while."""
    async with asyncio.timeout(20):
        while True:
            try:
                os.kill(pid, 0)
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (ProcessLookupError, FileNotFoundError):
                return
            if state == "Z":
                return
            await asyncio.sleep(0.02)


async def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    """Its whole process group is, whatever signals it ignores."""
    mark = tmp_path / "pid"
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    answer = await python(code).send(delivery(), 3_000)
    assert (answer.ok, answer.error) == (False, "timeout")
    if mark.exists() and mark.read_text():
        await gone(int(mark.read_text()))
    assert signal.getsignal(signal.SIGTERM) is not None
