"""``[proxies.NAME]``: paths of the gateway that lead to an upstream, by the rules of a proxy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from oncekey.abc import AsyncStore
from oncekey.http.asgi import ASGIScope
from oncekey.server.forwarding import Way
from oncekey.server.proxy import Proxy
from oncekey.server.settings import OWN_PATHS, ProxyRoute

__all__ = ["Found", "Proxies"]


class Found(NamedTuple):
    """The proxy of a request, and the request as that one gets it."""

    route: ProxyRoute
    proxy: Proxy
    scope: ASGIScope


class Proxies:
    """The routes of a config, changed while requests are under way.

    Args:
        store: Where keys are kept: that of the inbox.
    """

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._routes: list[tuple[ProxyRoute, Proxy]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.answers: Counter[tuple[str, str]] = Counter()

    def prepare(self, routes: Mapping[str, ProxyRoute]) -> Callable[[], None]:
        """Make these routes; what is given back puts them in place. What is under way goes on.

        Raises:
            PolicyError: One can't work.
        """
        kept = [(route, proxy) for route, proxy in self._routes if routes.get(route.name) == route]
        names = {route.name for route, _ in kept}
        made: list[tuple[ProxyRoute, Proxy]] = []
        try:
            for name, route in routes.items():
                if name not in names:
                    made.append((route, Proxy(route.rules, self._store)))
        except BaseException:
            self._close(proxy for _, proxy in made)
            raise

        def use() -> None:
            self._close(proxy for route, proxy in self._routes if route.name not in names)
            # The longest beginning that fits is the one that was meant.
            self._routes = sorted(kept + made, key=lambda one: -len(one[0].path))

        return use

    def _close(self, proxies: Iterable[Proxy]) -> None:
        for proxy in proxies:
            task = asyncio.get_running_loop().create_task(proxy.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _match(self, path: bytes) -> tuple[ProxyRoute, Proxy, bytes] | None:
        """By the path as it was sent: what is passed on is what was looked at."""
        if _is_own(path):
            return None
        for route, proxy in self._routes:
            begins = route.path.rstrip("/").encode()
            if path.startswith(begins) and path[len(begins) : len(begins) + 1] in (b"", b"/", b"?"):
                rest = path[len(begins) :] if route.strip_path else path
                return route, proxy, rest if rest.startswith(b"/") else b"/" + rest
        return None

    def find(self, scope: ASGIScope) -> Found | None:
        """Who serves a request; ``None``: nobody here."""
        if not self._routes:
            return None
        matched = self._match(scope.get("raw_path") or b"")
        if matched is None:
            return None
        child: dict[str, Any] = {**scope, "raw_path": matched[2]}
        return Found(matched[0], matched[1], child)

    async def serve(self, found: Found, receive: Any, send: Any) -> None:
        """Serve a request by its proxy, and count what it was answered."""
        answer = "none"
        shown = (found.route.rules.header.replay_header or "").lower().encode()

        async def noted(message: Any) -> None:
            nonlocal answer
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                answer = "replayed" if shown in names else f"{message['status'] // 100}xx"
            await send(message)

        try:
            await found.proxy(found.scope, receive, noted)
        finally:
            self.answers[found.route.name, answer] += 1

    def views(self, answers: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
        """Each route, with what its requests were answered."""
        ways = [(route, route.rules.upstream) for route, _ in self._routes]
        return [
            {
                "name": route.name,
                "path": route.path,
                "upstream": f"{to.scheme}://{to.authority}{to.path}",
                "answers": [
                    (kind, count)
                    for (name, kind), count in sorted(answers.items())
                    if name == route.name
                ],
            }
            for route, to in sorted(ways, key=lambda way: way[0].name)
        ]

    def way(self, target: bytes) -> Way | None:
        """Where a WebSocket leads."""
        matched = self._match(target)
        if matched is None:
            return None
        return Way(matched[0].rules, matched[2])

    async def aclose(self) -> None:
        """Close every connection to an upstream, after what is under way."""
        self.prepare({})()
        await asyncio.gather(*self._closing)


def _is_own(target: bytes) -> bool:
    """Whether the gateway itself serves a path, however that is written."""
    parts = unquote_to_bytes(target.partition(b"?")[0]).split(b"/", 2)
    return len(parts) > 1 and parts[1].decode("latin-1") in OWN_PATHS
