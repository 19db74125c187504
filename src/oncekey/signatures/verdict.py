"""What a verifier says of a delivery, and who it proved the sender to be."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

__all__ = ["CODES", "OK", "Item", "Nonce", "Verdict", "VerifiedWebhookSender"]

OK: Final = "ok"

CODES: Final[dict[str, str]] = {
    # code: what a person can do about it. Schemes with codes of their own (AdCP) add theirs.
    OK: "the signature is right",
    "header_missing": "send the signature header that the provider documents",
    "header_malformed": "send the signature header once, in the form that the provider documents",
    "timestamp_missing": "send the timestamp that the signature covers",
    "timestamp_malformed": "send the timestamp as whole seconds, or as the provider documents it",
    "timestamp_too_old": "check the clocks on both sides; a captured delivery can't be sent again",
    "timestamp_in_future": "check the clocks on both sides",
    "signature_mismatch": "the signature does not fit what arrived: check the secret on both "
    "sides, and that nothing changes the raw bytes of the body: parsing and writing JSON does",
    "url_malformed": "call the endpoint by a URL of at most 8192 characters",
    "host_not_allowed": "the URL names a host that is not served here: it was sent to, or signed "
    "for, another one",
    "body_malformed": "send the body that the provider documents, with no name twice in an object",
    "id_missing": "the delivery has no event id where the provider puts it",
    "key_unknown": "the key that signed is not known here: check the key id and the key set",
    "claim_mismatch": "the token is of another issuer or account, or for another receiver",
    "replayed": "the same signed delivery came before under another id",
    "store_unavailable": "send it again later: the record of used nonces can't be reached",
}


@dataclass(frozen=True, slots=True)
class VerifiedWebhookSender:
    """A sender whose signature was verified. Only verifiers make one; a payload can't name it.

    Attributes:
        provider: The provider's name, such as ``stripe``.
        account: Which of your endpoints or accounts the secret belongs to.
        key_id: Which key signed, where the scheme names one.
        publisher: The stable identity that the key was mapped to, if any.
    """

    provider: str
    account: str = ""
    key_id: str = ""
    publisher: str = ""

    def as_sender_identity(self) -> str:
        """The name to dedup under: it stays the same when a secret or key is rotated.

        Provider and account are always part of it: no tenant's event is another's duplicate. Then
        the publisher where one is mapped, else the key itself where there is no account.
        """
        parts: tuple[str, ...] = (self.provider, self.account)
        if self.publisher:
            parts = (self.provider, self.account, "publisher", self.publisher)
        elif self.key_id and not self.account:
            parts = (self.provider, "key", self.key_id)
        return ":".join(part.replace("%", "%25").replace(":", "%3A") for part in parts)


class Item(NamedTuple):
    """One event of a delivery.

    Attributes:
        event_id: The id to dedup by, where there is one.
        event_type: What happened, where the provider says.
        payload: The parsed JSON of this event, or ``None`` if the body is no JSON.
    """

    event_id: str | None
    event_type: str | None
    payload: Any


@dataclass(frozen=True, slots=True)
class Nonce:
    """A number used once: whoever accepts the delivery must not have seen it before."""

    key_id: str
    value: str
    lasts_ms: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier found. Any bytes give one; a verifier raises only for its own options.

    Attributes:
        ok: Whether the delivery is genuine.
        code: ``ok``, or a stable name of the first thing that is wrong.
        sender: Who sent it, if it is genuine.
        event_id: The provider's id of the event, where there is one.
        id_is_signed: Whether the signature covers that id. If not, a captured delivery can be
            sent again under a fresh one.
        message: What a person can do about it. Holds no secret and nothing of the body.
        timestamp: When it was signed, seconds since 1970, where the scheme says.
        signature: The signature that was right. Not a name for the delivery: one message can have
            several that are right. ``message_digest`` is.
        nonce: What must be used once, where the scheme has one.
        transient: Nothing is known against the delivery, and it can't be verified right now: a key
            set, a certificate or the record of nonces could not be had. Answer 503, so that the
            sender tries again.
        payload: The parsed body, if it had to be parsed to find the event's id.
        signed_message: The exact bytes that the signature covers, perhaps not one; ``None``
            if nothing was proven.
        items: The events of a batch.
    """

    ok: bool
    code: str
    sender: VerifiedWebhookSender | None = None
    event_id: str | None = None
    id_is_signed: bool = True
    message: str = ""
    timestamp: float | None = None
    signature: str = field(default="", repr=False)
    nonce: Nonce | None = None
    transient: bool = False
    payload: Any = field(default=None, repr=False, compare=False)
    signed_message: bytes | None = field(default=None, repr=False, compare=False)
    items: list[Item] | None = field(default=None, repr=False, compare=False)

    @property
    def message_digest(self) -> str:
        """SHA-256 over the sender's provider and what was signed: the name of this very message.

        It stays the same whatever unsigned headers a copy carries, and whichever form of its
        signature. Empty if nothing was proven.
        """
        if self.sender is None or self.signed_message is None:
            return ""
        digest = hashlib.sha256(self.sender.provider.encode() + b"\0")
        digest.update(self.signed_message)
        return digest.hexdigest()

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def rejected(cls, code: str, message: str = "", *, transient: bool = False) -> Verdict:
        """A verdict that says what is wrong."""
        return cls(False, code, message=message or CODES.get(code, ""), transient=transient)
