"""A gateway's API, for the commands that look at one."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from oncekey.cli._output import CommandError
from oncekey.errors import PolicyError, StoreUnavailableError

__all__ = ["GatewayClient", "add_gateway"]

_ANSWER_MOST: Final = 64 * 1024 * 1024


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """Add what says which gateway, and who asks."""
    parser.add_argument(
        "--gateway", default="http://127.0.0.1:8080", metavar="URL", help="where the gateway is"
    )
    parser.add_argument(
        "--token-env",
        default="ONCEKEY_TOKEN",
        metavar="NAME",
        help="the environment variable that holds the token; ONCEKEY_TOKEN if not given",
    )


class GatewayClient:
    """Asks a gateway.

    Attributes:
        now_ms: What the gateway's clock said with its last answer; this machine's before that.

    Raises:
        PolicyError: The address is no URL, or there is no token.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        try:
            self._parts = urlsplit(arguments.gateway)
            usable = self._parts.scheme in ("http", "https") and bool(self._parts.hostname)
            usable = usable and self._parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise PolicyError("--gateway: write it like http://127.0.0.1:8080")
        self.now_ms = int(time.time() * 1000)
        self._token_env: str = arguments.token_env
        self._token = os.environ.get(arguments.token_env, "")
        if not self._token:
            raise PolicyError(
                "a token is needed: put it into ONCEKEY_TOKEN, or name its variable by --token-env"
            )

    def get(self, *path: str, **query: Any) -> Any:
        """What the API answers to a GET.

        Raises:
            StoreUnavailableError: The gateway can't be reached.
            PolicyError: It refuses; says why.
        """
        given = {name: value for name, value in query.items() if value not in (None, "")}
        where = "/_oncekey/api/v1/" + "/".join(quote(one, safe="") for one in path)
        return self._call("GET", where + (f"?{urlencode(given)}" if given else ""))

    def post(self, *path: str, **body: Any) -> Any:
        """What the API answers to a POST; raises as ``get`` does."""
        where = "/_oncekey/api/v1/" + "/".join(quote(one, safe="") for one in path)
        return self._call("POST", where, json.dumps(body).encode())

    def _call(self, method: str, where: str, body: bytes | None = None) -> Any:
        parts = self._parts
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=30, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, parts.path.rstrip("/") + where, body, headers)
            answer = connection.getresponse()
            told = json.loads(answer.read(_ANSWER_MOST))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreUnavailableError(
                f"no gateway answers at {parts.scheme}://{parts.netloc} ({type(error).__name__}): "
                "start one with oncekey serve, or give --gateway URL"
            ) from None
        finally:
            connection.close()
        self.now_ms = _date(answer.getheader("date"))
        if answer.status == 401:
            raise CommandError(
                f"the gateway does not know the token in {self._token_env}: put there one of those "
                "that it was started with"
            )
        if answer.status >= 400:
            raise CommandError(
                f"{told.get('title', 'refused')}: {told.get('detail', '')}".rstrip(": ")
            )
        return told


def _date(given: str | None) -> int:
    """The time of an answer; without one, that of this machine."""
    try:
        return int(parsedate_to_datetime(given or "").timestamp() * 1000)
    except ValueError:
        return int(time.time() * 1000)
