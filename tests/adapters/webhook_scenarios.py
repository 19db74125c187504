"""What every adapter must do, told once: each function is one scenario against a served site."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import httpx
from tests.adapters.webhook_sites import MOST, SIGNED, Site, made

JSON = {"Content-Type": "application/json"}
COPIES = 16
# What a URL may hold. The odd ones can't be told from their decoded form.
TARGETS = {
    "path": "/a%20b/caf%C3%A9",
    "odd path": "/%61%2Fb/caf%c3%a9/",
    "query": "/x?b=2&c=%C3%A4%20x",
    "query with repeats": "/x?b=2&a=1&a=3",
    "odd query": "/x?b=%7e+&&a",
}
_numbers = itertools.count()

Scenario = Callable[[Site], None]


def fresh() -> str:
    return f"evt_{os.getpid()}_{next(_numbers)}"


def stripe(site: Site, event: str, kind: str = "paid", **more: object) -> httpx.Request:
    """A genuine delivery of Stripe's."""
    body = json.dumps({"id": event, "type": kind, **more}).encode()
    signed = made("stripe").sign("POST", f"{site.url}/hooks/stripe", JSON, body)
    return httpx.Request("POST", signed.url, headers=signed.headers, content=signed.body)


def send(request: httpx.Request) -> httpx.Response:
    # Without verify=False every client reads all certificates, which takes longer than the test.
    with httpx.Client(timeout=60, trust_env=False, verify=False) as client:
        return client.send(request)


# Scenarios


def first_and_duplicate(site: Site) -> None:
    """A first copy is handled and a second is not; both get the same 200."""
    event = fresh()
    answers = [send(stripe(site, event)) for _ in range(2)]
    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b"")] * 2
    assert "content-type" not in answers[0].headers  # a framework's default would be HTML
    assert site.notes("effects").count(event) == 1


def concurrent_copies(site: Site) -> None:
    """Copies that come at once run one handler, and each is told 200 or to come again."""
    event, start = fresh(), threading.Barrier(COPIES)

    def deliver(_: int) -> httpx.Response:
        request = stripe(site, event)
        start.wait()
        return send(request)

    with ThreadPoolExecutor(COPIES) as pool:
        answers = list(pool.map(deliver, range(COPIES)))
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert 200 in {answer.status_code for answer in answers}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    assert site.notes("effects").count(event) == 1
    assert send(stripe(site, event)).status_code == 200
    assert site.notes("effects").count(event) == 1


def copy_in_flight(site: Site) -> None:
    """A copy that comes while the handler runs is told to come again; later it is a duplicate."""
    event = fresh()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(send, stripe(site, event, "slow"))
        try:
            site.until("effects", event)
            copy = send(stripe(site, event, "slow"))
        finally:
            (site.folder / event).touch()
        assert (copy.status_code, copy.json()["error"]) == (503, "in_flight")
        assert int(copy.headers["retry-after"]) >= 1
        assert first.result().status_code == 200
    assert send(stripe(site, event, "slow")).status_code == 200
    assert site.notes("effects").count(event) == 1


