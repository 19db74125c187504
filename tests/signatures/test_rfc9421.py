"""RFC 9421: the examples of its appendix, the grammar, and the generic provider."""

from __future__ import annotations

import base64
from typing import Any

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from tests.signatures.rsa_for_tests import rsa_key

from oncekey import MemoryBackend, MemoryStore
from oncekey.errors import BackendMismatchError, PolicyError
from oncekey.signatures.algorithms import SignatureKey, load_key, sign_bytes, signature_is_right
from oncekey.signatures.asking import run_checks
from oncekey.signatures.base import SignedRequest
from oncekey.signatures.delivery import Delivery, Headers
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.rfc9421 import (
    component_value,
    content_digest,
    digest_is_right,
    rfc9421_provider,
    signature_base,
)
from oncekey.signatures.structured import (
    Component,
    HeaderError,
    Raw,
    parse_bytes,
    parse_signature_input,
)

NOW = 1_790_000_000
URL = "https://example.com/foo?param=Value&Pet=dog"
SECRET = b"a shared secret of at least 16 bytes"

# --- appendix B of the RFC ---------------------------------------------------------------------

THEN = 1_618_884_473
EXAMPLE = SignedRequest(
    "POST",
    URL,
    {
        "Host": "example.com",
        "Date": "Tue, 20 Apr 2021 02:07:55 GMT",
        "Content-Type": "application/json",
        "Content-Digest": "sha-512=:WZDPaVn/7XgHaAy8pmojAkGWoRx2UFChF41A2svX+TaPm+AbwAgBWnrIiYllu7B"
        "NNyealdVLvRwEmTHWXvJwew==:",
        "Content-Length": "18",
    },
    b'{"hello": "world"}',
)
SHARED = "uzvJfB4u3N0Jy4T7NZ75MDVcr8zSTInedJtkgcu46YW4XByzNJjxBdtjUkdJPBtbmHhIDi6pcl8jsasjlTMtDQ=="
ED25519_X = "JrQLj5P_89iXES9-vFgrIy29clF9CC_oPPsw3c5D0bs"


def example(signature_input: str, signature: str) -> SignedRequest:
    added = {"Signature-Input": signature_input, "Signature": signature}
    return EXAMPLE._replace(headers={**EXAMPLE.headers, **added})


def test_the_example_with_a_shared_secret() -> None:
    """B.2.5, HMAC with SHA-256, verifies, and is what we sign."""
    covers = ("date", "@authority", "content-type")
    provider = rfc9421_provider(
        allowed_hosts="*",
        keys={"test-shared-secret": base64.b64decode(SHARED)},
        covers=covers,
        label="sig-b25",
    )
    request = example(
        'sig-b25=("date" "@authority" "content-type");created=1618884473'
        ';keyid="test-shared-secret"',
        "sig-b25=:pxcQw6G3AjtMBQjwo8XzkZf/bws5LelbaMk5rGIGtE8=:",
    )
    assert provider.verify(*request, now=THEN).ok
    assert provider.verify(*request._replace(url="https://x.example/"), now=THEN).code == (
        "signature_mismatch"
    )


def test_the_example_with_ed25519() -> None:
    """B.2.6, a signature with ed25519 over six parts, verifies."""
    provider = rfc9421_provider(
        allowed_hosts="*",
        keys={"test-key-ed25519": {"kty": "OKP", "crv": "Ed25519", "x": ED25519_X}},
        covers=("date", "@method", "@path", "@authority", "content-type", "content-length"),
    )
    request = example(
        'sig-b26=("date" "@method" "@path" "@authority" "content-type" "content-length")'
        ';created=1618884473;keyid="test-key-ed25519"',
        "sig-b26=:wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKR"
        "Cw==:",
    )
    verdict = provider.verify(*request, now=THEN)
    assert verdict.ok
    assert verdict.timestamp == THEN
    assert provider.verify(*request._replace(method="PUT"), now=THEN).code == "signature_mismatch"


