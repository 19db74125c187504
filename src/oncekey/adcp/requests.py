"""AdCP requests signed by RFC 9421: ``RequestSigning`` for who takes them, a signer for who calls.

A signature says which agent sent a request, and that nobody changed it. Whether that agent may act
for a brand is another question, which brand.json answers and this module does not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, NamedTuple

from oncekey.adcp.checklist import ALLOWED, Publisher, SignedByAdcp
from oncekey.adcp.operations import UNREADABLE, Operation, operation_of
from oncekey.adcp.signing_profiles import COVERED, OLDER_REQUESTS, REQUESTS, Profile
from oncekey.errors import PolicyError
from oncekey.signatures.asking import Checks, arun_checks, run_checks
from oncekey.signatures.base import Facts, SignedRequest
from oncekey.signatures.delivery import Delivery, RawHeaders, as_delivery
from oncekey.signatures.jwks import FetchedKeys, Revocations, as_keys
from oncekey.signatures.keypairs import need_cryptography
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.parsing import Rejection
from oncekey.signatures.rfc9421 import load_signing_key
from oncekey.signatures.structured import Component, SignatureInput
from oncekey.signatures.urls import Hosts
from oncekey.signatures.verdict import OK, Verdict, VerifiedWebhookSender

__all__ = ["REQUEST_CODES", "RequestSigner", "RequestSigning", "RequestVerdict"]

logger = logging.getLogger("oncekey")

REQUEST_CODES: Final[dict[str, str]] = OLDER_REQUESTS.told()
"""The codes of AdCP's request profile, with what a person can do about each."""

Covers = Literal["required", "either", "forbidden"]
_FACTS: Final = Facts(
    name="adcp-requests", title="AdCP requests", scheme="rfc9421", source="", checked="2026-11"
)
_METHOD_ONLY: Final = ("tools/call",)


class RequestVerdict(NamedTuple):
    """What is known of a request.

    Attributes:
        ok: Whether it may go on.
        code: ``ok``, ``unsigned``, or the code of the profile that the signature failed with.
        signer: Who signed it; ``None`` unless a signature was right.
        operation: What it asks for. Carry out this, and read the body no other way.
        payload: The body, parsed strictly, if a signature was right.
        message: What a person can do about it.
        transient: Whether the same request may be accepted later.
        body_is_signed: Whether the signature covers the body: always so in version 3.2.
    """

    ok: bool
    code: str
    signer: VerifiedWebhookSender | None = None
    operation: Operation = Operation(None)
    payload: Any = None
    message: str = ""
    transient: bool = False
    body_is_signed: bool = False

    @property
    def status(self) -> int:
        """What to answer one that is refused with."""
        return 503 if self.transient else 401

    def headers(self) -> dict[str, str]:
        """The headers of the answer that refuses it."""
        if self.ok or self.transient:
            return {}
        return {"WWW-Authenticate": f'Signature error="{self.code}"'}


class _Requests(SignedByAdcp):
    """The profile for requests, with or without a body."""

    def __init__(self, *, profile: Profile, covers: Covers, **common: Any) -> None:
        super().__init__(_FACTS, **common)
        self.profile = profile
        self._policy = covers

    def checking(self, delivery: Delivery, now: float | None) -> Checks[Verdict]:
        """The checks, for somebody who has more of them."""
        return self._verdict(delivery, time.time() if now is None else now)

    def _covers(self, body: bytes) -> tuple[str, ...]:
        if not body:
            return COVERED[:3]
        return COVERED[:4] if self._policy == "forbidden" else COVERED

    def _check_components(self, covered: SignatureInput, body: bytes) -> None:
        found = set(covered.components)
        wanted: tuple[str, ...] = COVERED[:3] if not body else COVERED[:4]
        if body and self._policy == "required":
            wanted = COVERED
        if not {Component(name) for name in wanted} <= found:
            self.profile.reject("components_incomplete")
        if self._policy == "forbidden" and Component("content-digest") in found:
            self.profile.reject("components_unexpected")


