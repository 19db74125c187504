"""The one form of a URL that AdCP signs, so that sender and receiver get the same bytes."""

from __future__ import annotations

import re
import unicodedata
from ipaddress import IPv6Address
from typing import Final, NamedTuple

from oncekey.signatures.parsing import MAX_URL

__all__ = ["Target", "ascii_host", "canonical_authority", "canonical_target", "with_ascii_host"]

# Not urllib.parse.urlsplit: it drops line breaks and tabs, so that two URLs become one.
_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?P<query>\?[^#]*)?(?:#.*)?",
    re.IGNORECASE,
)
_AUTHORITY: Final = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]{0,5}))?")
_PLAIN: Final = re.compile(r"[!-~]*")
_ESCAPE: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_LONGEST_LABEL: Final = 63
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_UNRESERVED: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class Target(NamedTuple):
    """A URL in canonical form.

    Attributes:
        uri: Without credentials, default port and fragment; the query as it was sent.
        authority: Host, and port unless it is the scheme's own.
        scheme: ``http`` or ``https``.
    """

    uri: str
    authority: str
    scheme: str


def canonical_target(url: str) -> Target:
    """Bring an absolute URL into canonical form.

    Raises:
        ValueError: It is malformed, too long, or has a host that is not ASCII. Whoever sends it
            must write the host in its ``xn--`` form, as ``with_ascii_host`` does: two receivers
            might translate it into two.
    """
    parts = _URL.fullmatch(url) if len(url) <= MAX_URL and _PLAIN.fullmatch(url) else None
    if parts is None:
        raise ValueError("not an absolute URL of HTTP, in ASCII, that a request could have")
    scheme = parts["scheme"].lower()
    authority = canonical_authority(parts["authority"], scheme)
    path = _ESCAPE.sub(_normal_escape, _without_dots(parts["path"] or "/"))
    return Target(f"{scheme}://{authority}{path}{parts['query'] or ''}", authority, scheme)


def canonical_authority(text: str, scheme: str) -> str:
    """Bring ``host:port``, as in a URL or a ``Host`` header, into canonical form.

    Raises:
        ValueError: It names no host, or not clearly.
    """
    parts = _AUTHORITY.fullmatch(text.rpartition("@")[2])
    if parts is None or not _PLAIN.fullmatch(text):
        raise ValueError("the authority is malformed")
    host = parts["host"].lower()
    if host.startswith("["):
        if "%" in host:
            raise ValueError("a zone means nothing on another machine")
        IPv6Address(host[1:-1])
    else:
        host = host.removesuffix(".")
        if not all(host.split(".")):
            raise ValueError("the authority has no host, or an empty part in it")
    port = int(parts["port"] or _DEFAULT_PORTS[scheme])
    if port > 65_535:
        raise ValueError("there is no such port")
    return host if port == _DEFAULT_PORTS[scheme] else f"{host}:{port}"


def with_ascii_host(url: str) -> str:
    """The URL with its host as it goes over the wire, such as ``xn--bcher-kva.example``.

    Raises:
        ValueError: The host has no such form.
    """
    start, slashes, rest = url.partition("://")
    end = next((at for at, char in enumerate(rest) if char in "/?#"), len(rest))
    return start + slashes + ascii_host(rest[:end]) + rest[end:]


def ascii_host(authority: str) -> str:
    """A host, perhaps with a port, in ASCII: UTS 46 without transitional processing.

    Raises:
        ValueError: It holds what can't stand in a host, or only by rules that differ.
    """
    if authority.isascii():
        return authority
    host, colon, port = authority.partition(":")
    return ".".join(map(_ascii_label, host.split("."))) + colon + port


def _ascii_label(label: str) -> str:
    # Not the codec "idna", which is of 2003: there a sharp s is two, and names another host.
    mapped = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", label).lower())
    if mapped.isascii():
        if "." in mapped:
            raise ValueError("the host has a full stop that is none")
        return mapped
    if any(unicodedata.category(char)[0] not in "LMN" and char != "-" for char in mapped):
        raise ValueError("the host has a character that can't stand in one")
    coded = "xn--" + mapped.encode("punycode").decode("ascii")
    if len(coded) > _LONGEST_LABEL or mapped.startswith("-") or mapped.endswith("-"):
        raise ValueError("a part of the host is too long, or begins or ends with a hyphen")
    return coded


def _without_dots(path: str) -> str:
    """Resolve ``.`` and ``..`` (RFC 3986, 5.2.4). Slashes in a row stay as they are."""
    kept: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in {".", ".."}:
        kept.append("")
    return "/" + "/".join(kept)


def _normal_escape(found: re.Match[str]) -> str:
    char = chr(int(found[1], 16))
    return char if char in _UNRESERVED else found[0].upper()