def test_the_base_is_that_of_the_rfc() -> None:
    """The bytes that are signed for a full set of parts are those of B.2.3."""
    covered = parse_signature_input(
        'sig=("date" "@method" "@path" "@query" "@authority" "content-type" "content-digest" '
        '"content-length");created=1618884473;keyid="test-key-rsa-pss"'
    )["sig"]
    delivery = Delivery("POST", URL, Headers(EXAMPLE.headers), EXAMPLE.body)
    base = signature_base(covered, lambda part: component_value(delivery, part))
    assert base.decode().split("\n") == [
        '"date": Tue, 20 Apr 2021 02:07:55 GMT',
        '"@method": POST',
        '"@path": /foo',
        '"@query": ?param=Value&Pet=dog',
        '"@authority": example.com',
        '"content-type": application/json',
        f'"content-digest": {EXAMPLE.headers["Content-Digest"]}',
        '"content-length": 18',
        (
            '"@signature-params": ("date" "@method" "@path" "@query" "@authority" "content-type" '
            '"content-digest" "content-length");created=1618884473;keyid="test-key-rsa-pss"'
        ),
    ]


@pytest.mark.parametrize(
    "url, name, value",
    [
        ("https://WWW.Example.com/p?a=b", "@target-uri", "https://WWW.Example.com/p?a=b"),
        ("https://www.example.com/p#frag", "@target-uri", "https://www.example.com/p"),
        ("https://WWW.Example.com:443/", "@authority", "www.example.com"),
        ("http://www.example.com:80/", "@authority", "www.example.com"),
        ("http://www.example.com:443/", "@authority", "www.example.com:443"),
        ("https://user:pw@www.example.com/", "@authority", "www.example.com"),
        ("HTTPS://www.example.com/", "@scheme", "https"),
        ("https://www.example.com/path?a=b", "@path", "/path"),
        ("https://www.example.com", "@path", "/"),
        ("https://www.example.com/path?a=b?c", "@query", "?a=b?c"),
        ("https://www.example.com/path?", "@query", "?"),
        ("https://www.example.com/path", "@query", "?"),
        ("https://www.example.com/path?a=b", "@request-target", "/path?a=b"),
    ],
)
def test_parts_of_the_request_have_the_value_of_the_rfc(url: str, name: str, value: str) -> None:
    """The derived components of section 2.2."""
    delivery = Delivery("POST", url, Headers({}), b"")
    assert component_value(delivery, Component(name)) == value


PARAMETERS = (
    "https://www.example.com/parameters?var=this%20is%20a%20big%0Amultiline%20value&"
    "bar=with+plus+whitespace&fa%C3%A7ade%22%3A%20=something&twice=1&twice=2&none=&t=~"
)


@pytest.mark.parametrize(
    "name, value",
    [
        ("var", "this%20is%20a%20big%0Amultiline%20value"),
        ("bar", "with%20plus%20whitespace"),
        ("fa%C3%A7ade%22%3A%20", "something"),
        ("none", ""),
        ("t", "%7E"),
        ("twice", None),
        ("missing", None),
        ("VAR", None),
    ],
)
def test_one_parameter_of_the_query(name: str, value: str | None) -> None:
    """As section 2.2.8 has them; one that comes twice can't be covered."""
    part = parse_signature_input(f'sig=("@query-param";name="{name}")')["sig"].components[0]
    delivery = Delivery("GET", PARAMETERS, Headers({}), b"")
    if value is None:
        with pytest.raises(HeaderError):
            component_value(delivery, part)
    else:
        assert component_value(delivery, part) == value
    other = Component("@query-param", (("name", "bar"), ("req", True)))
    with pytest.raises(HeaderError, match="one parameter"):
        component_value(delivery, other)


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1])
def test_a_query_parameter_that_must_be_covered(curve: Any) -> None:
    """``covers`` names it; another value of it is a mismatch, a signature without it too little."""
    private = ec.generate_private_key(curve())
    given = {"allowed_hosts": "*", "signing_key": private, "key_id": "k"}
    strict = rfc9421_provider(**given, covers=("@method", "@query-param;name=Id"), event_id=None)
    lax = rfc9421_provider(**given, covers=("@method",), event_id=None)
    request = strict.sign("POST", "https://a.example/?Id=7", {}, b"", now=THEN)

    assert strict.verify(*request, now=THEN).code == "ok"
    bent = request._replace(url="https://a.example/?Id=8")
    assert strict.verify(*bent, now=THEN).code == "signature_mismatch"
    less = lax.sign("POST", "https://a.example/?Id=7", {}, b"", now=THEN)
    assert strict.verify(*less, now=THEN).code == "components_incomplete"


