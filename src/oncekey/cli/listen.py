"""``oncekey listen``: the events of a gateway, to an app on this machine; it resumes."""

from __future__ import annotations

import argparse
import base64
import http.client
import re
import sys
import time
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


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "listen",
        help="bring the events of a gateway to an app on this machine",
        description="Shows each new event of a running gateway, oldest first, and with --forward "
        "posts it to an app. An event that the app does not take is tried again until it does: "
        "none is left out. With --cursor, the next start goes on after the last one.",
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
    """Knows the last event that was brought."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._client = GatewayClient(arguments)
        self._output = Output(arguments)
        self._file = Path(arguments.cursor) if arguments.cursor else None
        self._dead = False
        self._last = self._kept()
        if not self._last and not arguments.since:
            newest = self._client.get("events", limit=1)["items"]
            self._last = newest[0]["id"] if newest else "msg_" + "0" * 16

    def _kept(self) -> str:
        if self._file is None or not self._file.exists():
            return ""
        text = self._file.read_text("utf-8").strip()
        if not _ID.fullmatch(text):
            raise PolicyError(f"{self._file} holds no event's id: remove it, or name another")
        return text

    def look(self) -> None:
        """Bring what is new."""
        try:
            for one in self._new():
                self._bring(self._client.get("events", one["id"]))
                self._last = one["id"]
                if self._file is not None:
                    self._file.write_text(self._last + "\n", "utf-8")
        except StoreUnavailableError as error:
            self._tell_dead(str(error))
            if self._arguments.once:
                raise
        else:
            self._dead = False

    def _new(self) -> list[dict[str, Any]]:
        """What came after the last one, oldest first."""
        since = "" if self._last else f" age:<{self._arguments.since}"
        found: list[dict[str, Any]] = []
        after: str | None = None
        while True:
            page = self._client.get(
                "events", q=f"{self._arguments.search}{since}".strip(), limit=_PAGE, after=after
            )
            fresh = [one for one in page["items"] if one["id"] > self._last]
            found += fresh
            after = page["next"]
            if after is None or len(fresh) < len(page["items"]):
                return found[::-1]

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
            status = _post(self._arguments.forward, headers, body)
            if 200 <= status < 300:
                return status
            self._tell_dead(
                f"{self._arguments.forward} answers {status or 'nothing'}, trying again"
            )
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _tell_dead(self, why: str) -> None:
        if not self._dead:
            print(f"oncekey: {why}", file=sys.stderr, flush=True)
        self._dead = True


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
