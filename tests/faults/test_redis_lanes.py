"""Nobody waits for a server of others, or past the deadline; cancelled claims are given back."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.servers.redis import ClusterGroup, Proxy, Server

from oncekey.errors import StoreTimeoutError, StoreUnavailableError
from oncekey.models import Key, Scope, Terms, Verdict
from oncekey.stores.redis import RedisBackend, RedisStore
from oncekey.stores.redis.topology import slot

TERMS = Terms(lease_ms=3_600_000, ttl_ms=86_400_000)
A, B = b"a" * 16, b"b" * 16
PRINT = b"f" * 64
PREFIX = "lanes"


def key(name: object = "") -> Key:
    return Key(Scope("once", "redis"), str(name) or os.urandom(8).hex())


_owners: dict[int, int] = {}  # the server of each slot: other tests move some of them


def key_of(server: int) -> Key:
    """A fresh key whose slot is on the numbered server of a ClusterGroup."""
    while True:
        found = key()
        if _owners[slot(PREFIX.encode() + b":" + found.digest)] == server:
            return found


@pytest.fixture
def hung(redis_cluster: ClusterGroup) -> Iterator[ClusterGroup]:
    """A Cluster whose first node can be stopped; it goes on in the end."""
    numbers = {server.port: number for number, server in enumerate(redis_cluster.servers)}
    for first, last, master, *_ in redis_cluster.servers[0].raw("CLUSTER SLOTS"):
        _owners.update(dict.fromkeys(range(first, last + 1), numbers[master[1]]))
    yield redis_cluster
    redis_cluster.servers[0].resume()


def test_a_hung_node_holds_up_no_thread_of_another(hung: ClusterGroup) -> None:
    """Threads with keys of other nodes go on while calls to a stopped one wait for it."""
    store = RedisStore(hung.url, prefix=PREFIX, timeout=60)
    try:
        for server in range(3):
            store.claim(key_of(server), A, PRINT, TERMS)
        hung.servers[0].pause()
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(store.claim, key_of(0), A, PRINT, TERMS) for _ in range(4)]
            for server in (1, 2) * 10:
                assert store.claim(key_of(server), A, PRINT, TERMS).verdict is Verdict.WON
            assert not any(future.done() for future in waiting)
            hung.servers[0].resume()
            assert {future.result(60).verdict for future in waiting} == {Verdict.WON}
    finally:
        store.close()


async def test_a_hung_node_holds_up_no_task_of_another(hung: ClusterGroup) -> None:
    """Tasks with keys of other nodes go on while more calls than lanes wait for a stopped one."""
    store = RedisBackend(hung.url, prefix=PREFIX, timeout=60)
    try:
        for server in range(3):
            await store.claim(key_of(server), A, PRINT, TERMS)
        hung.servers[0].pause()
        waiting = [asyncio.create_task(store.claim(key_of(0), A, PRINT, TERMS)) for _ in range(200)]
        for server in (1, 2) * 10:
            assert (await store.claim(key_of(server), A, PRINT, TERMS)).verdict is Verdict.WON
        assert not any(task.done() for task in waiting)
        hung.servers[0].resume()
        async with asyncio.timeout(60):
            assert {reply.verdict for reply in await asyncio.gather(*waiting)} == {Verdict.WON}
    finally:
        await store.aclose()


def test_a_cluster_is_found_past_a_hung_seed(
    hung: ClusterGroup, open_redis: Callable[..., Any]
) -> None:
    """The first address hangs: within the same deadline another one tells where the keys are."""
    store = open_redis(hung.url, prefix=PREFIX, timeout=2)
    hung.servers[0].pause()
    assert store.claim(key_of(1), A, PRINT, TERMS).verdict is Verdict.WON


def test_a_server_that_hangs_ends_the_call_in_doubt(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """After the deadline a typed error says that the call may have been carried out."""
    store = open_redis(redis_server.url, timeout=0.5)
    store.claim(key(), A, PRINT, TERMS)
    redis_server.pause()
    try:
        with pytest.raises(StoreTimeoutError, match="may have carried") as caught:
            store.claim(key("doubt"), A, PRINT, TERMS)
        assert caught.value.outcome_known is False
        assert caught.value.retryable
        with pytest.raises(StoreTimeoutError, match="Nothing was sent") as unsent:
            store.claim(key("unsent"), A, PRINT, TERMS)  # the first one's connection was dropped
        assert unsent.value.outcome_known is True
    finally:
        redis_server.resume()
    assert store.claim(key("unsent"), B, PRINT, TERMS).verdict is Verdict.WON
    assert store.claim(key("doubt"), A, PRINT, TERMS).verdict is Verdict.WON


def test_replies_that_trickle_in_for_other_calls_push_no_deadline_out(
    hung: ClusterGroup,
) -> None:
    """Steady work on healthy nodes does not keep a call to a hung one waiting past its time."""

    async def work() -> None:
        store = RedisBackend(hung.url, prefix=PREFIX, timeout=1)
        try:
            for server in range(3):
                await store.claim(key_of(server), A, PRINT, TERMS)
            hung.servers[0].pause()
            stuck = asyncio.create_task(store.claim(key_of(0), A, PRINT, TERMS))
            async with asyncio.timeout(60):
                while not stuck.done():
                    await store.claim(key_of(1), A, PRINT, TERMS)
            with pytest.raises(StoreTimeoutError):
                stuck.result()
        finally:
            hung.servers[0].resume()
            await store.aclose()

    asyncio.run(work())


# Cancelled claims


@pytest.mark.parametrize("moment", ["connecting", "grouped", "sent"])
async def test_a_cancelled_claim_is_given_back_in_order(
    redis_server: Server, make_proxy: Callable[[int], Proxy], moment: str
) -> None:
    """Whenever it is cancelled: the server frees the key after it was won, not before."""
    url = f"redis://127.0.0.1:{make_proxy(redis_server.port).port}"
    store = RedisBackend(url, prefix="cancelled")
    name, other = key(), key()
    try:
        if moment != "connecting":
            await store.claim(other, A, PRINT, TERMS)
        # In a batch calls of one kind go together: a release that comes first takes the other
        # release along, past the claim.
        company = [store.release(other, A, None), store.release(key(), A, None)]
        tasks = [asyncio.create_task(one) for one in company if moment == "grouped"]
        claim = asyncio.create_task(store.claim(name, A, PRINT, TERMS))
        late = asyncio.create_task(store.release(name, A, None))
        if moment == "sent":
            await asyncio.sleep(0)
        for one in company:
            if moment != "grouped":
                one.close()
        await asyncio.sleep(0)
        claim.cancel()
        await asyncio.gather(*tasks, claim, late, return_exceptions=True)
    finally:
        await store.aclose()
    after = RedisBackend(redis_server.url, prefix="cancelled")
    try:
        assert (await after.claim(name, B, PRINT, TERMS)).verdict is Verdict.WON
    finally:
        await after.aclose()


# Prefixes and certificates


def test_clear_leaves_a_longer_prefix_alone(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """The records of prefix ``a:b`` are not those of prefix ``a``."""
    stores = {prefix: open_redis(redis_server.url, prefix=prefix) for prefix in ("a", "a:b", "a:")}
    for store in stores.values():
        store.claim(key("k"), A, PRINT, TERMS)
    stores["a"].clear()
    found = {prefix: store.read(key("k")) is not None for prefix, store in stores.items()}
    assert found == {"a": False, "a:b": True, "a:": True}


def _self_signed(directory: Path) -> Path:
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(private, hashes.SHA256())
    )
    file = directory / "server.pem"
    file.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return file


def test_a_certificate_that_is_not_trusted_is_named(
    tmp_path: Path, open_redis: Callable[..., Any]
) -> None:
    """The error speaks of TLS and of the file to pass, not of a wrong address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_self_signed(tmp_path))

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                context.wrap_socket(plain, server_side=True).close()
            except OSError:
                plain.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        store = open_redis(f"rediss://localhost:{listener.getsockname()[1]}", timeout=20)
        with pytest.raises(StoreUnavailableError, match=r"TLS.*ssl_ca_certs"):
            store.claim(key(), A, PRINT, TERMS)
        listener.shutdown(socket.SHUT_RDWR)
        server.join(20)
