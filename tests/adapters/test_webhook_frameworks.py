"""What every adapter for an event loop must do, shown in its framework behind its real server."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.adapters.hooks import (
    FORM,
    JSON,
    PATIENCE,
    SMALL,
    STRIPE,
    effects,
    make_hook,
    make_hooks,
    signed,
)
from tests.adapters.sites import ALL, ASGI, READ_AHEAD, Site, site

from oncekey.signatures import provider
from oncekey.signatures.base import SignedRequest

COPIES = 16
TARGET = "/a%2Fb%20c/%C3%A9/%7e//d;e/../f?x=%20+&y=%26&x=2&&z"


@pytest.fixture(scope="module", params=ALL)
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A server with one hook of each kind."""
    hooks = make_hooks(tmp_path_factory.mktemp("hooks"))
    with site(request.param, hooks) as found:
        yield found
    assert all(hook.store.closed for hook in hooks.values() if not isinstance(hook.store, Path))


@pytest.fixture(scope="module")
def client(shop: Site) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shop.base, timeout=PATIENCE, trust_env=False) as client:
        yield client


def post(client: httpx.Client, request: SignedRequest, **more: Any) -> httpx.Response:
    path = request.url.removeprefix("http://x.example")
    options: dict[str, Any] = {"content": request.body, "headers": request.headers, **more}
    return client.post(path, **options)


@pytest.mark.parametrize("name", ["async", "sync"])
def test_first_and_duplicate(shop: Site, client: httpx.Client, name: str) -> None:
    """A first copy is handled and a second one is not; both get the provider's own answer."""
    hook = shop.hooks[name]
    hook.outcomes()
    request = signed(hook, "evt_first")
    answers = [post(client, request) for _ in range(2)]
    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b"")] * 2
    assert hook.ids("evt_first") == ["evt_first"]
    assert hook.outcomes() == ["first", "duplicate"]


def test_answer_without_content(shop: Site, client: httpx.Client) -> None:
    """A provider that wants 204 gets it, without a body or its length, on one connection."""
    request = signed(shop.hooks["quiet"], "evt_quiet")
    for _ in range(2):
        answer = post(client, request)
        assert (answer.status_code, answer.content) == (204, b"")
        assert "content-length" not in answer.headers
    assert shop.hooks["quiet"].ids("evt_quiet") == ["evt_quiet"]


def test_answer_with_content(shop: Site, client: httpx.Client) -> None:
    """A provider that wants a document gets it, once, with its type."""
    hook = shop.hooks["twilio"]
    headers = {**FORM, "I-Twilio-Idempotency-Token": "token"}
    request = hook.receiver.provider.sign("POST", f"{shop.base}/twilio/doc", headers, b"A=1")
    answer = client.post("/twilio/doc", content=request.body, headers=request.headers)
    assert (answer.status_code, answer.text) == (200, "<Response/>")
    assert answer.headers.get_list("content-type") == ["text/xml; charset=utf-8"]
    assert answer.headers.get_list("content-length") == ["11"]


