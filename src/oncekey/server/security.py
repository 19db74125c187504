"""What every answer of the dashboard and the API carries, and what a browser's request must."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from oncekey.server.auth import Session

__all__ = ["HEADERS", "is_from_elsewhere", "is_genuine_form"]

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


def is_from_elsewhere(headers: Mapping[str, str], public_url: str = "") -> bool:
    """Whether a browser says that another site made this request.

    ``Sec-Fetch-Site`` can't be set by a page. ``Origin`` is compared with ``Host``, which a page
    can't set either, or with ``public_url``, as a proxy before us may write its own ``Host``; a
    request with neither comes from no browser of these years.
    """
    site = headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        given = urlsplit(origin)
        if public_url and given[:2] == urlsplit(public_url.lower())[:2]:
            return False
        return given.netloc.lower() != headers.get("host", "").lower()
    except ValueError:
        return True


def is_genuine_form(session: Session, given: str) -> bool:
    """Whether a change was asked for by a page that this session was given."""
    return hmac.compare_digest(session.csrf.encode(), given.encode("utf-8", "replace"))
