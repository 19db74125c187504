"""Many small cases in one test: what pytest does around each costs more than they do."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["every"]


def every(names: str, cells: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As ``pytest.mark.parametrize``, but within one test: for cells that share its fixtures.

    All cells are tried, and what fails says in which it did. None of them may skip.
    """
    wanted = [name.strip() for name in names.split(",")]
    chosen = [
        dict(zip(wanted, cell if len(wanted) > 1 else (cell,), strict=True)) for cell in cells
    ]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run(**fixtures: Any) -> None:
                with _trials(len(chosen)) as trial:
                    for cell in chosen:
                        with trial(cell):
                            await test(**fixtures, **cell)

        else:

            @functools.wraps(test)
            def run(**fixtures: Any) -> None:
                with _trials(len(chosen)) as trial:
                    for cell in chosen:
                        with trial(cell):
                            test(**fixtures, **cell)

        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name not in wanted]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


@contextlib.contextmanager
def _trials(number: int) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Gathers what fails in blocks of its own, and raises it at the end."""
    failures: list[Exception] = []

    @contextlib.contextmanager
    def trial(cell: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(", ".join(f"{name}={value!r}"[:200] for name, value in cell.items()))
            failures.append(error)

    yield trial
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {number} cells failed", failures)
