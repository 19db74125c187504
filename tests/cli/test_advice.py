"""What commands advise is something that can be typed there."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from tests.servers.fixtures_pg import Databases
from tests.signatures.cases import keys

import oncekey
from oncekey.cli import main
from oncekey.cli._flags import ELSEWHERE, IN_URL, OPTIONS, in_flags
from oncekey.cli._parser import parse

KEYWORD = re.compile(r"(?<![\w?&/.=-])([a-z_0-9]+)=(?!=)")
ROOMS = ("signatures", "stores", "lab", "doctor", "operate", "drivers", "adcp/signatures.py")


def keywords_in_errors() -> dict[str, str]:
    """The keywords that errors of what commands use speak of, each with a place."""
    found: dict[str, str] = {}
    home = Path(oncekey.__file__).parent
    for file in sorted(home.rglob("*.py")):
        place = file.relative_to(home).as_posix()
        if not place.startswith(ROOMS):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if not name.endswith("Error"):
                continue
            parts = [
                part.value if isinstance(part.value, str) else "X"
                for one in node.args
                for part in ast.walk(one)
                if isinstance(part, (ast.Constant, ast.FormattedValue))
            ]
            for word in KEYWORD.findall("".join(map(str, parts))):
                found.setdefault(word, f"{place}:{node.lineno}")
    return found


def test_every_keyword_in_an_error_is_a_flag_or_known_not_to_be() -> None:
    """Whoever writes a new one says what it is called on the command line."""
    known = {*OPTIONS, *IN_URL, *ELSEWHERE}
    found = keywords_in_errors()
    assert {"webhook_id", "signing_key", "tenant"} <= found.keys()
    unknown = {word: place for word, place in found.items() if word not in known}
    assert unknown == {}
    assert [word for word in ELSEWHERE if word not in found] == []


@pytest.mark.parametrize(
    "words, told",
    [
        (["sign", "paypal"], "pass --option webhook_id=VALUE, the id"),
        (["sign", "stripe"], "the endpoint's signing secret (whsec_...) of Stripe into a variable"),
        (["sign", "aws-sns"], "pass --option topics=VALUE, the ARNs"),
        (["sign", "aws-sns", "--secret-env", "S"], "pass --option topics=VALUE and no --secret-en"),
        (["sign", "paypal", "--secret-env", "S"], "pass --option webhook_id=VALUE and no --secret"),
        (["sign", "plaid"], "give --signing-key-env NAME and --option key_id=ID"),
        (["sign", "plaid", "--secret-env", "S"], "leave --secret-env out"),
        (["sign", "adcp"], "give --signing-key-env NAME and --option key_id=ID"),
        (["sign", "google-pubsub"], "pass --option audience=VALUE, "),
        (["sign", "sendgrid", "--secret-env", "KEY"], "pass --signing-key-env NAME with one of"),
        (["sign", "stripe", "--secret-env", "S", "--event-id", "x"], "leave --event-id out"),
        (
            ["sign", "stripe", "--secret-env", "S", "--option", "public_url=https://x/"],
            "leave --option public_url=VALUE and --option allowed_hosts=VALUE out",
        ),
        (
            ["sign", "github", "--secret-env", "S", "--option", "tolerance=5"],
            "leave --option tolerance=VALUE out",
        ),
        (
            ["sign", "stripe", "--secret-env", "S", "--option", "verify_token=x"],
            "leave --option verify_token=VALUE out",
        ),
        (
            ["sign", "stripe", "--secret-env", "S", "--option", "accept_unsigned=body"],
            "leave --option accept_unsigned=VALUE out",
        ),
    ],
)
def test_a_provider_that_misses_something_is_told_the_flag(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of ``sign``, whose flags ``send``, ``simulate``, ``doctor``, ``lab`` and ``replay`` have."""
    monkeypatch.setenv("S", "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQ=")
    monkeypatch.setenv("KEY", keys().sendgrid_public)
    assert main([*words, "--json"]) == 2
    printed = capsys.readouterr()
    first, last = printed.err.splitlines()[-2:]
    assert told in first, first
    assert last == "Help: oncekey explain PolicyError"
    assert KEYWORD.findall(first.replace("--option ", "--option")) == []
    assert json.loads(printed.out)["error"]["message"] == first.removeprefix("oncekey: ")


def test_an_option_of_a_provider_is_read_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number of seconds is one, though all of a command line is text."""
    monkeypatch.setenv("S", "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQ=")
    assert main(["sign", "stripe", "--secret-env", "S", "--option", "tolerance=60"]) == 0
    assert main(["sign", "stripe", "--secret-env", "S", "--option", "tolerance=soon"]) == 2
    assert "--option tolerance=: write a number of seconds" in capsys.readouterr().err


def test_what_a_store_wants_is_told_as_part_of_its_url() -> None:
    """Where a command has one; elsewhere the text is left as it is."""
    arguments = parse(["stats", "memory://"])
    advice = "a pooler lends each transaction another one. Pass prepare=False to the store"
    assert "Pass ?prepare=false in the URL to the store" in in_flags(advice, arguments)
    assert "pass ?tenant=shop in the URL" in in_flags("pass tenant='shop'", arguments)
    assert in_flags("pass secret=", arguments) == "pass secret="


def test_a_database_without_tables_is_told_once_with_the_command(
    postgres: Databases, capsys: pytest.CaptureFixture[str]
) -> None:
    """``conformance`` asks a real database once and ends: no check is run."""
    for form in ("sync", "async"):
        assert main(["conformance", postgres.database(), "--only", form]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("no table oncekey_records") == 1
        assert "run 'oncekey migrate URL'" in printed.err
        assert "create_schema" not in printed.err
