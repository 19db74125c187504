"""The client of HTTP targets: what it keeps open, what it refuses to read, what it never sends."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.inbox.answering import OK, answering, delivery, read_request, serving, target_at
from tests.servers.papers import Papers

from oncekey.errors import PolicyError
from oncekey.inbox.targets import HttpTarget
from oncekey.inbox.targets.client import HttpClient
from oncekey.inbox.targets.replies import Reply, SendError

EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
LONG = 20.0
PRIVATE: dict[str, Any] = {"allow_private": True, "connections": 4}


@contextlib.asynccontextmanager
async def client_at(port: int, **options: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient(f"http://127.0.0.1:{port}/in", **{**PRIVATE, **options})
    try:
        yield client
    finally:
        await client.aclose()


async def post(client: HttpClient, body: bytes = b"{}", seconds: float = LONG) -> Reply | str:
    """The answer, or the cause of there being none."""
    try:
        return await client.post({"x-a": "1"}, body, seconds)
    except SendError as error:
        return str(error)


class Served:
    """A server that gives one answer after another, on any number of connections."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.connections = 0
        self.requests = 0
        self.hung_up = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                await read_request(reader)
                self.requests += 1
                writer.write(self.answers.pop(0))
            await reader.read()
        self.hung_up.set()
        writer.close()


async def test_a_connection_is_used_again() -> None:
    """Requests one after another share a connection; those at the same time have one each."""
    served = Served(*[OK] * 6)
    async with serving(served.handle) as port, client_at(port) as client:
        for _ in range(3):
            assert await post(client) == Reply(200, None, b"hi")
        assert served.connections == 1
        await asyncio.gather(*(post(client) for _ in range(3)))
        assert served.connections == 3


async def test_more_than_its_connections_wait_their_turn() -> None:
    """A client has no more connections than it may; who waits too long for one is told."""
    release = asyncio.Event()

    async def held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await release.wait()
        writer.write(EMPTY)

    async with serving(held) as port, client_at(port, connections=1) as client:
        first = asyncio.create_task(post(client))
        await asyncio.sleep(0)
        assert await post(client, seconds=0.05) == "timeout"
        release.set()
        assert await first == Reply(200, None, b"")


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
ODD = {
    "two ways to say its length": CHUNKED + b"content-length: 2\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi",
    "a signed length": b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nhi",
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nhi",
    "a list of lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nhi",
    "a length past 64 bits": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\nhi" % 2**64,
    "another coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding twice": CHUNKED + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks in 1.0": CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n",
    "no number of a chunk": CHUNKED + b"\r\nxyz\r\nhi\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"\r\n1\r\nhi\r\n0\r\n\r\n",
    "a version of none": b"HTTP/3.7 200 OK\r\ncontent-length: 0\r\n\r\n",
    "version 2 in words": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "a status past 599": b"HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n",
    "a switch to something else": b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "a space before the colon": b"HTTP/1.1 200 OK\r\ncontent-length : 0\r\n\r\n",
    "a NUL in a value": b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 0\r\n\r\n",
    "a bare CR": b"HTTP/1.1 200 OK\r\nx: a\rb\r\ncontent-length: 0\r\n\r\n",
    "no HTTP": b"\xff\xfe hello\r\n\r\n",
}


@pytest.mark.parametrize("raw", ODD.values(), ids=[name.replace(" ", "_") for name in ODD])
async def test_odd_framing_is_no_answer(raw: bytes) -> None:
    """Where it is not plain how long an answer is, there is none, and the connection ends."""
    served = Served(raw, OK)
    async with serving(served.handle) as port, client_at(port) as client:
        assert await post(client) == "bad answer"
        assert await post(client) == Reply(200, None, b"hi")
        assert served.connections == 2


LARGE = {
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"x-fill: 0123456789\r\n" * 2_000,
    "a header without end": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2**20,
    "a status without end": b"HTTP/1.1 200 " + b"y" * 2**20,
    "trailers": CHUNKED + b"\r\n2\r\nhi\r\n0\r\n" + b"x-fill: 0123456789\r\n" * 2_000,
}


