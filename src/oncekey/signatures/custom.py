"""``hmac_provider``: a provider that is not in the table, in five lines."""

from __future__ import annotations

from oncekey.signatures.base import Facts, Secrets
from oncekey.signatures.hmac_schemes import HmacProvider
from oncekey.signatures.urls import Hosts

__all__ = ["hmac_provider"]


def hmac_provider(
    name: str,
    *,
    secret: Secrets,
    header: str | list[str],
    previous: Secrets | None = None,
    account: str = "",
    title: str = "",
    encoding: str = "hex",
    algorithm: str = "sha256",
    prefix: str = "",
    form: str = "",
    signed: str = "{body}",
    timestamp_header: str = "",
    timestamp_path: str = "",
    timestamp_unit: str = "s",
    tolerance: float = 300,
    event_id: str | None = None,
    event_type: str | None = None,
    batch: str | None = None,
    repeats: bool = False,
    retry_seconds: int = 3 * 86_400,
    public_url: str = "",
    allowed_hosts: Hosts = "",
) -> HmacProvider:
    """A provider that is not in the table, or one of your own.

    Args:
        name: Lower case with hyphens; part of the sender's identity, so keep it.
        secret: The shared secret, or several.
        header: The header with the signature, or several names for it.
        previous: Older secrets that are still accepted.
        account: Which of your endpoints or accounts the secret belongs to.
        title: The name that people write.
        encoding: ``hex``, ``hex-upper``, ``base64`` or ``base64url`` (without padding).
        algorithm: ``sha256``, ``sha384``, ``sha512`` or ``sha1``.
        prefix: What stands before the signature, such as ``sha256=``.
        form: Instead of a prefix, for pairs: ``t={timestamp},v1={signature}``.
        signed: The signed bytes, of ``{timestamp} {body} {method} {url} {id}``.
        timestamp_header: The header with the timestamp, if it is in one.
        timestamp_path: Where the timestamp is in the body, if it is there.
        timestamp_unit: ``s``, ``ms`` or ``iso``.
        tolerance: Seconds that the clocks may differ, either way.
        event_id: Where the id is: ``data.id``, or ``header:X-Event-Id``. See
            ``oncekey.signatures.event_fields``.
        event_type: Where the type is.
        batch: Where the list of events is, if a delivery carries several; ``$`` is the body.
        repeats: Without an ``event_id``: two deliveries with the same bytes may be two events, so
            each is handled, a retry too. ``False``: they are copies of one.
        retry_seconds: How long the sender may retry; events are remembered a day longer.
        public_url: What the sender calls, if ``{url}`` is signed and a proxy changes it.
        allowed_hosts: Your hosts, if ``{url}`` is signed: what was signed for others is refused.

    Raises:
        PolicyError: An option can't work.

    Example:
        >>> acme = hmac_provider(
        ...     "acme", secret="s3cret", header="X-Acme-Signature", prefix="sha256=",
        ...     signed="{timestamp}.{body}", timestamp_header="X-Acme-Time", event_id="id")
        >>> request = acme.sign("POST", "https://example.com/", {}, b'{"id": "evt_1"}')
        >>> acme.verify(*request).event_id
        'evt_1'
    """
    # Long: one argument for each thing that differs between senders, and what each means.
    stamped = bool(timestamp_header or timestamp_path or form)
    settings = {
        "header": header,
        "prefix": prefix,
        "form": form,
        "encoding": encoding,
        "algorithm": algorithm,
        "signed": signed,
        "timestamp_header": timestamp_header,
        "timestamp_path": timestamp_path,
        "timestamp_unit": timestamp_unit,
    }
    facts = Facts(
        name=name,
        title=title or name,
        scheme="hmac",
        settings=settings,
        tolerance=300 if stamped else None,
        event_id=event_id,
        event_type=event_type,
        batch=batch,
        repeats=repeats,
        retry_seconds=retry_seconds,
        source="your own settings",
    )
    return HmacProvider(
        facts,
        secret=secret,
        previous=previous,
        account=account,
        tolerance=tolerance if stamped else None,
        public_url=public_url,
        allowed_hosts=allowed_hosts,
    )
