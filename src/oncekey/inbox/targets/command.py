"""Commands as targets: the body on standard input, success by the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncekey.errors import PolicyError
from oncekey.inbox.models import Delivery
from oncekey.inbox.targets.base import Answer

__all__ = ["CommandTarget"]

OUTPUT_KEPT: Final = 4_096  # bytes of what a command prints
_BAD_DATA: Final = 65  # EX_DATAERR of sysexits.h
_INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SYSTEMROOT")


class CommandTarget:
    """Runs a command for each delivery, without a shell.

    The body is its standard input; ``ONCEKEY_ID``, ``ONCEKEY_SOURCE``, ``ONCEKEY_TYPE``,
    ``ONCEKEY_ATTEMPT`` and ``ONCEKEY_FENCE`` are in its environment. Exit code 0 is success, 65
    gives the delivery up, any other is tried again. It runs in a process group of its own, which is
    killed when the command has ended or its time is over: nothing it started stays.

    Args:
        command: The program and its arguments.
        env: More of an environment; of ours it gets ``PATH``, ``HOME`` and the like only.
        cwd: Where it runs.

    Raises:
        PolicyError: The command is empty, or no list of strings.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(a, str) for a in command):
            raise PolicyError('a command is a list of strings: write ["program", "argument"]')
        self._command = list(command)
        self._env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._env.update(env or {})
        self._cwd = cwd

    async def send(self, delivery: Delivery, timeout_ms: int) -> Answer:
        """See ``Target``."""
        # No pipe that a grandchild could hold open: a file to read, and a pipe of our own to print.
        with tempfile.TemporaryFile() as given, _Printed() as printed:
            given.write(delivery.event.body)
            given.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=given,
                    stdout=printed.end,
                    stderr=printed.end,
                    env=self._env | _about(delivery),
                    cwd=self._cwd,
                    start_new_session=True,
                )
            except OSError as error:
                return Answer(False, error=f"can't start: {type(error).__name__}")
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    code = await process.wait()
            except TimeoutError:
                return Answer(False, error="timeout", note=printed.text())
            finally:
                await _end(process)
            note = printed.text()
        if code == 0:
            return Answer(True, note=note)
        cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return Answer(False, max(code, 0), cause, note, permanent=code == _BAD_DATA, sick=code < 0)

    async def aclose(self) -> None:
        """See ``Target``."""


def _about(delivery: Delivery) -> dict[str, str]:
    return {
        "ONCEKEY_ID": delivery.event.id,
        "ONCEKEY_SOURCE": delivery.event.source,
        "ONCEKEY_TYPE": delivery.event.type,
        "ONCEKEY_ATTEMPT": str(delivery.attempt),
        "ONCEKEY_FENCE": str(delivery.fence),
    }


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill whatever is left of the group, and collect the command itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(process.wait())


class _Printed:
    """What a command prints: the beginning is kept, the rest is read and dropped."""

    def __enter__(self) -> _Printed:
        self._begin, self.end = os.pipe()
        os.set_blocking(self._begin, False)
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._begin, self._read)
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.remove_reader(self._begin)
        os.close(self._begin)
        os.close(self.end)

    def _read(self) -> bool:
        try:
            piece = os.read(self._begin, 65_536)
        except BlockingIOError:
            return False
        self._kept += piece[: OUTPUT_KEPT - len(self._kept)]
        return bool(piece)

    def text(self) -> str:
        """What was printed so far."""
        for _ in range(64):
            if not self._read():
                break
        return self._kept[:400].decode("utf-8", "replace")
