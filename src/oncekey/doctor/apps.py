"""What an app with the ``Idempotency-Key`` header is looked at for, called in this process."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from typing import Any, Final

from oncekey.doctor.findings import Report, Severity
from oncekey.instrument.events import Event, EventKind, subscribe
from oncekey.testing import Answer, SignedDelivery, deliver, deliver_concurrently

__all__ = ["check_app"]

_COPIES: Final = 4
_REFUSED: Final = range(400, 500)


def check_app(
    app: Any,
    *,
    path: str = "/",
    method: str = "POST",
    body: bytes = b'{"oncekey": "doctor"}',
    headers: Mapping[str, str] | None = None,
    shown: str = "the app",
) -> Report:
    """Send keyed requests to an ASGI or WSGI app in this process, and judge what becomes of them.

    About ten requests, each with a fresh key: the route does its work for some of them. Give one
    where that does no harm, with a body that it takes.

    Args:
        app: The app.
        path: A route that the middleware is around.
        method: Its method.
        body: What it takes, as JSON.
        headers: Header fields to send along, such as those of a login.
        shown: What the report calls the app.

    Raises:
        PolicyError: It is no app.
    """
    report = Report(shown)
    seen = _Seen()
    fields = {"Content-Type": "application/json", "Authorization": "Bearer oncekey-doctor"}
    request = _Request(method, path, {**fields, **(headers or {})}, body)
    with subscribe(seen):
        if _replays(app, request, seen, report):
            _other_body(app, request, report)
            _other_caller(app, request, report)
            _copies(app, request, seen, report)
    return report


class _Seen:
    """The events of this process, for as long as it listens."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def taken(self) -> list[EventKind]:
        """What happened since it was asked last."""
        with self._lock:
            events, self._events = self._events, []
        return [event.kind for event in events]


class _Request:
    """A request, to be sent under one key or another."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.new_key()

    def new_key(self) -> None:
        """From here on another one."""
        self.key = f"oncekey-doctor-{uuid.uuid4().hex}"

    def made(self, body: bytes | None = None, **headers: str) -> SignedDelivery:
        """The request under the key of now."""
        fields = {**self.headers, "Idempotency-Key": f'"{self.key}"', **headers}
        url = f"http://testserver{self.path}"
        return SignedDelivery(self.method, url, fields, self.body if body is None else body)


def _is_replay(answer: Answer) -> bool:
    return any(name.lower() == "idempotent-replayed" for name in answer.headers)


def _told(answer: Answer) -> str:
    return f"answered {answer.status}" + (f" [{answer.excerpt}]" if answer.excerpt else "")


def _replays(app: Any, request: _Request, seen: _Seen, report: Report) -> bool:
    """The same request twice: the second must be a replay of the first."""
    first = deliver(app, request.made())
    kinds = seen.taken()
    if report.judge(
        "request",
        Severity.ERROR,
        not 200 <= first.status < 400,
        f"the request was {_told(first)}: there is nothing to replay",
        "give a --path, --method, --body-file and --header that the app takes",
    ):
        for check in ("guarded", "replay", "other body", "other caller", "concurrent copies"):
            report.skipped[check] = "the request is not taken"
        return False
    guarded = EventKind.FIRST in kinds or _is_replay(deliver(app, request.made()))
    if report.judge(
        "guarded",
        Severity.ERROR,
        not guarded,
        f"{request.method} {request.path} with an Idempotency-Key claimed no key: retries run",
        "put IdempotencyMiddleware around the app, or idempotent on the route; and see that its "
        "methods= and routes include this one",
    ):
        for check in ("replay", "other body", "other caller", "concurrent copies"):
            report.skipped[check] = "the route is not guarded"
        return False
    again = deliver(app, request.made())
    same = (again.status, again.body) == (first.status, first.body)
    report.judge(
        "replay",
        Severity.ERROR,
        not (_is_replay(again) and same),
        f"the same request a second time was {_told(again)}, the first {_told(first)}",
        "keep answers of this route: see the settings for statuses, sizes and no-store",
    )
    return True


def _other_body(app: Any, request: _Request, report: Report) -> None:
    answer = deliver(app, request.made(body=b'{"oncekey": "another body"}'))
    report.judge(
        "other body",
        Severity.ERROR,
        answer.status not in _REFUSED,
        f"another body under a used key was {_told(answer)}",
        "compare bodies: don't set a fingerprint that leaves the body out",
    )


def _other_caller(app: Any, request: _Request, report: Report) -> None:
    answer = deliver(app, request.made(Authorization="Bearer somebody-else"))
    report.judge(
        "other caller",
        Severity.ERROR,
        _is_replay(answer),
        f"the key of one caller, sent by another, was {_told(answer)}, replayed: callers get each "
        "other's answers",
        "tell callers apart: scope= of the middleware gives who asks, by their login and not by a "
        "constant",
    )


def _copies(app: Any, request: _Request, seen: _Seen, report: Report) -> None:
    request.new_key()
    seen.taken()
    report_of_copies = deliver_concurrently(app, request.made(), _COPIES)
    ran = seen.taken().count(EventKind.FIRST)
    failed = [one for one in report_of_copies.answers if one.status >= 500 and one.status != 503]
    report.judge(
        "concurrent copies",
        Severity.ERROR,
        ran != 1 or bool(failed),
        f"of {_COPIES} copies at once {ran} ran"
        + (f", and one was {_told(failed[0])}" if failed else ""),
        "use one store for the whole app: one middleware, one URL, not memory:// in each worker",
    )
