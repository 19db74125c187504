"""``Provider``: what every webhook provider can do, whatever its signature looks like."""

from __future__ import annotations

import functools
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Final, NamedTuple, cast

from oncekey.errors import InvalidKeyError, PolicyError
from oncekey.signatures.delivery import (
    Delivery,
    Headers,
    RawHeaders,
    SignedRequest,
    as_delivery,
    put_header,
)
from oncekey.signatures.event_fields import EventField, event_field, value_at
from oncekey.signatures.facts import DAY, Facts
from oncekey.signatures.handshakes import Ack, answer_to, greeting_to
from oncekey.signatures.options import Secrets, as_bytes, as_secrets, check_accepted
from oncekey.signatures.parsing import MAX_URL, Rejection, check_clock, json_body
from oncekey.signatures.verdict import OK, Item, Verdict, VerifiedWebhookSender

__all__ = [
    "Ack",
    "Facts",
    "Item",
    "Proof",
    "Provider",
    "Secrets",
    "SignedRequest",
    "UnreadableError",
    "as_bytes",
    "as_secrets",
    "put_header",
]

MAX_BATCH: Final = 10_000
_AS_DOCUMENTED: Final = "as the provider documents it"
_USABLE: Final = "send text of 1 to 255 characters without a NUL, or a whole number"


class Proof(NamedTuple):
    """What a scheme found to be genuine.

    Attributes:
        signature: The signature in its one spelling.
        message: The bytes that it covers.
        timestamp: When it was signed, if the scheme says.
        payload: The parsed body, if the scheme had to parse it.
    """

    signature: str
    message: bytes
    timestamp: float | None = None
    payload: Any = None


