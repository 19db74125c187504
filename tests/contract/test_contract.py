"""The contract suite on every store, sync and async, and on stores that break it."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import Callable

import pytest

from oncekey import AsyncSQLiteStore, MemoryBackend, MemoryStore, SQLiteStore
from oncekey.cli import main
from oncekey.conformance import CHECKS, Check, arun_check, run_check
from oncekey.models import ClaimReply, Key, Terms, Verdict

_numbers = itertools.count()


def _file(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / f"{next(_numbers)}.db")


SYNC = {
    "memory": lambda tmp: MemoryStore(),
    "sqlite": lambda tmp: SQLiteStore(_file(tmp)),
    "sqlite-normal": lambda tmp: SQLiteStore(_file(tmp), durability="normal"),
}
ASYNC = {
    "memory": lambda tmp: MemoryBackend(),
    "sqlite-thread": lambda tmp: AsyncSQLiteStore(_file(tmp)),
    "sqlite-inline": lambda tmp: AsyncSQLiteStore(_file(tmp), commit="inline"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", SYNC.values(), ids=SYNC.keys())
def test_sync_store_keeps_the_contract(
    make: Callable[..., MemoryStore], check: Check, tmp_path: pathlib.Path
) -> None:
    """A sync store keeps every promise of the contract."""
    run_check(check, lambda: make(tmp_path))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", ASYNC.values(), ids=ASYNC.keys())
async def test_async_store_keeps_the_contract(
    make: Callable[..., MemoryBackend], check: Check, tmp_path: pathlib.Path
) -> None:
    """An async store keeps every promise of the contract."""
    await arun_check(check, lambda: make(tmp_path))


class Forgetful(MemoryStore):
    """Loses completions."""

    def complete(self, *args: object) -> bool:  # type: ignore[override]
        return True


class Generous(MemoryStore):
    """Lets everybody win."""

    def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        return ClaimReply(Verdict.WON, 1, terms.lease_ms, 1, None)


class Deleting(MemoryStore):
    """Releases by deleting, so that fences start over with the clock."""

    def release(self, key: Key, owner: bytes, fence: int | None) -> bool:
        held = super().release(key, owner, fence)
        if held:
            self.clear()
        return held


class CheckThenPut(MemoryBackend):
    """Looks first and writes later: the race that the suite must find."""

    async def claim(self, key: Key, owner: bytes, fingerprint: bytes, terms: Terms) -> ClaimReply:
        found = await self.read(key)
        await asyncio.sleep(0)
        if found is None:
            self._table.shards = type(self._table)(10).shards
        return await super().claim(key, owner, fingerprint, terms)


@pytest.mark.parametrize("broken", [Forgetful, Generous, Deleting])
def test_the_suite_finds_a_broken_store(broken: type[MemoryStore]) -> None:
    """A store that breaks a promise fails at least one check, which says what is wrong."""
    failures = []
    for check in CHECKS:
        try:
            run_check(check, broken)
        except AssertionError as error:
            failures.append(str(error))
    assert failures
    assert all(failures)


async def test_the_suite_finds_a_check_then_put_store() -> None:
    """A store that checks and then puts fails the race."""
    race = next(check for check in CHECKS if check.__name__ == "racing_claims_have_one_winner")
    with pytest.raises(AssertionError, match="racing claims won"):
        await arun_check(race, CheckThenPut)


def test_command_reports_each_promise(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``oncekey conformance URL`` prints a line a check, and the count."""
    assert main(["conformance", f"sqlite:///{tmp_path}/x.db"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{2 * len(CHECKS)} passed, 0 failed"
    assert sum(line.startswith("ok ") for line in lines) == 2 * len(CHECKS)


def test_command_names_a_wrong_url(capsys: pytest.CaptureFixture[str]) -> None:
    """A URL that can't be opened is one line and exit code 2."""
    assert main(["conformance", "nosuch://x"]) == 2
    assert "no store has the scheme 'nosuch'" in capsys.readouterr().err
