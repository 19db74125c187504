"""What a URL or a client says of the servers, and how a connection to one of them is made.

A store never uses up the pool of a client that it was given: it takes the client's settings and
opens connections of its own, one a server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from oncekey.errors import StoreConfigError
from oncekey.policy import did_you_mean
from oncekey.stores.redis.errors import driver
from oncekey.stores.redis.topology import Address, Cluster, Sentinels, Single, Topology

__all__ = ["STORE_OPTIONS", "Target", "parse_query", "target_of"]

STORE_OPTIONS: Final = ("prefix", "min_replicas", "replica_timeout", "check", "timeout")
_TLS: Final = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_keyfile",
    "ssl_password",
)
# What is taken over from a client; the rest (decoding, retries, pool, protocol) is ours to decide.
_KEPT: Final = (
    *("db", "username", "password", "credential_provider", "client_name"),
    *("socket_keepalive", "socket_keepalive_options", "socket_type", "socket_connect_timeout"),
    *_TLS,
    *("ssl_ca_data", "ssl_min_version", "ssl_ciphers", "ssl_validate_ocsp"),
    *("ssl_validate_ocsp_stapled", "ssl_ocsp_context", "ssl_ocsp_expected_cert"),
    *("ssl_include_verify_flags", "ssl_exclude_verify_flags"),
)


class Target:
    """Servers and how to speak to them.

    Attributes:
        topology: Makes a fresh ``Topology``: every event loop has one of its own.
        timeout: The seconds after which a server that does not answer is given up.
    """

    def __init__(
        self,
        topology: Callable[[], Topology],
        settings: dict[str, Any],
        *,
        kind: type[Any],
        sentinel: tuple[type[Any], dict[str, Any]] | None = None,
        timeout: float = 5.0,
    ) -> None:
        self.topology = topology
        self.timeout = timeout
        self._kind = kind
        self._settings = settings
        self._sentinel = sentinel

    def connection(
        self,
        address: Address,
        sentinel: bool,
        timeout: float | None,
        to_connect: float | None = None,
    ) -> Any:
        """A connection that is not open yet: ``connect`` opens it, within ``to_connect``."""
        kind, settings = self._kind, self._settings
        if sentinel and self._sentinel is not None:
            kind, settings = self._sentinel
        where: dict[str, Any]
        if isinstance(address, str):
            where = {"path": address}
        else:
            where = {"host": address[0], "port": address[1]}
        most = self.timeout if to_connect is None else to_connect
        own = settings.get("socket_connect_timeout") or most
        settings = {**settings, "socket_connect_timeout": min(own, most)}
        # RESP2, so that what is published comes as a plain reply.
        return kind(**settings, **where, socket_timeout=timeout, protocol=2)


def _classes(is_async: bool) -> tuple[Any, Any, Any]:
    found: Any = driver("redis.asyncio.connection" if is_async else "redis.connection")
    return found.Connection, found.SSLConnection, found.UnixDomainSocketConnection


# URLs


def parse_query(url: str) -> dict[str, str]:
    """The options in a URL's query.

    Raises:
        StoreConfigError: One has no value, or stands there twice.
    """
    place, _, query = url.partition("?")
    if "@" in query and "@" not in place:
        raise StoreConfigError(
            "special characters in a Redis URL must be percent-encoded: ? as %3F, @ as %40"
        )
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if not value or name in found:
            raise StoreConfigError(f"the option {_told(name)} of a Redis URL needs one value, once")
        found[name] = value
    return found


def target_of(client_or_url: Any, *, is_async: bool, timeout: float) -> Target:
    """The servers that a URL or a client speaks of.

    Raises:
        StoreConfigError: It can't be understood.
    """
    make = from_url if isinstance(client_or_url, str) else from_client
    return make(client_or_url, is_async=is_async, timeout=timeout)


def from_url(url: str, *, is_async: bool, timeout: float) -> Target:
    """The servers that a URL names.

    Raises:
        StoreConfigError: Something in it can't be understood.
    """
    scheme, _, rest = url.partition("://")
    query = parse_query(url)
    login, _, place = rest.partition("?")[0].rpartition("@")
    plain, tls, unix = _classes(is_async)
    if scheme.lower() == "unix":
        settings = _settings(query, ("db", "username", "password"))
        _login(login, settings)
        if not place.startswith("/"):
            raise StoreConfigError("write unix:///path/to/redis.sock?db=0")
        return Target(lambda: Single(unquote(place)), settings, kind=unix, timeout=timeout)
    base, _, layout = scheme.lower().partition("+")
    secure = base in ("rediss", "valkeys")
    known: tuple[str, ...] = ("username", "password", *(_TLS if secure else ()))
    if layout != "cluster":
        known += ("db",)
    if layout == "sentinel":
        known += ("sentinel_username", "sentinel_password")
    settings = _settings(query, known)
    sentinel_settings = {
        name: settings.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in settings
    }
    _login(login, settings)
    hosts, _, path = place.partition("/")
    seeds = [_address(text, 26379 if layout == "sentinel" else 6379) for text in hosts.split(",")]
    kind = tls if secure else plain
    if layout == "cluster":
        if path:
            raise StoreConfigError("a Redis Cluster has no databases: leave the path empty")
        return Target(lambda: Cluster(seeds), settings, kind=kind, timeout=timeout)
    if layout == "sentinel":
        service, _, db = path.partition("/")
        if not service:
            raise StoreConfigError(
                "name the service that Sentinel watches: redis+sentinel://host1,host2/service"
            )
        _database(db, settings)
        sentinel_settings |= {name: settings[name] for name in _TLS if name in settings}
        return Target(
            lambda: Sentinels(seeds, unquote(service)),
            settings,
            kind=kind,
            sentinel=(kind, sentinel_settings),
            timeout=timeout,
        )
    if len(seeds) > 1:
        raise StoreConfigError(
            "several addresses need redis+cluster:// or redis+sentinel://; redis:// names one"
        )
    _database(path, settings)
    return Target(lambda: Single(seeds[0]), settings, kind=kind, timeout=timeout)


def _told(name: str) -> str:
    """The name of an option in an error: not if it may be the rest of a password with a ``?``."""
    return repr(name) if name.isidentifier() and len(name) <= 32 else "in its query"


def _settings(query: dict[str, str], known: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    all_known = sorted((*known, *STORE_OPTIONS))
    for name, value in query.items():
        if name in STORE_OPTIONS:
            continue
        if name not in known:
            raise StoreConfigError(
                f"a Redis URL of this kind has no option {_told(name)}"
                f"{did_you_mean(name, all_known)} {', '.join(all_known)}"
            )
        settings[name] = value
    if "db" in settings:
        _database(settings.pop("db"), settings)
    if "ssl_check_hostname" in settings:
        choice = str(settings["ssl_check_hostname"]).lower()
        if choice not in ("true", "false"):
            raise StoreConfigError("ssl_check_hostname must be true or false")
        settings["ssl_check_hostname"] = choice == "true"
    if settings.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise StoreConfigError("ssl_cert_reqs must be required, optional or none")
    return settings


def _login(text: str, settings: dict[str, Any]) -> None:
    user, colon, password = text.partition(":")
    if user:
        settings["username"] = unquote(user)
    if colon and password:
        settings["password"] = unquote(password)


def _database(text: str, settings: dict[str, Any]) -> None:
    if not text:
        return
    if not text.isdigit() or not text.isascii():
        raise StoreConfigError(
            "the database of a Redis URL must be a number, as in redis://host:6379/0; special "
            "characters in a password must be percent-encoded"
        )
    if "db" in settings and settings["db"] != int(text):
        raise StoreConfigError("a Redis URL names two databases: leave one out")
    settings["db"] = int(text)


def _address(text: str, port: int) -> tuple[str, int]:
    """``host``, ``host:port``, ``[::1]:port``. Empty is this machine."""
    host, number = text, ""
    if text.startswith("["):
        host, bracket, number = text[1:].partition("]")
        if not bracket or (number and not number.startswith(":")):
            raise StoreConfigError("an IPv6 address stands in brackets, as in [::1]:6379")
        number = number[1:]
    elif ":" in text:
        host, _, number = text.partition(":")
    if number and not (number.isascii() and number.isdigit() and 0 < int(number) < 65_536):
        raise StoreConfigError(
            "the port of a Redis URL must be a number from 1 to 65535; special characters in a "
            "password must be percent-encoded"
        )
    return unquote(host) or "localhost", int(number or port)


# Clients


def from_client(client: Any, *, is_async: bool, timeout: float) -> Target:
    """The servers that an existing client speaks to.

    Raises:
        StoreConfigError: It is no client of redis-py, or of the other kind.
    """
    sync, loop = driver("redis"), driver("redis.asyncio")
    module, other = (loop, sync) if is_async else (sync, loop)
    cluster, wrong = module.RedisCluster, other.RedisCluster
    if isinstance(client, (other.Redis, wrong)) and not isinstance(client, (module.Redis, cluster)):
        need = "redis.asyncio.Redis" if is_async else "redis.Redis"
        name, twin = (
            ("AsyncRedisStore", "RedisStore") if is_async else ("RedisStore", "AsyncRedisStore")
        )
        raise StoreConfigError(f"{name} needs a {need} client; this one is for {twin}")
    if isinstance(client, cluster):
        return _from_cluster(client, is_async, timeout)
    if isinstance(client, module.Redis):
        return _from_pool(client.connection_pool, is_async, timeout)
    raise StoreConfigError(
        f"a Redis store needs a URL or a client of redis-py, got {type(client).__name__}"
    )


def _kept(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {name: settings[name] for name in _KEPT if settings.get(name) is not None}
    if "credential_provider" in kept:
        kept.pop("username", None)
        kept.pop("password", None)
    return kept


def _patience(settings: dict[str, Any], timeout: float) -> float:
    return float(settings.get("socket_timeout") or timeout)


def _from_pool(pool: Any, is_async: bool, timeout: float) -> Target:
    plain, tls, unix = _classes(is_async)
    settings = pool.connection_kwargs
    patience = _patience(settings, timeout)
    secure = issubclass(pool.connection_class, tls)
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None:
        service = pool.service_name
        pools = [client.connection_pool for client in manager.sentinels]
        seeds = [
            (each.connection_kwargs["host"], int(each.connection_kwargs["port"])) for each in pools
        ]
        first = pools[0]
        return Target(
            lambda: Sentinels(seeds, service),
            _kept(settings),
            kind=tls if secure else plain,
            sentinel=(first.connection_class, _kept(first.connection_kwargs)),
            timeout=patience,
        )
    address: Address
    if issubclass(pool.connection_class, unix) or "path" in settings:
        address = settings["path"]
    else:
        address = (settings.get("host", "localhost"), int(settings.get("port", 6379)))
    return Target(
        lambda: Single(address), _kept(settings), kind=pool.connection_class, timeout=patience
    )


def _from_cluster(client: Any, is_async: bool, timeout: float) -> Target:
    plain, tls, _ = _classes(is_async)
    manager = client.nodes_manager
    nodes = {**manager.startup_nodes, **manager.nodes_cache}.values()
    seeds = [(str(node.host), int(node.port)) for node in nodes]
    settings = dict(client.connection_kwargs if is_async else manager.connection_kwargs)
    secure = bool(settings.get("ssl")) or issubclass(settings.get("connection_class", plain), tls)
    remap = getattr(manager, "address_remap", None)
    return Target(
        lambda: Cluster(seeds, remap),
        {name: value for name, value in _kept(settings).items() if name != "db"},
        kind=tls if secure else plain,
        timeout=_patience(settings, timeout),
    )
