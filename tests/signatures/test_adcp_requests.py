"""AdCP requests signed by RFC 9421: the protocol's own vectors, and its package as a peer."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest

from oncekey import MemoryStore
from oncekey.adcp import checklist
from oncekey.adcp.operations import operation_of
from oncekey.adcp.requests import REQUEST_CODES, RequestSigner, RequestSigning
from oncekey.errors import PolicyError
from oncekey.signatures.asking import run_checks
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.verdict import Nonce

Vector = dict[str, Any]
SPEC = find_spec("adcp")
if SPEC is None and os.environ.get("CI"):
    raise RuntimeError("the adcp package carries the vectors of this test: install adcp==9.2.0")
if SPEC is None or SPEC.origin is None:
    pytest.skip("adcp is not installed: pip install adcp==9.2.0", allow_module_level=True)
ROOT = Path(SPEC.origin).parent / "_compliance" / "3.2.4" / "test-vectors" / "request-signing"
PUBLISHED = json.loads((ROOT / "keys.json").read_text("utf-8"))["keys"]
LISTS = (
    *("required_for", "warn_for", "supported_for", "protocol_methods_required_for"),
    *("protocol_methods_warn_for", "protocol_methods_supported_for"),
)


def load(*patterns: str) -> list[Any]:
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    names = [path.relative_to(ROOT).with_suffix("").as_posix() for path in paths]
    found = [json.loads(path.read_text("utf-8")) for path in paths]
    return [pytest.param(one, id=name) for one, name in zip(found, names, strict=True)]


POSITIVE = load("positive/*.json", "profile-3.2/positive/*.json", "a2a/positive/*.json")
NEGATIVE = load("negative/*.json", "profile-3.2/negative/*.json", "a2a/negative/*.json")

WITH_BASE = [one for one in POSITIVE if "expected_signature_base" in one.values[0]]


def keys_of(vector: Vector) -> Vector:
    override = vector.get("jwks_override", {}).get("keys")
    if override is None:
        return {"keys": [one for one in PUBLISHED if one["kid"] in vector["jwks_ref"]]}
    names = {one["kid"] for one in override}
    return {"keys": [*override, *(one for one in PUBLISHED if one["kid"] not in names)]}


def signing_of(vector: Vector, nonces: Nonces | None = None) -> RequestSigning:
    """A verifier as the vector describes it, with the state that it asks for."""
    capability, state = vector["verifier_capability"], vector.get("test_harness_state", {})
    if nonces is None:
        cap = 1 if "replay_cache_per_keyid_cap_hit" in state else 100
        nonces = Nonces(MemoryStore(), per_key=cap)
        if cap == 1:
            run_checks(
                nonces.using(Nonce(state["replay_cache_per_keyid_cap_hit"]["keyid"], "1", 60_000))
            )
        for one in state.get("replay_cache_entries", ()):
            run_checks(nonces.using(Nonce(one["keyid"], one["nonce"], one["ttl_seconds"] * 1000)))
    return RequestSigning(
        keys=keys_of(vector),
        nonces=nonces,
        revocations=state.get("revocation_list"),
        allowed_hosts="*",
        version=vector["signing_profile_version"],
        covers_content_digest=capability["covers_content_digest"],
        **{name: capability[name] for name in LISTS if name in capability},
    )


def request_of(vector: Vector) -> tuple[str, str, dict[str, str], bytes]:
    request = vector["request"]
    return request["method"], request["url"], request["headers"], request["body"].encode()


@pytest.mark.parametrize("vector", POSITIVE)
def test_a_positive_vector_is_accepted(vector: Vector) -> None:
    """Signed: its signer is known, once; unsigned where that is allowed: nobody's."""
    signing = signing_of(vector)
    verdict = signing.check(*request_of(vector), now=vector["reference_now"])
    assert verdict.ok, verdict
    outcome = vector["expected_outcome"]
    if "resolved_operation" in outcome:
        assert verdict.operation.name == outcome["resolved_operation"]
    if outcome.get("status") == "unsigned":
        assert (verdict.code, verdict.signer, verdict.payload) == ("unsigned", None, None)
        return
    assert verdict.signer is not None
    assert verdict.signer.key_id in vector["jwks_ref"]
    again = signing.check(*request_of(vector), now=vector["reference_now"])
    assert again.code == "request_signature_replayed"


