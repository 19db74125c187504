"""What a config says, as frozen values, and the table of every key that it may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from oncekey.inbox.policy import TargetPolicy
from oncekey.server.forwarding import ProxyRules
from oncekey.signatures import Provider

__all__ = [
    "KEYS",
    "NEVER_KEPT",
    "OWN_PATHS",
    "POLICY",
    "ROLES",
    "ApiToken",
    "KeyRule",
    "ProxyRoute",
    "ServerSettings",
    "SourceSettings",
    "TargetSettings",
    "User",
]

NEVER_KEPT: Final = frozenset({"authorization", "cookie", "proxy-authorization", "set-cookie"})
"""Headers that no setting keeps."""

OWN_PATHS: Final = ("_oncekey", "hooks", "healthz", "readyz", "metrics")
"""Beginnings of paths that the gateway itself serves, and no proxy."""

ROLES: Final = ("read", "operate", "admin")
"""Each may do what those before it may."""


class KeyRule(NamedTuple):
    """One key of the config."""

    kind: str  # text, flag, whole, number, seconds, names, fields
    default: Any
    help: str


_SECRET: Final = {
    "secret_env": KeyRule("text", "", "the environment variable that holds the secret"),
    "secret_file": KeyRule("text", "", "the file that holds the secret, such as a mounted one"),
}

POLICY: Final = {
    "timeout": KeyRule("seconds", 30, "how long one attempt may take"),
    "concurrency": KeyRule("whole", 16, "attempts at the same time, on each node"),
    "rate": KeyRule("number", None, "attempts a second at most, on each node"),
    "tries": KeyRule("whole", 12, "after so many a delivery is dead"),
    "first_delay": KeyRule("seconds", 5, "how long after the first failure it is tried again"),
    "factor": KeyRule("number", 3.0, "by how much each wait is longer than the one before"),
    "max_delay": KeyRule("seconds", 21_600, "the longest wait, and the longest Retry-After"),
    "jitter": KeyRule("number", 0.2, "which part of a wait is left to chance"),
    "order_by": KeyRule("text", None, "a JSON path: events with one value there come in order"),
    "types": KeyRule("names", (), "only events of these types; * at the end is anything"),
    "where": KeyRule("names", (), "only bodies that hold this, such as $.livemode == true"),
    "breaker_after": KeyRule("whole", 10, "failures in a row until it is left alone; 0: never"),
    "breaker_pause": KeyRule("seconds", 30, "for how long; then one attempt is made to see"),
}

KEYS: Final[Mapping[str, Mapping[str, KeyRule]]] = MappingProxyType(
    {
        "": {
            "store": KeyRule("text", "", "where the inbox is: sqlite:///FILE or postgresql://..."),
            "host": KeyRule("text", "127.0.0.1", "the address to listen on"),
            "port": KeyRule("whole", 8080, "the port to listen on; 0 takes a free one"),
            "workers": KeyRule("whole", 1, "processes that share the port and the inbox"),
            "public_url": KeyRule("text", "", "the address that providers and browsers use"),
            "retention": KeyRule("seconds", 2_592_000, "how long finished events are kept"),
            "remember": KeyRule("seconds", None, "how long copies are known; as providers retry"),
            "metrics_public": KeyRule("flag", False, "/metrics needs no token"),
            "stop_seconds": KeyRule("seconds", 20, "how long a stop may take"),
        },
        "sources": {
            "provider": KeyRule("text", "", "who signs: a name of `oncekey providers`"),
            **_SECRET,
            "previous_env": KeyRule("text", "", "an older secret that is still accepted"),
            "previous_file": KeyRule("text", "", "the same from a file"),
            "targets": KeyRule("names", (), "who gets its events, by name"),
            "account": KeyRule("text", "", "which of your accounts the secret belongs to"),
            "tolerance": KeyRule("seconds", None, "how far clocks may differ"),
            "max_body_bytes": KeyRule("whole", 1_048_576, "a larger body gets 413"),
            "body_timeout": KeyRule("seconds", 10, "a slower body gets 408"),
            "keep_headers": KeyRule("names", (), "headers to keep and pass on beside the usual"),
            "verify_token_env": KeyRule("text", "", "the token of a GET hub.challenge test"),
            "verify_token_file": KeyRule("text", "", "the same from a file"),
            "options": KeyRule("fields", {}, "options of the provider, such as webhook_id"),
        },
        "targets": {
            "url": KeyRule("text", "", "where deliveries go, by POST"),
            "allow_private": KeyRule("flag", False, "loopback and private addresses are taken"),
            "pull": KeyRule("flag", False, "an app takes them with a Consumer: nothing is sent"),
            **_SECRET,
            **POLICY,
        },
        "proxies": {
            "upstream": KeyRule("text", "", "where requests go, such as http://127.0.0.1:9000"),
            "path": KeyRule("text", "", "which paths, by their beginning; /NAME if not given"),
            "strip_path": KeyRule("flag", False, "the upstream gets the path without it"),
            "scope_header": KeyRule("text", "", "who calls, if not said by Authorization"),
            "anonymous": KeyRule("text", "refuse", "keyed requests of nobody: refuse or shared"),
            "require_key": KeyRule("flag", False, "a POST or PATCH without a key is refused"),
            "ttl": KeyRule("seconds", 86_400, "how long an answer is replayed"),
            "max_body_bytes": KeyRule("whole", 1_048_576, "of a request with a key"),
            "timeout": KeyRule("seconds", 60, "how long the upstream may be silent"),
            "connect_timeout": KeyRule("seconds", 10, "how long connecting may take"),
            "keep_host": KeyRule("flag", False, "the upstream sees the client's Host"),
            "trust_forwarded": KeyRule("flag", False, "X-Forwarded-* of clients is passed on"),
        },
        "users": {
            "password_hash": KeyRule("text", "", "what `oncekey password` printed"),
            "role": KeyRule("text", "read", "read, operate or admin"),
        },
        "tokens": {
            "token_env": KeyRule("text", "", "the environment variable that holds the token"),
            "token_file": KeyRule("text", "", "the file that holds it"),
            "role": KeyRule("text", "read", "read, operate or admin"),
        },
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """One ``[sources.NAME]``: taken at ``/hooks/NAME``."""

    name: str
    provider: Provider
    targets: tuple[str, ...]
    max_body_bytes: int
    body_timeout: float
    keep_headers: tuple[str, ...] = ()
    verify_token: str = field(default="", repr=False)
    secret_from: str = ""  # the variable or file: what may be shown


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """One ``[targets.NAME]``."""

    name: str
    url: str  # empty: pulled
    allow_private: bool
    policy: TargetPolicy
    pull: bool = False
    secret_from: str = ""
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRoute:
    """One ``[proxies.NAME]``: paths that lead to an upstream."""

    name: str
    path: str
    strip_path: bool
    rules: ProxyRules


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Who may sign in."""

    name: str
    role: str
    password_hash: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiToken:
    """A bearer token of the API, as its SHA-256."""

    name: str
    role: str
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """A whole config."""

    store: str = field(repr=False)  # a password may be in it
    host: str
    port: int
    workers: int
    public_url: str
    retention: float
    remember: float
    metrics_public: bool
    stop_seconds: float
    sources: Mapping[str, SourceSettings]
    targets: Mapping[str, TargetSettings]
    proxies: Mapping[str, ProxyRoute]
    users: Mapping[str, User]
    tokens: tuple[ApiToken, ...]
