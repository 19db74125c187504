"""Stricter isolation: what the server undoes is begun anew before the handler, else retryable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from tests.transactions.conftest import PATIENCE, Witness
from tests.transactions.crashing import follow
from tests.transactions.routes import ROUTES, Caller, Place, Route, block

from oncekey import StoreUnavailableError
from oncekey.models import Key, Scope

connections = pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.flavour == "pg" and route.joins],
    ids=lambda route: route.id,
)
LEVELS = ["REPEATABLE READ", "SERIALIZABLE"]


async def strict(caller: Caller, level: str) -> None:
    """Have all later transactions of the connection at ``level``."""
    sql = f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}"
    await caller.run(caller.on, sql)
    if caller.in_transaction():
        await caller.commit()


@pytest_asyncio.fixture(loop_scope="session")
async def relaxed(caller: Caller) -> Any:
    """The connection is as strict as any again afterwards."""
    yield
    await strict(caller, "READ COMMITTED")


@pytest.fixture
def rival(place: Place) -> Iterator[Any]:
    """A connection of somebody else's."""
    connection: Any = psycopg.connect(place.url)
    yield connection
    connection.close()


@connections
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("relaxed")
async def test_claim_that_the_server_undoes_is_made_again(
    route: Route,
    level: str,
    own_store: Any,
    caller: Caller,
    rival: Any,
    witness: Witness,
    name: str,
) -> None:
    """A serialization failure before the handler is nobody's business: it runs once, then."""
    with pytest.raises(KeyError):
        async with block(own_store, f"{name} warm", on=caller.on):
            raise KeyError
    await strict(caller, level)
    key = Key(Scope("once", "default"), name)
    attempts: list[str] = []
    follow(own_store, attempts.append)
    ran = 0

    # Another's row of that key, not committed yet: the claim has its snapshot and waits for it.
    rival.execute(
        "INSERT INTO oncekey_records (tenant, key, scope, state, owner, fence, fingerprint, "
        "lease_until, expires_at, purge_at, attempts) VALUES ('', %s, %s, 2, '', 1, '', 0, "
        "9000000000000, 9000000000000, 1)",
        (key.digest, key.scope.label),
    )
    with ThreadPoolExecutor(1) as pool:
        let_go = pool.submit(_commit_when_somebody_waits, rival, witness)
        async with block(own_store, name, on=caller.on, wait=PATIENCE) as tx:
            ran += 1
            await caller.write(tx.connection, name)
            tx.answer = 1
        let_go.result()
    assert (ran, attempts.count("opened"), attempts.count("committed")) == (1, 2, 1)
    assert witness.effects("pg", name) == 1
    async with block(own_store, name, on=caller.on) as tx:
        assert (tx.replayed, tx.answer) == (True, 1)
    assert witness.effects("pg", name) == 1


def _commit_when_somebody_waits(rival: Any, witness: Witness) -> None:
    query = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    until = time.monotonic() + PATIENCE
    while not witness.pg.execute(query).fetchone()[0] and time.monotonic() < until:
        time.sleep(0.005)
    rival.commit()


@connections
@pytest.mark.parametrize("step", ["written", "completed"])
@pytest.mark.usefixtures("relaxed")
async def test_serialization_failure_at_the_end_is_retryable_and_leaves_nothing(
    route: Route,
    step: str,
    own_store: Any,
    caller: Caller,
    rival: Any,
    witness: Witness,
    name: str,
) -> None:
    """What SERIALIZABLE refuses to commit is gone, answer and all, and a retry does it once."""
    await strict(caller, "SERIALIZABLE")
    mine, theirs = f"{name} mine", f"{name} theirs"
    count = "SELECT count(*) FROM effects WHERE name = '{}'"
    rival.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    left = [step]

    def strike(reached: str) -> None:
        if reached in left:
            left.remove(reached)
            rival.commit()

    follow(own_store, strike)

    async def work(answer: int) -> tuple[bool, Any]:
        async with block(own_store, name, on=caller.on, wait=PATIENCE) as tx:
            if not tx.replayed:
                await caller.run(tx.connection, count.format(theirs))
                if left:  # it reads what we write, and writes what we have read
                    rival.execute(count.format(mine))
                    rival.execute("INSERT INTO effects VALUES (%s)", (theirs,))
                await caller.write(tx.connection, mine)
                strike("written")
                tx.answer = answer
            return tx.replayed, tx.answer

    with pytest.raises(StoreUnavailableError) as caught:
        await work(1)
    assert caught.value.retryable
    assert not left
    assert not caller.in_transaction()
    assert [witness.effects("pg", one) for one in (mine, theirs)] == [0, 1]
    assert witness.record("pg", name) is None
    assert await work(2) == (False, 2)
    assert await work(3) == (True, 2)
    assert witness.effects("pg", mine) == 1
