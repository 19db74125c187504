"""``[proxies.NAME]`` in ``oncekey serve``: the rules of a proxy beside the gateway's own paths."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.server.kit import CONFIG, ENVIRON
from tests.server.process import PATIENCE, TOKEN, Served, config, event, until
from tests.server.test_proxy import HANDSHAKE, KEYED, ME, Upstream, running

from oncekey.server.config import settings_from
from oncekey.server.problems import ConfigError
from oncekey.server.proxies import Proxies
from oncekey.server.settings import ServerSettings
from oncekey.stores.urls import aconnect

ADMIN = {"Authorization": f"Bearer {TOKEN}"}
LEAST = """
[proxies.shop]
upstream = "{url}/base"
strip_path = true
[proxies.all]
path = "/"
upstream = "{url}"
"""


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with running(Upstream()) as one:
        yield one


@pytest.fixture(scope="module")
def gateway(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    more = LEAST.format(url=upstream.url)
    file = config(folder, "http://127.0.0.1:9/events", more=more)
    with Served("--config", str(file), "--port", "0") as one:
        yield one


def test_a_keyed_request_reaches_the_upstream_once(gateway: Served, upstream: Upstream) -> None:
    """A retry gets the recorded answer; each proxy has keys of its own."""
    upstream.requests.clear()
    for _ in range(2):
        status, headers, body = gateway.call("POST", "/shop/charges?a=%20b", b"{}", **KEYED)
        assert (status, json.loads(body)) == (201, {"number": 1})
    assert headers["idempotent-replayed"] == "true"
    assert gateway.call("POST", "/charges", b"{}", **KEYED)[0] == 201
    assert [one[1] for one in upstream.requests] == ["/base/charges?a=%20b", "/charges"]
    assert gateway.call("POST", "/shop/charges", b"{}", Idempotency_Key="k-1")[0] == 401
    told = gateway.call("GET", "/metrics", **ADMIN)[2].decode()
    for route, answer in (("shop", "2xx"), ("shop", "replayed"), ("shop", "4xx"), ("all", "2xx")):
        line = f'oncekey_gateway_proxied_total{{route="{route}",answer="{answer}"}} 1'
        assert line in told.splitlines(), (line, told)


async def test_routes_are_on_the_page_of_sources(tmp_path: Path) -> None:
    """Each with where it leads and what its requests were answered."""
    text = CONFIG.format(store=f"sqlite:///{tmp_path}/inbox.db") + LEAST.format(url="http://h:9")
    settings = settings_from(text, "t.toml", ENVIRON)
    store = aconnect(f"sqlite:///{tmp_path}/keys.db")
    proxies = Proxies(store)
    proxies.prepare(settings.proxies)()
    shown = proxies.views({("shop", "2xx"): 3, ("shop", "replayed"): 1, ("gone", "2xx"): 9})
    await proxies.aclose()
    await store.aclose()
    assert [one["name"] for one in shown] == ["all", "shop"]
    assert shown[1]["answers"] == [("2xx", 3), ("replayed", 1)]
    assert shown[1]["upstream"] == "http://h:9/base"


def test_the_gateways_own_paths_stay_its_own(gateway: Served, upstream: Upstream) -> None:
    """No proxy gets what the gateway serves, however the path is written; nothing climbs out."""
    upstream.requests.clear()
    assert gateway.deliver(event("evt_1", gateway.address)) == 200
    assert gateway.call("GET", "/healthz")[2] == b"ok\n"
    for path in ("/_oncekey/api/v1/stats", "/%5foncekey/api/v1/stats", "/metrics"):
        assert gateway.call("GET", path)[0] == 401
    for path in ("/shop/../secret", "/shop/%2e%2e/secret", "/shop/..%5csecret"):
        assert gateway.call("GET", path)[0] == 400
    assert upstream.requests == []
    assert gateway.call("GET", "/shopping")[0] == 201
    assert gateway.call("GET", "/shop")[0] == 201
    assert [one[1] for one in upstream.requests] == ["/shopping", "/base/"]


def _spoken(port: int, said: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as raw:
        raw.sendall(said)
        told = b""
        with contextlib.suppress(OSError):
            while part := raw.recv(65_536):
                told += part
    return told


async def test_websockets_pass_but_not_into_the_gateway(gateway: Served) -> None:
    """A WebSocket is tunnelled by the route of its path; the gateway itself has none."""
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{gateway.address}/ws", headers=ME) as socket:
            assert (await socket.receive_json())["Authorization"] == "Bearer mine"
            await socket.send_str("hello")
            assert await socket.receive_str() == "hello"
    for path in (b"/_oncekey/ws", b"/%68ooks/x", b"/hooks/x"):
        answer = _spoken(gateway.port, b"GET " + path + b" HTTP/1.1\r\n" + HANDSHAKE)
        assert answer.startswith(b"HTTP/1.1 404")


def test_routes_change_by_sighup(upstream: Upstream, tmp_path: Path) -> None:
    """A route that is added is served after a reload, and one that is gone is not."""
    file = config(tmp_path, "http://127.0.0.1:9/events")
    least = file.read_text()
    with Served("--config", str(file), "--port", "0") as gateway:
        assert gateway.call("GET", "/orders/1")[0] == 404
        file.write_text(f'{least}[proxies.orders]\nupstream = "{upstream.url}"\n')
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: gateway.call("GET", "/orders/1")[0] == 201, "the route")
        file.write_text(least)
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: gateway.call("GET", "/orders/1")[0] == 404, "its end")
        assert gateway.stop()[0] == 0


def _settings(more: str) -> ServerSettings:
    text = CONFIG.format(store="sqlite:///inbox.db") + more
    return settings_from(text, "gateway.toml", ENVIRON)


@pytest.mark.parametrize(
    "lines, told",
    [
        ("", "proxies.a: upstream: write it like http://127.0.0.1:9000"),
        ('upstream = "ftp://x"', "proxies.a: upstream: write it like"),
        ('upstream = "http://u:geheim@x"', "no user or password in the URL"),
        ('upstream = "http://x"\npath = "/hooks/x"', "proxies.a.path: is no path of a proxy"),
        ('upstream = "http://x"\npath = "x"', "proxies.a.path: is no path of a proxy"),
        ('upstream = "http://x"\npath = "/b/"', "proxies.b.path: is that of a, too"),
        ('upstream = "http://x"\nanonymous = "yes"', 'Write "refuse" or "shared"'),
        ('upstream = "http://x"\nmax_body_bytes = 0', "max_body_bytes"),
        ('upstream = "http://x"\nupstrem = "http://x"', "Did you mean 'upstream'?"),
    ],
)
def test_faults_are_told(lines: str, told: str) -> None:
    """A route that can't work is refused with its key and what to write, and no password."""
    with pytest.raises(ConfigError) as caught:
        _settings(f'\n[proxies.a]\n{lines}\n[proxies.b]\nupstream = "http://x"\n')
    assert told in str(caught.value)
    assert "geheim" not in str(caught.value)


async def test_an_unchanged_route_stays(tmp_path: Path) -> None:
    """A reload leaves a route alone whose settings are the same, with its connections."""
    async with aconnect(f"sqlite:///{tmp_path}/keys.db") as store:
        proxies = Proxies(store)
        lines = '\n[proxies.a]\nupstream = "http://x"\n'
        proxies.prepare(_settings(lines).proxies)()
        scope = {"raw_path": b"/a/1"}
        first = proxies.find(scope)
        proxies.prepare(_settings(lines + '[proxies.b]\nupstream = "http://y"\n').proxies)()
        second = proxies.find(scope)
        proxies.prepare(_settings(lines + "ttl = 60\n").proxies)()
        third = proxies.find(scope)
        assert first is not None
        assert second is not None
        assert third is not None
        assert first.proxy is second.proxy
        assert third.proxy is not first.proxy
        await proxies.aclose()
        assert proxies.find(scope) is None
