"""A guarded block that never looks whether its work was done before does it twice, and is told."""

from __future__ import annotations

import pytest

from oncekey import AsyncOnce, MemoryBackend, MemoryStore, Once


def test_a_block_that_never_looks_is_told() -> None:
    """The second time: its work has run once more, which must not be silent."""
    once, runs = Once(MemoryStore()), list[int]()
    with once.guard("invoice-7"):
        runs.append(1)
    with pytest.raises(LookupError, match=r"never looked at claim\.replayed"):
        with once.guard("invoice-7"):
            runs.append(2)
    assert runs == [1, 2]


async def test_a_block_of_a_loop_is_told_too() -> None:
    """By the same words."""
    once = AsyncOnce(MemoryBackend())
    async with once.guard("invoice-7"):
        pass
    with pytest.raises(LookupError, match="Put its work under 'if not"):
        async with once.guard("invoice-7"):
            pass


@pytest.mark.parametrize("look", ["replayed", "answer"])
def test_any_look_will_do(look: str) -> None:
    """Who looked knows, and may do as it likes."""
    once = Once(MemoryStore())
    for _ in range(2):
        with once.guard("invoice-7") as claim:
            getattr(claim, look)


def test_an_error_of_the_block_stays_the_error() -> None:
    """What went wrong first is what is told."""
    once = Once(MemoryStore())
    with once.guard("invoice-7"):
        pass
    with pytest.raises(KeyError), once.guard("invoice-7"):
        raise KeyError
