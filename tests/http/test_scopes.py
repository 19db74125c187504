"""The ready-made scopes, with requests as servers and frameworks make them."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.http.conftest import Make
from tests.http.doors import Calls

from oncekey import MemoryBackend, MemoryStore, PolicyError
from oncekey.http import by_client_certificate, by_header
from oncekey.http.callers import header_of
from oncekey.http.facts import asgi_facts, facts_of, wsgi_facts


def test_callers_by_a_header(make: Make) -> None:
    """Each key of an API is a caller; without one the request is refused, however long it is."""
    calls = Calls()
    door = make(calls, scope=by_header("X-API-Key"), anonymous="refuse")
    long = "k" * 10_000
    for key in ("ann", "bob", long, long + "2", "ann,bob"):
        assert not door.post(headers=[("X-API-Key", key)]).replayed
        assert door.post(headers=[("x-api-key", key)]).replayed
    for missing in ([], [("X-API-Key", "")], [("X-API-Key", "  ")]):
        assert door.post(headers=missing).problem == "caller-unknown"
    assert calls.count == 5


@pytest.mark.parametrize("name", ["", "X API", "X:Key", "Schlüssel"])
def test_a_scope_needs_a_header_that_can_be(name: str) -> None:
    """A name that no client can send is refused where it is written."""
    with pytest.raises(PolicyError, match="header"):
        by_header(name)


def test_headers_are_found_in_every_kind_of_request() -> None:
    """ASGI, WSGI, Flask, aiohttp's multidicts and events of AWS Lambda; two are joined."""
    import flask
    from multidict import CIMultiDict

    class Request:
        headers = CIMultiDict([("X-Key", "a"), ("x-key", "b")])

    asgi = {"type": "http", "headers": [(b"x-key", b"a"), (b"x-key", b"b"), (b"other", b"c")]}
    wsgi = {"wsgi.input": None, "HTTP_X_KEY": "a,b"}
    rest = {"multiValueHeaders": {"X-KEY": ["a", "b"]}, "headers": {"X-KEY": "b"}}
    app = flask.Flask("shop")
    with app.test_request_context(headers=[("X-Key", "a,b")]):
        sources = [asgi, wsgi, flask.request, Request(), rest, {"headers": {"x-Key": "a,b"}}]
        assert [header_of(source, "X-Key") for source in sources] == ["a,b"] * 6
        assert [header_of(source, "X-None") for source in sources] == [""] * 6


def made_certificates(folder: Path) -> dict[str, Path]:
    """An authority, a server and two clients, as files of key and certificate."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    authority: Any = None
    files = {}
    for name in ("authority", "server", "ann", "bob"):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer, issuer = authority or (key, subject)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(x509.BasicConstraints(name == "authority", None), critical=True)
            # What Python 3.13 wants beside: usage, and whose keys these are.
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    key_cert_sign=name == "authority",
                    crl_sign=False,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
                critical=False,
            )
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(signer, hashes.SHA256())
        )
        authority = authority or (key, subject)
        files[name] = folder / f"{name}.pem"
        files[name].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
    return files


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_certificates(tmp_path_factory.mktemp("certificates"))


def asks_clients(files: dict[str, Path]) -> ssl.SSLContext:
    """The server's side: a client may show a certificate, and it must be good."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["server"])
    context.load_verify_locations(files["authority"])
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


def shows(files: dict[str, Path], name: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files["authority"]))
    if name is not None:
        context.load_cert_chain(files[name])
    return context


PAIRS = [("ann", "201"), ("ann", "201 replayed"), ("bob", "201"), (None, "401")]


def told(reply: httpx.Response) -> str:
    return f"{reply.status_code}{' replayed' * ('idempotent-replayed' in reply.headers)}"


@pytest.fixture
def https(certificates: dict[str, Path]) -> Iterator[str]:
    """Flask behind a real server with TLS, guarded as a whole."""
    import flask
    from werkzeug.serving import make_server

    from oncekey.http.wsgi import IdempotencyMiddleware

    app = flask.Flask("shop")
    app.add_url_rule("/", view_func=lambda: ("made", 201), methods=["POST"])
    guarded = IdempotencyMiddleware(app.wsgi_app, MemoryStore(), scope=by_client_certificate)
    context = asks_clients(certificates)
    server = make_server("127.0.0.1", 0, guarded, threaded=True, ssl_context=context)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_callers_by_certificate_of_a_wsgi_server(https: str, certificates: dict[str, Path]) -> None:
    """Who shows another certificate is another caller, who shows none is nobody."""
    for name, expected in PAIRS:
        with httpx.Client(verify=shows(certificates, name), trust_env=False) as client:
            reply = client.post(https, headers={"Idempotency-Key": "k"})
        assert told(reply) == expected