@pytest.mark.parametrize("vector", NEGATIVE)
def test_a_negative_vector_is_refused_with_its_code(vector: Vector) -> None:
    """Byte for byte, in the body of the challenge too."""
    verdict = signing_of(vector).check(*request_of(vector), now=vector["reference_now"])
    code = vector["expected_outcome"]["error_code"]
    assert (verdict.ok, verdict.code, verdict.signer) == (False, code, None)
    assert verdict.headers() == {"WWW-Authenticate": f'Signature error="{code}"'}
    assert verdict.status == 401
    assert verdict.message == REQUEST_CODES[code]


@pytest.mark.parametrize("vector", WITH_BASE)
def test_the_signed_bytes_are_those_of_the_vector(
    vector: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the signature is over, whatever the key."""
    bases: list[bytes] = []
    monkeypatch.setattr(
        checklist, "signature_is_right", lambda _key, base, _sig: bases.append(base)
    )
    signing_of(vector).check(*request_of(vector), now=vector["reference_now"])
    assert bases == [vector["expected_signature_base"].encode()]


# --- policy ----------------------------------------------------------------------------------

KEY = next(one for one in PUBLISHED if one["kid"] == "test-ed25519-2026")
PRIVATE = {**KEY, "d": KEY["_private_d_for_test_only"]}
NOW = 1_776_520_800
CASES = json.loads((ROOT / "body-integrity-policy.json").read_text("utf-8"))["cases"]
METHODS = json.loads((ROOT / "protocol-method-names.json").read_text("utf-8"))


def rpc(name: str, method: str = "tools/call") -> bytes:
    params = {"name": name, "arguments": {}} if method == "tools/call" else {"taskId": "t"}
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


def signing(**options: Any) -> RequestSigning:
    given = {"keys": {"keys": [KEY]}, "nonces": Nonces(MemoryStore()), "allowed_hosts": "*"}
    return RequestSigning(**{**given, **options})


@pytest.mark.parametrize("case", [pytest.param(one, id=one["id"]) for one in CASES])
def test_the_policy_for_bodies_is_that_of_the_vectors(case: Vector) -> None:
    """A real request for each: signed without its digest, changed on the way, or not signed."""
    version: Literal["3.1", "3.2"] = case["endpoint_profile"]
    covers = case.get("legacy_digest_policy", "required")
    protocol = case["mode"].startswith("protocol_methods")
    verifier = signing(
        version=version,
        covers_content_digest=covers,
        **{case["mode"]: ["tasks/cancel" if protocol else "create_media_buy"]},
    )
    body = rpc("create_media_buy", "tasks/cancel" if protocol else "tools/call")
    body = body if case["has_body"] else b""
    url = "https://seller.example.com/mcp"
    unbound = not case.get("covers_content_digest", True) and case["has_body"]
    signer = RequestSigner(PRIVATE, KEY["kid"], version=version, covers_content_digest=covers)
    if unbound:  # no signer of ours leaves the digest out, unless it must
        signer._provider._policy = "forbidden"
    headers = {"content-type": "application/json"}
    request = signer.sign("POST", url, headers, body, now=NOW)
    fields, sent = dict(request.headers), body
    if not case["signature_present"]:
        fields = headers
    elif case.get("signature_header_state") == "malformed_pair":
        del fields["Signature-Input"]
    else:
        if not case.get("digest_matches_body", True):
            sent = body.replace(b'"t"', b'"u"').replace(b"{}", b'{"a": 1}')
        if not case.get("cryptographic_signature_valid", True) and not unbound:
            fields["Signature"] = f"sig1=:{'A' * 86}==:"
    fallback = case["fallback_auth_valid"]
    verdict = verifier.check("POST", url, fields, sent, authenticated=fallback, now=NOW)
    wanted = case["expected"]
    assert verdict.ok is (wanted["action"] in ("accept", "accept_with_warning")), verdict
    assert (verdict.signer is not None) is wanted["verified_signer_identity"]
    if "error_code" in wanted:
        assert verdict.code == wanted["error_code"]


def test_operations_and_methods_are_two_lists() -> None:
    """One on the other's list is a mistake of the configuration, told with the right one."""
    for family in METHODS["valid_declarations"]:
        signing(protocol_methods_required_for=family["methods"])
    for wrong in METHODS["invalid_declarations"]:
        with pytest.raises(PolicyError, match="no method of JSON-RPC"):
            signing(protocol_methods_supported_for=[wrong])
    for wrong in ("tasks/cancel", "SendMessage", "Create_Media_Buy", "tools/call", ""):
        with pytest.raises(PolicyError, match="no operation of AdCP"):
            signing(required_for=[wrong])
    for case in METHODS["exact_match_cases"]:
        verifier = signing(protocol_methods_required_for=case["declared_methods"])
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": case["wire_method"]}).encode()
        if case["wire_method"] not in ("SendMessage", "sendMessage"):
            verdict = verifier.check("POST", "https://seller.example/a2a", {}, body)
            assert verdict.ok is not case["matches"], case


def test_the_lists_do_not_match_each_other() -> None:
    """A tool named like a method is not that method."""
    verifier = signing(protocol_methods_required_for=["tasks/cancel"], required_for=["sync_x"])
    url = "https://seller.example/mcp"
    assert verifier.check("POST", url, {}, rpc("tasks/cancel")).ok
    assert verifier.check("POST", url, {}, rpc("x", "tasks/get")).ok
    assert not verifier.check("POST", url, {}, rpc("sync_x")).ok
    assert verifier.check("POST", url, {}, b"", operation="sync_x").code.endswith("required")
    assert verifier.capability() == {
        "supported": True,
        "covers_content_digest": "required",
        "required_for": ["sync_x"],
        "warn_for": [],
        "supported_for": [],
        "protocol_methods_required_for": ["tasks/cancel"],
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {"push_notification_config": {"authentication": {}}},
        {"accounts": [{}, {"notification_configs": [{"authentication": {"schemes": []}}]}]},
    ],
)
def test_a_webhook_with_credentials_is_registered_by_a_signature_alone(
    arguments: Vector,
) -> None:
    """Whoever stole a token can't have webhooks signed with a secret of their own."""
    call = {"name": "update_media_buy", "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}).encode()
    verdict = signing().check("POST", "https://s.example/mcp", {}, body, authenticated=True)
    assert verdict.code == "request_signature_required"
    signed = RequestSigner(PRIVATE, KEY["kid"]).sign("POST", "https://s.example/mcp", {}, body)
    assert signing().check(*signed).ok


SECRET = {"push_notification_config": {"url": "https://e.example", "authentication": {"x": 1}}}
BUY = "https://s.example/adcp/create_media_buy"


def test_a_signature_that_fails_registers_no_credentials() -> None:
    """Not where a failure is only logged, either: a made-up signature would be enough else."""
    body = json.dumps(SECRET).encode()
    bad = RequestSigner(PRIVATE, KEY["kid"]).sign("POST", BUY, {}, b"{}")._replace(body=body)
    verdict = signing(warn_for=["create_media_buy"]).check(*bad, authenticated=True)
    assert (verdict.ok, verdict.code) == (False, "request_signature_digest_mismatch")
    harmless = RequestSigner(PRIVATE, KEY["kid"]).sign("POST", BUY, {}, b"{}")._replace(body=b"[1]")
    verdict = signing(warn_for=["create_media_buy"]).check(*harmless, authenticated=True)
    assert not verdict.ok  # a list is none of AdCP's bodies
    harmless = harmless._replace(body=b'{"a": 1}')
    assert signing(warn_for=["create_media_buy"]).check(*harmless, authenticated=True).ok


def test_a_signature_that_leaves_the_body_out_registers_no_credentials() -> None:
    """Whoever holds such a request can put any body under it."""
    older: dict[str, Any] = {"version": "3.1"}
    signer = RequestSigner(PRIVATE, KEY["kid"], **older, covers_content_digest="forbidden")
    verifier = signing(**older, covers_content_digest="either")
    signed = signer.sign("POST", BUY, {}, b"{}")._replace(body=json.dumps(SECRET).encode())
    assert verifier.check(*signed).code == "request_signature_components_incomplete"
    bound = RequestSigner(PRIVATE, KEY["kid"], **older)
    assert verifier.check(*bound.sign("POST", BUY, {}, json.dumps(SECRET).encode())).ok
    assert verifier.check(*signer.sign("POST", BUY, {}, b'{"a": 1}')).ok


@pytest.mark.parametrize(
    "body",
    [
        b'{"push_notification_config": 1, ' + json.dumps(SECRET).encode()[1:],
        json.dumps(SECRET).encode("utf-16"),
        json.dumps({**SECRET, "x": float("nan")}).encode(),
        json.dumps(SECRET).encode()[:-1] + b', "x": ' + b"[" * 60_000 + b"]" * 60_000 + b"}",
    ],
    ids=["a name twice", "UTF-16", "NaN", "deep"],
)
def test_a_body_that_hides_something_is_refused_unsigned(body: bytes) -> None:
    """What strict parsing can't read, a lenient parser behind us must not read either."""
    verdict = signing().check("POST", BUY, {}, body, authenticated=True)
    assert verdict.code == "request_body_malformed"


@pytest.mark.parametrize("names", [("Jsonrpc", "Method"), ("jsonrpc", "METHOD"), ("x", "Method")])
def test_json_rpc_in_another_letter_case_is_refused(names: tuple[str, str]) -> None:
    """A parser that ignores it would carry out what was not checked."""
    call = {"name": "create_media_buy", "arguments": {}}
    body = json.dumps({names[0]: "2.0", names[1]: "tools/call", "params": call}).encode()
    verdict = signing(required_for=["create_media_buy"]).check(
        "POST", "https://s.example/mcp", {}, body
    )
    assert verdict.code == "request_body_malformed"


def test_a_signed_body_with_a_name_twice_is_refused() -> None:
    """Whether or not it is JSON-RPC; the nonce of a right signature is used up by it."""
    signer, verifier = RequestSigner(PRIVATE, KEY["kid"]), signing()
    for url, body in (
        ("https://s.example/adcp/create_media_buy", b'{"a": 1, "a": 2}'),
        ("https://s.example/mcp", b'{"jsonrpc": "2.0", "method": "x/y", "method": "a/b"}'),
        ("https://s.example/mcp", b'[{"jsonrpc": "2.0", "method": "x/y"}]'),
        ("https://s.example/adcp/create_media_buy", b"no json"),
    ):
        signed = signer.sign("POST", url, {}, body)
        assert verifier.check(*signed).code == "request_body_malformed", body
    first = signer.sign("POST", "https://s.example/adcp/x", {}, b'{"a": 1, "a": 2}')
    codes = [verifier.check(*first).code for _ in range(2)]
    assert codes == ["request_body_malformed", "request_signature_replayed"]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"null", b"\xff", b"3", b"NaN", b"1e999", b'"method"', b"{"]
)
def test_any_body_has_an_operation_or_none(body: bytes) -> None:
    """No bytes are an error of ours."""
    signing(required_for=["create_media_buy"]).check("POST", "https://s.example/x", {}, body)
    if body != b"[]":
        assert operation_of("https://s.example/create_media_buy?x=1", body).name == (
            "create_media_buy"
        )