@pytest.mark.parametrize("raw", LARGE.values(), ids=[name.replace(" ", "_") for name in LARGE])
async def test_a_head_is_read_to_a_bound(raw: bytes) -> None:
    """Headers, a status line and trailers are cut off before they are many."""
    async with serving(Served(raw).handle) as port, client_at(port) as client:
        assert await post(client) == "answer too large"


async def test_what_costs_more_than_it_says_is_read_to_a_bound() -> None:
    """Extensions of chunks count: an answer that is little else ends, with what was said."""
    raw = CHUNKED + b"\r\n" + (b"1;" + b"e" * 60_000 + b"\r\nx\r\n") * 100
    served = Served(raw)
    async with serving(served.handle) as port, client_at(port) as client:
        found = await post(client)
        async with asyncio.timeout(LONG):
            await served.hung_up.wait()
    assert isinstance(found, Reply)
    assert found.status == 200
    assert 0 < len(found.body) < 20


WELL = {
    "chunks": (CHUNKED + b"\r\n1\r\nh\r\n1;x=y\r\ni\r\n0\r\nretry-after: 9\r\n\r\n", None),
    "hints first": (b"HTTP/1.1 103 X\r\nretry-after: 9\r\n\r\n" + OK, None),
    "asked to wait": (OK.replace(b"\r\n\r\n", b"\r\nRetry-AFTER: 7\r\n\r\n"), "7"),
}


@pytest.mark.parametrize("name", WELL)
async def test_an_answer_is_the_same_however_it_is_cut(name: str) -> None:
    """Byte by byte or at once; trailers and hints say nothing about retries."""
    raw, after = WELL[name]

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(2):
            await read_request(reader)
            for place in range(0, len(raw), 1 if number else len(raw)):
                writer.write(raw[place : place + (1 if number else len(raw))])
                await asyncio.sleep(0)

    async with serving(drip) as port, client_at(port) as client:
        wanted = Reply(200, after, b"hi")
        assert [await post(client), await post(client)] == [wanted, wanted]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
    ],
)
async def test_an_answer_may_end_with_its_connection(raw: bytes) -> None:
    """Without a length the end is the end; such a connection is not used again."""
    seen: list[Any] = []
    async with serving(answering(raw, seen)) as port, client_at(port) as client:
        for _ in range(2):
            assert await post(client) == Reply(200, None, b"hi")
    assert len(seen) == 2


async def test_what_comes_after_an_answer_is_no_answer_to_the_next() -> None:
    """A second answer in the same breath, or one that nobody asked for, ends the connection."""
    lie = b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"
    served = Served(OK + lie, OK + b"garbage", OK)
    async with serving(served.handle) as port, client_at(port) as client:
        for _ in range(3):
            assert await post(client) == Reply(200, None, b"hi")
    assert served.connections == 3
    answered, told = asyncio.Event(), asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await answered.wait()
        writer.write(lie)
        await writer.drain()
        told.set()

    async with serving(late) as port, client_at(port) as client, asyncio.timeout(LONG):
        assert await post(client) == Reply(200, None, b"hi")
        answered.set()
        await told.wait()
        assert await post(client) == Reply(200, None, b"hi")


async def test_a_connection_that_was_closed_meanwhile_is_not_used() -> None:
    """The peer hung up after its answer: the next request has a new connection."""
    served = 0
    closed = asyncio.Event()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await read_request(reader)
        served += 1
        writer.write(OK)
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with serving(once) as port, client_at(port) as client:
        for number in range(3):
            closed.clear()
            assert await post(client) == Reply(200, None, b"hi")
            await closed.wait()
            assert served == number + 1