def test_rsa_of_the_older_padding_is_for_keys_that_say_so() -> None:
    """A key set's RS256 key is one; the same key without that word is for RSA-PSS."""
    private = rsa_key()
    numbers = private.public_key().public_numbers()
    jwk = {"kty": "RSA", "kid": "k"}
    for name, number in (("n", numbers.n), ("e", numbers.e)):
        raw = number.to_bytes((number.bit_length() + 7) // 8, "big")
        jwk[name] = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
    older, usual = load_key({**jwk, "alg": "RS256"}), load_key(jwk)
    signature = sign_bytes(SignatureKey("rsa-v1_5-sha256", private, {}), b"message")

    assert (older.algorithm, usual.algorithm) == ("rsa-v1_5-sha256", "rsa-pss-sha512")
    assert signature_is_right(older, b"message", signature)
    assert not signature_is_right(older, b"another", signature)
    assert not signature_is_right(usual, b"message", signature)


def test_a_field_that_comes_twice_is_joined() -> None:
    """Values of one name are stripped and joined with a comma and a space."""
    headers = Headers([("Cache-Control", " max-age=60 "), ("cache-control", "\tmust-revalidate")])
    delivery = Delivery("GET", URL, headers, b"")
    found = component_value(delivery, Component("cache-control"))
    assert found == "max-age=60, must-revalidate"


@pytest.mark.parametrize(
    "url, part",
    [
        (URL, Component("@status")),
        (URL, Component("@query-param", (("name", "Cat"),))),
        (URL + "&x=%FF", Component("@query-param", (("name", "Pet"),))),
        (URL, Component("date", (("sf", True),))),
        (URL, Component("x-absent")),
        (URL, Component("x-broken")),
        (URL, Component("x-foreign")),
        ("/foo", Component("@path")),
        ("https://a b/", Component("@authority")),
        ("https://x/" + "a" * 9000, Component("@path")),
        ("https://x/\ny", Component("@path")),
    ],
)
def test_what_has_no_value_is_refused(url: str, part: Component) -> None:
    """Parts that are missing, not supported or could forge a line of the base."""
    headers = Headers({"x-broken": 'a\n"@method": GET', "x-foreign": "é", "date": "x"})
    with pytest.raises(HeaderError):
        component_value(Delivery("POST", url, headers, b""), part)


# --- the grammar -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "sig=()",
        'sig=("a")',
        'sig=("@method" "a-b");created=1;x="y"',
        'sig=("a";sf;key="k");n=-5;t=token/x;b=:AA==:;f;g=?0;d=1.5',
        r'sig=();x="a\"b\\c"',
        'a=(), *b.c-d_1=("x")',
    ],
)
def test_what_is_canonical_is_written_back_the_same(text: str) -> None:
    """Parsing and writing gives the same text."""
    parsed = parse_signature_input(text)
    assert ", ".join(f"{label}={one}" for label, one in parsed.items()) == text


@pytest.mark.parametrize(
    "text, canonical",
    [
        ('sig=( "a"   "b" ); created=01', '("a" "b");created=1'),
        ("sig=();x=?1", "();x"),
        (" sig=() ", "()"),
    ],
)
def test_other_spellings_get_the_canonical_form(text: str, canonical: str) -> None:
    """What is signed is the canonical form, whatever spaces were sent."""
    assert str(parse_signature_input(text)["sig"]) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "sig",
        "sig=",
        "sig=(",
        "sig=)",
        'sig=("a)',
        'sig=("a""b")',
        'sig=("a"\t"b")',
        "sig=(a)",
        'sig=("a" "a")',
        'sig=("A")',
        "Sig=()",
        "1sig=()",
        "sig=(),",
        ",sig=()",
        "sig=() sig2=()",
        "sig=(), sig=()",
        "sig=();created=1;created=2",
        "sig=();Created=1",
        "sig=();created=",
        "sig=();created=1234567890123456",
        "sig=();created=1.",
        'sig=();x="é"',
        'sig=();x="\x7f"',
        'sig=();x="a',
        r'sig=();x="a\b"',
        "sig=();x=:A",
        "sig=();x=:é:",
        "sig=();x=?2",
        "sig=:AAAA:",
        "sig=()\n",
        "sig=()\0",
        'sig=("a" "b"',
        "s" * 65 + "=()",
        ", ".join(f"s{n}=()" for n in range(9)),
        "sig=(" + " ".join(f'"c{n}"' for n in range(33)) + ")",
        "sig=()" + "".join(f";p{n}" for n in range(17)),
        f'sig=("{"a" * 8192}")',
    ],
)
def test_what_is_not_the_grammar_is_refused(text: str) -> None:
    """Names twice, other characters, and more of anything than the bounds allow."""
    with pytest.raises(HeaderError):
        parse_signature_input(text)


