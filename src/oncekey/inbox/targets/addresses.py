"""Which addresses a target may have: the public internet, unless private ones are allowed.

Decided where the socket is made, on the address that it is about to connect to: names, redirects,
digits in circles and records that change between two looks all end up there. The table is ours, as
``ipaddress.is_global`` lets several ranges through that lead back inside.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any, Final
from urllib.parse import urlsplit

__all__ = ["BlockedAddressError", "any_address", "is_private_at_sight", "is_public", "public_only"]

_NOT_PUBLIC_4: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
    )
)
# Of IPv6 only what is given out for the internet, less what is translated, tunnelled or for books.
_PUBLIC_6: Final = ipaddress.ip_network("2000::/3")
_NOT_PUBLIC_6: Final = tuple(
    ipaddress.ip_network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)


class BlockedAddressError(OSError):
    """A target's address is not on the public internet, and private ones are not allowed."""


def is_public(text: str) -> bool:
    """Whether an address is on the public internet. What can't be read is not."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is None:
            inside = any(address in network for network in _NOT_PUBLIC_6)
            return address in _PUBLIC_6 and not inside
        address = mapped
    return not any(address in network for network in _NOT_PUBLIC_4)


def is_private_at_sight(url: str) -> bool:
    """Whether a URL shows that it leads inside. Where a name leads is seen when it is dialled."""
    host = ""
    try:
        host = urlsplit(url).hostname or ""
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a name, or no URL at all
        return host == "localhost"
    return not is_public(host)


def public_only(info: Any) -> socket.socket:
    """A socket for an address, if that is public.

    Raises:
        BlockedAddressError: It is not.
    """
    if not is_public(info[4][0]):
        raise BlockedAddressError(
            "the target's address is private: set allow_private for a target of your own network"
        )
    return any_address(info)


def any_address(info: Any) -> socket.socket:
    """A socket for an address, wherever that is."""
    family, kind, protocol, _, _ = info
    return socket.socket(family, kind, protocol)
