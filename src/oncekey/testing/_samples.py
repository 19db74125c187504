"""Signed deliveries of every provider: ``sample("stripe")``, or ``signed(yours, body)``."""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from oncekey.errors import OncekeyError, PolicyError
from oncekey.testing._bodies import BODIES, Body
from oncekey.testing._keys import keys_of, words_of
from oncekey.testing._placing import id_goes_to_header, id_is_in_body, in_batch, put_id, put_type

if TYPE_CHECKING:
    from oncekey.signatures import Provider

__all__ = ["SignedDelivery", "sample", "sample_provider", "signed"]

HOST: Final = "https://testserver"
JSON: Final = {"Content-Type": "application/json"}
FORM: Final = {"Content-Type": "application/x-www-form-urlencoded"}


@dataclass(frozen=True, slots=True)
class SignedDelivery:
    """A delivery that is ready to send. ``receiver.receive(*delivery)`` takes it as it is.

    Attributes:
        method: Such as ``POST``.
        url: Where it goes; the signature of some providers covers it.
        headers: Header fields, the signature among them.
        body: The raw bytes.
        provider: Who verifies it, and signs further copies. ``None``: unknown, as for recordings.
        now: When it was signed, and what time a receiver is told it is. ``None``: the real time.
    """

    method: str
    url: str
    headers: Mapping[str, str] | list[tuple[str, str]]
    body: bytes = field(repr=False)
    provider: Provider | None = None
    now: float | None = None

    def __iter__(self) -> Iterator[Any]:
        yield from (self.method, self.url, self.headers, self.body)

    @property
    def event_id(self) -> str | None:
        """The id that the provider reads, of the first event; ``None`` if there is none."""
        if self.provider is None:
            return None
        try:
            return self.provider.items(self.headers, self.body)[0].event_id
        except OncekeyError:
            return None

    def again(self, url: str | None = None) -> SignedDelivery:
        """Another copy of the same event, signed anew, as a sender's retries are.

        The very same bytes where nobody here can sign.
        """
        changed = self if url is None else replace(self, url=url)
        if self.provider is None:
            return changed
        try:
            return _sign(changed)
        except PolicyError:  # the private key is elsewhere
            return changed

    def another(self, id: str | None = None) -> SignedDelivery:
        """A delivery like this one, of another event.

        Args:
            id: The new event's id; random if not given.

        Raises:
            PolicyError: It has no provider, or its body is no JSON to put an id into.
        """
        if self.provider is None:
            raise PolicyError("nobody knows where the id of this delivery is: it has no provider")
        name = id or _fresh_id()
        headers = dict(self.headers)
        payload = None
        if id_is_in_body(self.provider):
            try:
                payload = json.loads(self.body)
            except ValueError:
                raise PolicyError("this body is no JSON: an id can't be put into it") from None
        put_id(self.provider, headers, payload, name)
        body = self.body if payload is None else _text(payload) + _end_of(self.body)
        if id_goes_to_header(self.provider) and not self.provider.id_is_signed:
            body = _told_apart(body, name)
        return _checked(_sign(replace(self, headers=headers, body=body)), name)


def sample(
    of: str | Provider,
    *,
    id: str | None = None,
    type: str | None = None,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    url: str = "/webhooks",
    method: str = "POST",
    now: float | None = None,
    **options: Any,
) -> SignedDelivery:
    """A signed delivery with a body such as the provider sends.

    Args:
        of: A provider of yours, or a name such as ``stripe`` for one with a secret of the kit's
            own: hand ``delivery.provider`` to the receiver under test.
        id: The event's id; random if not given.
        type: The event's type; a common one if not given.
        body: The event's other fields, in place of the sample's.
        headers: Header fields to send along.
        url: The endpoint; a path alone is enough for apps.
        method: The method.
        now: The time to sign for, seconds since 1970; the real one if not given.
        **options: Of the provider, if ``of`` is a name: ``secret=``, ``account=`` and so on.

    Raises:
        PolicyError: No such provider, an id that it does not take, or no package to sign with.

    Example:
        >>> delivery = sample("stripe", type="invoice.paid", id="evt_1")
        >>> delivery.provider.verify(*delivery).event_id
        'evt_1'
    """
    provider = sample_provider(of, **options) if isinstance(of, str) else of
    kind = BODIES.get(provider.name, Body("sample.created", {}))
    fields = {**_kind_of(provider), **(headers or {})}
    name = id or _fresh_id()
    if provider.facts.scheme == "twilio":  # a form, with nothing of ours in it
        form = b"MessageSid=SM0&From=%2B15005550006&Body=Hello"
        raw = _told_apart(form, name) if body is None else _text(dict(body))
        fields = {**(FORM if body is None else JSON), **(headers or {})}
        put_id(provider, fields, None, name)
    else:
        event = copy.deepcopy(dict(kind.event if body is None else body))
        if provider.event_type:
            put_type(provider, fields, event, kind.type if type is None else type)
        payload = in_batch(provider, event, kind.around)
        put_id(provider, fields, payload, name)
        raw = _text(payload) + kind.end
        if body is None and id_goes_to_header(provider) and not provider.id_is_signed:
            raw = _told_apart(raw, name)
    return _checked(_sign(SignedDelivery(method, _whole(url), fields, raw, provider, now)), name)


