"""Audit trails: what was done to one is found offline, and several processes may write it."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.servers.fixtures_pg import Databases

from oncekey import Once
from oncekey.cli import main
from oncekey.errors import PolicyError
from oncekey.instrument.audit import (
    AuditEntry,
    AuditError,
    AuditFile,
    Head,
    audit_events,
    verify_file,
)
from oncekey.receiver.audit import AuditEntry as EntryOfReceivers
from oncekey.receiver.audit import AuditTable

SECRET = b"sixteen bytes or more"
WRITERS, EACH = 4, 50


def entry(number: int) -> AuditEntry:
    return AuditEntry(1e9 + number, "stripe", "acct", f"{number:016x}", "first", 200, "", 0.25)


def written(path: Path, secret: bytes | None = None, entries: int = 6) -> list[bytes]:
    sink = AuditFile(path, secret=secret)
    for number in range(entries):
        sink(entry(number))
    return path.read_bytes().splitlines(keepends=True)


def test_a_whole_trail_has_no_problems(tmp_path: Path) -> None:
    """Its head counts the entries; files are their owner's alone; an empty one is whole."""
    path = tmp_path / "audit"
    path.touch()
    assert verify_file(path) == (Head(0, "0" * 64), [])
    written(path)
    report = verify_file(path)
    assert (report.head.number, report.problems) == (6, [])
    beside = tmp_path / "audit.head"
    assert stat.S_IMODE(beside.stat().st_mode) == 0o600
    assert EntryOfReceivers is AuditEntry


Lines = list[bytes]
TAMPERED: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "changed": (
        lambda a: [*a[:2], a[2].replace(b"first", b"dead!"), *a[3:]],
        "entry 3 was changed",
    ),
    "removed": (lambda a: [*a[:2], *a[3:]], "entry 3 is missing"),
    "removed two": (lambda a: [*a[:2], *a[4:]], "entry 3 is missing, up to 4"),
    "removed first": (lambda a: a[1:], "entry 1 is missing"),
    "reordered": (lambda a: [*a[:2], a[3], a[2], *a[4:]], "out of order, or a copy"),
    "copied": (lambda a: [*a[:3], a[2], *a[3:]], "out of order, or a copy"),
    "cut off": (lambda a: a[:4], "entries 5 to 6 were cut off at the end"),
    "emptied": (lambda a: [], "entries 1 to 6 were cut off at the end"),
    "no entry": (lambda a: [*a, b"{}\n"], "line 7 is no entry"),
    "torn": (lambda a: [*a[:5], a[5][:20]], "line 6 is no entry"),
}


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("how", TAMPERED)
def test_what_was_done_to_a_file_is_found(tmp_path: Path, how: str, secret: bytes | None) -> None:
    """Changed, removed, moved, copied or cut off: a problem says what and where."""
    path = tmp_path / "audit"
    tamper, told = TAMPERED[how]
    path.write_bytes(b"".join(tamper(written(path, secret))))
    assert any(told in one for one in verify_file(path, secret=secret).problems)


def test_a_missing_or_moved_head_is_found(tmp_path: Path) -> None:
    """Who cuts off entries can't hide it by taking the head away or writing another."""
    path, beside = tmp_path / "audit", tmp_path / "audit.head"
    lines = written(path, SECRET)
    kept = verify_file(path, secret=SECRET).head
    path.write_bytes(b"".join(lines[:4]))
    number, _, _, digest = json.loads(lines[3])
    beside.write_text(f"{number}:{digest} {digest}\n")
    assert verify_file(path, secret=SECRET).problems == [
        "the head was changed, or made with another secret"
    ]
    beside.unlink()
    assert "the head is missing" in verify_file(path, secret=SECRET).problems[0]
    assert (
        "entry 6 is not the one that was noted"
        in (verify_file(path, secret=SECRET, expected=kept).problems[-1])
    )


def test_a_chain_made_anew_is_found_by_secret_or_noted_head(tmp_path: Path) -> None:
    """Without a secret anybody can make another chain: only a head noted elsewhere tells."""
    real, forged = tmp_path / "real", tmp_path / "forged"
    written(real, SECRET)
    written(forged, b"another secret, as long")
    assert len(verify_file(forged, secret=SECRET).problems) == 7
    written(tmp_path / "plain")
    noted = verify_file(tmp_path / "plain").head
    sink = AuditFile(tmp_path / "other")
    for number in range(1, 8):
        sink(entry(number))
    assert verify_file(tmp_path / "other").problems == []
    assert verify_file(tmp_path / "other", expected=noted).problems == [
        "entry 6 is not the one that was noted"
    ]
    assert verify_file(tmp_path / "plain", expected=noted).problems == []


