"""``oncekey reconcile``: the same as the API, for an operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.resilience.conftest import TERMS, Away, key

from oncekey.cli import main
from oncekey.resilience import Breaker, resilient
from oncekey.resilience.journal import pages

OWNER = b"o" * 16


@pytest.fixture
def journal(opened: Any, away: Away, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of a process that is gone: one key done twice, one done once."""
    opened.first_seen(key("twice"), TERMS)
    opened.__class__ = type("SQLiteStore", (type(opened),), {})  # as the command's own is called
    store = resilient(opened, on_outage="open", journal=tmp_path / "j", breaker=Breaker(failures=1))
    away.begin()
    store.first_seen(key("twice"), TERMS)
    reply = store.claim(key("once"), OWNER, b"f", TERMS)
    store.complete(key("once"), OWNER, reply.fence, b"j1", TERMS)
    away.end()
    store._fallback.close()  # type: ignore[union-attr]
    return tmp_path / "j"


def test_it_reconciles_lists_and_settles(
    journal: Path, away: Away, opened: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a store it makes it whole; what slipped is listed until somebody settles it."""
    assert main(["reconcile", str(journal), f"sqlite:///{away.path}", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["reconciled"]["inserted"] == 1
    assert told["reconciled"]["duplicates"] == 1
    (found,) = told["findings"]
    assert found["key"] == key("twice").digest.hex()
    assert len(found["sides"]) == 2
    assert list(pages(journal)) == []
    assert opened.read(key("once")).answer == b"j1"

    assert main(["reconcile", str(journal)]) == 1
    assert "1 to look at" in capsys.readouterr().out
    assert main(["reconcile", str(journal), "--settle", found["id"], "--note", "refunded"]) == 0
    assert "1 settled" in capsys.readouterr().out
    assert main(["reconcile", str(journal), "--all"]) == 0
    assert "refunded" in capsys.readouterr().out


def test_it_says_what_it_can_not_do(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No such directory, a note about nothing, another kind of store: exit 2 and the fix."""
    assert main(["reconcile", str(tmp_path / "none")]) == 2
    assert "journal=" in capsys.readouterr().err
    assert main(["reconcile", str(journal), "--note", "x"]) == 2
    assert "--settle" in capsys.readouterr().err
    assert main(["reconcile", str(journal), "memory://"]) == 2
    assert "directory of its own" in capsys.readouterr().err
    queue = tmp_path / "findings.db"
    queue.touch()
    assert main(["reconcile", str(queue), "memory://"]) == 2
    assert "not a file" in capsys.readouterr().err