def _profile(version: str, covers: Covers) -> Profile:
    if version not in ("3.0", "3.1", "3.2"):
        raise PolicyError(f"version is {version!r}: write 3.0, 3.1 or 3.2")
    if covers not in ("required", "either", "forbidden"):
        raise PolicyError("covers_content_digest is required, either or forbidden")
    if version == "3.2" and covers != "required":
        raise PolicyError(
            "AdCP 3.2 binds every body: leave covers_content_digest= out, or say version='3.1'"
        )
    return REQUESTS if version == "3.2" else OLDER_REQUESTS


class RequestSigning:
    """Verifies the signatures of AdCP requests, for whoever takes them. Share one in a process.

    Args:
        keys: The callers' JSON Web Key Set, or keys by key id.
        jwks: Instead: a function that fetches the set, or ``FetchedKeys`` of one.
        agent: The URL of the agent that a key belongs to: a name for all keys, a mapping from key
            id, or a function of the key id. It is the signer's identity, and outlives its keys.
        nonces: Where used nonces are kept: ``Nonces(store)``.
        revocations: The list of revoked keys, or a function that fetches it.
        required_for: Operations of AdCP that must be signed, unless the caller is known otherwise.
        warn_for: Those where a signature that fails is logged, and the request goes on if the
            caller is known otherwise.
        supported_for: Those where a signature is checked if it is there.
        protocol_methods_required_for: The same for JSON-RPC methods, such as ``tasks/cancel``.
        protocol_methods_warn_for: The same.
        protocol_methods_supported_for: The same.
        public_url: The URL that callers know, where a proxy changes it.
        allowed_hosts: Your hosts, in its place: a request to another one is refused.
        version: Of the profile. ``3.1`` and before wrote bytes in another way: never both.
        covers_content_digest: ``required``; for older versions also ``either`` or ``forbidden``.

    Raises:
        PolicyError: An option can't work, or ``cryptography`` is not installed.

    Example:
        >>> from oncekey import MemoryStore
        >>> signing = RequestSigning(
        ...     keys={"keys": []}, nonces=Nonces(MemoryStore()), allowed_hosts="seller.example",
        ...     required_for=["create_media_buy"],
        ... )
        >>> url = "https://seller.example/adcp/create_media_buy"
        >>> signing.check("POST", url, {}, b"{}").code
        'request_signature_required'
    """

    def __init__(
        self,
        *,
        keys: Mapping[str, Any] | None = None,
        jwks: FetchedKeys | Callable[[], Any] | None = None,
        agent: Publisher = None,
        nonces: Nonces,
        revocations: Revocations | Mapping[str, Any] | Callable[[], Any] | None = None,
        required_for: Collection[str] = (),
        warn_for: Collection[str] = (),
        supported_for: Collection[str] = (),
        protocol_methods_required_for: Collection[str] = (),
        protocol_methods_warn_for: Collection[str] = (),
        protocol_methods_supported_for: Collection[str] = (),
        public_url: str = "",
        allowed_hosts: Hosts = "",
        version: Literal["3.0", "3.1", "3.2"] = "3.2",
        covers_content_digest: Covers = "required",
    ) -> None:
        # Long: most of it says what the options do.
        need_cryptography()
        given = [one for one in (keys, jwks) if one is not None]
        if len(given) != 1:
            raise PolicyError("pass keys= or jwks= to verify with, one of them")
        if not isinstance(nonces, Nonces):
            raise PolicyError("nonces= must be Nonces(store)")
        self._lists = {
            "required": frozenset(required_for),
            "warn": frozenset(warn_for),
            "supported": frozenset(supported_for),
        }
        self._methods = {
            "required": frozenset(protocol_methods_required_for),
            "warn": frozenset(protocol_methods_warn_for),
            "supported": frozenset(protocol_methods_supported_for),
        }
        _check_lists(self._lists, self._methods)
        self._digest = covers_content_digest
        if revocations is not None and not isinstance(revocations, Revocations):
            revocations = Revocations(revocations)
        self._provider = _Requests(
            profile=_profile(version, covers_content_digest),
            covers=covers_content_digest,
            keys=as_keys(given[0]),
            nonces=nonces,
            signing_key=None,
            key_id="",
            publisher=agent,
            revocations=revocations,
            public_url=public_url,
            allowed_hosts=allowed_hosts,
        )

    def capability(self) -> dict[str, Any]:
        """What to say under ``request_signing`` in the answer to ``get_adcp_capabilities``."""
        said: dict[str, Any] = {"supported": True, "covers_content_digest": self._digest}
        said |= {f"{name}_for": sorted(found) for name, found in self._lists.items()}
        methods = {f"protocol_methods_{name}_for": one for name, one in self._methods.items()}
        return said | {name: sorted(found) for name, found in methods.items() if found}

    def check(
        self,
        method: str,
        url: str,
        headers: RawHeaders,
        body: bytes,
        *,
        operation: str | None = None,
        authenticated: bool = False,
        now: float | None = None,
    ) -> RequestVerdict:
        """Say who signed a request, and whether it may go on.

        Args:
            method: Such as ``POST``.
            url: The whole URL as the caller wrote it. Behind a proxy, see ``public_url``.
            headers: All headers, best as pairs, so that repeated ones can be seen.
            body: The raw bytes.
            operation: The operation of AdCP, where your routes know it; read from the body or the
                path if not given.
            authenticated: Whether the caller is known by other means: a token, a key, mTLS.
            now: Seconds since 1970, for tests.

        Raises:
            BackendMismatchError: Keys or nonces must be awaited: use ``acheck``.
        """
        steps = self._check(as_delivery(method, url, headers, body), operation, authenticated, now)
        return run_checks(steps)

    async def acheck(
        self,
        method: str,
        url: str,
        headers: RawHeaders,
        body: bytes,
        *,
        operation: str | None = None,
        authenticated: bool = False,
        now: float | None = None,
    ) -> RequestVerdict:
        """``check`` in an event loop: whatever must be waited for is awaited."""
        steps = self._check(as_delivery(method, url, headers, body), operation, authenticated, now)
        return await arun_checks(steps)

    def _check(
        self, delivery: Delivery, name: str | None, authenticated: bool, now: float | None
    ) -> Checks[RequestVerdict]:
        signed = "signature" in delivery.headers or "signature-input" in delivery.headers
        try:
            found = operation_of(delivery.url, delivery.body)
        except Rejection as rejected:
            return RequestVerdict(False, rejected.code, message=rejected.message)
        found = found if name is None else found._replace(name=name)
        hidden = found.arguments is UNREADABLE
        found = found._replace(arguments=None) if hidden else found
        if not signed and hidden:  # a signed one is refused when its nonce is used up
            code = REQUESTS.code("body_malformed")
            return RequestVerdict(False, code, None, found, None, REQUEST_CODES[code])
        if not signed:
            return self._unsigned(found, authenticated)
        verdict = yield from self._provider.checking(delivery, now)
        if verdict.ok:
            bound = b'"content-digest"' in (verdict.signed_message or b"")
            if self._digest == "either" and not bound and _registers_secret(found.arguments):
                # The signature says nothing of the body, which anybody on the way can change.
                code = REQUESTS.code("components_incomplete")
                return RequestVerdict(False, code, None, found, None, REQUEST_CODES[code])
            return RequestVerdict(
                True, OK, verdict.sender, found, verdict.payload, body_is_signed=bound
            )
        warned = self._mode(found) == "warn" and authenticated and not verdict.transient
        # A signature that fails is none: it lets nothing in that must have one, or that hides it.
        warned = warned and not hidden and not _registers_secret(found.arguments)
        if warned and verdict.code != REQUESTS.code("header_malformed"):
            logger.warning("AdCP: a signature failed with %s; the caller is known", verdict.code)
            return RequestVerdict(True, verdict.code, None, found)
        return RequestVerdict(
            False, verdict.code, None, found, None, verdict.message, verdict.transient
        )

    def _unsigned(self, found: Operation, authenticated: bool) -> RequestVerdict:
        mode = self._mode(found)
        if _registers_secret(found.arguments) or (mode == "required" and not authenticated):
            code = REQUESTS.code("required")
            return RequestVerdict(False, code, None, found, None, REQUEST_CODES[code])
        if mode == "warn":
            logger.warning("AdCP: an unsigned request for %s", found.name or found.method)
        return RequestVerdict(True, "unsigned", None, found)

    def _mode(self, found: Operation) -> str:
        """The strictest of the lists that the operation, or the method, is on."""
        for mode in ("required", "warn", "supported"):
            if found.name in self._lists[mode] or found.method in self._methods[mode]:
                return mode
        return ""


