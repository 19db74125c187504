"""Sixty-four claimers for each of a hundred keys: processes, threads and tasks, every driver."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any

import pytest
from tests.servers.fixtures_pg import sql

KEYS = 100
CLAIMERS = 16  # of each process
PATIENCE = 120  # seconds, also of a call: on a busy machine nothing is wrong before
PROCESSES = ["threads", "threads", "asyncpg", "psycopg"]

WORKER = """
    import asyncio, json, os, random, sys, threading
    from concurrent.futures import ThreadPoolExecutor
    from oncekey._core.flows import new_owner
    from oncekey.models import Key, Scope, Terms, Verdict
    from oncekey.stores.postgres import AsyncPostgresStore, PostgresStore

    kind, url = sys.argv[1:3]
    keys, claimers, patience = map(int, sys.argv[3:])
    scope, terms = Scope("once", "race"), Terms(lease_ms=600_000, ttl_ms=86_400_000)
    verdicts, wins, replays = [], {}, {}

    def told(name, reply):
        verdicts.append(reply.verdict.value)
        if reply.verdict is Verdict.REPLAY:
            replays.setdefault(name, set()).add(reply.answer.hex())

    def shuffled():
        names = [str(number) for number in range(keys)]
        random.shuffle(names)
        return names

    def together():
        print("ready", flush=True)
        sys.stdin.readline()

    def claimer(store):
        for name in shuffled():
            key, owner = Key(scope, name), new_owner()
            reply = store.claim(key, owner, b"f", terms)
            told(name, reply)
            if reply.verdict is Verdict.WON:
                answer = owner + os.urandom(20)
                assert store.complete(key, owner, reply.fence, answer, terms)
                wins.setdefault(name, []).append(answer.hex())

    def again(store):
        for name in shuffled():
            told(name, store.claim(Key(scope, name), new_owner(), b"f", terms))

    async def aclaimer(store):
        for name in shuffled():
            key, owner = Key(scope, name), new_owner()
            reply = await store.claim(key, owner, b"f", terms)
            told(name, reply)
            if reply.verdict is Verdict.WON:
                answer = owner + os.urandom(20)
                assert await store.complete(key, owner, reply.fence, answer, terms)
                wins.setdefault(name, []).append(answer.hex())

    async def aagain(store):
        for name in shuffled():
            told(name, await store.claim(Key(scope, name), new_owner(), b"f", terms))

    async def tasks():
        async with AsyncPostgresStore(url, driver=kind, timeout=patience) as store:
            await store.now()
            together()
            await asyncio.gather(*(aclaimer(store) for _ in range(claimers)))
            together()
            verdicts.clear()
            await asyncio.gather(*(aagain(store) for _ in range(2)))

    if kind == "threads":
        with PostgresStore(url, timeout=patience) as store, ThreadPoolExecutor(claimers) as threads:
            store.now()
            together()
            list(threads.map(claimer, [store] * claimers))
            together()
            verdicts.clear()
            list(threads.map(again, [store] * 2))
    else:
        asyncio.run(tasks())
    print(json.dumps([wins, {name: sorted(found) for name, found in replays.items()}, verdicts]))
"""


def together(workers: list[subprocess.Popen[str]]) -> None:
    """Let all go on at the same time, once all have come here."""
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()


def raced(url: str) -> list[Any]:
    """What each worker says at the end. None outlives this, so that no later test meets it."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(WORKER)]
    with contextlib.ExitStack() as ends:
        workers = []
        for kind in PROCESSES:
            arguments = [*command, kind, url, str(KEYS), str(CLAIMERS), str(PATIENCE)]
            pipe = subprocess.PIPE
            worker = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True)
            workers.append(ends.enter_context(worker))
            ends.callback(worker.kill)
        together(workers)
        together(workers)
        said = [json.loads(worker.communicate(timeout=PATIENCE)[0]) for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * len(workers)
    return said


@pytest.mark.parametrize("partitions", [0, 3], ids=["plain", "partitioned"])
def test_every_key_has_one_winner(postgres: Any, partitions: int) -> None:
    """Each key is won once, and everybody is replayed the winner's very bytes."""
    from oncekey.stores.postgres import PostgresStore

    url = postgres.database()
    with PostgresStore(url) as store:
        store.create_schema(partitions=partitions)
    said = raced(url)

    won: Counter[str] = Counter()
    answers: dict[str, str] = {}
    for wins, _, _ in said:
        for name, found in wins.items():
            won[name] += len(found)
            answers[name] = found[0]
    assert won == Counter({str(number): 1 for number in range(KEYS)})
    for _, replays, verdicts in said:
        assert replays == {name: [answer] for name, answer in answers.items()}
        assert Counter(verdicts) == {"replay": 2 * KEYS}  # after the race nobody gets anything else
    rows = sql(url, "SELECT state, attempts, count(*) FROM oncekey_records GROUP BY 1, 2")
    assert rows == [(1, 1, KEYS)]
