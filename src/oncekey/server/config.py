"""Read a config: one TOML file, and environment variables that stand above it.

``ONCEKEY__SOURCES__SHOP__PROVIDER=stripe`` is ``provider`` in ``[sources.shop]``. Everything that
is wrong is said at once, and nothing is taken of a config with a fault in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from oncekey._core.switch import VARIABLE as GUARDING
from oncekey.errors import OncekeyError
from oncekey.inbox.policy import TargetPolicy
from oncekey.inbox.routing import Router
from oncekey.inbox.targets.addresses import is_private_at_sight
from oncekey.server.forwarding import ProxyRules, header_settings, upstream_at
from oncekey.server.problems import ConfigError, Fault, Faults, lines_of, nearest
from oncekey.server.settings import (
    KEYS,
    NEVER_KEPT,
    OWN_PATHS,
    POLICY,
    ROLES,
    ApiToken,
    KeyRule,
    ProxyRoute,
    ServerSettings,
    SourceSettings,
    TargetSettings,
    User,
)
from oncekey.signatures import UnpinnedHostWarning, hmac_provider, provider, providers

__all__ = ["TOKEN_VARIABLE", "overlay", "read_config", "read_text", "settings_from"]

TOKEN_VARIABLE: Final = "ONCEKEY_TOKEN"  # noqa: S105 - a name, not a token
CUSTOM: Final = "hmac"
"""In place of a provider's name: one of your own, by the options of ``hmac_provider``."""
_PREFIX: Final = "ONCEKEY__"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_LEAST_TOKEN: Final = 16
_LEAST_REMEMBERED: Final = 604_800
_MOST_SECONDS: Final = 315_360_000  # in milliseconds since 1970 it fits every database
_LEAST_KEPT: Final = 60
_MOST_WORKERS: Final = 256
_PATH: Final = re.compile(r"/[A-Za-z0-9._~/-]*")
_SCHEMES: Final = ("sqlite", "postgresql", "postgres")
_KINDS: Final = {
    "text": "text in quotes",
    "flag": "true or false",
    "whole": "a whole number, 0 or more",
    "number": "a number, 0 or more",
    "seconds": "seconds, more than 0, up to ten years",
    "names": 'a list of names, such as ["app"]',
    "fields": "a table of names and values",
}


def read_config(path: str | None, environ: Mapping[str, str] | None = None) -> ServerSettings:
    """The config of a file, of the environment, or of both.

    Raises:
        ConfigError: It can't be used; names every fault.
    """
    text, file = read_text(path)
    return settings_from(text, file, os.environ if environ is None else environ)


def read_text(path: str | None) -> tuple[str, str]:
    """What a file says, and what to call it; nothing, without one.

    Raises:
        ConfigError: It can't be read.
    """
    if path is None:
        return "", "the environment"
    try:
        return Path(path).read_text("utf-8"), path
    except OSError as error:
        fix = "Write one with: oncekey init stripe"
        raise ConfigError(path, [Fault("", f"can't be read: {error.strerror}", fix)]) from None
    except UnicodeDecodeError:
        raise ConfigError(path, [Fault("", "is not UTF-8", "Save it as UTF-8")]) from None


def settings_from(text: str, file: str, environ: Mapping[str, str]) -> ServerSettings:
    """The config of a text, with what the environment puts above it.

    Raises:
        ConfigError: It can't be used; names every fault.
    """
    try:
        given: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        fault = Fault("", "is nested too deeply", "Write lists and tables as the settings say")
        raise ConfigError(file, [fault]) from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+)", str(error))
        told = f"is no TOML: {str(error).partition(' (at')[0]}"
        fix = 'Texts stand in quotes: name = "value"; see https://toml.io'
        fault = Fault("", told, fix, int(place[1]) if place else None)
        raise ConfigError(file, [fault]) from None
    faults = Faults(lines_of(text))
    if environ.get(GUARDING, "on") not in ("", "on"):
        told = f"{GUARDING} is set, which is for development: a gateway is there to guard"
        faults.add("", told, "Unset it")
    overlay(given, environ)
    settings = _Reading(faults, environ, Path(file).parent if text else Path()).settings(given)
    if faults.found or settings is None:
        raise ConfigError(file, faults.found)
    return settings


