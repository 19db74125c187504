"""What is known of a request, in one form for every server and framework.

Two requests are the same only if every way in tells them alike: the middleware for ASGI, the one
for WSGI, and the guards of single routes. So that all of them get their facts from here.

A path is compared by what its escapes stand for, written in one way: of ``/caf%C3%A9`` and a raw
``/café`` WSGI tells the same, and ASGI should. ``%3F`` stays what it is, since a ``?`` ends a path.
``%2F`` and ``/`` are one, as WSGI can't tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

__all__ = ["Facts", "asgi_facts", "facts_of", "is_plain_path", "wsgi_facts"]

# What a path may hold as it is (RFC 3986, 3.3).
_SAFE: Final = "/:@!$&'()*+,;=-._~"
is_plain_path: Final = re.compile(rb"/[A-Za-z0-9/:@!$&'()*+,;=._~-]*\Z").match
"""Whether a path is the same with and without escapes."""


class Facts(NamedTuple):
    """A request, as every adapter sees it.

    Attributes:
        method: Such as ``POST``.
        path: The whole path without escapes, for the ``applies`` option.
        target: Path and query, in the form that is compared.
        keys: Every value of the key's header.
        content_type: The ``Content-Type`` header, or nothing.
        encoding: The ``Content-Encoding`` header, or nothing.
        authorization: The ``Authorization`` header.
        length: The declared length of the body.
        host: The ``Host`` header in lower case, or nothing.
        source: The framework's request, which the ``scope`` option is called with.
    """

    method: str
    path: bytes
    target: bytes
    keys: Sequence[bytes | str]
    content_type: str
    encoding: str
    authorization: bytes | None
    length: bytes | str | None
    host: bytes
    source: Any


def asgi_facts(scope: Mapping[str, Any], header: bytes, source: Any) -> Facts:
    """A request of ASGI.

    Args:
        scope: The scope.
        header: The name of the key's header, in lower case.
        source: The framework's request.
    """
    headers = scope["headers"]
    if type(headers) is not list:
        headers = list(headers)
    fields: dict[bytes, bytes] = dict(headers)
    if len(fields) == len(headers):  # each came once, as nearly always
        keys = [fields[header]] if header in fields else []
    else:
        keys = [value for name, value in headers if name == header]
        fields = _joined(headers)
    path = scope.get("raw_path")
    if path and is_plain_path(path) and not scope.get("root_path"):
        query = scope.get("query_string")
        target = b"%b?%b" % (path, query) if query else path
    else:
        path = _asgi_path(scope)
        target = _target(path, scope.get("query_string") or b"")
    made = (
        scope["method"],
        path,
        target,
        keys,
        fields.get(b"content-type", b"").decode("latin-1"),
        fields.get(b"content-encoding", b"").decode("latin-1"),
        fields.get(b"authorization"),
        fields.get(b"content-length"),
        fields.get(b"host", b"").lower(),
        source,
    )
    return tuple.__new__(Facts, made)  # for each request: a call less


def _asgi_path(scope: Mapping[str, Any]) -> bytes:
    """The whole path without escapes."""
    raw = scope.get("raw_path")
    if raw:
        path = unquote_to_bytes(_path_of(raw))
    else:
        path = scope["path"].encode("utf-8", "surrogatepass")
    # A server that was told of a prefix puts it in front of the path, or leaves that to us.
    prefix = (scope.get("root_path") or "").rstrip("/").encode("utf-8", "surrogatepass")
    return path if (path + b"/").startswith(prefix + b"/") else bytes(prefix + path)


def _joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Header fields, joined as a WSGI server joins them."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        fields[name] = b"%b,%b" % (fields[name], value) if name in fields else value
        if name == b"authorization" and fields[name] is not value:
            fields[name] = b""  # of two credentials it is not known which counts
    return fields


def wsgi_facts(
    environ: Mapping[str, Any], header: str, source: Any, path: bytes | None = None
) -> Facts:
    """A request of WSGI. A server has joined a header that came twice, which is no key then.

    Args:
        environ: The environ.
        header: The name of the key's header.
        source: The framework's request.
        path: The whole path without escapes, where the environ doesn't tell it as WSGI says.
    """
    if path is None:
        path = _octets(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))
    key = environ.get("HTTP_" + header.upper().replace("-", "_"))
    return Facts(
        environ["REQUEST_METHOD"],
        path,
        _target(path, _octets(environ.get("QUERY_STRING", ""))),
        [] if key is None else [key],
        environ.get("CONTENT_TYPE", ""),
        environ.get("HTTP_CONTENT_ENCODING", ""),
        _octets(environ.get("HTTP_AUTHORIZATION", "")),
        environ.get("CONTENT_LENGTH"),
        _octets(environ.get("HTTP_HOST", "")).lower(),
        source,
    )


def facts_of(
    method: str,
    target: bytes,
    headers: Iterable[tuple[str, str]],
    header: str,
    source: Any,
    **known: Any,
) -> Facts:
    """A request of anything else.

    Args:
        method: Such as ``POST``.
        target: Path and query as they were sent, escapes and all.
        headers: All header fields.
        header: The name of the key's header.
        source: The framework's request.
        known: Facts that the framework has changed, such as ``encoding`` of a body that it has
            decompressed already.
    """
    fields: dict[str, list[str]] = {}
    for name, value in headers:
        fields.setdefault(name.lower(), []).append(value)
    raw, _, query = target.partition(b"?")
    path = unquote_to_bytes(_path_of(raw))

    def joined(name: str) -> str:
        return ",".join(fields.get(name, ()))

    credentials = fields.get("authorization", ())
    made = Facts(
        method,
        path,
        _target(path, query),
        fields.get(header.lower(), []),
        joined("content-type"),
        joined("content-encoding"),
        credentials[0].encode("utf-8", "surrogateescape") if len(credentials) == 1 else None,
        joined("content-length") or None,
        joined("host").encode("utf-8", "surrogateescape").lower(),
        source,
    )
    return made._replace(**known) if known else made


def _target(path: bytes, query: bytes) -> bytes:
    """Path and query in the form that is compared, from the whole path without escapes."""
    target = path if is_plain_path(path) else quote(path or b"/", _SAFE).encode()
    return b"%b?%b" % (target, query) if query else target


def _path_of(raw: bytes) -> bytes:
    """The path of a request line, which may hold a whole URL, and a query."""
    raw = raw.partition(b"?")[0]
    if not raw.startswith(b"/") and b"://" in raw:
        return b"/" + raw.partition(b"://")[2].partition(b"/")[2]
    return raw


def _octets(text: str) -> bytes:
    """What a server wrote as latin-1, as it has to."""
    return text.encode("latin-1", "replace")
