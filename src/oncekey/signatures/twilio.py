"""Twilio: the signature covers the URL and the form's fields, or the URL with the body's hash.

Names and values of the fields are joined without anything between, so ``a=bc`` and ``ab=c`` have
one signature: a weakness of the scheme that no verifier can mend. The timestamp is not signed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from oncekey.errors import PolicyError
from oncekey.signatures.base import (
    Facts,
    Proof,
    Provider,
    Secrets,
    SignedRequest,
    as_bytes,
    as_secrets,
    put_header,
)
from oncekey.signatures.delivery import Delivery, Headers
from oncekey.signatures.parsing import Rejection, decode, encode, one_header
from oncekey.signatures.urls import Hosts, SignedUrl, encoded

__all__ = ["TwilioProvider"]

_SIGNATURE: Final = "X-Twilio-Signature"
_SETTINGS: Final = "X-Twilio-Webhooks-Signature-Settings"
_ALGORITHMS: Final = {"HMAC_SHA1": "sha1", "HMAC_SHA256": "sha256"}
_MOST_FIELDS: Final = 1000
_PORT = re.compile(r":[0-9]*$")


class TwilioProvider(Provider):
    """Checks Twilio's form of the URL, with and without its port."""

    def __init__(
        self,
        facts: Facts,
        *,
        secret: Secrets | None = None,
        previous: Secrets | None = None,
        public_url: str = "",
        allowed_hosts: Hosts = "",
        algorithm: str = "",
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        if algorithm and algorithm not in _ALGORITHMS:
            raise PolicyError(f"algorithm must be one of {', '.join(_ALGORITHMS)}, or left out")
        self._only = algorithm
        self._keys = [as_bytes(facts, one) for one in as_secrets(facts, secret, previous)]
        self._url = SignedUrl(facts.title, public_url, allowed_hosts)

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        text = one_header(delivery.headers, _SIGNATURE)
        algorithm = self._algorithm(delivery.headers)
        given = decode(text, "base64")
        if given is None or len(given) != hashlib.new(algorithm).digest_size:
            raise Rejection("header_malformed", f"{_SIGNATURE} holds no base64 of HMAC-{algorithm}")
        self._url.check(delivery.url)
        url = self._url.form(delivery.url)
        fields = self._covered_fields(delivery, url)
        matching = b""
        for form in _forms(url):
            message = encoded(form) + fields
            for key in self._keys:
                if hmac.compare_digest(hmac.digest(key, message, algorithm), given):
                    matching = message
        if not matching:
            raise Rejection(
                "signature_mismatch",
                "check the auth token, and that the URL is the one that Twilio called, which is "
                "another one behind some proxies",
            )
        return Proof(encode(given, "base64"), matching)

    def _algorithm(self, headers: Headers) -> str:
        found = "HMAC_SHA1"
        if _SETTINGS in headers:
            for part in one_header(headers, _SETTINGS).split(","):
                name, _, value = part.strip().partition("=")
                found = value if name == "algorithm" else found
        if found not in _ALGORITHMS or (self._only and found != self._only):
            wanted = self._only or " or ".join(_ALGORITHMS)
            raise Rejection("header_malformed", f"the algorithm must be {wanted}")
        return _ALGORITHMS[found]

    def _covered_fields(self, delivery: Delivery, url: str) -> bytes:
        """What is signed after the URL; the body must be covered by one or the other."""
        hashes = _query_values(url, "bodySHA256")
        if hashes:
            # Whatever the type says: a captured JSON request must not pass as an empty form.
            actual = hashlib.sha256(delivery.body).hexdigest()
            if len(hashes) > 1 or not hmac.compare_digest(actual.encode(), encoded(hashes[0])):
                raise Rejection("signature_mismatch", "bodySHA256 in the URL is not the body's")
            return b""
        if not delivery.body:
            return b""
        if _is_form(delivery.headers):
            return _form_fields(delivery.body)
        raise Rejection(
            "signature_mismatch",
            "nothing signed covers the body: it is no form, and the URL has no bodySHA256",
        )

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        url, fields = request.url, b""
        headers = Headers(request.headers)
        if request.body and _is_form(headers):
            try:
                fields = _form_fields(request.body)
            except Rejection as found:
                raise PolicyError(found.message) from None
        elif request.body and not _query_values(url, "bodySHA256"):
            joint = "&" if "?" in url else "?"
            url = f"{url}{joint}bodySHA256={hashlib.sha256(request.body).hexdigest()}"
        algorithm = self._only or "HMAC_SHA1"
        if self._only:
            put_header(request.headers, _SETTINGS, f"algorithm={self._only}")
        message = self._url.form(url).encode() + fields
        digest = hmac.digest(self._keys[0], message, _ALGORITHMS[algorithm])
        put_header(request.headers, _SIGNATURE, encode(digest, "base64"))
        return SignedRequest(request.method, url, request.headers, request.body)


def _is_form(headers: Headers) -> bool:
    kind = (headers.one("Content-Type") or "").partition(";")[0].strip().lower()
    return kind == "application/x-www-form-urlencoded"


def _form_fields(body: bytes) -> bytes:
    """Names and values, sorted, each pair once."""
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
        )
    except ValueError:  # no UTF-8, or too many fields
        raise Rejection(
            "body_malformed", f"the form must be UTF-8, with at most {_MOST_FIELDS} fields"
        ) from None
    return "".join(name + value for name, value in sorted(set(pairs))).encode()


def _query_values(url: str, name: str) -> list[str]:
    query = url.partition("#")[0].partition("?")[2]
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise Rejection("url_malformed", "the URL's query can't be read") from None
    return [value for key, value in pairs if key == name]


def _forms(url: str) -> list[str]:
    """As it is, without its port, and with the default one: Twilio signs any of them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise Rejection("url_malformed", "the URL can't be read") from None
    bare = _PORT.sub("", parts.netloc)
    default = "443" if parts.scheme == "https" else "80"
    forms = [url]
    head = url.find(parts.netloc) if parts.netloc else -1
    if head >= 0:
        before, after = url[:head], url[head + len(parts.netloc) :]
        forms.append(before + bare + after)
        if bare == parts.netloc:
            forms.append(f"{before}{bare}:{default}{after}")
    return list(dict.fromkeys(forms))