async def test_a_request_whose_connection_dies_is_not_sent_again() -> None:
    """On a connection that was kept open, too: the target may have it, so it is a failure."""
    seen: list[Any] = []

    async def second_dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(OK)
        seen.append(await read_request(reader))
        writer.close()

    async with serving(second_dies) as port, client_at(port) as client:
        assert await post(client) == Reply(200, None, b"hi")
        assert await post(client) == "connection closed"
    assert len(seen) == 2


async def test_an_answer_before_the_request_is_out_ends_the_connection() -> None:
    """A refusal counts though the body was not read; the rest of it is no next request."""
    refusal = b"HTTP/1.1 413 X\r\ncontent-length: 0\r\n\r\n"
    connections = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal)
        await asyncio.sleep(LONG)

    async with serving(refuse) as port, client_at(port) as client:
        for _ in range(2):
            assert await post(client, b"x" * 30_000_000) == Reply(413, None, b"")
    assert connections == 2


async def test_a_caller_that_goes_away_takes_its_connection_with_it() -> None:
    """Nobody else gets the answer of a request that was cancelled."""
    came = asyncio.Event()
    gone = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        came.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()

    async with serving(wait) as port, client_at(port, connections=1) as client:
        task = asyncio.create_task(post(client))
        await came.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(LONG):
            await gone.wait()


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody uses for a while is given back, and the rest when the client is closed."""
    served = Served(OK, OK)
    monkeypatch.setattr("oncekey.inbox.targets.client.IDLE", 0.01)
    async with serving(served.handle) as port, client_at(port) as client:
        await post(client)
        async with asyncio.timeout(LONG):
            await served.hung_up.wait()
    monkeypatch.undo()
    served = Served(OK, OK)
    async with serving(served.handle) as port:
        async with client_at(port) as client:
            await post(client)
        async with asyncio.timeout(LONG):
            await served.hung_up.wait()
            assert await post(client) == Reply(200, None, b"hi")  # it may come after that


@pytest.mark.parametrize(
    "fields",
    [
        {"content-type": "a\r\nx-b: c"},
        {"content-type": "a\nb"},
        {"content-type": "a\0b"},
        {"a b": "c"},
        {"a:b": "c"},
        {"Transfer-Encoding": "chunked"},
        {"host": "elsewhere"},
        {"content-length": "0"},
    ],
)
async def test_no_header_can_carry_another(fields: dict[str, str]) -> None:
    """What came with an event can't add a header, or say how long the request is."""
    seen: list[Any] = []
    async with serving(answering(OK, seen)) as port, client_at(port) as client:
        with pytest.raises(SendError, match="a header can't be sent"):
            await client.post(fields, b"{}", LONG)
        assert seen == []


async def test_a_path_is_written_as_it_may_stand() -> None:
    """Letters of any alphabet are escaped once, what is escaped already stays, no fragment goes."""
    seen: list[Any] = []
    async with serving(answering(OK, seen)) as port:
        async with target_at(port, "/\u00e9%20x?q=\u20ac&r=%C3%A9#frag") as to:
            assert (await to.send(delivery(), 5_000)).ok
        async with target_at(port, "?a=1") as to:
            assert (await to.send(delivery(), 5_000)).ok
    assert seen[0][0] == "POST /%C3%A9%20x?q=%E2%82%AC&r=%C3%A9 HTTP/1.1"
    assert seen[1][0] == "POST /?a=1 HTTP/1.1"
    assert seen[0][1]["host"] == f"127.0.0.1:{port}"
    with pytest.raises(PolicyError, match="xn--"):
        HttpTarget("https://b\u00fccher.example/")


