"""What a Redis store is looked at for, on each of its servers."""

from __future__ import annotations

from typing import Any, Final

from oncekey.doctor.findings import Report, Severity
from oncekey.stores.redis.browsing import LOOK
from oncekey.stores.redis.operations import command
from oncekey.stores.redis.store import RedisStore, open_sync

__all__ = ["examine"]

OLDEST: Final = (6, 2)
_SETTINGS: Final = ("maxmemory-policy", "appendonly", "appendfsync", "save", "protected-mode")
_QUESTIONS: Final = [
    command(b"INFO"),
    command(b"ACL", b"GETUSER", b"default"),
    *(command(b"CONFIG", b"GET", name.encode()) for name in _SETTINGS),
]


def examine(url: str, report: Report) -> bool:
    """Look at the servers. Gives whether they can be used at all."""
    with open_sync(url, {"check": "off"}) as store:
        assert isinstance(store, RedisStore)  # noqa: S101 - which it is
        told: dict[str, list[Any]] = store._do(LOOK, b"", None, _QUESTIONS)
    usable = True
    for where, (info, user, *settings) in told.items():
        facts = _facts(info)
        values = {name: _setting(reply) for name, reply in zip(_SETTINGS, settings, strict=True)}
        usable &= _server(where, facts, report)
        _eviction(where, facts, values, report)
        _durability(where, facts, values, report)
        _access(where, user, values, report)
    return usable


def _server(where: str, facts: dict[str, str], report: Report) -> bool:
    version = facts.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not numbers:
        report.skipped["version"] = f"{where} does not permit INFO"
        return True
    old = report.judge(
        "version",
        Severity.ERROR,
        numbers < OLDEST,
        f"{where} is Redis {version}",
        "use Redis 6.2 or later, or Valkey",
    )
    replica = report.judge(
        "role",
        Severity.ERROR,
        facts.get("role") == "slave",
        f"{where} is a replica, which takes no writes",
        "give the address of the master, or redis+sentinel:// with the names of the Sentinels",
    )
    return not old and not replica


def _eviction(
    where: str, facts: dict[str, str], values: dict[str, str | None], report: Report
) -> None:
    policy = values["maxmemory-policy"] or facts.get("maxmemory_policy")
    if policy is None:
        report.skipped["eviction"] = f"{where} permits neither INFO nor CONFIG GET"
        return
    report.judge(
        "eviction",
        Severity.ERROR,
        policy != "noeviction",
        f"{where} has maxmemory-policy {policy}: with its memory full it drops keys, and a "
        "duplicate whose key was dropped runs",
        "CONFIG SET maxmemory-policy noeviction, and in its configuration file",
    )


def _durability(
    where: str, facts: dict[str, str], values: dict[str, str | None], report: Report
) -> None:
    aof = facts.get("aof_enabled")
    if aof is None and values["appendonly"] is None:
        report.skipped["durability"] = f"{where} permits neither INFO nor CONFIG GET"
        return
    off = aof == "0" or values["appendonly"] == "no"
    lost = "since the last snapshot" if values["save"] else "there is"
    report.judge(
        "durability",
        Severity.ERROR,
        off,
        f"{where} has appendonly no: a restart forgets every key {lost}, and retries run again",
        "CONFIG SET appendonly yes, and in its configuration file",
    )
    report.judge(
        "durability",
        Severity.WARNING,
        not off and values["appendfsync"] == "no",
        f"{where} has appendfsync no: a crash of the machine forgets what the system had not "
        "written, often half a minute",
        "CONFIG SET appendfsync everysec, or always; and in its configuration file",
    )


def _access(where: str, user: Any, values: dict[str, str | None], report: Report) -> None:
    if isinstance(user, BaseException) or not isinstance(user, list):
        report.skipped["access"] = f"{where} does not permit ACL GETUSER"
        return
    flags = user[user.index(b"flags") + 1] if b"flags" in user else []
    free = b"nopass" in flags and b"on" in flags
    report.judge(
        "access",
        Severity.WARNING,
        free and values["protected-mode"] == "no",
        f"{where} has protected-mode no and a default user without a password: whoever reaches its "
        "port can read answers and forge them",
        "set a password (requirepass, or ACL SETUSER), or protected-mode yes",
    )


def _facts(info: Any) -> dict[str, str]:
    lines = info.decode("utf-8", "replace").splitlines() if isinstance(info, bytes) else []
    pairs = (line.partition(":") for line in lines)
    return {name: value for name, colon, value in pairs if colon}


def _setting(reply: Any) -> str | None:
    if isinstance(reply, list) and len(reply) == 2:
        return str(reply[1].decode("utf-8", "replace"))
    return None