def test_a_version_and_what_it_covers_must_fit() -> None:
    """3.2 has one form; keys of other kinds sign nothing."""
    with pytest.raises(PolicyError, match=r"3\.2 binds every body"):
        signing(covers_content_digest="either")
    with pytest.raises(PolicyError, match="Ed25519 or P-256"):
        RequestSigner(b"sixteen bytes or more", "k")
    with pytest.raises(PolicyError, match="keys= or jwks="):
        RequestSigning(nonces=Nonces(MemoryStore()), allowed_hosts="*")


# --- the adcp package on the other side ------------------------------------------------------


@pytest.mark.parametrize("version", ["3.1", "3.2"])
@pytest.mark.parametrize("kid", ["test-ed25519-2026", "test-es256-2026"])
@pytest.mark.parametrize("body", [rpc("create_media_buy"), b""])
def test_its_signer_is_accepted_and_its_verifier_accepts_ours(
    version: Literal["3.1", "3.2"], kid: str, body: bytes
) -> None:
    """Both ways, each key, with a body and without."""
    from adcp import signing as peer

    published = next(one for one in PUBLISHED if one["kid"] == kid)
    private = {**published, "d": published["_private_d_for_test_only"]}
    url = "https://seller.example.com:443/mcp/./x?b=2&a=1"
    signer = RequestSigner(private, kid, version=version)
    method, sent, headers, raw = signer.sign("POST", url, {}, body, now=NOW)
    public = {name: value for name, value in published.items() if not name.startswith("_")}
    options = peer.VerifyOptions(
        now=float(NOW),
        # It asks for the digest of no body too; the protocol's vectors do not.
        capability=peer.VerifierCapability(covers_content_digest="required" if body else "either"),
        operation="create_media_buy",
        jwks_resolver=peer.StaticJwksResolver({"keys": [public]}),
        signing_profile_version=version,
    )
    found = peer.verify_request_signature(
        method=method, url=sent, headers=headers, body=raw, options=options
    )
    assert found.key_id == kid

    made = peer.sign_request(
        method="POST",
        url=url,
        headers={"Content-Type": "application/json"},
        body=body,
        private_key=peer.private_key_from_jwk(private, d_field="d"),
        key_id=kid,
        alg="ed25519" if "ed25519" in kid else "ecdsa-p256-sha256",
        created=NOW,
        cover_content_digest=bool(body),
        signing_profile_version=version,
    )
    verifier = signing(keys={"keys": [published]}, version=version)
    theirs = {"Content-Type": "application/json", **made.as_dict()}
    verdict = verifier.check("POST", url, theirs, body, now=NOW)
    assert verdict.ok, verdict
    assert verdict.body_is_signed is bool(body)


