"""What a webhook receiver is looked at for, over HTTP: signed probes, and what it answers.

Each probe is a delivery as the provider would make it. About fifteen are sent, one after another
but for the copies that must come at once.
"""

from __future__ import annotations

import email.utils
import json
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oncekey.abc import Browsable, Store
from oncekey.doctor.findings import Report, Severity
from oncekey.errors import PolicyError, StoreUnavailableError
from oncekey.testing import deliver, deliver_concurrently, sample

if TYPE_CHECKING:
    from oncekey.signatures import Provider
    from oncekey.testing import Answer, SignedDelivery

__all__ = ["check_receiver"]

_BUSY: Final = frozenset({408, 425, 429, 503})  # what a copy may be told while another is in hand
_SKEW: Final = 30.0
_COPIES: Final = 4
_MOST: Final = 10_000  # records of a store in which new ones can be told from old ones


def check_receiver(
    url: str, provider: Provider, *, type: str | None = None, store: Store | None = None
) -> Report:
    """Send signed probes to a receiver and judge its answers.

    The probes are events of the provider's kind with ids that start with ``oncekey-doctor``: a
    handler for their type runs. Send them where that does no harm.

    Args:
        url: The endpoint.
        provider: The provider with the secret that the receiver has.
        type: The type of the events; a common one of the provider's if not given.
        store: The receiver's store, to see what a probe left in it.

    Raises:
        StoreUnavailableError: Nothing answers at that address.
        PolicyError: The URL is none, or the provider can't sign.
    """
    report = Report(url)
    probes = _Probes(url, provider, type)
    before = _records(store)
    first = probes.send(good := probes.event())
    if first.status == 0:
        raise StoreUnavailableError(
            f"nothing answers at {url} ({first.excerpt}): is the server running, and is this its "
            "address?"
        )
    if not _first(first, provider, report):
        for check in ("duplicates", "raw body", "clock skew", "in flight", "unhandled type", "ttl"):
            report.skipped[check] = "a delivery with a good signature is not taken"
    else:
        after = _records(store)
        _duplicate(probes.send(good.again()), report)
        _raw_body(probes, report)
        _time(probes, first, report)
        _copies(probes, report)
        _unhandled(probes, report)
        _ttl(provider, before, after, report)
    _signatures(probes, store, report)
    return report


class _Probes:
    """Makes and sends deliveries."""

    def __init__(self, url: str, provider: Provider, type: str | None) -> None:
        self.url = url
        self.provider = provider
        self.type = type

    def event(self, **options: Any) -> SignedDelivery:
        """A delivery of a new event."""
        given = {"type": self.type, **options}
        name = f"oncekey-doctor-{uuid.uuid4().hex[:16]}"
        try:
            return sample(self.provider, id=name, url=self.url, **given)
        except PolicyError:  # it takes no such id
            return sample(self.provider, id=uuid.uuid4().hex, url=self.url, **given)

    def send(self, delivery: SignedDelivery) -> Answer:
        """Make a delivery."""
        return deliver(self.url, delivery)


def _records(store: Store | None) -> dict[bytes, float] | None:
    """Digests and seconds until their ends, of all records; ``None`` where that can't be told."""
    if not isinstance(store, Browsable) or not isinstance(store, Store):
        return None
    page, now = store.browse("", _MOST), store.now()
    found = list(page.entries)
    while page.cursor is not None:
        if len(found) >= _MOST:
            return None
        page = store.browse(page.cursor, _MOST)
        found += page.entries
    return {one.key.digest: (one.record.expires_at - now) / 1000 for one in found}


def _told(answer: Answer) -> str:
    return f"answered {answer.status or 'nothing'}" + (
        f" [{answer.excerpt}]" if answer.excerpt else ""
    )


def _first(answer: Answer, provider: Provider, report: Report) -> bool:
    refused = report.judge(
        "secret",
        Severity.ERROR,
        answer.status in (400, 401, 403),
        f"a delivery signed with this secret was {_told(answer)}",
        f"give the receiver and the doctor the same secret: {provider.facts.secret}; and see that "
        "it verifies the raw bytes of the body, for the URL that the sender has",
    )
    if refused:
        return False
    return not report.judge(
        "delivery",
        Severity.ERROR,
        not answer.ok,
        f"a good delivery was {_told(answer)}",
        "answer 2xx once the event is handled; see the receiver's log for why it was not",
    )


def _duplicate(answer: Answer, report: Report) -> None:
    report.judge(
        "duplicates",
        Severity.ERROR,
        not answer.ok,
        f"a second copy of a handled event was {_told(answer)}: the sender takes that for a "
        "failure, retries for days, and may disable the endpoint",
        "answer 2xx for what was handled already, not 409",
    )


def _raw_body(probes: _Probes, report: Report) -> None:
    """A body that no serializer of ours would write, and one that was changed after signing."""
    plain = probes.event()
    try:
        event = json.loads(plain.body)
    except ValueError:
        event = None
    if not isinstance(event, (dict, list)) or not probes.provider.body_is_signed:
        report.skipped["raw body"] = f"{probes.provider.title} does not sign a JSON body"
        return
    odd = json.dumps(event, indent=1, ensure_ascii=True).replace("/", "\\/").encode() + b"\n"
    answer = probes.send(replace(plain, body=odd).again())
    report.judge(
        "raw body",
        Severity.ERROR,
        not answer.ok,
        f"a signed body with other spaces and escapes than Python's was {_told(answer)}",
        "verify the bytes as they came (request.get_data(), await request.body()), before anything "
        "parses and writes them again",
    )


