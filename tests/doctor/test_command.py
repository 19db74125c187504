"""``oncekey doctor``: what it prints and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.doctor.faulty import SECRET, Conflicts, Good, served

from oncekey import connect
from oncekey.cli import main

APP = """
from tests.doctor.faulty import shop
from oncekey.adapters.asgi import IdempotencyMiddleware
guarded = IdempotencyMiddleware(shop, "sqlite:///app.db")
bare = shop
"""


def test_store_by_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clean is 0, a finding is 1 with its evidence and fix, and what is not there is 2."""
    path = tmp_path / "keys.db"
    url = f"sqlite:///{path}"
    assert main(["doctor", url, "--read-only"]) == 2
    assert not path.exists()
    assert "no file" in capsys.readouterr().err
    connect(url).close()
    assert main(["doctor", url, "--read-only"]) == 0
    shown = capsys.readouterr().out
    assert "nothing found" in shown
    assert "skipped  atomicity" in shown
    path.chmod(0o666)
    assert main(["doctor", url, "--read-only"]) == 1
    shown = capsys.readouterr().out
    assert "warning  permissions" in shown
    assert "fix: chmod" in shown


def test_unreachable_server_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that does not answer is no finding: it could not look."""
    assert main(["doctor", "redis://127.0.0.1:1/0", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["error"]["code"]


def test_receiver_and_store_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are looked at in one call; the secret comes from the environment and is not shown."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    url = f"sqlite:///{tmp_path}/hooks.db"
    words = ["doctor", url, "--read-only", "--provider", "stripe", "--secret-env", "HOOK_SECRET"]
    for kind, code in ((Good, 0), (Conflicts, 1)):
        with served(kind(url)) as endpoint:
            assert main([*words, "--url", endpoint, "--json"]) == code
        text = capsys.readouterr().out
        store, receiver = json.loads(text)
        assert store["ok"]
        assert receiver["ok"] is (code == 0)
        assert {"ttl", "nothing stored"} <= {*receiver["passed"]}
        assert SECRET not in text


def test_nobody_at_the_url_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A receiver that does not answer at all can't be judged."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    words = ["--provider", "stripe", "--secret-env", "HOOK_SECRET"]
    assert main(["doctor", "--url", "http://127.0.0.1:1/", *words]) == 2
    assert "nothing answers" in capsys.readouterr().err


def test_app_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An app is imported from the directory that one stands in."""
    (tmp_path / "doctored_shop.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["doctor", "--app", "doctored_shop:guarded"]) == 0
    assert "concurrent copies" in capsys.readouterr().out
    assert main(["doctor", "--app", "doctored_shop:bare"]) == 1
    assert "claimed no key" in capsys.readouterr().out
    for name in ("doctored_shop:nothing", "no_such_module:app", "doctored_shop"):
        assert main(["doctor", "--app", name]) == 2


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "what is to be looked at"),
        (["--url", "http://127.0.0.1:1/"], "--provider"),
        (["--app", "json:loads", "--header", "nonsense"], "--header"),
        (["--app", "json:loads", "--body-file", "/no/such/file"], "can't be read"),
    ],
)
def test_wrong_calls_say_what_to_give(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that can't be carried out names what is missing, and ends with 2."""
    assert main(["doctor", *words]) == 2
    assert told in capsys.readouterr().err