def signed(
    provider: Provider,
    body: bytes | str | Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    url: str = "/webhooks",
    method: str = "POST",
    event_id: str | None = None,
    now: float | None = None,
) -> SignedDelivery:
    """A delivery with a body of yours, signed by a provider of yours.

    Args:
        provider: From ``provider(...)`` or ``hmac_provider(...)``.
        body: The raw bytes; text and mappings are encoded.
        headers: Header fields to send along. ``Content-Type`` is the provider's if not given, of
            most JSON's.
        url: The endpoint; a path alone is enough for apps.
        method: The method.
        event_id: The id, for providers that read it from a header.
        now: The time to sign for, seconds since 1970; the real one if not given.

    Raises:
        PolicyError: The provider can't sign this.

    Example:
        >>> from oncekey.signatures import hmac_provider
        >>> acme = hmac_provider("acme", secret="s3cret", header="X-Signature", event_id="id")
        >>> signed(acme, {"id": "e-1"}).event_id
        'e-1'
    """
    raw = body if isinstance(body, bytes) else _text(body)
    given = {**_kind_of(provider), **(headers or {})}
    return _sign(SignedDelivery(method, _whole(url), given, raw, provider, now), event_id)


def sample_provider(name: str, **options: Any) -> Provider:
    """A provider of the table with a secret or key of the kit's own.

    Args:
        name: Such as ``stripe``.
        **options: As for ``oncekey.signatures.provider``, in place of the kit's own.

    Raises:
        PolicyError: No such provider or option, or no package ``cryptography`` for its key pair.
    """
    from oncekey.signatures import provider

    given = words_of(name)
    if not options.keys() & {"secret", "keys", "jwks", "webhook_id", "signing_key", "topics"}:
        given |= keys_of(name)
    return provider(name, **{**given, **options})


def _sign(delivery: SignedDelivery, event_id: str | None = None) -> SignedDelivery:
    provider = delivery.provider
    if provider is None:
        return delivery
    request = provider.sign(*delivery, now=delivery.now, event_id=event_id)
    return SignedDelivery(*request, provider, delivery.now)


def _checked(delivery: SignedDelivery, id: str) -> SignedDelivery:
    provider = delivery.provider
    if provider is not None and provider.event_id and delivery.event_id is None:
        raise PolicyError(f"{provider.name} takes no id such as {id!r} (at {provider.event_id})")
    return delivery


def _text(body: Any) -> bytes:
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))
    return text.encode()


def _told_apart(body: bytes, name: str) -> bytes:
    """The body of another event, for providers that sign the body and not the id.

    The same body under another id is what a replay guard refuses.
    """
    try:
        payload = json.loads(body)
    except ValueError:
        return re.sub(rb"(?<=MessageSid=)[^&]*", name.encode(), body)
    return _text({**payload, "id": name}) if isinstance(payload, dict) else body


def _end_of(body: bytes) -> bytes:
    return body[len(body.rstrip(b" \t\r\n")) :]


def _kind_of(provider: Provider) -> dict[str, str]:
    """What the provider says that its bodies are."""
    own = provider.content_types
    return {"Content-Type": f"{own[0]}; charset=UTF-8"} if own else JSON


def _whole(url: str) -> str:
    return HOST + url if url.startswith("/") else url


def _fresh_id() -> str:
    return f"evt_{uuid.uuid4().hex}"