# --- a client and a server -------------------------------------------------------------------


async def test_a_client_s_requests_are_checked_before_the_app() -> None:
    """httpx signs, the middleware checks, and the app gets the same bytes and the verdict."""
    import httpx

    from oncekey.adcp.middleware import SignedRequests

    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        seen.append((scope["adcp.verdict"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    verifier = signing(agent="https://buyer.example", required_for=["create_media_buy"])
    known = lambda scope: (b"authorization", b"Bearer good") in scope["headers"]  # noqa: E731
    served = SignedRequests(app, verifier, authenticated=known, max_body_bytes=500)
    transport = httpx.ASGITransport(app=served)
    body = rpc("create_media_buy")
    async with httpx.AsyncClient(transport=transport, base_url="https://s.example") as client:
        signer = RequestSigner(PRIVATE, KEY["kid"])
        answer = await client.post("/mcp", content=body, auth=signer)
        assert (answer.status_code, answer.content) == (200, b"done")
        verdict, received = seen.pop()
        assert received == body
        assert verdict.signer.publisher == "https://buyer.example"
        assert verdict.operation.name == "create_media_buy"

        refused = await client.post("/mcp", content=body)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == (
            'Signature error="request_signature_required"'
        )
        assert refused.json()["error"] == "request_signature_required"
        again = {**answer.request.headers, "content-type": "application/json"}
        assert (await client.post("/mcp", content=body, headers=again)).status_code == 401
        changed = await client.post("/mcp", content=body + b" ", headers=again)
        assert "digest_mismatch" in changed.headers["www-authenticate"]
        token = {"authorization": "Bearer good"}
        assert (await client.post("/mcp", content=body, headers=token)).status_code == 200
        assert seen.pop()[0].signer is None
        assert (await client.post("/mcp", content=b" " * 501, auth=signer)).status_code == 413
    assert seen == []
    await served({"type": "lifespan"}, None, None)
