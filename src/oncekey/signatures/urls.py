"""URLs in the form that a provider signed them, which is not always the form that arrived."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from oncekey.errors import PolicyError
from oncekey.signatures.strict import Rejection

__all__ = ["check_public_url", "decode_reserved", "encoded", "public_form"]

# What HubSpot decodes before it signs a URL; everything else stays as it was sent.
_ESCAPED = re.compile(r"%(3A|2F|3F|40|21|24|27|28|29|2A|2C|3B)", re.IGNORECASE)


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


def check_public_url(public_url: str) -> str:
    """Return it, if it can stand in for scheme, host and path.

    Raises:
        PolicyError: It is no such URL.
    """
    if public_url and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", public_url):
        raise PolicyError(
            f"public_url is {public_url!r}; give what the provider was told, without a query, such "
            "as https://example.com or https://example.com/hooks/square"
        )
    return public_url


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
