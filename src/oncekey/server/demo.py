"""``oncekey serve --demo``: a gateway with nothing to set up, that ends without a trace."""

from __future__ import annotations

import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from oncekey.server.config import TOKEN_VARIABLE, settings_from
from oncekey.server.settings import ServerSettings

__all__ = ["Demo"]

PORT: Final = 8080
_CONFIG: Final = """
store = "sqlite:///{folder}/inbox.db"
host = "{host}"
port = {port}
public_url = "http://{shown}:{port}"
[sources.shop]
provider = "stripe"
secret_env = "DEMO_SECRET"
targets = ["app"]
[sources.code]
provider = "github"
secret_env = "DEMO_SECRET"
targets = ["app"]
[targets.app]
url = "http://{shown}:{port}/demo/app"
secret_env = "DEMO_TARGET_SECRET"
allow_private = true
"""


class Demo:
    """A config in a folder of its own, and an app to deliver to, in the same process."""

    def __init__(self, host: str | None, port: int | None) -> None:
        self._host = host or "127.0.0.1"
        self._port = _free_port(self._host) if port == 0 else (port or PORT)
        self._token = secrets.token_urlsafe(18)
        self._folder = ""
        self.effects: dict[str, int] = {}
        self.settings: ServerSettings

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="oncekey-demo-")
        shown = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host  # noqa: S104
        text = _CONFIG.format(
            folder=Path(self._folder).as_posix(), host=self._host, port=self._port, shown=shown
        )
        made = {
            "DEMO_SECRET": secrets.token_urlsafe(24),
            "DEMO_TARGET_SECRET": "whsec_" + "b25jZWtleS1kZW1vLXRhcmdldC1zZWNyZXQ=",
            TOKEN_VARIABLE: self._token,
        }
        self.settings = settings_from(text, "the demo", made)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def announce(self, address: str) -> None:
        """Say where to look, and how to get in."""
        sys.stdout.write(
            f"oncekey demo: {address}/_oncekey\n"
            f"  sign in with an empty name and this token: {self._token}\n"
            "  then press 'Send 5 copies'. Ctrl-C ends it, and removes what it kept.\n"
        )
        sys.stdout.flush()

    def wrap(self, app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """The app with a target in it, which counts what it gets."""

        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"] == "/demo/app":
                await self._effect(scope, send)
            else:
                await app(scope, receive, send)

        return wrapped

    async def _effect(self, scope: Any, send: Any) -> None:
        fields = dict(scope["headers"])
        event = fields.get(b"webhook-id", b"").decode("latin-1")
        self.effects[event] = self.effects.get(event, 0) + 1
        body = b'{"effect": "recorded"}\n'
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])
