"""What webhooks and requests of AdCP differ in, and what they share of bodies and codes."""

from __future__ import annotations

import json
import logging
from typing import Any, Final, NamedTuple, NoReturn

from oncekey.canonical import parse_json
from oncekey.errors import CanonicalJSONError
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.parsing import Rejection
from oncekey.signatures.verdict import Verdict

__all__ = ["COVERED", "OLDER_REQUESTS", "REQUESTS", "WEBHOOKS", "Profile", "strict_payload"]

logger = logging.getLogger("oncekey")

COVERED: Final = ("@method", "@target-uri", "@authority", "content-type", "content-digest")

_CODES: Final = {  # in the order of the checks; each with what a person can do about it
    "required": "this operation asks for a signature: sign the request as AdCP's profile says",
    "mode_mismatch": "the delivery is signed the other way than agreed: RFC 9421 and HMAC are a "
    "switch, set both sides to the same",
    "header_malformed": "send Signature and Signature-Input once each, with the label sig1 and the "
    "signature in the base64 of the profile",
    "params_incomplete": "Signature-Input needs created, expires, nonce, keyid, alg and tag",
    "tag_invalid": "the tag of the signature is that of another purpose",
    "alg_not_allowed": "sign with ed25519 or ecdsa-p256-sha256",
    "window_invalid": "expires must be at most 300 s after created; check the clocks on both sides",
    "components_incomplete": f"the signature must cover {', '.join(COVERED)}",
    "components_unexpected": "the signature covers content-digest, which is not agreed here",
    "key_unknown": "the key id is not in the sender's key set, or the set can't be fetched",
    "key_purpose_invalid": 'the key needs use "sig", key_ops with "verify", an alg that fits, and '
    'adcp_use "request-signing"',
    "key_revoked": "the key was revoked: sign with another",
    "revocation_stale": "the list of revoked keys is out of date and can't be fetched",
    "rate_abuse": "too many signatures of this key are alive: slow down, or check for a stolen key",
    "target_uri_malformed": "the URL or Host is malformed, or they name two different hosts",
    "invalid": "the signature is wrong: check the key, the URL as the sender saw it, and the "
    "headers it covers",
    "digest_mismatch": "Content-Digest is not the digest of the body that arrived",
    "replayed": "this nonce was used before: a retry must be signed anew",
    "body_malformed": "send JSON with no name twice in an object",
}
_WHOLE: Final = ("mode_mismatch", "target_uri_malformed", "body_malformed")


class Profile(NamedTuple):
    """One use of RFC 9421 in AdCP.

    Attributes:
        kind: ``webhook`` or ``request``: its codes begin with it.
        tag: What a signature's ``tag`` must be, so that one is never taken for the other.
        purposes: What ``adcp_use`` of a published key may say.
        encoding: How the signature's bytes are written.
        digests: How those of a digest may be written.
        codes: The codes that it has, without what they begin with.
    """

    kind: str
    tag: str
    purposes: tuple[str, ...]
    encoding: str
    digests: tuple[str, ...]
    codes: tuple[str, ...]

    def code(self, name: str) -> str:
        """A code as it goes over the wire."""
        return f"{self.kind}_{name}" if name in _WHOLE else f"{self.kind}_signature_{name}"

    def told(self) -> dict[str, str]:
        """Every code, with what a person can do about it."""
        return {self.code(name): _CODES[name] for name in self.codes}

    def reject(self, name: str, *, transient: bool = False) -> NoReturn:
        """Raise the rejection with a code of the profile, given without what it begins with."""
        raise Rejection(self.code(name), _CODES[name], transient=transient)

    def headers(self, verdict: Verdict) -> dict[str, str]:
        """The headers of the 401 that answers what was rejected; none if it was accepted.

        A code that is none of the profile's is sent as an invalid signature.
        """
        if verdict.ok:
            return {}
        known = verdict.code in map(self.code, self.codes)
        code = verdict.code if known else self.code("invalid")
        return {"WWW-Authenticate": f'Signature error="{code}"'}


WEBHOOKS: Final = Profile(
    "webhook",
    "adcp/webhook-signing/v1",
    ("request-signing", "webhook-signing"),
    "base64url",
    ("base64", "base64url"),
    tuple(name for name in _CODES if name not in ("required", "components_unexpected")),
)
REQUESTS: Final = Profile(
    "request",
    "adcp/request-signing/v1",
    ("request-signing",),
    "base64",
    ("base64",),
    tuple(name for name in _CODES if name not in ("mode_mismatch", "components_unexpected")),
)
OLDER_REQUESTS: Final = REQUESTS._replace(
    encoding="base64url",
    digests=("base64", "base64url"),
    codes=tuple(name for name in _CODES if name != "mode_mismatch"),
)
"""Requests of AdCP 3.0 and 3.1, which wrote bytes in another way."""


def strict_payload(profile: Profile, delivery: Delivery, key_id: str, nonce: str) -> Any:
    """The body, parsed so that every parser would read it alike; ``None`` if it is empty."""
    if not delivery.body.strip(b" \t\r\n"):
        return None
    try:
        return parse_json(delivery.body)
    except CanonicalJSONError:
        logger.warning(
            "AdCP %s with a malformed body: key id %s, nonce %s, %d bytes, names sent twice: %s",
            profile.kind,
            key_id,
            nonce,
            len(delivery.body),
            ", ".join(_shown(_names_sent_twice(delivery.body))) or "none",
        )
        profile.reject("body_malformed")


def _names_sent_twice(body: bytes) -> list[str]:
    twice: dict[str, None] = {}

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                twice[name] = None
            seen.add(name)

    try:
        json.JSONDecoder(object_pairs_hook=look, parse_int=float).decode(body.decode())
    except (ValueError, RecursionError):
        pass
    return list(twice)


def _shown(names: list[str]) -> list[str]:
    """Names that strangers chose, cut so that a log can't be written through them."""
    shown: list[str] = []
    for name in names[:4]:
        bad = next((at for at, char in enumerate(name) if not char.isprintable()), None)
        if bad is not None:
            shown.append(f"<sanitized:{len(name[:bad].encode())}>")
        else:
            shown.append(name.encode()[:32].decode(errors="ignore"))
    if len(names) > 4:
        shown.append(f"<...{len(names) - 4} more>")
    return shown
