"""``oncekey providers``, ``oncekey sign`` and ``oncekey send``."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.signatures.cases import NOW, SECRET, URL, make

from oncekey.cli import main
from oncekey.cli._parser import parse
from oncekey.errors import PolicyError
from oncekey.signatures import Verdict, providers


def run(*arguments: str) -> int:
    parsed = parse(arguments)
    code: int = parsed.run(parsed)
    return code


@pytest.fixture
def body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with an event; the secret is in the environment."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    file = tmp_path / "event.json"
    file.write_bytes(b'{"id": "evt_1"}')
    return str(file)


def test_the_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each, and all of it as JSON."""
    assert run("providers") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(providers())

    assert run("providers", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(providers())
    assert rows[0]["retention_seconds"] == 31 * 86_400


def test_one_provider_is_shown_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that is known, with the date it was checked."""
    assert run("providers", "mailgun") == 0
    out = capsys.readouterr().out
    assert "NOT the event" in out
    assert "checked:            2026-11" in out
    assert run("providers", "stripe", "--json") == 0
    assert json.loads(capsys.readouterr().out)["settings"]["header"] == "Stripe-Signature"
    with pytest.raises(PolicyError, match="no provider 'strip'"):
        run("providers", "strip")


def test_what_sign_prints_is_verified(body: str, capfdbinary: Any) -> None:
    """A request with its headers, an empty line and the body; or a line of JSON."""
    assert run("sign", "stripe", "--secret-env", "HOOK_SECRET", "--url", URL, body) == 0
    head, _, rest = capfdbinary.readouterr().out.partition(b"\n\n")
    first, *lines = head.decode().splitlines()
    headers = dict(line.split(": ", 1) for line in lines)
    assert first == f"POST {URL}"
    assert rest == b'{"id": "evt_1"}\n'
    assert make("stripe").verify("POST", URL, headers, rest[:-1]).event_id == "evt_1"
    assert SECRET not in head.decode()

    options = ("--secret-env", "HOOK_SECRET", "--url", URL, "--json", "--now", str(NOW))
    assert run("sign", "github", *options, "--event-id", "g-1", body, body) == 0
    rows = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert len(rows) == 2
    raw = base64.b64decode(rows[0]["body_base64"])
    verdict = make("github").verify(rows[0]["method"], rows[0]["url"], rows[0]["headers"], raw)
    assert verdict.event_id == "g-1"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("stripe", "FILE"), "secret= is empty"),
        (("stripe", "--secret-env", "NOT_SET", "FILE"), "--secret-env takes the name"),
        (("stripe", "--secret-env", SECRET, "FILE"), "--secret-env takes the name"),
        (("stripe", "--option", f"secret={SECRET}", "FILE"), "--secret-env NAME"),
        (("stripe", "--option", f"previous={SECRET}", "FILE"), "--secret-env NAME"),
        (("stripe", "--option", f"signing_key={SECRET}", "FILE"), "--signing-key-env NAME"),
        (("stripe", "--option", SECRET, "FILE"), "NAME=VALUE"),
        (("stripe", "--secret-env", "HOOK_SECRET", "/no/such/file"), "can't be read"),
        (("stripe", "--secret-env", "HOOK_SECRET", "--option", "x", "FILE"), "NAME=VALUE"),
        (("stripe", "--secret-env", "HOOK_SECRET", "--option", "x=1", "FILE"), "no option x"),
        (("stripe", "--secret-env", "HOOK_SECRET", "--header", "x", "FILE"), "NAME: VALUE"),
        (("stripe", "--secret-env", "HOOK_SECRET", "--event-id", "x", "FILE"), "from the body"),
        (("paypal", "FILE"), "webhook_id"),
        (("nobody", "FILE"), "no provider 'nobody'"),
    ],
)
def test_wrong_calls_are_named(arguments: tuple[str, ...], message: str, body: str) -> None:
    """Each says what to change, and none shows the secret."""
    with pytest.raises(PolicyError, match=message) as caught:
        run("sign", *[body if one == "FILE" else one for one in arguments])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [("--secret", SECRET), (f"--secret={SECRET}",), ("--signing-key", SECRET), ("--x", SECRET)],
)
def test_options_are_not_abbreviated_and_not_repeated(
    arguments: tuple[str, ...], body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A secret behind what looks like an option for it is refused, and stays out of the error."""
    for command in (("sign", "stripe"), ("send", "http://localhost:1", "stripe")):
        with pytest.raises(SystemExit) as ended:
            main([*command, body, *arguments])
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert "no option --" in told
        assert SECRET not in told


class Endpoint:
    """A receiver that remembers its verdicts, and answers 500 to every delivery from ``fails``."""

    def __init__(self, name: str) -> None:
        self.verdicts: list[Verdict] = []
        self.status = 200
        endpoint, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                url = f"http://127.0.0.1:{self.server.server_port}{self.path}"  # type: ignore[attr-defined]
                with lock:
                    verdict = make(name).verify("POST", url, self.headers.items(), raw)
                    endpoint.verdicts.append(verdict)
                self.send_response(endpoint.status if verdict.ok else 401)
                self.end_headers()
                self.wfile.write(verdict.code.encode() + b"\x1b[2J")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks?x=1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def github() -> Iterator[Endpoint]:
    endpoint = Endpoint("github")
    yield endpoint
    endpoint.close()


def test_copies_are_sent_under_one_id(
    body: str, github: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a provider's retries are, also at the same time."""
    options = ("--secret-env", "HOOK_SECRET", "--times", "6", "--at-once", "3")

    assert run("send", github.url, "github", *options, body) == 0
    assert [one.ok for one in github.verdicts] == [True] * 6
    assert len({one.event_id for one in github.verdicts}) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("200 ")
    assert out.splitlines()[-1] == "all answers were 2xx"
    assert "\x1b" not in out, "an answer must not reach the terminal raw"


def test_other_answers_are_an_exit_code(
    body: str,
    github: Endpoint,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong secret, an error of the receiver, nobody there."""
    monkeypatch.setenv("WRONG_SECRET", "x" * 20)
    assert run("send", github.url, "github", "--secret-env", "WRONG_SECRET", body) == 1
    assert "signature_mismatch" in capsys.readouterr().out
    github.status = 503
    assert run("send", github.url, "github", "--secret-env", "HOOK_SECRET", body) == 1
    assert "503" in capsys.readouterr().out
    nobody = "http://127.0.0.1:9/"  # the discard port: nothing listens there
    assert run("send", nobody, "github", "--secret-env", "HOOK_SECRET", body) == 1
    assert capsys.readouterr().out.startswith("none ")


@pytest.mark.parametrize(
    "url, options",
    [
        ("example.com", ()),
        ("ftp://example.com/", ()),
        ("http://[::1", ()),
        ("http://a:99999/", ()),
        ("http://a/", ("--times", "0")),
        ("http://a/", ("--at-once", "0")),
        ("http://a/", ("--timeout", "0")),
    ],
)
def test_wrong_targets_are_refused(body: str, url: str, options: tuple[str, ...]) -> None:
    """Before anything is sent."""
    with pytest.raises(PolicyError):
        run("send", url, "github", "--secret-env", "HOOK_SECRET", *options, body)


@pytest.mark.parametrize("name, kind", [("stripe", "invoice.paid"), ("github", "issues")])
def test_a_sample_needs_no_file(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a file a body of the provider's is made, of the type that is asked for."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    assert run("sign", name, "--secret-env", "HOOK_SECRET", "--type", kind, "--json") == 0
    row = json.loads(capsys.readouterr().out)
    raw = base64.b64decode(row["body_base64"])
    maker = make(name)
    verdict = maker.verify(row["method"], row["url"], row["headers"], raw)
    assert verdict.ok
    assert maker.items(row["headers"], raw)[0].event_type == kind


def test_curl_is_printed_and_nothing_sent(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--curl`` prints a command with the signature in it, and never the secret."""
    words = ("send", "http://127.0.0.1:9/hooks", "stripe", body, "--secret-env", "HOOK_SECRET")
    assert run(*words, "--curl") == 0
    told = capsys.readouterr().out
    assert told.startswith("curl -X POST http://127.0.0.1:9/hooks -H ")
    assert "v1=" in told
    assert SECRET not in told


def test_a_sample_by_provider_and_type(
    github: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``send github push URL`` needs no body; without a URL it goes to the gateway here."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    secret = ("--secret-env", "HOOK_SECRET")
    assert run("send", "github", "push", github.url, *secret) == 0
    assert run("send", "github", github.url, *secret, "--type", "push") == 0
    assert [one.ok for one in github.verdicts] == [True, True]
    capsys.readouterr()
    assert run("send", "github", "push", github.url, *secret, "--curl") == 0
    told = capsys.readouterr().out
    assert github.url in told
    assert "x-github-event: push" in told.lower()
    assert run("send", "stripe", "invoice.paid", *secret, "--curl") == 0
    told = capsys.readouterr().out
    assert told.startswith("curl -X POST http://127.0.0.1:8080/hooks/stripe -H ")
    assert '"invoice.paid"' in told


@pytest.mark.parametrize(
    "words",
    [
        ("http://a/",),
        ("stripe", "one", "two"),
        ("stripe", "http://a/", "http://b/"),
        ("stripe", "-"),
        ("stripe", "invoice.paid", "--type", "invoice.paid"),
    ],
)
def test_words_that_can_mean_two_things_are_refused(words: tuple[str, ...], body: str) -> None:
    """Nothing is guessed: two types, two URLs, or a file where a type belongs."""
    with pytest.raises(PolicyError):
        run("send", *words, "--secret-env", "HOOK_SECRET")
    with pytest.raises(PolicyError, match="FILE"):
        run("send", "stripe", body, "--secret-env", "HOOK_SECRET")