def failed_handler(site: Site) -> None:
    """A handler that fails is a 500, and the sender's retry runs it again."""
    event = fresh()
    answers = [send(stripe(site, event, "fails")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500, 200, 200]
    assert site.notes("effects").count(event) == 2
    assert "not now" not in answers[0].text


def refused(site: Site) -> None:
    """What is not genuine is refused, and neither the store nor a handler hears of it."""
    before = site.notes("calls"), site.notes("effects")
    good = stripe(site, fresh())
    changed = httpx.Request(
        "POST",
        good.url,
        headers={**JSON, "Stripe-Signature": good.headers["stripe-signature"]},
        content=good.content + b" ",
    )
    unsigned = httpx.Request("POST", good.url, headers=JSON, content=good.content)
    hostile = httpx.Request(
        "POST",
        good.url,
        headers=[
            (b"content-type", b"application/json"),
            (b"stripe-signature", b"t=\xff\xb2,v1=\xe9"),
        ],
        content=good.content,
    )
    twice = stripe(site, fresh())
    twice.headers = httpx.Headers(
        [*twice.headers.multi_items(), ("stripe-signature", "t=1,v1=" + "0" * 64)]
    )
    typed = stripe(site, fresh())
    typed.headers["content-type"] = "text/html"
    empty = httpx.Request("POST", good.url, headers=JSON)
    answers = [send(one) for one in (changed, unsigned, hostile, twice, empty, typed)]
    assert [answer.status_code for answer in answers] == [401] * 5 + [415]
    assert answers[0].json()["error"] == "signature_mismatch"
    assert "signature_mismatch" in answers[0].headers["www-authenticate"]
    assert (site.notes("calls"), site.notes("effects")) == before


def oversized(site: Site) -> None:
    """A body over the limit is a 413, whether its length is told or not; one at it is taken."""
    before = site.notes("calls")
    request = stripe(site, fresh(), pad="x" * MOST)
    answers = [send(request)]
    if site.chunked:
        answers.append(send(chunked(request)))
    assert {answer.status_code for answer in answers} == {413}
    assert answers[0].json()["error"] == "body_too_large"
    assert site.notes("calls") == before
    event = fresh()
    room = MOST - len(stripe(site, event, pad="").content)
    exact = stripe(site, event, pad="x" * room)
    assert len(exact.content) == MOST
    assert send(exact).status_code == 200


def chunked_body(site: Site) -> None:
    """A body without a length is verified and handled as any other."""
    event = fresh()
    if site.chunked:
        assert send(chunked(stripe(site, event))).status_code == 200
        assert site.notes("effects").count(event) == 1
    else:  # then the server drops it, and what is left has no right signature
        assert send(chunked(stripe(site, event))).status_code in (400, 401)
        assert site.notes("effects").count(event) == 0


def chunked(request: httpx.Request) -> httpx.Request:
    """The same, in pieces."""

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(request.content), 100):
            yield request.content[at : at + 100]

    fields = [item for item in request.headers.multi_items() if item[0] != "content-length"]
    return httpx.Request("POST", request.url, headers=fields, content=pieces())


def cut_short(site: Site) -> None:
    """A body that ends before its length does is never handled, and a server's 400."""
    event = fresh()
    request = stripe(site, event)
    lines = [f"{name}: {value}" for name, value in request.headers.items()]
    head = "\r\n".join(["POST /hooks/stripe HTTP/1.1", *lines, "", ""])
    address = urlsplit(site.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + request.content[:-5])
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    # Some servers give up without a word.
    assert answer == b"" or answer.split()[1] == b"400", answer
    assert site.notes("effects").count(event) == 0
    assert send(request).status_code == 200


def other_methods(site: Site) -> None:
    """Only POST is taken."""
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):
        answer = send(httpx.Request(method, f"{site.url}/hooks/stripe"))
        assert (method, answer.status_code) == (method, 405)
        assert "POST" in answer.headers["allow"]


def signed_url(site: Site, name: str) -> None:
    """A provider that signs the URL gets it as it was sent, with its escapes and its query."""
    fields = {"Content-Type": "application/x-www-form-urlencoded"} if name == "twilio" else JSON
    accepted = []
    for what, target in TARGETS.items():
        event = fresh()
        body: bytes = {
            "hubspot": json.dumps([{"eventId": event}]).encode(),
            "square": json.dumps({"event_id": event, "type": "paid"}).encode(),
            "twilio": b"Body=Hello+there&From=%2B15005550006&Empty=",
        }[name]
        header_id = event if name == "twilio" else None
        url = f"{site.url}/signed/{name}{target}"
        signed = made(name).sign("POST", url, fields, body, event_id=header_id)
        request = httpx.Request("POST", url, headers=signed.headers, content=body)
        assert request.url.raw_path.decode().endswith(target)  # the client changes nothing
        answers = [send(request).status_code for _ in range(2)]
        assert answers in ([200, 200], [401, 401])
        assert site.notes("effects").count(event) == (answers[0] == 200)
        if answers[0] == 200:
            accepted.append(what)
        elsewhere = httpx.Request("POST", f"{url}x", headers=signed.headers, content=body)
        assert send(elsewhere).status_code == 401
    assert accepted == [what for what in TARGETS if what not in site.untold]


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        first_and_duplicate,
        concurrent_copies,
        copy_in_flight,
        failed_handler,
        refused,
        oversized,
        chunked_body,
        cut_short,
        other_methods,
    )
}
for _name in SIGNED:
    SCENARIOS[f"signed_url_{_name}"] = partial(signed_url, name=_name)