async def test_addresses_are_tried_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose first address refuses is reached at its second."""
    async with serving(answering(OK)) as closed:
        pass
    async with serving(answering(OK)) as port:

        def lookup(host: str, at: int, flags: int = 0, **_: Any) -> list[Any]:
            if flags:
                raise socket.gaierror
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, ("127.0.0.1", closed)), (*kind, ("127.0.0.1", at))]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        to = HttpTarget(f"http://two.example:{port}/", allow_private=True)
        assert (await to.send(delivery(), 20_000)).ok
        await to.aclose()


async def test_a_name_server_that_hangs_holds_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of attempts share one look, each within its own time, and none blocks others."""
    looks: list[str] = []
    answers = threading.Event()

    def lookup(host: str, at: int, flags: int = 0, **_: Any) -> list[Any]:
        if flags:
            raise socket.gaierror
        looks.append(threading.current_thread().name)
        answers.wait(LONG)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    to = HttpTarget("http://slow.example/")
    try:
        found = await asyncio.gather(*(to.send(delivery(), 50) for _ in range(10)))
        found += await asyncio.gather(*(to.send(delivery(), 50) for _ in range(10)))
        assert {one.error for one in found} == {"timeout"}
        assert len(looks) == 1
        await asyncio.wait_for(asyncio.to_thread(len, looks), LONG)  # others have threads
    finally:
        answers.set()
        await to.aclose()


async def test_tls_is_checked_and_kept_open(papers: Papers) -> None:
    """The certificate must be for the name and of somebody trusted; then a connection stays."""
    served = Served(OK, OK)
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(papers.certificate, papers.key)
    trusting = ssl.create_default_context(cafile=str(papers.root))
    async with serving(served.handle, host="0.0.0.0", ssl=here) as port:
        found = []
        for host, tls in (
            ("127.0.0.1", trusting),
            ("127.0.0.1", None),
            ("127.0.0.2", trusting),
        ):
            client = HttpClient(f"https://{host}:{port}/", **PRIVATE, tls=tls)
            found.append([await post(client) for _ in range(2)])
            await client.aclose()
    assert found == [[Reply(200, None, b"hi")] * 2, *[["certificate refused"] * 2] * 2]
    assert (served.connections, served.requests) == (1, 2)
    async with serving(answering(b"no TLS at all")) as plain:
        client = HttpClient(f"https://127.0.0.1:{plain}/", **PRIVATE)
        assert await post(client, seconds=2) in ("TLS failed", "timeout")
        await client.aclose()


async def test_what_waits_on_tls_is_no_answer_to_the_next(papers: Papers) -> None:
    """Something unasked, or the notice that it is closed, ends a connection of TLS, too."""
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(papers.certificate, papers.key)
    go = threading.Semaphore(0)
    requests = []

    def serve(listener: socket.socket) -> None:
        for more in (OK, b"", b""):  # what comes after each first answer
            with here.wrap_socket(listener.accept()[0], server_side=True) as one:
                requests.append(one.recv(65_536))
                one.sendall(EMPTY)
                go.acquire()
                with contextlib.suppress(OSError):
                    if more:
                        one.sendall(more)
                        one.recv(1)  # until it is hung up
                    else:
                        one.unwrap()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        tls = ssl.create_default_context(cafile=str(papers.root))
        client = HttpClient(url, **PRIVATE, tls=tls)
        for number in range(3):
            assert await post(client) == Reply(200, None, b"")
            assert len(requests) == number + 1
            go.release()
            # Not an await: what has come must not have reached the loop before the next request.
            assert select.select([client._idle[-1]._sock], [], [], LONG)[0]
        await client.aclose()
        await asyncio.to_thread(server.join, LONG)


@pytest.mark.parametrize(
    "test",
    [
        test_a_connection_is_used_again,
        test_more_than_its_connections_wait_their_turn,
        test_what_comes_after_an_answer_is_no_answer_to_the_next,
        test_a_connection_that_was_closed_meanwhile_is_not_used,
        test_a_request_whose_connection_dies_is_not_sent_again,
        test_an_answer_before_the_request_is_out_ends_the_connection,
        test_a_caller_that_goes_away_takes_its_connection_with_it,
        test_what_costs_more_than_it_says_is_read_to_a_bound,
    ],
)
def test_the_loop_of_the_gateway_does_the_same(test: Any) -> None:
    """What holds on asyncio's own loop holds on uvloop, which the gateway runs on."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
