"""The look at a server before it is trusted: eviction, persistence, version."""

from __future__ import annotations

from typing import Any, Final

from oncekey.errors import StoreConfigError
from oncekey.stores.redis.operations import command

__all__ = ["CHECKS", "QUESTIONS", "faults"]

CHECKS: Final = ("warn", "refuse", "off")
QUESTIONS: Final = [
    command(b"INFO"),
    command(b"CONFIG", b"GET", b"save"),
    command(b"CONFIG", b"GET", b"maxmemory-policy"),
]
OLDEST: Final = (6, 2)


def faults(replies: list[Any], where: str) -> list[str]:
    """What is wrong with a server, in sentences that name the fix. Empty: nothing is.

    Raises:
        StoreConfigError: It is too old to work at all.
    """
    info, save, policy = (None if isinstance(r, BaseException) else r for r in replies)
    facts = _facts(info)
    found = []
    version = facts.get("redis_version", "")
    numbers = version.split(".")[:2]
    if all(part.isdigit() for part in numbers) and len(numbers) == 2:
        if tuple(map(int, numbers)) < OLDEST:
            raise StoreConfigError(
                f"{where} is Redis {version}; the store needs Redis 6.2 or later, or Valkey"
            )
    else:
        found.append(_unchecked(where, "version", "+info"))
    eviction = _setting(policy) or facts.get("maxmemory_policy")
    if eviction is None:
        found.append(_unchecked(where, "maxmemory-policy", "+info"))
    elif eviction != "noeviction":
        found.append(
            f"{where} may evict keys (maxmemory-policy {eviction}): a claim that is dropped lets "
            "a duplicate run. Run CONFIG SET maxmemory-policy noeviction"
        )
    if facts.get("aof_enabled") is None:
        found.append(_unchecked(where, "appendonly", "+info"))
    elif facts["aof_enabled"] == "0":
        saves = _setting(save)
        if saves is None:
            lost = "how much a restart forgets depends on its snapshots, which can't be checked"
        elif saves:
            lost = "a crash forgets every key since the last snapshot, and retries run again"
        else:
            lost = "it keeps nothing on disk: a restart forgets every key, and retries run again"
        fix = "Run CONFIG SET appendonly yes, and write it in redis.conf"
        found.append(f"{where} has appendonly off, so that {lost}. {fix}")
    return found


def _unchecked(where: str, what: str, right: str) -> str:
    return (
        f"{where} does not permit to look at its {what}, so that it could not be checked: make "
        "sure of maxmemory-policy noeviction and appendonly yes, then pass check='off', or permit "
        f"{right}"
    )


def _facts(info: Any) -> dict[str, str]:
    lines = info.decode("utf-8", "replace").splitlines() if isinstance(info, bytes) else []
    pairs = (line.partition(":") for line in lines)
    return {name: value for name, colon, value in pairs if colon}


def _setting(reply: Any) -> str | None:
    """The value in a reply of CONFIG GET."""
    if isinstance(reply, list) and len(reply) == 2:
        value: str = reply[1].decode("utf-8", "replace")
        return value
    return None