def _time(probes: _Probes, first: Answer, report: Report) -> None:
    date = next((value for name, value in first.headers.items() if name.lower() == "date"), "")
    try:
        skew = email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        report.skipped["clock"] = "the answer has no Date header"
    else:
        report.judge(
            "clock",
            Severity.WARNING,
            abs(skew) > _SKEW,
            f"the receiver's clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}",
            "synchronise it (chrony, systemd-timesyncd): signatures with a time are refused "
            "otherwise",
        )
    window = probes.provider.tolerance
    if window is None:
        report.skipped["clock skew"] = f"{probes.provider.title} signs no time"
        return
    past, future = window
    now = time.time()
    near = probes.send(probes.event(now=now - min(past, future) / 2))
    report.judge(
        "clock skew",
        Severity.WARNING,
        not near.ok,
        f"a delivery signed {min(past, future) / 2:.0f} s ago was {_told(near)}",
        f"allow clocks to differ by {past:.0f} s, as {probes.provider.title} does",
    )
    old = probes.send(probes.event(now=now - past - 3600))
    report.judge(
        "clock skew",
        Severity.ERROR,
        old.ok,
        f"a delivery signed {(past + 3600) / 60:.0f} minutes ago was {_told(old)}: whoever has "
        "recorded one can send it again for ever",
        f"refuse signatures older than {past:.0f} s",
    )


def _copies(probes: _Probes, report: Report) -> None:
    answers = deliver_concurrently(probes.url, probes.event(), _COPIES).answers
    wrong = [one for one in answers if not one.ok and one.status not in _BUSY]
    report.judge(
        "in flight",
        Severity.ERROR,
        bool(wrong),
        f"of {_COPIES} copies at once, one was {_told(wrong[0])}" if wrong else "",
        "answer 2xx, or 503 with Retry-After while the first is being handled; an error of a "
        "unique constraint means that the event is known",
    )


def _unhandled(probes: _Probes, report: Report) -> None:
    if not probes.provider.event_type:
        report.skipped["unhandled type"] = f"{probes.provider.title} has no types of events"
        return
    answer = probes.send(probes.event(type="oncekey.doctor.unknown"))
    report.judge(
        "unhandled type",
        Severity.WARNING,
        not answer.ok,
        f"an event of a type that nobody handles was {_told(answer)}: it is retried for days",
        "answer 2xx for types without a handler",
    )


def _ttl(
    provider: Provider,
    before: dict[bytes, float] | None,
    after: dict[bytes, float] | None,
    report: Report,
) -> None:
    if before is None or after is None:
        report.skipped["ttl"] = (
            f"give the receiver's store too, with fewer than {_MOST} records, to see what was kept"
        )
        return
    new = [seconds for digest, seconds in after.items() if digest not in before]
    unkept = report.judge(
        "ttl",
        Severity.ERROR,
        not new,
        "a handled event left no record in this store",
        "give the doctor the store that the receiver has; or record events before they are handled",
    )
    horizon = max(provider.facts.retry_seconds, provider.facts.redelivery_seconds)
    kept = max(new, default=0.0)
    if not unkept:
        report.judge(
            "ttl",
            Severity.ERROR,
            kept < provider.facts.retry_seconds or kept < horizon,
            f"events are remembered for {kept / 86_400:.1f} days; {provider.title} retries for "
            f"{provider.facts.retry_seconds / 86_400:.1f} and can be made to send one again for "
            f"{horizon / 86_400:.1f}",
            f"keep them for {provider.retention_seconds} s or more (ttl)",
        )


def _signatures(probes: _Probes, store: Store | None, report: Report) -> None:
    """What must not get in: another secret, a changed body, no signature. Nothing may be stored."""
    before = _records(store)
    forged = _forgeries(probes)
    for what, delivery in forged.items():
        answer = probes.send(delivery)
        report.judge(
            "signature",
            Severity.ERROR,
            answer.ok,
            f"a delivery with {what} was {_told(answer)}",
            "verify the signature before anything else, with a constant-time comparison",
        )
        report.judge(
            "signature",
            Severity.WARNING,
            not answer.ok and answer.status not in (400, 401, 403),
            f"a delivery with {what} was {_told(answer)}",
            "answer 401, so that forgeries are told from failures",
        )
    after = _records(store)
    if before is None or after is None:
        report.skipped["nothing stored"] = "give the receiver's store too, to see what was kept"
        return
    report.judge(
        "nothing stored",
        Severity.ERROR,
        bool(after.keys() - before.keys()),
        f"forged deliveries left {len(after.keys() - before.keys())} records in the store: whoever "
        "knows an id can have the real event taken for a duplicate",
        "look an id up only after its signature was verified",
    )


def _forgeries(probes: _Probes) -> dict[str, SignedDelivery]:
    """Deliveries that must be refused, by what is wrong with them. Nobody signs them again."""
    good = replace(probes.event(), provider=None)
    headers = dict(good.headers)
    bare = {name: value for name, value in headers.items() if "sig" not in name.lower()}
    other = {name: _misfit(value) if name not in bare else value for name, value in headers.items()}
    found: dict[str, SignedDelivery] = {}
    if len(bare) < len(headers):
        found["no signature"] = replace(good, headers=bare)
        found["a signature that does not fit"] = replace(good, headers=other)
    changed = good.body.replace(b"oncekey-doctor-", b"oncekey-forged-")
    if changed == good.body:
        changed = good.body.replace(b"{", b'{"forged":1,', 1)
    if probes.provider.body_is_signed and changed != good.body:
        found["a body that was changed after it was signed"] = replace(good, body=changed)
    return found


def _misfit(signature: str) -> str:
    """A signature of the same form that fits nothing: its last letters and digits are others."""
    turned = str.maketrans("0123456789abcdefABCDEF", "1032547698badcfeBADCFE")
    return signature[:-12] + signature[-12:].translate(turned)