async def test_callers_by_certificate_of_aiohttp(certificates: dict[str, Path]) -> None:
    """The same from the connection of aiohttp's own server."""
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    from oncekey.adapters.aiohttp import idempotent

    @idempotent(MemoryBackend(), scope=by_client_certificate)
    async def charge(request: web.Request) -> web.StreamResponse:
        return web.Response(status=201)

    app = web.Application()
    app.router.add_post("/", charge)
    server = TestServer(app, scheme="https", host="127.0.0.1")
    await server.start_server(ssl=asks_clients(certificates))
    try:
        for name, expected in PAIRS:
            context = shows(certificates, name)
            async with httpx.AsyncClient(verify=context, trust_env=False) as client:
                url = f"https://127.0.0.1:{server.port}/"
                reply = await client.post(url, headers={"Idempotency-Key": "k"})
            assert told(reply) == expected
    finally:
        await server.close()


def test_names_that_a_server_has_verified() -> None:
    """The TLS extension of ASGI and the variables of Apache, but nothing that was not verified."""

    def asgi(**tls: Any) -> dict[str, Any]:
        return {"type": "http", "extensions": {"tls": tls}}

    good = {"SSL_CLIENT_VERIFY": "SUCCESS", "SSL_CLIENT_S_DN": "CN=ann", "SSL_CLIENT_CERT": "pem"}
    known = [
        asgi(client_cert_name="CN=ann", client_cert_chain=["pem-1"]),
        asgi(client_cert_name="CN=bob"),
        asgi(client_cert_name=None, client_cert_chain=["pem-1"]),
        good,
        {**good, "SSL_CLIENT_I_DN": "CN=other authority"},
        {"SSL_CLIENT_CERT": "pem"},
    ]
    assert len({by_client_certificate(source) for source in known}) == 6
    nobody = [
        asgi(client_cert_name="CN=ann", client_cert_error="expired"),
        asgi(client_cert_name=None, client_cert_chain=[]),
        {"type": "http", "extensions": None},
        {"type": "http"},
        {**good, "SSL_CLIENT_VERIFY": "GENEROUS"},
        {**good, "SSL_CLIENT_VERIFY": "NONE"},
        {"SSL_CLIENT_S_DN": "CN=ann"},
        {"HTTP_SSL_CLIENT_S_DN": "CN=ann", "HTTP_SSL_CLIENT_VERIFY": "SUCCESS"},
    ]
    assert [by_client_certificate(source) for source in nobody] == [None] * len(nobody)


def test_who_sends_a_name_twice_is_nobody() -> None:
    """Authentication may look at the other one; and each pair would be a caller with new limits."""
    scope = by_header("X-API-Key")
    twice = {"headers": [(b"x-api-key", b"mine"), (b"x-api-key", b"more")]}
    assert scope(twice) is None
    assert scope({"headers": twice["headers"][:1]}) is not None
    for facts in (
        asgi_facts(
            {
                "method": "POST",
                "path": "/",
                "headers": [(b"authorization", b"mine"), (b"authorization", b"more")],
            },
            b"idempotency-key",
            None,
        ),
        facts_of("POST", b"/", [("Authorization", "mine"), ("authorization", "more")], "k", None),
    ):
        assert not facts.authorization


def test_a_name_is_the_bytes_that_were_sent() -> None:
    """Only blanks around it don't count; WSGI's text stands for the same bytes as ASGI's."""
    scope = by_header("X-API-Key")
    plain, padded = ({"headers": [(b"x-api-key", value)]} for value in (b"ann", b"ann\xa0"))
    assert scope(plain) != scope(padded)
    environ = {"REQUEST_METHOD": "POST", "HTTP_AUTHORIZATION": "k\xe9"}
    assert wsgi_facts(environ, "Idempotency-Key", None).authorization == b"k\xe9"
