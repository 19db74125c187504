"""URLs in the form that a provider signed them, which is not always the form that arrived."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from oncekey.errors import PolicyError
from oncekey.signatures.parsing import Rejection
from oncekey.signatures.target_uri import ascii_host, canonical_authority, with_ascii_host

__all__ = ["Hosts", "SignedUrl", "UnpinnedHostWarning", "decode_reserved", "encoded"]

Hosts = str | Iterable[str]
ANY_HOST: Final = "*"

# What HubSpot decodes before it signs a URL; everything else stays as it was sent.
_ESCAPED = re.compile(r"%(3A|2F|3F|40|21|24|27|28|29|2A|2C|3B)", re.IGNORECASE)


class UnpinnedHostWarning(UserWarning):
    """A provider signs URLs, and nobody said which of them are yours."""


class SignedUrl:
    """The URL that a signature covers, and the hosts that it may name.

    A server makes the URL of a delivery from ``Host``, which whoever sends it chooses: what was
    signed for one of your hosts would pass on another that has the same secret.

    Args:
        title: The provider's name, for messages.
        public_url: What the provider calls, in place of what the server saw.
        allowed_hosts: The hosts that are yours, with their port unless it is the scheme's own.
            ``*``: any.
        signed: Whether the host is signed at all, so that it is worth a warning.

    Raises:
        PolicyError: One of them is no such thing.
    """

    def __init__(
        self, title: str, public_url: str, allowed_hosts: Hosts, *, signed: bool = True
    ) -> None:
        self.public_url = _checked_url(public_url)
        self._hosts = _checked_hosts(allowed_hosts)
        if signed and not public_url and not self._hosts:
            from oncekey._core.placement import users_level

            warnings.warn(
                f"{title} signs the URL, and its host is what the Host header says: a delivery "
                "that was signed for another host with the same secret, staging say, is accepted "
                "here. Pass public_url='https://...' or allowed_hosts=['...'] with what is yours; "
                "allowed_hosts='*' if something in front lets no other host through",
                UnpinnedHostWarning,
                stacklevel=users_level(),
            )

    def check(self, url: str) -> None:
        """Refuse a URL of another host.

        Raises:
            Rejection: ``host_not_allowed``, or ``url_malformed`` if it names none.
        """
        if not self._hosts or ANY_HOST in self._hosts:
            return
        scheme, _, rest = url.partition("://")
        try:
            authority = re.split("[/?#]", rest, maxsplit=1)[0]
            if "@" in authority:  # no Host header has a user in it
                raise ValueError("more than a host")
            host = canonical_authority(authority, scheme.lower())
        except (ValueError, KeyError):
            raise Rejection("url_malformed", "the URL names no host") from None
        if host not in self._hosts:
            raise Rejection("host_not_allowed")

    def form(self, url: str) -> str:
        """The URL as the provider knows it."""
        return public_form(url, self.public_url)


def public_form(url: str, public_url: str) -> str:
    """The URL as the provider knows it.

    Args:
        url: The URL that the server saw.
        public_url: Empty, or what to put in place of scheme and host (and of the path, if it
            has one). The query stays.
    """
    if not public_url:
        return url
    rest = url.partition("#")[0]
    path, question, query = rest.partition("?")
    if urlsplit(public_url).path in {"", "/"}:
        after_host = path.split("://", 1)[-1]
        slash = after_host.find("/")
        path = public_url.rstrip("/") + (after_host[slash:] if slash >= 0 else "/")
    else:
        path = public_url
    return path + question + query


def _checked_hosts(hosts: Hosts) -> frozenset[str]:
    given = [hosts] if isinstance(hosts, str) else list(hosts)
    found: set[str] = set()
    for one in given if given != [""] else []:
        try:
            if re.search(r"[/?#@\s]", one):
                raise ValueError("more than a host")
            found.add(one if one == ANY_HOST else canonical_authority(ascii_host(one), "https"))
        except (TypeError, ValueError):
            raise PolicyError(
                f"allowed_hosts: {one!r} is no host; write it as example.com or example.com:8443"
            ) from None
    return frozenset(found)


def _checked_url(public_url: str) -> str:
    if public_url and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", public_url):
        raise PolicyError(
            f"public_url is {public_url!r}; give what the provider was told, without a query, such "
            "as https://example.com or https://example.com/hooks/square"
        )
    try:
        return with_ascii_host(public_url)
    except ValueError as error:
        raise PolicyError(f"public_url is {public_url!r}: {error}") from None


def decode_reserved(url: str) -> str:
    """The URL with its reserved characters decoded, as HubSpot signs it."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), url)


def encoded(text: str) -> bytes:
    """The UTF-8 bytes of a URL or a method.

    Raises:
        Rejection: ``url_malformed``.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Rejection("url_malformed", "the URL or the method is not valid text") from None