@pytest.mark.parametrize("name", ["async", "sync", "tx"])
def test_concurrent_copies_are_one_call(shop: Site, client: httpx.Client, name: str) -> None:
    """Copies at the same moment: one handler call, and no answer that makes a sender give up."""
    hook = shop.hooks[name]
    request = signed(hook, "evt_many")
    start = threading.Barrier(COPIES)
    answers: list[httpx.Response] = []

    def deliver() -> None:
        start.wait()
        answers.append(post(client, request))

    threads = [threading.Thread(target=deliver) for _ in range(COPIES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == COPIES
    for answer in answers:
        assert answer.status_code in (200, 503)
        assert answer.status_code == 200 or int(answer.headers["Retry-After"]) >= 1
    assert hook.ids("evt_many") == ["evt_many"]


@pytest.mark.parametrize("name", ["async", "sync"])
def test_bad_signature(shop: Site, client: httpx.Client, name: str) -> None:
    """What is not genuine gets a 401 that names no secret; no store and no handler hears of it."""
    hook = shop.hooks[name]
    request = signed(hook, "evt_bad")
    hook.store.calls.clear()
    answer = post(client, request, content=request.body + b" ")
    assert (answer.status_code, answer.json()["error"]) == (401, "signature_mismatch")
    assert answer.headers["WWW-Authenticate"].startswith("Signature ")
    assert "whsec_test" not in answer.text
    assert hook.store.calls == []
    assert hook.ids("evt_bad") == []


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_oversized_body(shop: Site, client: httpx.Client, chunked: bool) -> None:
    """A body of the limit is taken, one byte more is a 413, and the connection goes on."""
    hook = shop.hooks["small"]
    hook.outcomes()
    empty = len(signed(hook, f"evt_{chunked}", pad="").body)
    for over, status in ((0, 200), (1, 413), (SMALL, 413), (0, 200)):
        request = signed(hook, f"evt_{chunked}", pad="x" * (SMALL - empty + over))
        assert len(request.body) == SMALL + over
        content = iter([request.body[:9], request.body[9:]]) if chunked else request.body
        answer = post(client, request, content=content)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"] == "body_too_large"
    assert hook.outcomes() == ["first", "rejected", "rejected", "duplicate"]
    assert hook.ids(f"evt_{chunked}") == [f"evt_{chunked}"]


def raw_request(site: Site, request: SignedRequest, *lines: str) -> bytes:
    """The head of a request, with more lines."""
    path = request.url.removeprefix("http://x.example")
    fields = [f"{name}: {value}" for name, value in request.headers.items()]
    head = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{site.port}", *fields, *lines, "", ""]
    return "\r\n".join(head).encode()


@contextlib.contextmanager
def connection(site: Site) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as found:
        yield found


@pytest.mark.parametrize(
    "line, body",
    [
        (f"Content-Length: {10**15}", b""),
        ("Transfer-Encoding: chunked", b"3e9\r\n" + b"x" * 1001 + b"\r\n"),
    ],
    ids=["length", "chunked"],
)
def test_refuses_before_it_has_read(shop: Site, line: str, body: bytes) -> None:
    """The 413 comes while the client still holds back what is over the limit."""
    if shop.name in READ_AHEAD:
        line, body = f"Content-Length: {SMALL + 1}", b"x" * (SMALL + 1)
    hook = shop.hooks["small"]
    with connection(shop) as sock:
        sock.sendall(raw_request(shop, signed(hook, "evt_huge"), line) + body)
        status = sock.recv(100).split(b"\r\n")[0]
    assert b" 413 " in status
    assert hook.ids("evt_huge") == []


def test_chunked_body(shop: Site, client: httpx.Client) -> None:
    """A body that comes in pieces is put together again."""
    hook = shop.hooks["async"]
    request = signed(hook, "evt_chunked", text="x" * 300_000)
    pieces = [request.body[at : at + 999] for at in range(0, len(request.body), 999)]
    answer = post(client, request, content=iter(pieces))
    assert answer.status_code == 200
    assert [one.body for one in hook.handled if one.id == "evt_chunked"] == [request.body]


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_other_methods(shop: Site, client: httpx.Client, method: str) -> None:
    """Only POST is taken; the answer says so, and no store hears of it."""
    hook = shop.hooks["async"]
    hook.store.calls.clear()
    request = signed(hook, "evt_method")
    content = request.body if method == "PUT" else None
    answer = client.request(method, hook.path, content=content, headers=request.headers)
    assert answer.status_code == 405
    assert "POST" in answer.headers["Allow"]
    assert hook.store.calls == []
    assert hook.ids("evt_method") == []


def test_json_stays_raw(shop: Site, client: httpx.Client) -> None:
    """The handler and the signature see the bytes that came, not what a parser made of them."""
    hook = shop.hooks["async"]
    body = b'\r\n{ "id":"evt_raw" ,"type": "paid","n":1.0e1,"s":"\\u00e9\xc3\xa9" }\t'
    headers = {"Content-Type": "application/json; charset=utf-8"}
    request = STRIPE.sign("POST", "http://x.example/async/in", headers, body)
    assert post(client, request).status_code == 200
    assert [one.body for one in hook.handled if one.id == "evt_raw"] == [body]


def test_form_stays_raw(shop: Site, client: httpx.Client) -> None:
    """A form is not parsed by anything in front, and keeps its order and its spelling."""
    hook = shop.hooks["twilio"]
    body = b"B=2+3&A=%7e1&B=%20&_csrf_token=&"
    headers = {**FORM, "I-Twilio-Idempotency-Token": "form"}
    request = hook.receiver.provider.sign("POST", f"{shop.base}/twilio/form", headers, body)
    answer = client.post("/twilio/form", content=request.body, headers=request.headers)
    assert answer.status_code == 200
    assert [one.body for one in hook.handled if one.id == "form"] == [body]


@pytest.mark.parametrize("name", ["tx", "synctx"])
def test_transactional_handler(shop: Site, client: httpx.Client, name: str) -> None:
    """A handler that fails leaves nothing; the retry commits its effect with the mark, once."""
    hook = shop.hooks[name]
    hook.failing.add("evt_tx")
    request = signed(hook, "evt_tx")
    assert post(client, request).status_code == 500
    assert effects(hook, "evt_tx") == 0
    assert [post(client, request).status_code for _ in range(2)] == [200, 200]
    assert effects(hook, "evt_tx") == 1


def test_repeated_fields(shop: Site, client: httpx.Client) -> None:
    """A header field that came twice is seen as two, and a signature that did is no signature."""
    hook = shop.hooks["async"]
    request = signed(hook, "evt_fields")
    fields = [*request.headers.items(), ("X-Note", "a"), ("X-Note", "b, c"), ("X-Byte", "\xe9")]
    encoded = [(name, value.encode("latin-1")) for name, value in fields]
    assert post(client, request, headers=encoded).status_code == 200
    headers = hook.handled[-1].headers
    assert headers.all("x-note") == ["a", "b, c"]
    assert headers.one("X-Byte") == "\xe9"
    twice = [*fields, ("Stripe-Signature", request.headers["Stripe-Signature"])]
    again = signed(hook, "evt_fields_2")
    assert (
        post(client, again, headers=[one for one in twice if one[0] != "X-Byte"]).status_code == 401
    )
    assert hook.ids("evt_fields") == ["evt_fields"]


@pytest.mark.parametrize("name", ["twilio", "square", "hubspot"])
def test_signed_url(shop: Site, name: str) -> None:
    """Path and query reach a provider that signs URLs as they were sent, escapes and order too."""
    hook = shop.hooks[name]
    target = f"/{name}{TARGET}"
    event = {"id": "u", "event_id": "u", "type": "t", "eventId": 1, "subscriptionType": "t"}
    headers, body = JSON, json.dumps([event] if name == "hubspot" else event).encode()
    if name == "twilio":
        headers, body = {**FORM, "I-Twilio-Idempotency-Token": "u"}, b"A=1"
    request = hook.receiver.provider.sign("POST", shop.base + target, headers, body)
    before = len(hook.handled)
    for path, status in ((target, 200), (target.replace("%20", "%2520"), 401)):
        # http.client sends the target as it is.
        client = http.client.HTTPConnection("127.0.0.1", shop.port, timeout=PATIENCE)
        client.request("POST", path, request.body, request.headers)
        assert client.getresponse().status == status
        client.close()
    assert len(hook.handled) == before + 1


@pytest.mark.parametrize("name", ["async", "sync"])
def test_context_is_kept(shop: Site, client: httpx.Client, name: str) -> None:
    """Context variables that were set in front are the handler's too, also in a thread."""
    hook = shop.hooks[name]
    request = signed(hook, "evt_context")
    assert (
        post(client, request, headers={**request.headers, "X-Context": "here"}).status_code == 200
    )
    assert hook.contexts["evt_context"] == "here"


def test_client_that_leaves_early(shop: Site) -> None:
    """If the client goes away while its body is read, no receiver hears of it."""
    hook = shop.hooks["async"]
    hook.outcomes()
    hook.store.calls.clear()
    request = signed(hook, "evt_early")
    for name, line, sent in (
        ("length", f"Content-Length: {len(request.body)}", request.body[:-1]),
        ("chunks", "Transfer-Encoding: chunked", b"5\r\n" + request.body[:5] + b"\r\n"),
    ):
        with connection(shop) as sock:
            sock.sendall(raw_request(shop, request, line, f"X-Watch: {name}") + sent)
        if shop.name not in ASGI:
            shop.saw(name, "gone")
        shop.saw(name, "ended")
    assert hook.outcomes() == []
    assert hook.store.calls == []
    assert hook.ids("evt_early") == []


@pytest.mark.parametrize("name", ["async", "sync", "tx"])
@pytest.mark.parametrize("cancel", [False, True], ids=["left alone", "cancelled"])
def test_client_that_leaves_late(shop: Site, client: httpx.Client, name: str, cancel: bool) -> None:
    """If it goes away later, also where the server cancels, the handler ends and that counts."""
    hook, event = shop.hooks[name], f"evt_late_{cancel}"
    hook.outcomes()
    hook.gates[event] = threading.Event()
    request = signed(hook, event)
    lines = [f"Content-Length: {len(request.body)}", f"X-Watch: {event}"]
    with connection(shop) as sock:
        cancelling = ["X-Cancel: 1"] if cancel else []
        sock.sendall(raw_request(shop, request, *lines, *cancelling) + request.body)
        assert hook.started.get(timeout=PATIENCE) == event
    shop.saw(event, "gone")
    is_cancelled = cancel if shop.name in ASGI else shop.name == "aiohttp"
    if is_cancelled:
        shop.saw(event, "ended")
    hook.gates[event].set()
    assert hook.audits.get(timeout=PATIENCE).outcome == "first"
    if not is_cancelled:
        shop.saw(event, "ended")
    assert post(client, request).status_code == 200
    assert hook.outcomes() == ["duplicate"]
    assert hook.ids(event) == [event]


@pytest.mark.parametrize("name", ["asgi", "starlette", "fastapi", "litestar"])
def test_prefix_that_a_proxy_strips(name: str) -> None:
    """With the server's ``root_path`` the URL is the one before the proxy cut it."""
    hook = make_hook(
        "twilio", provider("twilio", secret="s", allowed_hosts="*"), rest="/{rest:path}"
    )
    headers = {**FORM, "I-Twilio-Idempotency-Token": "u"}
    with site(name, {"twilio": hook}, root_path="/api") as found:
        url = f"{found.base}/api/twilio/a%20b?c=%2F"
        request = hook.receiver.provider.sign("POST", url, headers, b"A=1")
        answer = httpx.post(
            url.replace("/api", ""), content=b"A=1", headers=request.headers, trust_env=False
        )
    assert answer.status_code == 200
    assert [event.id for event in hook.handled] == ["u"]