def overlay(given: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Put ``ONCEKEY__A__B=value`` at ``a.b``; a value is TOML where it can be read as such."""
    for name in sorted(environ):
        if not name.startswith(_PREFIX):
            continue
        *tables, key = name[len(_PREFIX) :].lower().split("__")
        place = given
        for table in tables:
            inner = place.setdefault(table, {})
            if not isinstance(inner, dict):
                inner = place[table] = {}
            place = inner
        place[key] = _value(environ[name])


def _value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return raw


class _Reading:
    """One pass over a config."""

    def __init__(self, faults: Faults, environ: Mapping[str, str], folder: Path) -> None:
        self._faults = faults
        self._environ = environ
        self._folder = folder

    def settings(self, given: dict[str, Any]) -> ServerSettings | None:
        tables = {name: given.pop(name, {}) for name in KEYS if name}
        top = self._table("", given)
        if top["store"]:
            self._check_store(top["store"])
        else:
            self._faults.add("store", "is missing", 'Write store = "sqlite:///inbox.db"')
        if top["port"] > 65_535:
            self._faults.add("port", f"{top['port']} is no port", "Give 0 to 65535")
        if not 1 <= top["workers"] <= _MOST_WORKERS:
            self._faults.add("workers", f"is {top['workers']}", f"Give 1 to {_MOST_WORKERS}")
        for key in ("retention", "remember"):
            if top[key] is not None and top[key] < _LEAST_KEPT:
                self._faults.add(key, f"is {top[key]}", f"Give at least {_LEAST_KEPT} seconds")
        if top["public_url"]:
            self._check_url("public_url", top["public_url"])
        targets = self._each("targets", tables["targets"], self._target)
        sources = self._each(
            "sources",
            tables["sources"],
            lambda name, table: self._source(name, table, tables["targets"]),
        )
        if top["remember"] is None:
            known = [one.provider.retention_seconds for one in sources.values() if one]
            top["remember"] = max([*known, _LEAST_REMEMBERED])
        proxies = self._each("proxies", tables["proxies"], self._proxy)
        self._check_paths(proxies)
        users = self._each("users", tables["users"], self._user)
        tokens = self._each("tokens", tables["tokens"], self._token)
        if own := self._environ.get(TOKEN_VARIABLE):
            tokens[TOKEN_VARIABLE] = self._api_token(TOKEN_VARIABLE, TOKEN_VARIABLE, "admin", own)
        if self._faults.found:
            return None
        return ServerSettings(
            **top,
            sources=sources,
            targets=targets,
            proxies=proxies,
            users=users,
            tokens=tuple(tokens.values()),
        )

    # Tables and their keys

    def _each(self, kind: str, given: Any, make: Any) -> dict[str, Any]:
        """What each table of a kind says, by name. Those with a fault are left out."""
        if not isinstance(given, dict):
            self._faults.add(kind, "is no table", f"Write it as [{kind}.NAME]")
            return {}
        made: dict[str, Any] = {}
        for name, table in given.items():
            path = f"{kind}.{name}"
            if not isinstance(table, dict):
                self._faults.add(path, "is no table", f"Write it as [{kind}.NAME]")
            elif not _NAME.fullmatch(name):
                self._faults.add(
                    path, "is no name", "Use small letters, digits, - and _, at most 63"
                )
            else:
                made[name] = make(name, self._table(kind, table, path))
        return made

    def _table(self, kind: str, given: dict[str, Any], path: str = "") -> dict[str, Any]:
        rules = KEYS[kind]
        read = {}
        for key, value in given.items():
            at = f"{path}.{key}" if path else key
            if key not in rules:
                known = [*rules, *(() if path else (name for name in KEYS if name))]
                self._faults.add(at, "is no setting", nearest(key, known))
            elif not _fits(rules[key].kind, value):
                told = f"is {_shown(value)}"
                self._faults.add(at, told, f"Give {_KINDS[rules[key].kind]}")
            else:
                read[key] = _as_kind(rules[key], value)
        return {key: read.get(key, rule.default) for key, rule in rules.items()}

    # What each means

    def _check_store(self, url: str) -> None:
        scheme = url.partition(":")[0]
        if scheme not in _SCHEMES:
            fix = 'Write "sqlite:///FILE" or "postgresql://user@host/database"'
            # Only what looks like a scheme is said again: anything else may be a password.
            named = re.fullmatch(r"([a-z][a-z0-9+.-]{0,19})://.*", url, re.DOTALL)
            told = f"there is no inbox of kind {named[1]!r}" if named else "is no URL of an inbox"
            self._faults.add("store", told, fix)

    def _check_url(self, key: str, url: str) -> None:
        netloc, usable = "", False
        with contextlib.suppress(ValueError):
            parts = urlsplit(url)
            netloc, port = parts.netloc, parts.port
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
            usable = usable and re.search(r"[\s\x00-\x1f]", url) is None
        if not usable:
            self._faults.add(key, "is no URL", "Write it like https://host/path")
        elif "@" in netloc:
            fix = "Leave it out: what is delivered is signed; see secret_env"
            self._faults.add(key, "has a user or password in it", fix)

    def _source(
        self, name: str, table: dict[str, Any], targets: Mapping[str, Any]
    ) -> SourceSettings | None:
        path = f"sources.{name}"
        for one in table["targets"]:
            if one not in targets:
                self._faults.add(f"{path}.targets", f"no target {one!r}", nearest(one, targets))
        if not table["targets"]:
            fix = f'Write targets = ["NAME"] and [targets.NAME] under [{path}]'
            self._faults.add(f"{path}.targets", "names nobody who gets the events", fix)
        if not table["provider"]:
            fix = f"{nearest('', providers())} (all: oncekey providers)"
            self._faults.add(f"{path}.provider", "is missing", fix)
            return None
        known = [*providers(), CUSTOM]
        secret = self._secret(path, table, "secret")
        previous = self._secret(path, table, "previous")
        if table["provider"] not in known:
            told = f"no provider {table['provider']!r}"
            self._faults.add(f"{path}.provider", told, nearest(table["provider"], known))
            return None
        options = dict(table["options"])
        if secret:
            options["secret"] = secret
        if previous:
            options["previous"] = previous
        if table["tolerance"] is not None:
            options["tolerance"] = table["tolerance"]
        made = self._provider(path, table, options)
        if made is None:
            return None
        return SourceSettings(
            name=name,
            provider=made,
            targets=tuple(dict.fromkeys(table["targets"])),
            max_body_bytes=table["max_body_bytes"],
            body_timeout=table["body_timeout"],
            keep_headers=self._kept(path, table["keep_headers"]),
            verify_token=self._secret(path, table, "verify_token"),
            secret_from=_named(table, "secret"),
        )

    def _kept(self, path: str, names: tuple[str, ...]) -> tuple[str, ...]:
        lower = tuple(name.lower() for name in names)
        for name in lower:
            if name in NEVER_KEPT or not re.fullmatch(r"[a-z0-9-]{1,64}", name):
                fix = "Leave it out: credentials are neither kept nor passed on"
                self._faults.add(f"{path}.keep_headers", f"can't keep {name[:64]!r}", fix)
        return lower

    def _provider(self, path: str, table: dict[str, Any], options: dict[str, Any]) -> Any:
        name = path.partition(".")[2]
        named = table["secret_env"] or table["secret_file"]
        if named and "secret" not in options:
            return None  # what it names is not there, which was said
        if table["max_body_bytes"] < 1:
            self._faults.add(f"{path}.max_body_bytes", "takes no body at all", "Give at least 1")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnpinnedHostWarning)  # doctor says it
                if table["provider"] == CUSTOM:
                    return hmac_provider(name, account=table["account"], **options)
                return provider(table["provider"], account=table["account"], **options)
        except (OncekeyError, TypeError) as error:
            fix = (
                "See `oncekey providers`"
                if named
                else 'Write secret_env = "NAME", the variable that holds the secret'
            )
            told = f"{error}" if isinstance(error, OncekeyError) else "an option does not fit"
            self._faults.add(path, told.rstrip("."), fix)
            return None

    def _target(self, name: str, table: dict[str, Any]) -> TargetSettings:
        path = f"targets.{name}"
        if table["url"] and table["pull"]:
            fix = "Leave one out: what an app pulls is not sent to it, too"
            self._faults.add(f"{path}.pull", "is set beside a url", fix)
        elif table["url"]:
            self._check_url(f"{path}.url", table["url"])
            if not table["allow_private"] and is_private_at_sight(table["url"]):
                fix = "Write allow_private = true for an app of yours"
                self._faults.add(f"{path}.url", "is a private address", fix)
        elif not table["pull"]:
            fix = 'Write url = "https://host/path", or pull = true for an app with a Consumer'
            self._faults.add(f"{path}.url", "is missing", fix)
        secret = self._secret(path, table, "secret")
        if secret:
            self._check_signing_secret(path, secret)
        try:
            policy = TargetPolicy(**{key: table[key] for key in POLICY})
            Router({name: policy})  # reads its paths and rules
        except OncekeyError as error:
            self._faults.add(path, str(error), "See the settings of targets")
            policy = TargetPolicy()
        return TargetSettings(
            name=name,
            url=table["url"],
            allow_private=table["allow_private"],
            pull=table["pull"],
            policy=policy,
            secret=secret,
            secret_from=_named(table, "secret"),
        )

    def _check_signing_secret(self, path: str, secret: str) -> None:
        try:
            provider("standard-webhooks", secret)
        except OncekeyError:
            fix = "Write whsec_ and 24 to 64 random bytes in base64"
            self._faults.add(f"{path}.secret_env", "is no secret of Standard Webhooks", fix)

    def _proxy(self, name: str, table: dict[str, Any]) -> ProxyRoute | None:
        where, path = f"proxies.{name}", table["path"] or f"/{name}"
        if not _PATH.fullmatch(path) or path.split("/")[1] in OWN_PATHS:
            fix = f"Give one like /{name}; {', '.join(f'/{one}' for one in OWN_PATHS)} are taken"
            self._faults.add(f"{where}.path", "is no path of a proxy", fix)
        if table["anonymous"] not in ("refuse", "shared"):
            self._faults.add(f"{where}.anonymous", "is not known", 'Write "refuse" or "shared"')
            return None
        keep_host = table["keep_host"]
        try:
            upstream = upstream_at(
                table["upstream"], keep_host=keep_host, trust_forwarded=table["trust_forwarded"]
            )
            header = header_settings(
                namespace=f"proxy:{name}",
                scope_header=table["scope_header"],
                keep_host=keep_host,
                anonymous=table["anonymous"],
                required=table["require_key"],
                ttl=table["ttl"],
                max_body_bytes=table["max_body_bytes"],
            )
        except OncekeyError as error:
            self._faults.add(where, str(error).rstrip("."), "See the settings of proxies")
            return None
        rules = ProxyRules(
            upstream=upstream,
            header=header,
            connect_seconds=table["connect_timeout"],
            answer_seconds=table["timeout"],
            part=path != "/",
        )
        return ProxyRoute(name=name, path=path, strip_path=table["strip_path"], rules=rules)

    def _check_paths(self, proxies: Mapping[str, ProxyRoute | None]) -> None:
        seen: dict[str, str] = {}
        for name, one in proxies.items():
            if one is not None:
                other = seen.setdefault(one.path.rstrip("/"), name)
                if other != name:
                    fix = "Give each a path of its own"
                    self._faults.add(f"proxies.{name}.path", f"is that of {other}, too", fix)

    def _user(self, name: str, table: dict[str, Any]) -> User:
        path = f"users.{name}"
        if not table["password_hash"].startswith("$argon2"):
            fix = "Write what `oncekey password` prints"
            self._faults.add(f"{path}.password_hash", "is no argon2 hash", fix)
        self._check_role(path, table["role"])
        return User(name=name, role=table["role"], password_hash=table["password_hash"])

    def _token(self, name: str, table: dict[str, Any]) -> ApiToken:
        path = f"tokens.{name}"
        if not table["token_env"] and not table["token_file"]:
            fix = 'Write token_env = "NAME", the variable that holds it'
            self._faults.add(f"{path}.token_env", "is missing", fix)
        self._check_role(path, table["role"])
        return self._api_token(path, name, table["role"], self._secret(path, table, "token"))

    def _api_token(self, path: str, name: str, role: str, token: str) -> ApiToken:
        if token and len(token) < _LEAST_TOKEN:
            fix = "Make one with: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
            self._faults.add(path, f"the token has less than {_LEAST_TOKEN} characters", fix)
        return ApiToken(name=name, role=role, digest=hashlib.sha256(token.encode()).digest())

    def _check_role(self, path: str, role: str) -> None:
        if role not in ROLES:
            # Not said again: it may be what belongs into another key, such as a password.
            self._faults.add(f"{path}.role", "is none of the roles", nearest(role, ROLES))

    def _secret(self, path: str, table: dict[str, Any], what: str) -> str:
        """What a variable or file holds; never what it is, in a fault."""
        variable, file = table[f"{what}_env"], table[f"{what}_file"]
        if variable and file:
            fix = f"Keep {what}_env or {what}_file"
            self._faults.add(f"{path}.{what}_file", f"{what}_env is given too", fix)
        if variable:
            if value := self._environ.get(variable, ""):
                return value
            shown = f" {variable}" if re.fullmatch(r"[A-Z][A-Z0-9_]*", variable) else ""
            fix = "Set it where the gateway starts; it takes a variable's name, not the secret"
            self._faults.add(f"{path}.{what}_env", f"the variable{shown} is not set", fix)
        elif file:
            try:
                found: str = (self._folder / file).read_text("utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not text"
                fix = "Give a file that the gateway may read"
                self._faults.add(f"{path}.{what}_file", f"can't be read: {why}", fix)
            else:
                if found:
                    return found
                self._faults.add(f"{path}.{what}_file", "is empty", "Write the secret into it")
        return ""


def _fits(kind: str, value: Any) -> bool:
    if kind in ("whole", "number", "seconds"):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind == "whole":
            return number and isinstance(value, int) and 0 <= value < 2**53
        least = 0 if kind == "number" else math.ulp(0.0)
        most = _MOST_SECONDS if kind == "seconds" else math.inf
        return number and math.isfinite(value) and least <= value <= most
    if kind == "names":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    return isinstance(value, {"text": str, "flag": bool, "fields": dict}[kind])


def _as_kind(rule: KeyRule, value: Any) -> Any:
    return tuple(value) if rule.kind == "names" else value


def _shown(value: Any) -> str:
    """What stands there, without what may be a secret."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "something else"


def _named(table: dict[str, Any], what: str) -> str:
    if table[f"{what}_env"]:
        return f"${table[f'{what}_env']}"
    return str(table[f"{what}_file"])