def test_the_bounds_are_reached() -> None:
    """Eight labels, 32 components and 16 parameters are still taken."""
    labels = ", ".join(f"s{n}=()" for n in range(7))
    parts = " ".join(f'"c{n}"' for n in range(32))
    params = "".join(f";p{n}" for n in range(16))
    parsed = parse_signature_input(f"{labels}, big=({parts}){params}")
    assert len(parsed) == 8
    assert (len(parsed["big"].components), len(parsed["big"].params)) == (32, 16)


def test_types_of_parameters_are_kept_apart() -> None:
    """A token is no string, and true is no number."""
    params = parse_signature_input('s=();a="x";b=x;c=1;d;e=:AA==:')["s"].params
    assert params == {"a": "x", "b": "x", "c": 1, "d": True, "e": ":AA==:"}
    assert [type(value) for value in params.values()] == [str, Raw, int, bool, Raw]


@pytest.mark.parametrize("text", ["a=1", 'a="x"', "a", "a=token", "a=:b:c", "a=:AA==:;", "a=:"])
def test_only_bytes_are_signatures(text: str) -> None:
    """A Signature header holds byte sequences and nothing else."""
    with pytest.raises(HeaderError):
        parse_bytes(text)
    assert parse_bytes("a=:AA==:;p=1, b=::") == {"a": "AA==", "b": ""}


# --- digests -----------------------------------------------------------------------------------


def test_digests_of_the_rfc() -> None:
    """The digest of the example is right for its body, and for no other."""
    header = EXAMPLE.headers["Content-Digest"]
    assert digest_is_right(header, EXAMPLE.body, algorithms=("sha-512",))
    assert not digest_is_right(header, EXAMPLE.body + b" ", algorithms=("sha-512",))
    assert not digest_is_right(header, EXAMPLE.body)
    assert digest_is_right(content_digest(b""), b"")


def test_every_digest_must_be_right() -> None:
    """With two digests, one that is wrong is enough to refuse."""
    both = f"{content_digest(EXAMPLE.body)}, {EXAMPLE.headers['Content-Digest']}"
    assert digest_is_right(both, EXAMPLE.body, algorithms=("sha-256", "sha-512"))
    one = f"{content_digest(b'')}, {EXAMPLE.headers['Content-Digest']}"
    assert not digest_is_right(one, EXAMPLE.body, algorithms=("sha-256", "sha-512"))


# --- the provider ------------------------------------------------------------------------------

PRIVATE_KEYS = {
    "ed25519": ed25519.Ed25519PrivateKey.generate(),
    "ecdsa-p256-sha256": ec.generate_private_key(ec.SECP256R1()),
    "rsa-pss-sha512": rsa_key(),
    "hmac-sha256": SECRET,
}


def made(**options: Any) -> Any:
    return rfc9421_provider(allowed_hosts="*", **{"signing_key": SECRET, "key_id": "k1", **options})


def with_header(request: SignedRequest, name: str, value: str | None) -> SignedRequest:
    fields = {key: text for key, text in request.headers.items() if key != name}
    return request._replace(headers=fields if value is None else {**fields, name: value})