def _check_lists(names: Mapping[str, Any], methods: Mapping[str, Any]) -> None:
    """AdCP's operations and JSON-RPC's methods are two lists, and none is on the other.

    Raises:
        PolicyError: One is on the wrong list.
    """
    for one in (one for found in names.values() for one in found):
        if not one.replace("_", "").isalnum() or not one.islower():
            raise PolicyError(
                f"{one!r} is no operation of AdCP, such as create_media_buy: methods of JSON-RPC "
                "go to protocol_methods_required_for= and its like"
            )
    for one in (one for found in methods.values() for one in found):
        parts = one.split("/")
        pascal = len(parts) == 1 and one[:1].isupper() and one.isalpha()
        path = len(parts) > 1 and all(part.isalpha() for part in parts)
        if not (pascal or path) or one in _METHOD_ONLY:
            raise PolicyError(
                f"{one!r} is no method of JSON-RPC, such as tasks/cancel: operations of AdCP go to "
                "required_for= and its like"
            )


def _registers_secret(arguments: Any) -> bool:
    """Whether a request registers a webhook with credentials: never without a signature.

    Else whoever stole a token could have the webhooks signed with a secret of their own.
    """
    if not isinstance(arguments, dict):
        return False
    configs = [arguments.get("push_notification_config")]
    accounts = arguments.get("accounts")
    for account in accounts if isinstance(accounts, list) else ():
        several = account.get("notification_configs") if isinstance(account, dict) else None
        configs += several if isinstance(several, list) else ()
    return any(isinstance(one, dict) and one.get("authentication") is not None for one in configs)


