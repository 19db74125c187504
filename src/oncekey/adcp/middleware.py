"""``SignedRequests``: ASGI middleware that checks the signatures of AdCP requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from oncekey.adapters.asgi import request_url
from oncekey.adcp.requests import RequestSigning, RequestVerdict
from oncekey.http.body import ClientGoneError, asgi_body

__all__ = ["SignedRequests"]

logger = logging.getLogger("oncekey")


class SignedRequests:
    """Lets through what its ``RequestSigning`` accepts; who signed is ``scope["adcp.verdict"]``.

    A request that is refused is answered 401, with the code of AdCP's profile in
    ``WWW-Authenticate`` and in the body, and never reaches the app. The app gets the body that was
    checked, byte for byte.

    Args:
        app: The ASGI app, such as that of an MCP server.
        signing: What to check by.
        authenticated: Whether the caller of a scope is known by other means, such as a token.
            Nobody is, if not given.
        max_body_bytes: The longest body that is read: 413 above.
        body_seconds: How long a body may take to arrive.

    Example:
        >>> app = SignedRequests(app, signing)  # doctest: +SKIP
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        signing: RequestSigning,
        *,
        authenticated: Callable[[Any], bool | Awaitable[bool]] | None = None,
        max_body_bytes: int = 1_048_576,
        body_seconds: float | None = 30,
    ) -> None:
        self._app = app
        self._signing = signing
        self._authenticated = authenticated
        self._most = max_body_bytes
        self._seconds = body_seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Check one request. Whatever is no HTTP goes to the app as it is."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = list(scope["headers"])
        declared = next((value for name, value in headers if name == b"content-length"), None)
        try:
            body = await asgi_body(receive, self._most, declared, self._seconds)
        except ClientGoneError:
            await _answer(send, 408, {"error": "the body did not arrive whole"}, {})
            return
        if len(body) > self._most:
            await _answer(send, 413, {"error": f"at most {self._most} bytes"}, {})
            return
        verdict = await self._signing.acheck(
            scope["method"],
            request_url(scope),
            headers,
            body,
            authenticated=await self._is_known(scope),
        )
        if not verdict.ok:
            logger.warning("AdCP: a request was refused: %s", verdict.code)
            await _answer(send, verdict.status, _told(verdict), verdict.headers())
            return
        given = False

        async def again() -> Any:
            nonlocal given
            if given:
                return await receive()  # what comes after the body: that the client went away
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app({**scope, "adcp.verdict": verdict}, again, send)

    async def _is_known(self, scope: Any) -> bool:
        if self._authenticated is None:
            return False
        answer = self._authenticated(scope)
        return answer if isinstance(answer, bool) else bool(await answer)


def _told(verdict: RequestVerdict) -> dict[str, str]:
    return {"error": verdict.code, "message": verdict.message}


async def _answer(send: Any, status: int, body: dict[str, str], headers: dict[str, str]) -> None:
    raw = json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(raw)), **headers}
    pairs = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": raw})
