"""What a SQLite store is looked at for."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any, Final

from oncekey.doctor.findings import Report, Severity
from oncekey.errors import StoreConfigError
from oncekey.models import Record
from oncekey.stores.sqlite.database import MIGRATIONS
from oncekey.stores.sqlite.store import _path

__all__ = ["examine", "file_system"]

OLDEST: Final = (3, 35, 0)
_REMOTE: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs"}


def examine(url: str, report: Report) -> bool:
    """Look at the file. Gives whether it can be used at all.

    Raises:
        StoreConfigError: There is no such file; it is not made here.
    """
    options: dict[str, Any] = {}
    path = Path(_path(url, options))
    if not path.is_file():
        raise StoreConfigError(f"there is no file {path}: a store makes it when it is opened first")
    report.judge(
        "version",
        Severity.WARNING,
        sqlite3.sqlite_version_info < OLDEST,
        f"this Python has SQLite {sqlite3.sqlite_version}",
        "use a Python with SQLite 3.35 or later",
    )
    report.judge(
        "durability",
        Severity.WARNING,
        options.get("durability") == "normal",
        "durability=normal: a power loss may take the last answers that were acknowledged",
        "leave durability out of the URL, for full, unless that may happen",
    )
    _files(path, report)
    kind = file_system(path, _mounts())
    report.judge(
        "file system",
        Severity.ERROR,
        kind in _REMOTE,
        f"the file is on {kind}, whose locks SQLite can't trust",
        "put it on a local disk, or use PostgreSQL or Redis for several machines",
    )
    return _schema(path, report)


def _files(path: Path, report: Report) -> None:
    open_to = [
        f"{one.name} has mode {stat.S_IMODE(one.stat().st_mode):04o}"
        for one in (path, Path(f"{path}-wal"), Path(f"{path}-shm"))
        if one.exists() and one.stat().st_mode & 0o007
    ]
    report.judge(
        "permissions",
        Severity.WARNING,
        bool(open_to),
        f"everybody on this machine can get at the answers: {', '.join(open_to)}",
        f"chmod o= {path}*",
    )
    report.judge(
        "permissions",
        Severity.ERROR,
        not os.access(path, os.W_OK) or not os.access(path.absolute().parent, os.W_OK),
        "this user can't write the file or its directory, in which SQLite makes files beside it",
        "run as the user that owns them, or give it the right to write",
    )


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text("utf-8")
    except OSError:
        return ""


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system that a path is on, by the table of mounts; empty if unknown."""
    full = str(path.resolve())
    best = ("", "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        inside = full == point or full.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _schema(path: Path, report: Report) -> bool:
    """Look at the tables, by a connection that can't change them."""
    connection = sqlite3.connect(f"file:{path.absolute().as_posix()}?mode=ro", uri=True)
    try:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        columns = {
            row[0]
            for row in connection.execute("SELECT name FROM pragma_table_info('oncekey_records')")
        }
        version = 0
        if "oncekey_schema" in tables:
            version = connection.execute("SELECT max(version) FROM oncekey_schema").fetchone()[0]
    except sqlite3.DatabaseError as error:
        return not report.judge(
            "schema",
            Severity.ERROR,
            True,
            f"it is no SQLite database, or damaged: {error}",
            "restore it from a backup, or try 'sqlite3 FILE .recover'",
        )
    finally:
        connection.close()
    newest = MIGRATIONS[-1][0]
    missing = sorted({"key", "scope", *Record._fields} - columns)
    if version > newest:
        wrong = f"it was made by a newer oncekey: schema {version}, this one knows {newest}"
    elif version and missing:
        wrong = f"oncekey_records lacks {', '.join(missing)}"
    elif not version and "oncekey_records" in tables:
        wrong = "there is a table oncekey_records, but none that says which version it is"
    else:
        wrong = ""
    return not report.judge(
        "schema",
        Severity.ERROR,
        bool(wrong),
        wrong,
        "upgrade oncekey, restore the file from a backup, or use another file",
    )