def test_a_trail_that_ends_in_the_middle_takes_no_more(tmp_path: Path) -> None:
    """Nothing is added after what can't be followed: the error says what to do."""
    path = tmp_path / "audit"
    lines = written(path)
    path.write_bytes(b"".join(lines)[:-5])
    with pytest.raises(AuditError, match="oncekey audit verify"):
        AuditFile(path)(entry(7))


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    """A secret that could be guessed is none."""
    with pytest.raises(PolicyError, match="16 bytes"):
        AuditFile(tmp_path / "audit", secret=b"short")


def _write(sink: Any, writer: int) -> None:
    for number in range(EACH):
        sink(entry(writer * EACH + number))


def together(sink: Any) -> None:
    """Write from forked processes at once, with a sink that the parent has used."""
    sink(entry(0))
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write, args=(sink, number)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    sink(entry(1))


def test_processes_write_one_chain_in_a_file(tmp_path: Path) -> None:
    """Four forked processes at once: every entry is there, in one unbroken chain."""
    together(AuditFile(tmp_path / "audit"))
    report = verify_file(tmp_path / "audit")
    assert (report.head.number, report.problems) == (WRITERS * EACH + 2, [])


def test_processes_write_one_chain_in_a_sqlite_table(tmp_path: Path) -> None:
    """The same in a SQLite file; then a changed and a removed row are found."""
    path = str(tmp_path / "audit.db")
    sink = AuditTable(path, secret=SECRET)
    together(sink)
    report = sink.verify()
    assert (report.head.number, report.problems) == (WRITERS * EACH + 2, [])
    with sqlite3.connect(path) as other:
        other.execute("UPDATE oncekey_audit_chain SET entry = '{}' WHERE n = 3")
        other.execute("DELETE FROM oncekey_audit_chain WHERE n IN (7, 202)")
    other.close()
    assert sink.verify().problems == [
        "entry 3 was changed, or made with another secret",
        "entry 7 is missing",
        "entries 202 to 202 were cut off at the end",
    ]
    sink.close()


def test_processes_write_one_chain_in_postgresql(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in PostgreSQL, verified by the command from an environment variable."""
    import psycopg

    url = postgres.database()
    sink = AuditTable(lambda: psycopg.connect(url), "%s", secret=SECRET)
    together(sink)
    assert sink.verify().head.number == WRITERS * EACH + 2
    monkeypatch.setenv("AUDIT_URL", url)
    monkeypatch.setenv("AUDIT_SECRET", SECRET.decode())
    command = ["audit", "verify", "--url-env", "AUDIT_URL", "--secret-env", "AUDIT_SECRET"]
    assert main(command) == 0
    with psycopg.connect(url) as other:
        other.execute("DELETE FROM oncekey_audit_chain WHERE n > 100")
    assert main(command) == 1
    sink.close()


def test_the_command_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 0 whole, 1 with problems, 2 if it can't be read; a head may be noted and expected."""
    path = tmp_path / "audit"
    lines = written(path, SECRET)
    monkeypatch.setenv("AUDIT_SECRET", SECRET.decode())
    base = ["audit", "verify", str(path), "--secret-env", "AUDIT_SECRET", "--json"]

    def run(*more: str) -> tuple[int, Any]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main([*base, *more])
        return code, json.loads(out.getvalue())

    code, found = run()
    assert (code, found["problems"]) == (0, [])
    assert run("--expect", found["head"])[0] == 0
    path.write_bytes(b"".join(lines[:-1]))
    assert run("--expect", found["head"]) == (
        1,
        {
            "head": f"5:{json.loads(lines[4])[3]}",
            "problems": [
                "entries 6 to 6 were cut off at the end",
                "entry 6 is not the one that was noted",
            ],
        },
    )
    assert main(["audit", "verify", str(tmp_path / "none")]) == 2
    assert main(["audit", "verify", f"sqlite:///{tmp_path}/none.db"]) == 2
    assert not (tmp_path / "none.db").exists()


def test_decisions_of_the_stream_are_audited(tmp_path: Path) -> None:
    """A guard's decisions make a trail, with hashes for keys and scopes."""
    path = tmp_path / "audit"
    once = Once("memory://", scope="the-scope")
    with audit_events(AuditFile(path)):
        for _ in range(2):
            with once.guard("the-key") as claim:
                assert claim.replayed in (True, False)
    made = [json.loads(json.loads(line)[1]) for line in path.read_text().splitlines()]
    assert [one["outcome"] for one in made] == ["first", "completed", "replay"]
    assert {one["provider"] for one in made} == {"guard"}
    assert "the-" not in path.read_text()
    assert verify_file(path).problems == []


def test_a_full_disk_leaves_no_half_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that was taken in part is taken back, and the error is the writer's."""
    path = tmp_path / "audit"
    written(path)
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:10]))
    with pytest.raises(OSError, match="is it full"):
        AuditFile(path)(entry(7))
    monkeypatch.undo()
    AuditFile(path)(entry(7))
    assert verify_file(path) == (verify_file(path).head, [])
