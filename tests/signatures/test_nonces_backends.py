"""The replay store on every backend: of many copies of one nonce, one is accepted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from tests.servers.redis import free_port
from tests.signatures.cases import NOW
from tests.signatures.schemes import scheme

from oncekey import aconnect, connect
from oncekey.adcp.signatures import adcp_provider
from oncekey.models import Key, Scope
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.verdict import Nonce

COPIES = 16
REPLAYED = "webhook_signature_replayed"


@pytest.fixture(params=["memory", "sqlite", "postgresql", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store that several objects can open."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/nonces.db"
    return str(
        request.getfixturevalue({"postgresql": "pg_url", "redis": "redis_url"}[request.param])
    )


def verifier(store: Any) -> Any:
    keys = {"k1": scheme("adcp").provider.signing_key}  # type: ignore[attr-defined]
    return adcp_provider(allowed_hosts="*", keys=keys, nonces=Nonces(store))


def test_one_of_sixteen_copies_is_accepted(url: str) -> None:
    """Threads with a store object each, as processes have: one copy wins, others are replays."""
    for _ in range(3):
        request = scheme("adcp").sign()
        codes: list[str] = []
        start = threading.Barrier(COPIES)
        with contextlib.ExitStack() as opened:
            makers = [verifier(opened.enter_context(connect(url))) for _ in range(COPIES)]

            def deliver(
                maker: Any, request: Any = request, start: Any = start, codes: Any = codes
            ) -> None:
                start.wait(60)
                codes.append(maker.verify(*request, now=NOW).code)

            threads = [threading.Thread(target=deliver, args=(maker,)) for maker in makers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert sorted(codes) == ["ok", *[REPLAYED] * (COPIES - 1)]


async def test_one_of_sixteen_copies_is_accepted_async(url: str) -> None:
    """Tasks on four store objects of one loop say the same."""
    request = scheme("adcp").sign()
    async with contextlib.AsyncExitStack() as opened:
        makers = [verifier(await opened.enter_async_context(aconnect(url))) for _ in range(4)]
        verdicts = await asyncio.gather(
            *(makers[n % 4].averify(*request, now=NOW) for n in range(COPIES))
        )
        codes = sorted(verdict.code for verdict in verdicts)
        assert codes == ["ok", *[REPLAYED] * (COPIES - 1)]
        assert (await makers[0].averify(*scheme("adcp").sign(), now=NOW)).ok


def test_many_nonces_in_threads_are_each_fresh_once(url: str) -> None:
    """Sixteen threads that use the same twenty nonces: twenty are fresh, whoever came first."""
    outcomes: list[str] = []
    start = threading.Barrier(COPIES)
    with connect(url) as store:
        nonces = Nonces(store)

        def work() -> None:
            start.wait(60)
            outcomes.extend(nonces.use(Nonce("k1", f"n{n}", 360_000)) for n in range(20))

        threads = [threading.Thread(target=work) for _ in range(COPIES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("fresh") == 20
        assert outcomes.count("replayed") == 20 * (COPIES - 1)
        assert nonces._live == 20


def test_nonces_share_the_store_and_nothing_else(url: str) -> None:
    """Another key, another namespace and a webhook of the same name are no replays of it."""
    with connect(url) as store:
        nonce = Nonce("k1", "n1", 360_000)
        assert Nonces(store).use(nonce) == "fresh"
        assert Nonces(store).use(nonce) == "replayed"
        assert Nonces(store).use(Nonce("k2", "n1", 360_000)) == "fresh"
        assert Nonces(store, namespace="other").use(nonce) == "fresh"
        assert store.read(Key(Scope("webhook", "webhook", "k1"), "n1")) is None
        mark = store.read(Key(Scope("nonce", "webhook", "k1"), "n1"))
        assert mark is not None
        assert 0 < mark.expires_at - store.now() <= 360_000


def test_a_closed_store_is_no_acceptance(url: str) -> None:
    """What can't be looked up is transient on every backend: not ok, and no exception."""
    store = connect(url)
    maker = verifier(store)
    assert maker.verify(*scheme("adcp").sign(), now=NOW).ok
    store.close()
    verdict = maker.verify(*scheme("adcp").sign(), now=NOW)
    assert (verdict.ok, verdict.code, verdict.transient) == (False, "store_unavailable", True)


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
async def test_a_server_that_is_not_there_is_no_acceptance(kind: str) -> None:
    """Sync and async: a port that nobody listens at gives the same transient verdict."""
    url = f"{kind}://127.0.0.1:{free_port()}/0"
    with connect(url) as store:
        verdict = verifier(store).verify(*scheme("adcp").sign(), now=NOW)
    assert (verdict.ok, verdict.code, verdict.transient) == (False, "store_unavailable", True)
    async with aconnect(url) as backend:
        verdict = await verifier(backend).averify(*scheme("adcp").sign(), now=NOW)
    assert (verdict.ok, verdict.code, verdict.transient) == (False, "store_unavailable", True)
