"""The command line itself: what every command has in common."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oncekey.cli import main
from oncekey.cli._output import Output
from oncekey.cli._parser import Parser, whole_parser
from oncekey.cli._stores import redacted
from oncekey.cli._table import COMMANDS, GROUPS, START

ROOT = Path(__file__).parents[2]


def parsers() -> dict[str, Parser]:
    """The parser of each command, and of each command in a command."""
    found: dict[str, Parser] = {}

    def walk(parser: argparse.ArgumentParser, name: str) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, inner in action.choices.items():
                    walk(inner, f"{name} {word}".strip())
                return
        assert isinstance(parser, Parser)
        found[name] = parser

    walk(whole_parser(), "")
    return found


def test_bare_call_shows_the_commands_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command is shown once, under its group, after three lines to start with."""
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert len(START) == 3
    for name, command in COMMANDS.items():
        assert shown.count(f"\n    {name} ") == 1
        assert command.group in GROUPS
    assert all(line in shown for line in START)
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("line", START)
def test_lines_to_start_with_are_commands(line: str) -> None:
    """Each of the three can be parsed as it stands."""
    _, name, *words = line.split()
    parsers()[name].read(words)


@pytest.mark.parametrize("name", [name for name in parsers() if name != "completion"])
def test_every_command_can_print_json(name: str) -> None:
    """``--json`` is an option of all but the one that prints a script."""
    assert "--json" in parsers()[name]._option_string_actions


@pytest.mark.parametrize("name", parsers())
def test_every_option_and_argument_is_described(name: str) -> None:
    """``--help`` has a line for what can be given, and no option is short for another."""
    parser = parsers()[name]
    assert parser.allow_abbrev is False
    assert parser.description
    for action in parser._actions:
        assert action.help, f"{action.dest} of {name}"


def test_only_the_named_command_is_loaded() -> None:
    """Neither the overview nor a command imports the others, or what only they need."""
    code = (
        "import sys; from oncekey.cli import main; main([]); main(['providers', '--json']);"
        "print(sorted(name for name in sys.modules if name.startswith("
        "('oncekey.cli.', 'oncekey.stores', 'oncekey.testing', 'asyncio', 'rich', 'shtab'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert "oncekey.cli.providers" in loaded
    for other in ("cli.migrate", "cli.send", "oncekey.stores", "oncekey.testing", "rich", "shtab"):
        assert other not in loaded, other


def test_wrong_command_says_which_one_may_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is no command ends with 2, with a near one named and the word not repeated."""
    with pytest.raises(SystemExit) as ended:
        main(["provider"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "is it providers?" in told
    with pytest.raises(SystemExit):
        main(["whsec_0123456789abcdef"])
    assert "whsec" not in capsys.readouterr().err


def test_arguments_may_come_in_any_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option may stand before, between and after arguments that can be left out."""
    url = f"sqlite:///{tmp_path}/a.db"
    for words in ([url, "--only", "sync", "--json"], ["--json", "--only", "sync", url]):
        assert main(["conformance", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert {one["form"] for one in found} == {"sync"}


def test_no_abbreviated_options(capsys: pytest.CaptureFixture[str]) -> None:
    """``--secret`` is not taken for ``--secret-env``, and what follows it is not said again."""
    with pytest.raises(SystemExit) as ended:
        main(["sign", "stripe", "--secret", "whsec_abc", "-"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--secret" in told
    assert "whsec_abc" not in told


def test_url_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``--url-env`` names the variable; one that is not set, none at all and both are refused."""
    monkeypatch.setenv("STORE", f"sqlite:///{tmp_path}/b.db")
    assert main(["conformance", "--url-env", "STORE", "--only", "sync"]) == 0
    assert "0 failed" in capsys.readouterr().out
    assert main(["conformance", "--url-env", "NOT_SET_AT_ALL"]) == 2
    told = capsys.readouterr().err
    assert "not set" in told
    assert "NOT_SET_AT_ALL" not in told
    assert main(["conformance"]) == 2
    assert "--url-env" in capsys.readouterr().err
    assert main(["conformance", "memory://", "--url-env", "STORE"]) == 2
    assert "not both" in capsys.readouterr().err


def test_password_in_a_url_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    """A password in the call works, is said to be readable by others, and is not shown again."""
    assert main(["migrate", "mysql://me:s3cret@host/db", "--json"]) == 2
    out, told = capsys.readouterr()
    assert "--url-env" in told
    assert "s3cret" not in told + out
    assert json.loads(out)["error"]["code"]


@pytest.mark.parametrize(
    "url, shown",
    [
        ("redis://:pw@host/0", "redis://:***@host/0"),
        ("postgresql://u:p%40w@h/db?sslmode=require", "postgresql://u:***@h/db?sslmode=require"),
        ("postgresql:///db?password=pw&host=x", "postgresql:///db?password=***&host=x"),
        ("redis://host/0", "redis://host/0"),
        ("sqlite:////tmp/a:b@c.db", "sqlite:////tmp/a:b@c.db"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    """What stands for a secret in a URL is replaced wherever it is shown."""
    assert redacted(url) == shown


def test_plain_table() -> None:
    """Columns are as wide as what is in them; numbers stand on the right."""
    out, kept = io.StringIO(), sys.stdout
    sys.stdout = out
    try:
        Output(argparse.Namespace(json=False)).table(["a", ">n"], [["x", "1"], ["long", "100"]])
    finally:
        sys.stdout = kept
    assert out.getvalue() == "a       n\nx       1\nlong  100\n"


def on_a_terminal(**environment: str) -> bytes:
    """What ``oncekey conformance`` prints to a terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "oncekey", "conformance", "memory://", "--only", "sync"]
    env = {**os.environ, "TERM": "xterm-256color", **environment}
    env.pop("NO_COLOR", None) if "NO_COLOR" not in environment else None
    process = subprocess.Popen(command, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 65_536)
        except OSError:  # Linux says so at the end
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0
    os.close(master)
    return seen


def test_colour_and_progress_where_a_terminal_is() -> None:
    """A terminal gets control sequences from rich; with NO_COLOR, or without a terminal, none."""
    assert b"\x1b[" in on_a_terminal()
    plain = on_a_terminal(NO_COLOR="1")
    assert b"\x1b[" not in plain
    assert b"passed, 0 failed" in plain
    command = [sys.executable, "-m", "oncekey", "conformance", "memory://", "--only", "sync"]
    piped = subprocess.run(command, capture_output=True, check=True)
    assert b"\x1b[" not in piped.stdout + piped.stderr


def test_works_without_rich_and_shtab(tmp_path: Path) -> None:
    """Without the extra the text is plain, and completion names the extra."""
    code = (
        "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None;"
        "sys.modules['shtab'] = None; sys.stdout.isatty = lambda: True;"
        "from oncekey.cli import main;"
        "assert main(['conformance', 'memory://', '--only', 'sync']) == 0;"
        "sys.exit(main(['completion', 'bash']))"
    )
    env = {**os.environ, "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "oncekey[cli]" in done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script knows every command, and the shell takes it."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert name in script
    if shutil.which(shell) is None:
        return
    file = tmp_path / "script"
    file.write_text(script)
    subprocess.run([shell, "-n", str(file)], check=True)
    if shell == "bash":
        typed = "COMP_WORDS=(oncekey prov); COMP_CWORD=1; _shtab_oncekey; echo ${COMPREPLY[@]}"
        asked = f"source {file}; {typed}"
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["providers"]


def test_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is 130, as shells expect, without a traceback."""

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("oncekey.cli.providers.run", interrupted)
    assert main(["providers"]) == 130
