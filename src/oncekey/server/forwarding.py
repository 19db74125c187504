"""What a proxy changes of a request and its answer: the rules, without any connection."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from oncekey.errors import PolicyError
from oncekey.http import Settings, by_header
from oncekey.http.answer import Answer

__all__ = [
    "Field",
    "FindWay",
    "ProxyRules",
    "Upstream",
    "Way",
    "answer_fields",
    "climbs",
    "header_settings",
    "problem",
    "upstream_at",
]

Field = tuple[bytes, bytes]

HOP_BY_HOP: Final = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip
FORWARDED: Final = frozenset((
    b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto",
    b"x-forwarded-port", b"x-real-ip",
))  # fmt: skip
_BODILESS: Final = (204, 304)
# What a client's ``Connection`` can't take away: by these it is decided here who calls, and what.
_NEEDED: Final = frozenset((
    b"authorization", b"cookie", b"content-encoding", b"content-length", b"content-type", b"host",
))  # fmt: skip
_LENGTH: Final = frozenset((b"content-length",))
_DECODED: Final = 4  # how often a path is decoded to see whether it climbs


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where requests go.

    Attributes:
        scheme: ``http`` or ``https``.
        host: Its name or address.
        port: Its port.
        path: What stands before every path.
        keep_host: It sees the client's ``Host``, not its own.
        trust_forwarded: What the client says of those before it is passed on: only behind a proxy
            of yours.
    """

    scheme: str
    host: str
    port: int
    path: str = ""
    keep_host: bool = False
    trust_forwarded: bool = False

    @property
    def authority(self) -> str:
        """Its name as a ``Host`` header has it."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return name if self.port == usual else f"{name}:{self.port}"

    def request_fields(
        self,
        fields: Sequence[Field],
        client: str,
        scheme: str,
        needed: frozenset[bytes] = _NEEDED,
    ) -> list[Field]:
        """The header of a request as the upstream gets it.

        Args:
            fields: As the client sent it, names in lower case.
            client: The address of who is connected.
            scheme: How: ``http`` or ``https``.
            needed: The names that ``Connection`` can't take away.
        """
        given: dict[bytes, bytes] = {}
        for name, value in fields:
            if name in FORWARDED or name == b"host":
                given[name] = given[name] + b", " + value if name in given else value
        chunked = any(name == b"transfer-encoding" for name, _ in fields)
        changed = FORWARDED | {b"host", b"expect"} | ({b"content-length"} if chunked else set())
        kept = [one for one in _end_to_end(fields, needed) if one[0] not in changed]
        host = given.get(b"host", b"")
        told = given if self.trust_forwarded else {}
        before = told.get(b"x-forwarded-for")
        me = client.encode()
        shown = host if self.keep_host and host else self.authority.encode()
        kept += [
            (b"host", shown),
            (b"x-forwarded-for", before + b", " + me if before else me),
            (b"x-forwarded-proto", told.get(b"x-forwarded-proto", scheme.encode())),
            (b"x-forwarded-host", told.get(b"x-forwarded-host", host)),
        ]
        if b"forwarded" in told:
            kept.append((b"forwarded", told[b"forwarded"]))
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRules:
    """What is done with a request, wherever it came in.

    Attributes:
        upstream: Where requests go.
        header: How keyed requests are treated.
        connect_seconds: How long a connection to the upstream may take.
        answer_seconds: How long the upstream may say nothing: before its answer, or within it.
            Event streams may be quiet for as long as they like.
        part: Only a part of the upstream's paths is for callers, and a path with ``..`` in it,
            which may lead out of there, is refused.
    """

    upstream: Upstream
    header: Settings
    connect_seconds: float = 10.0
    answer_seconds: float = 60.0
    part: bool = False
    _needed: frozenset[bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = (self.header.header, getattr(self.header.scope, "header", ""))
        needed = _NEEDED | {name.lower().encode() for name in names if name}
        object.__setattr__(self, "_needed", needed)

    def request_fields(self, fields: Sequence[Field], client: str, scheme: str) -> list[Field]:
        """The header of a request as the upstream gets it: with all by which it was judged here."""
        return self.upstream.request_fields(fields, client, scheme, self._needed)

    def refuses(self, path: bytes) -> bool:
        """Whether a path leads out of what is for callers."""
        return (self.part or bool(self.upstream.path)) and climbs(path)


class Way(NamedTuple):
    """Where a WebSocket is led: by which rules, and the path as the upstream gets it."""

    rules: ProxyRules
    target: bytes


FindWay = Callable[[bytes], Way | None]
"""The way of a request by its target, the path with its query. ``None``: there is none."""


def header_settings(
    *, namespace: str, scope_header: str, keep_host: bool, **given: Any
) -> Settings:
    """How a proxy treats keyed requests.

    Args:
        namespace: Sets its keys apart.
        scope_header: The header that says who calls; empty: ``Authorization``.
        keep_host: The upstream serves several hosts, and each has keys of its own.
        **given: More options of ``Settings``.

    Raises:
        PolicyError: An option can't work.
    """
    return Settings(
        scope=by_header(scope_header) if scope_header else None,
        per_host=keep_host,
        namespace=namespace,
        disconnect_grace=None,  # the answer is for the retry, too; the upstream's time bounds it
        **given,
    )


def climbs(path: bytes) -> bool:
    """Whether a path has ``..`` in it, however it is written.

    An upstream that resolves it leaves the part of its site that requests were to go to. Some cut
    parameters off before that (``..;a=b``), and some decode twice (``%252e``).
    """
    text = path.partition(b"?")[0]
    for _ in range(_DECODED):
        before, text = text, unquote_to_bytes(re.sub(rb"%(?:25)+", b"%", text))
        if any(part.partition(b";")[0] == b".." for part in re.split(rb"[/\\]", text)):
            return True
        if text == before:
            return False
    return True  # nobody encodes a path so often to be understood


def upstream_at(
    url: str, *, keep_host: bool = False, trust_forwarded: bool = False, given_by: str = "upstream"
) -> Upstream:
    """The upstream that a URL names.

    Raises:
        PolicyError: It is no such URL.
    """
    wrong = PolicyError(f"{given_by}: write it like http://127.0.0.1:9000")
    try:
        parts = urlsplit(url)
        given = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
        raise wrong
    if parts.query or parts.fragment or given == 0:
        raise wrong
    if parts.username or parts.password:
        raise PolicyError(f"{given_by}: no user or password in the URL; callers send their own")
    port = given or (443 if parts.scheme == "https" else 80)
    path = parts.path.rstrip("/")
    return Upstream(parts.scheme, parts.hostname, port, path, keep_host, trust_forwarded)


def answer_fields(status: int, fields: Iterable[Field]) -> list[Field]:
    """The header of an answer as the client gets it."""
    kept = _end_to_end([(name.lower(), value) for name, value in fields])
    if status in _BODILESS:
        return [one for one in kept if one[0] != b"content-length"]
    return kept


def _end_to_end(fields: Sequence[Field], needed: frozenset[bytes] = _LENGTH) -> list[Field]:
    """Without what is about one connection, and what ``Connection`` names as such.

    But with what is ``needed``, whatever it names: how long the body is stays true.
    """
    named = {
        token.strip().lower()
        for name, value in fields
        if name == b"connection"
        for token in value.split(b",")
    }
    dropped = HOP_BY_HOP | (named - needed)
    return [one for one in fields if one[0] not in dropped]


def problem(status: int, name: str, title: str, detail: str) -> Answer:
    """What the proxy itself answers, where the upstream does not."""
    told = {
        "type": f"urn:oncekey:problem:{name}",
        "title": title,
        "status": status,
        "detail": detail,
    }
    fields = ((b"content-type", b"application/problem+json"), (b"cache-control", b"no-store"))
    return Answer(status, fields, json.dumps(told).encode())