@pytest.mark.parametrize("algorithm", PRIVATE_KEYS)
def test_every_algorithm_goes_round(algorithm: str) -> None:
    """What is signed with the private key verifies with the public one."""
    private: Any = PRIVATE_KEYS[algorithm]
    public = private if algorithm == "hmac-sha256" else private.public_key()
    provider = made(signing_key=private, keys={"k1": public})
    request = provider.sign("POST", URL, {}, b"body", now=NOW)
    assert f'alg="{algorithm}"' in request.headers["Signature-Input"]
    verdict = provider.verify(*request, now=NOW)
    assert verdict.ok
    assert verdict.sender.key_id == "k1"
    assert provider.verify(*request._replace(body=b"x"), now=NOW).code == "digest_mismatch"
    assert provider.verify(*request._replace(url=URL + "x"), now=NOW).code == "signature_mismatch"
    others = [name for name in PRIVATE_KEYS if name != algorithm]
    strict = made(signing_key=private, keys={"k1": public}, algorithms=others)
    assert strict.verify(*request, now=NOW).code == "algorithm_not_allowed"


@pytest.mark.parametrize(
    "name, change, expected",
    [
        ("Signature", None, "header_malformed"),
        ("Signature-Input", None, "header_malformed"),
        ("Signature", "sig1=:AAAA:", "signature_mismatch"),
        ("Signature", "sig1=:A_-A:", "header_malformed"),
        ("Signature", "sig2=:AAAA:", "header_malformed"),
        ("Signature-Input", "nonsense", "header_malformed"),
        ("Content-Digest", None, "header_malformed"),
    ],
)
def test_a_header_that_is_wrong_gets_its_code(name: str, change: Any, expected: str) -> None:
    """Every fault of the headers has a code."""
    request = made().sign("POST", URL, {}, b"body", now=NOW)
    assert made().verify(*with_header(request, name, change), now=NOW).code == expected


@pytest.mark.parametrize(
    "old, new, expected",
    [
        (";created=1790000000", "", "timestamp_missing"),
        (";created=1790000000", ";created=soon", "timestamp_malformed"),
        (";created=1790000000", ";created=1790000000;expires=x", "timestamp_malformed"),
        (";created=1790000000", ";created=1790000061", "timestamp_in_future"),
        (";created=1790000000", ";created=1789999639", "timestamp_too_old"),
        (";created=1790000000", ";created=1790000000;expires=1789999939", "timestamp_too_old"),
        (';keyid="k1"', "", "key_unknown"),
        (';keyid="k1"', ';keyid="k2"', "key_unknown"),
        (';keyid="k1"', ";keyid=k1", "header_malformed"),
        (';keyid="k1"', ';keyid="k1";nonce=5', "header_malformed"),
        (';alg="hmac-sha256"', ';alg="ed25519"', "algorithm_not_allowed"),
        (';alg="hmac-sha256"', "", "signature_mismatch"),
        ('"@method" ', "", "components_incomplete"),
        ('"@method"', '"@method" "x-absent"', "header_malformed"),
        ("sig1=", "sig1=(), sig2=", "header_malformed"),
    ],
)
def test_a_parameter_that_is_wrong_gets_its_code(old: str, new: str, expected: str) -> None:
    """Every fault of the parameters has a code."""
    request = made().sign("POST", URL, {}, b"body", now=NOW)
    assert old in request.headers["Signature-Input"]
    changed = request.headers["Signature-Input"].replace(old, new)
    verdict = made().verify(*with_header(request, "Signature-Input", changed), now=NOW)
    assert verdict.code == expected
    assert verdict.message


def test_what_is_not_signed_is_missing_a_header() -> None:
    """A delivery without a signature is told apart from a malformed one."""
    assert made().verify("POST", URL, {}, b"", now=NOW).code == "header_missing"


def test_a_tag_tells_purposes_apart() -> None:
    """A signature for one purpose does not count for another."""
    request = made(tag="one").sign("POST", URL, {}, b"", now=NOW)
    assert made(tag="one").verify(*request, now=NOW).ok
    assert made(tag="two").verify(*request, now=NOW).code == "tag_mismatch"
    assert made().verify(*request, now=NOW).ok


def nonced(value: str = "n1") -> SignedRequest:
    """A request with a nonce, which ``sign`` leaves out."""
    provider = made()
    request = provider.sign("POST", URL, {}, b"", now=NOW)
    covered = parse_signature_input(request.headers["Signature-Input"])["sig1"]
    covered.params["nonce"] = value
    from oncekey.signatures.rfc9421 import sign_request

    return sign_request(provider, request, "sig1", covered, component_value, "base64")


