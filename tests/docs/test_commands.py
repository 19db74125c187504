"""The command lines that the pages show: each can be read as it stands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncekey.cli._parser import parse

ROOT = Path(__file__).parents[2]
PAGES = [  # but for what docs/cookbook.py left there: tests/docs/test_cookbook.py runs those
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "providers"),
]
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPERATOR = re.compile(r"[|&;<>()]+")
INSIDE = re.compile(r'"\$\((oncekey [^)]*)\)"')  # eval "$(oncekey completion bash)"


def words_of(line: str) -> Iterator[list[str]]:
    """What follows ``oncekey`` in a line, up to the next operator, as the shell reads it."""
    tokens = shlex.shlex(INSIDE.sub(r"; \1 ;", line), posix=True, punctuation_chars=True)
    tokens.whitespace_split = True
    command: list[str] = []
    for token in [*tokens, ";"]:
        if OPERATOR.fullmatch(token):
            if "oncekey" in command:
                yield command[command.index("oncekey") + 1 :]
            command = []
        else:
            command.append(token)


def shown() -> Iterator[tuple[str, list[str]]]:
    """Each command in a block of the shell, with its page."""
    for page in PAGES:
        for block in SHELL.findall(page.read_text("utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if "oncekey " in line.partition(" #")[0]:
                    for words in words_of(line):
                        yield f"{page.relative_to(ROOT)}: {' '.join(words)}", words


SHOWN = dict(shown())


@pytest.mark.parametrize("words", SHOWN.values(), ids=list(SHOWN))
def test_a_shown_command_can_be_read(words: list[str]) -> None:
    """The command is there, has the options that the page gives, and lacks no argument."""
    assert parse(words).run


def test_the_commands_are_found() -> None:
    """Most commands are shown somewhere, so that the test above is about something."""
    assert len({words[0] for words in SHOWN.values()}) > 15