class RequestSigner:
    """Signs requests, for whoever calls: ``sign`` for any client, or as ``auth=`` of httpx.

    Args:
        signing_key: A private key of Ed25519 or P-256: PEM, a key object, or a JSON Web Key with
            ``d``.
        key_id: Its id in the key set that you publish, with ``adcp_use`` of ``request-signing``.
        version: Of the profile that the other side has.
        covers_content_digest: What it asks for; ``required`` but for older versions.

    Raises:
        PolicyError: The key can't be used, or ``cryptography`` is not installed.
    """

    def __init__(
        self,
        signing_key: object,
        key_id: str,
        *,
        version: Literal["3.0", "3.1", "3.2"] = "3.2",
        covers_content_digest: Covers = "required",
    ) -> None:
        need_cryptography()
        key = load_signing_key(signing_key, key_id)
        if key is None or key.algorithm not in ALLOWED:
            raise PolicyError("signing_key= must be of Ed25519 or P-256")
        self._provider = _Requests(
            profile=_profile(version, covers_content_digest),
            covers=covers_content_digest,
            keys=as_keys({key_id: key._replace(jwk={})}),
            nonces=None,
            signing_key=key,
            key_id=key_id,
            publisher=None,
            revocations=None,
            public_url="",
            allowed_hosts="*",
        )

    def sign(
        self,
        method: str,
        url: str,
        headers: RawHeaders,
        body: bytes,
        *,
        now: float | None = None,
    ) -> SignedRequest:
        """The request with its signature: send what is returned, the URL too, and nothing else.

        Raises:
            PolicyError: The URL can't be signed.
        """
        return self._provider.sign(method, url, headers, body, now=now)

    def __call__(self, request: Any) -> Any:
        """A request of httpx, signed: ``httpx.Client(auth=signer)``. A redirect is signed anew."""
        body = request.read()
        signed = self.sign(request.method, str(request.url), list(request.headers.items()), body)
        request.headers.update(signed.headers)
        return request