def test_a_nonce_is_used_once() -> None:
    """With nonces kept the second copy is a replay; without, the verdict carries the nonce."""
    provider = made(nonces=Nonces(MemoryStore(), per_key=2))
    found = [provider.verify(*nonced(n), now=NOW) for n in ("a", "a", "b", "c")]
    assert [one.code for one in found] == ["ok", "replayed", "ok", "rate_abuse"]
    assert found[0].nonce is None
    nonce = made().verify(*nonced("a"), now=NOW).nonce
    assert (nonce.key_id, nonce.value, nonce.lasts_ms) == ("k1", "a", 361_000)


async def test_an_async_store_is_awaited() -> None:
    """On an async store only averify works."""
    provider = made(nonces=Nonces(MemoryBackend()))
    with pytest.raises(BackendMismatchError, match="averify"):
        provider.verify(*nonced(), now=NOW)
    assert (await provider.averify(*nonced(), now=NOW)).ok
    assert (await provider.averify(*nonced(), now=NOW)).code == "replayed"


def test_ids_are_signed_if_they_are_covered() -> None:
    """An id in a header that no signature must cover can be changed by whoever captured it."""
    loose = made(event_id="header:X-Event-Id")
    strict = made(event_id="header:X-Event-Id", covers=("@method", "x-event-id"))
    inside = made(event_id="id")
    assert (loose.id_is_signed, strict.id_is_signed, inside.id_is_signed) == (False, True, True)
    assert not made(event_id="id", covers=("@method",)).id_is_signed
    assert not made(event_id="id", covers=("@method",)).body_is_signed
    request = strict.sign("POST", URL, {}, b"", now=NOW, event_id="evt_1")
    verdict = strict.verify(*request, now=NOW)
    assert (verdict.event_id, verdict.id_is_signed) == ("evt_1", True)
    changed = with_header(request, "X-Event-Id", "evt_2")
    assert strict.verify(*changed, now=NOW).code == "signature_mismatch"
    body = inside.sign("POST", URL, {}, b'{"id":"evt_3"}', now=NOW)
    assert inside.verify(*body, now=NOW).event_id == "evt_3"
    empty = inside.sign("POST", URL, {}, b"{}", now=NOW)
    assert inside.verify(*empty, now=NOW).code == "id_missing"


@pytest.mark.parametrize(
    "options",
    [
        {"signing_key": None},
        {"key_id": ""},
        {"signing_key": b"short"},
        {"keys": {}},
        {"algorithms": ()},
        {"algorithms": ("none",)},
        {"max_age": 0},
        {"skew": -1},
        {"max_age": float("nan")},
    ],
)
def test_an_option_that_can_not_work_is_refused(options: dict[str, Any]) -> None:
    """Wrong options raise when the provider is made."""
    with pytest.raises(PolicyError):
        made(**options)


def test_checks_that_must_be_awaited_say_so() -> None:
    """The sync driver closes a coroutine that it can't await, and the checks may clean up."""
    from oncekey._core.drive import Op

    class Later:
        async def ask(self) -> None:
            raise AssertionError("never run")

    cleaned: list[bool] = []

    def checks() -> Any:
        try:
            yield Op("ask", (), Later())
        finally:
            cleaned.append(True)

    with pytest.raises(BackendMismatchError):
        run_checks(checks())
    assert cleaned == [True]


def test_white_space_around_a_signed_id_is_none_of_it() -> None:
    """It is not signed, so that it must not make another id."""
    covers = ("@method", "@target-uri", "content-digest", "x-event-id")
    maker = made(event_id="header:X-Event-Id", covers=covers)
    request = maker.sign("POST", URL, {}, b"{}", now=NOW, event_id="evt_1")
    assert maker.id_is_signed
    for value in ("evt_1", " evt_1", "evt_1 ", "\tevt_1 \t"):
        verdict = maker.verify(
            "POST", URL, {**request.headers, "X-Event-Id": value}, b"{}", now=NOW
        )
        assert (verdict.code, verdict.event_id) == ("ok", "evt_1")
