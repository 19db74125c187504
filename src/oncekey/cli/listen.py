"""``oncekey listen``: the events of a gateway, to an app on this machine; it resumes."""

from __future__ import annotations

import argparse
import base64
import http.client
import os
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from oncekey.cli._gateway import GatewayClient, add_gateway
from oncekey.cli._output import Output, add_json_option, printable
from oncekey.errors import PolicyError, StoreUnavailableError

__all__ = ["add_to"]

_PAGE: Final = 200
_LONGEST_PAUSE: Final = 30.0
_ID: Final = re.compile(r"msg_[0-9a-f]{16}")
_NONE: Final = "msg_" + "0" * 16
_SHIFT: Final = 20  # of an id: then it is the millisecond at which it was made
_WINDOW_MS: Final = 10_000
"""So long after an id was made its event may show up."""
_CLOCKS: Final = 60  # seconds that a look goes back further: two clocks are compared now and then
_COMPARED: Final = 600.0
_MOST_AGE: Final = 10**9
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "listen",
        help="bring the events of a gateway to an app on this machine",
        description="Shows each new event of a running gateway, oldest first, and with --forward "
        "posts it to an app. An event that the app does not take is tried again until it does: "
        "none is left out. It says when the app or the gateway is gone and when it is back. With "
        "--cursor, the next start goes on after the last one.",
    )
    parser.add_argument(
        "--since", default="", metavar="AGE", help="begin so long ago: 2h, 30m, 1d; else now"
    )
    parser.add_argument("--forward", default="", metavar="URL", help="where to post each event")
    parser.add_argument("--search", default="", metavar="SEARCH", help="only these, as in events")
    parser.add_argument("--cursor", metavar="FILE", help="where to keep how far it came")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between looks")
    parser.add_argument("--once", action="store_true", help="end when all are shown")
    add_gateway(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Listen until Ctrl-C."""
    if arguments.since and not re.fullmatch(r"\d{1,9}[smhdw]", arguments.since):
        raise PolicyError("--since: write it like 2h, 30m or 1d")
    if not arguments.every > 0:
        raise PolicyError("--every must be more than 0 seconds")
    if arguments.forward and urlsplit(arguments.forward).scheme not in ("http", "https"):
        raise PolicyError("--forward: write it like http://127.0.0.1:9000/events")
    listener = _Listener(arguments)
    while True:
        listener.look()
        if arguments.once:
            return 0
        time.sleep(arguments.every)


class _Listener:
    """Knows what was brought.

    An id has the time at which it was made, and is seen only after its commit: on a server with
    several nodes one may show up after a higher one was brought. So each look goes back a while
    from the newest that the one before has seen, and passes over what was brought.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._client = GatewayClient(arguments)
        self._output = Output(arguments)
        self._file = Path(arguments.cursor) if arguments.cursor else None
        self._dead: set[str] = set()
        self._ahead = 0  # milliseconds of the inbox's clock, of the gateway's
        self._compare_at = 0.0
        self._from = ""  # the least id that may still be new
        self._brought: set[str] = set()  # those from there on that are not
        self._read()
        if not self._from and not arguments.since:
            self._begin_now()

    # Where it is

    def _read(self) -> None:
        if self._file is None or not self._file.exists():
            return
        first, *brought = self._file.read_text("utf-8").split() or [""]
        if not all(_ID.fullmatch(one) for one in (first, *brought)):
            raise PolicyError(f"{self._file} holds no event's id: remove it, or name another")
        self._from, self._brought = first, set(brought or [first])

    def _write(self) -> None:
        """All of it or what was there before: a kill or a full disk leaves no half of it."""
        if self._file is None:
            return
        fresh = self._file.with_name(f"{self._file.name}.new")
        with fresh.open("w", encoding="utf-8") as file:
            # One id alone is the last that was brought, as it was written before.
            ids = [self._from, *sorted(self._brought)] if self._brought else [_less(self._from)]
            file.write("\n".join(ids) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._file)

    def _move(self, id: str) -> None:
        """Look from this id on, from now on; never from an earlier one."""
        if id > self._from:
            self._from = id
            self._brought = {one for one in self._brought if one >= id}

    def _begin_now(self) -> None:
        """What there is by now is old."""
        newest = self._newest()
        self._from = _before(newest) if newest else _NONE
        self._brought = {one["id"] for one in self._new()}
        self._write()  # else the next start would begin at what is the newest then

    # Looking

    def look(self) -> None:
        """Bring what is new."""
        try:
            self._look()
        except StoreUnavailableError as error:
            self._tell_dead("the gateway", str(error))
            if self._arguments.once:
                raise
        else:
            self._tell_back("the gateway")

    def _look(self) -> None:
        # Without a search what is found says how far the ids are; a rare match would not.
        newest = self._newest() if self._arguments.search or not self._from else ""
        if not self._from:
            self._from = _id_at(self._now() - _milliseconds(self._arguments.since))
        found = self._new()
        newest = newest or max([one["id"] for one in found], default="")
        kept = _before(newest) if newest else ""
        for one in found:
            self._bring(self._client.get("events", one["id"]))
            self._brought.add(one["id"])
            self._move(min(one["id"], kept))  # what came before it was brought
            self._write()
        self._move(kept)

    def _newest(self) -> str:
        """The id of the newest event of all; empty: there is none."""
        items = self._client.get("events", limit=1)["items"]
        return items[0]["id"] if items else ""

    def _new(self) -> list[dict[str, Any]]:
        """What was not brought yet, oldest first."""
        search = self._arguments.search
        if "age:<" not in search:
            search = f"{search} {self._age()}".strip()
        found: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            page = self._client.get("events", q=search, limit=_PAGE, after=after)
            fresh = [one for one in page["items"] if one["id"] >= self._from]
            found += [one for one in fresh if one["id"] not in self._brought]
            after = page["next"]
            if after is None or len(fresh) < len(page["items"]):
                return found[::-1]

    def _age(self) -> str:
        """What keeps a look from the history before: rounded up, as clocks differ."""
        seconds = max(0, self._now() - _time_of(self._from)) // 1000 + _CLOCKS
        return f"age:<{seconds}s" if seconds < _MOST_AGE else ""

    def _now(self) -> int:
        """The inbox's time, in milliseconds: an age counts by that clock, and so do ids."""
        if time.monotonic() >= self._compare_at:
            since = datetime.fromisoformat(self._client.get("stats", minutes=1)["since"])
            self._ahead = int(since.timestamp() * 1000) + 60_000 - self._client.now_ms
            self._compare_at = time.monotonic() + _COMPARED
        return self._client.now_ms + self._ahead

    def _bring(self, event: dict[str, Any]) -> None:
        told = (
            f"{event['at']}  {event['id']}  {printable(event['source'])} {printable(event['type'])}"
        )
        if self._arguments.forward:
            told += f"  -> {self._forward(event)}"
        if self._output.as_json:
            self._output.json({name: event[name] for name in ("id", "at", "source", "type", "key")})
        else:
            self._output.line(told)
        sys.stdout.flush()

    def _forward(self, event: dict[str, Any]) -> int:
        """Post it until the app takes it; gives the status."""
        body = event["body"].encode()
        if event["body_encoding"] == "base64":
            body = base64.b64decode(event["body"])
        headers = dict(event["headers"])
        headers |= {
            "webhook-id": event["id"],
            "idempotency-key": event["id"],
            "oncekey-source": event["source"],
            "oncekey-type": printable(event["type"]),
        }
        pause = 0.5
        while True:
            status, where = _post(self._arguments.forward, headers, body), self._arguments.forward
            if 200 <= status < 300:
                self._tell_back(where)
                return status
            self._tell_dead(where, f"{where} answers {status or 'nothing'}, trying again")
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _tell_dead(self, who: str, why: str) -> None:
        if who not in self._dead:
            print(f"oncekey: {why}", file=sys.stderr, flush=True)
        self._dead.add(who)

    def _tell_back(self, who: str) -> None:
        if who in self._dead:
            print(f"oncekey: {who} is back", file=sys.stderr, flush=True)
        self._dead.discard(who)


def _time_of(id: str) -> int:
    """The milliseconds in an id: see ``event_time``."""
    return int(id.removeprefix("msg_"), 16) >> _SHIFT


def _less(id: str) -> str:
    """The id before this one."""
    return f"msg_{max(0, int(id.removeprefix('msg_'), 16) - 1):016x}"


def _id_at(ms: int) -> str:
    """The least id of a time."""
    return f"msg_{max(0, ms) << _SHIFT:016x}"


def _before(id: str) -> str:
    """The least id that may show up after this one."""
    return _id_at(_time_of(id) - _WINDOW_MS)


def _milliseconds(age: str) -> int:
    return int(age[:-1]) * _UNITS[age[-1]] * 1000


def _post(url: str, headers: dict[str, str], body: bytes) -> int:
    """The status; 0 if there was none."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=30)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, body, headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError):
        return 0
    finally:
        connection.close()