class Provider(ABC):
    """Verifies and signs the deliveries of one provider. Make one with ``provider("stripe", ...)``.

    Safe to share between threads. Any bytes give a ``Verdict``; only wrong options raise, and
    they do so when the provider is made.

    Attributes:
        name: Such as ``stripe``; part of the sender's identity.
        title: The name that people write.
        retention_seconds: How long an event must be remembered: a day longer than the provider
            retries it, or lets somebody send it again by hand.
        ack: What to answer when a delivery was taken.
        retry_status: What to answer when it could not be handled, so that it is sent again.
        retry_after_most: The longest ``Retry-After`` that the provider waits for, if it has one.
        id_is_signed: Whether the signature covers the event id, wherever it may be found.
        body_is_signed: Whether it covers the body.
        on_changed: What an id that comes again with another payload gets, unless the receiver's
            settings say: ``first-wins`` or ``reject``.
        needs_nonces: Whether a receiver must give it a place for nonces, by ``with_nonces``.
        event_id: Where the id is, as ``oncekey.signatures.event_fields`` writes it, or ``None``.
        event_type: Where the type is.
        batch: Where the list of events is, if a delivery carries several; ``$`` is the body. The
            id and type are then looked for in each of them.
        repeats: Events have no id, and two that are alike may be two: a receiver without ``key=``
            handles each delivery, since a lost event is worse than one that is handled twice.
        content_types: What its deliveries say they are, beside JSON and forms.
        source, checked, notes: Where the facts come from, when they were read, what to know.
    """

    body_is_signed: bool = True
    on_changed: str = "first-wins"
    needs_nonces: bool = False

    def __init__(
        self,
        facts: Facts,
        *,
        account: str = "",
        accept_unsigned: str = "",
        verify_token: str = "",
        tolerance: float | None = None,
        event_id: str | None = _AS_DOCUMENTED,
        event_type: str | None = _AS_DOCUMENTED,
        batch: str | None = _AS_DOCUMENTED,
    ) -> None:
        check_accepted(facts, accept_unsigned)
        if verify_token and "token" not in facts.greeting:
            raise PolicyError(f"{facts.title} sends no token by GET: leave verify_token= out")
        self._verify_token = verify_token
        self.facts = facts
        self.name = facts.name
        self.title = facts.title
        self.retention_seconds = facts.retention
        self.source = facts.source
        self.checked = facts.checked
        self.notes = facts.notes
        self.event_id = facts.event_id if event_id == _AS_DOCUMENTED else event_id
        self.event_type = facts.event_type if event_type == _AS_DOCUMENTED else event_type
        self.batch = facts.batch if batch == _AS_DOCUMENTED else batch
        self.repeats = facts.repeats and self.event_id is None
        self.content_types = tuple(facts.content_types)
        value_at(None, self.batch or "$")  # no path: said now, not by the first delivery
        self.retry_status, self.retry_after_most = facts.retry_status, facts.retry_after_most
        self._signed_id = facts.signed_id if event_id == _AS_DOCUMENTED else {}
        answer = dict(facts.ack)
        self.ack = Ack(
            answer.get("status", 200),
            answer.get("body", "").encode(),
            answer.get("type", Ack().content_type),
        )
        self.sender = VerifiedWebhookSender(facts.name, account)
        self._id_field: EventField | None = event_field(self.event_id) if self.event_id else None
        self._type_field: EventField | None = (
            event_field(self.event_type) if self.event_type else None
        )
        self._past, self._future = self._window(tolerance)

    def __repr__(self) -> str:
        """No secret in it."""
        return f"<{type(self).__name__} {self.name!r} account={self.sender.account!r}>"

    @functools.cached_property
    def id_is_signed(self) -> bool:
        """Whether the signature covers the event id; if not, a replay can carry a fresh one."""
        if self._id_field is None:
            return True
        covered = self.signed_headers()
        return all(name in covered for name in self._id_field.headers) and (
            self.body_is_signed or not self._id_field.in_body
        )

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """Seconds into the past and into the future that are accepted; ``None``: no timestamp."""
        return None if self.facts.tolerance is None else (self._past, self._future)

    def signed_headers(self) -> frozenset[str]:
        """The headers that the signature covers, in lower case."""
        return frozenset()

    # --- verify ----------------------------------------------------------------------------

    def verify(
        self,
        method: str,
        url: str,
        headers: RawHeaders | Headers,
        body: bytes,
        *,
        now: float | None = None,
    ) -> Verdict:
        """Say whether a delivery is genuine, and which event it is.

        Args:
            method: Such as ``POST``.
            url: The whole URL as the provider called it. Behind a proxy, see ``public_url``.
            headers: All headers: a mapping, or pairs so that repeated ones can be seen.
            body: The raw bytes, as they came over the wire.
            now: Seconds since 1970, for tests; the system clock if not given.

        Raises:
            TypeError: The body is not bytes.
            BackendMismatchError: Keys or nonces must be awaited: use ``averify``.
        """
        return self.judge(as_delivery(method, url, headers, body), now)

    async def averify(
        self,
        method: str,
        url: str,
        headers: RawHeaders | Headers,
        body: bytes,
        *,
        now: float | None = None,
    ) -> Verdict:
        """``verify`` in an event loop: whatever must be waited for is awaited."""
        return await self.ajudge(as_delivery(method, url, headers, body), now)

    async def ajudge(self, delivery: Delivery, now: float | None = None) -> Verdict:
        """``averify`` a delivery that is put together already."""
        return self.judge(delivery, now)

    def judge(self, delivery: Delivery, now: float | None = None) -> Verdict:
        """``verify`` a delivery that is put together already."""
        try:
            if len(delivery.url) > MAX_URL:
                raise Rejection("url_malformed", f"the URL has more than {MAX_URL} characters")
            proof = self._prove(delivery, time.time() if now is None else now)
            return self._genuine(delivery, proof)
        except Rejection as found:
            return Verdict.rejected(found.code, found.message, transient=found.transient)

    @abstractmethod
    def _prove(self, delivery: Delivery, now: float) -> Proof:
        """Check the signature and the clock.

        Raises:
            Rejection: With the code of the first thing that is wrong.
        """

    def _genuine(self, delivery: Delivery, proof: Proof) -> Verdict:
        event_id: str | None = None
        payload, signed, items = proof.payload, self.id_is_signed, None
        field = self._id_field
        if self.batch:
            payload = self._payload(delivery, proof)
            if not self._is_handshake(delivery, proof):
                items = self._items(delivery.headers, payload)
        elif field is not None:
            if field.in_body:
                payload = json_body(delivery.body) if payload is None else payload
            elif self._signed_id:
                with suppress(Rejection):  # a body that is no JSON has no id in it
                    payload = self._payload(delivery, proof)
            if self._signed_id:
                event_id, signed = self._named(delivery.headers, payload)
            else:
                event_id = field.read(delivery.headers, payload)
            if event_id is None and not self._is_handshake(delivery, proof):
                raise Rejection("id_missing", f"no event id at {self.event_id}: {_USABLE}")
        return Verdict(
            True,
            OK,
            self.sender,
            event_id,
            signed,
            timestamp=proof.timestamp,
            signature=proof.signature,
            payload=payload,
            signed_message=proof.message,
            items=items,
        )

    def _named(self, headers: Headers, payload: Any) -> tuple[str | None, bool]:
        """The event id, and whether the signature covers it: one in the signed body comes first."""
        rule = self._signed_id
        if rule and value_at(payload, rule["where"]) is not None:
            found = event_field(rule["path"]).read(headers, payload)
            if found is not None:
                return found, self.body_is_signed
        found = self._id_field.read(headers, payload) if self._id_field else None
        return found, self.id_is_signed

    def _payload(self, delivery: Delivery, proof: Proof) -> Any:
        return json_body(delivery.body) if proof.payload is None else proof.payload

    # --- events ----------------------------------------------------------------------------

    def items(self, headers: RawHeaders | Headers, body: bytes, payload: Any = None) -> list[Item]:
        """The events of a delivery that was verified: one, or those of a batch.

        A body that is no JSON has no payload. One that is JSON by its ``Content-Type`` must be.
        ``payload`` is the verdict's, where it had to parse the body: it is not parsed again.

        Raises:
            UnreadableError: The body can't be read as what it says it is, or can't be split.
        """
        fields = headers if isinstance(headers, Headers) else Headers(headers)
        try:
            payload = self._readable(fields, body) if payload is None else payload
            if self.batch:
                return self._items(fields, payload)
            return [self._item(fields, payload, self._named(fields, payload)[0])]
        except Rejection as found:
            raise UnreadableError(found.code, found.message) from None

    def events(self, delivery: Delivery, verdict: Verdict) -> list[Item]:
        """``items``, without another look for what the verdict knows.

        Raises:
            UnreadableError: The body can't be read as what it says it is, or can't be split.
        """
        if verdict.items is not None:
            return verdict.items
        headers, body, payload = delivery.headers, delivery.body, verdict.payload
        if self.batch:
            return self.items(headers, body, payload)
        try:
            payload = self._readable(headers, body) if payload is None else payload
            return [self._item(headers, payload, verdict.event_id)]
        except Rejection as found:
            raise UnreadableError(found.code, found.message) from None

    def _readable(self, headers: Headers, body: bytes) -> Any:
        try:
            return json_body(body)
        except Rejection:
            if self.batch or (body and _says_json(headers)):
                raise
            return None

    def _item(self, headers: Headers, payload: Any, event_id: str | None) -> Item:
        event_type = self._type_field.read(headers, payload) if self._type_field else None
        return Item(event_id, event_type, payload)

    def _items(self, headers: Headers, payload: Any) -> list[Item]:
        found = value_at(payload, self.batch or "$")
        if not isinstance(found, list) or not found:
            raise Rejection("body_malformed", f"the body has no list of events at {self.batch}")
        check_batch(found)
        items = [self._item(headers, one, self._named(headers, one)[0]) for one in found]
        if self._id_field is not None and any(item.event_id is None for item in items):
            raise Rejection(
                "id_missing", f"an event of the batch has no id at {self.event_id}: {_USABLE}"
            )
        return items

    def handshake(self, body: bytes, payload: Any = None) -> Ack | None:
        """The answer to the provider's own test of the endpoint, if the delivery is one.

        Such a delivery carries no event: verify it, answer it, and do nothing else. ``payload`` is
        the verdict's, as for ``items``.
        """
        rules = self.facts.handshake
        if not rules:
            return None
        try:
            return answer_to(
                json_body(body) if payload is None else payload, rules, self._keyed_hash
            )
        except Rejection:
            return None

    def greeting(self, url: str) -> Ack | None:
        """The answer to a GET request by which the provider checks the endpoint, if it is one."""
        return greeting_to(url, self.facts.greeting, self._verify_token)

    def _keyed_hash(self, text: str) -> str:
        """The hex of ``text`` under the secret, for checks of the endpoint that ask for it."""
        raise PolicyError(f"{self.name} has no secret to hash by")

    def _is_handshake(self, delivery: Delivery, proof: Proof) -> bool:
        rules = self.facts.handshake
        if not rules:
            return False
        return answer_to(self._payload(delivery, proof), rules, self._keyed_hash) is not None

    # --- sign ------------------------------------------------------------------------------

    def sign(
        self,
        method: str,
        url: str,
        headers: RawHeaders | Headers,
        body: bytes,
        *,
        now: float | None = None,
        event_id: str | None = None,
    ) -> SignedRequest:
        """Sign a request as the provider would, for tests and for sending.

        Args:
            method: Such as ``POST``.
            url: Where it will be sent.
            headers: What it carries already.
            body: The raw bytes. Where the signature is in the body, it must be a JSON object.
            now: Seconds since 1970 to sign for; the system clock if not given.
            event_id: The id to send, for providers that put it in a header; random if not given.

        Raises:
            PolicyError: This can't be signed: the private key is missing, the body doesn't fit,
                or an ``event_id`` was given although the provider reads it from the body.
        """
        delivery = as_delivery(method, url, headers, body)
        fields: dict[str, str] = {}
        for name, value in delivery.headers.items():
            fields[name] = f"{fields[name]}, {value}" if name in fields else value
        self._put_event_id(fields, event_id)
        self._check_signable(delivery.body)
        moment = time.time() if now is None else now
        return self._sign(SignedRequest(method, url, fields, delivery.body), moment)

    def _check_signable(self, body: bytes) -> None:
        """Refuse a body that every receiver must refuse: none, of most providers."""
        return

    @abstractmethod
    def _sign(self, request: SignedRequest, now: float) -> SignedRequest: ...

    def _put_event_id(self, fields: dict[str, str], event_id: str | None) -> None:
        first = self._id_field.parts[0] if self._id_field is not None else None
        if first is not None and first.names:
            if event_id is not None:
                put_header(fields, first.names[0], event_id)
            elif not any(name.lower() in fields for name in first.names):
                put_header(fields, first.names[0], str(uuid.uuid4()))
        elif event_id is not None:
            where = f"from the body at {self.event_id}: put it there" if first else "nowhere"
            raise PolicyError(f"{self.name} reads the event id {where}; don't pass event_id=")

    # --- options ---------------------------------------------------------------------------

    def _window(self, tolerance: float | None) -> tuple[float, float]:
        facts = self.facts
        if tolerance is None:
            both = facts.tolerance or 0
            return (facts.max_age or both, both)
        if facts.tolerance is None:
            raise PolicyError(
                f"{self.name} signs no timestamp, so there is nothing to hold a tolerance against; "
                "leave tolerance= out and let the dedup store catch replays"
            )
        if not isinstance(tolerance, (int, float)) or not 0 < tolerance <= 30 * DAY:
            raise PolicyError(
                f"tolerance is {tolerance!r}; give seconds, more than 0, up to 30 days"
            )
        return (tolerance, tolerance)

    def _check_clock(self, timestamp: float, now: float) -> None:
        if not -self._future <= now - timestamp <= self._past:
            check_clock(timestamp, now, self._past, self._future)


class UnreadableError(InvalidKeyError):
    """A genuine delivery whose events can't be read.

    Attributes:
        reason: The code that a verdict would have: ``body_malformed``, ``id_missing``, ...
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_batch(events: list[Any]) -> None:
    """Refuse a batch that is too large before anything is done for each of its events.

    Raises:
        Rejection: ``body_malformed``.
    """
    if len(events) > MAX_BATCH:
        raise Rejection(
            "body_malformed", f"a batch of {len(events)} events: at most {MAX_BATCH} are taken"
        )


def _says_json(headers: Headers) -> bool:
    kind = (headers.one("content-type") or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def object_body(facts: Facts, body: bytes) -> dict[str, Any]:
    """The body as a JSON object to put a signature into.

    Raises:
        PolicyError: It is none.
    """
    try:
        payload = json_body(body)
    except Rejection:
        payload = None
    if not isinstance(payload, dict):
        raise PolicyError(f"{facts.title} signs inside the body: give a JSON object")
    return cast("dict[str, Any]", payload)
