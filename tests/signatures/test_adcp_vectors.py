"""AdCP's own conformance vectors, as the ``adcp`` package carries them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from oncekey import MemoryBackend, MemoryStore
from oncekey.adcp import checklist
from oncekey.adcp.signatures import adcp_provider, rejection_headers
from oncekey.canonical import canonicalize, sha256_hex
from oncekey.receiver import WebhookReceiver
from oncekey.signatures.nonces import Nonces
from oncekey.signatures.target_uri import canonical_target, with_ascii_host
from oncekey.signatures.verdict import Nonce, Verdict

Vector = dict[str, Any]


def _vectors() -> Path | None:
    spec = find_spec("adcp")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "_compliance" / "3.2.4" / "test-vectors"


FOUND = _vectors()
if FOUND is None and os.environ.get("CI"):
    raise RuntimeError("the adcp package carries the vectors of this test: install adcp==9.2.0")
if FOUND is None:
    pytest.skip("adcp is not installed: pip install adcp==9.2.0", allow_module_level=True)
VECTORS: Path = FOUND


def load(pattern: str) -> list[Any]:
    found = [json.loads(path.read_text("utf-8")) for path in sorted(VECTORS.glob(pattern))]
    names = [path.stem for path in sorted(VECTORS.glob(pattern))]
    return [pytest.param(vector, id=name) for vector, name in zip(found, names, strict=True)]


POSITIVE = load("webhook-signing/positive/*.json")
NEGATIVE = load("webhook-signing/negative/*.json")
PLANS = load("plan-hash/*.json")
SIGNING = json.loads((VECTORS / "webhook-signing/keys.json").read_text("utf-8"))["keys"][0]
CANONICAL = json.loads((VECTORS / "request-signing/canonicalization.json").read_text("utf-8"))


def keys_of(vector: Vector) -> Vector:
    published = json.loads((VECTORS / "webhook-signing/keys.json").read_text("utf-8"))["keys"]
    changed = vector.get("jwks_override", {})
    return {
        "keys": [
            changed.get(key["kid"], key) for key in published if key["kid"] in vector["jwks_ref"]
        ]
    }


def prepared(vector: Vector, store: Any) -> tuple[Any, list[Nonce], Nonces]:
    """A provider in the state that the vector asks for, and the nonces that were used before."""
    state = vector.get("test_harness_state", {})
    now = vector["reference_now"]
    stale = state.get("revocation_list_stale_seconds", 0)
    revocations = {"revoked_kids": state.get("revoked_kids", []), "next_update": now + 60 - stale}
    full = state.get("per_keyid_cap_filled_for")
    nonces = Nonces(store, per_key=3 if full else 100)
    used = [Nonce(e["keyid"], e["nonce"], 360_000) for e in state.get("replay_cache_entries", [])]
    if full:
        used += [Nonce(full, f"nonce-{n}", 360_000) for n in range(3)]
    provider = adcp_provider(
        allowed_hosts="*", keys=keys_of(vector), nonces=nonces, revocations=revocations
    )
    return provider, used, nonces


def arguments(vector: Vector) -> tuple[str, str, dict[str, str], bytes]:
    request = vector["request"]
    return request["method"], request["url"], request["headers"], request["body"].encode()


def test_no_vector_was_lost() -> None:
    """The package has the number of vectors that it had when this was written."""
    assert (len(POSITIVE), len(NEGATIVE), len(PLANS)) == (8, 21, 11)


def accepts(vector: Vector, verdict: Verdict) -> None:
    assert verdict.ok, verdict
    assert verdict.code == "ok"
    assert verdict.sender is not None
    assert verdict.sender.key_id in vector["jwks_ref"]
    assert verdict.event_id == json.loads(vector["request"]["body"]).get("idempotency_key")
    assert verdict.nonce is None


@pytest.mark.parametrize("vector", POSITIVE)
def test_a_right_delivery_is_accepted(vector: Vector) -> None:
    """Every positive vector is accepted, with the key that signed and the event's id."""
    provider, _, _ = prepared(vector, MemoryStore())
    accepts(vector, provider.verify(*arguments(vector), now=vector["reference_now"]))


@pytest.mark.parametrize("vector", POSITIVE)
async def test_a_right_delivery_is_accepted_async(vector: Vector) -> None:
    """Every positive vector is accepted by the asynchronous form as well."""
    provider, _, _ = prepared(vector, MemoryBackend())
    accepts(vector, await provider.averify(*arguments(vector), now=vector["reference_now"]))


@pytest.mark.parametrize("vector", NEGATIVE)
def test_a_wrong_delivery_gets_its_exact_code(vector: Vector) -> None:
    """Every negative vector is refused with the code that it names, and no other."""
    provider, used, nonces = prepared(vector, MemoryStore())
    assert [nonces.use(nonce) for nonce in used] == ["fresh"] * len(used)
    verdict = provider.verify(*arguments(vector), now=vector["reference_now"])
    code = vector["expected_outcome"]["error_code"]
    assert (verdict.ok, verdict.code, verdict.sender) == (False, code, None)
    assert verdict.message
    assert rejection_headers(verdict) == {"WWW-Authenticate": f'Signature error="{code}"'}


@pytest.mark.parametrize("vector", NEGATIVE)
async def test_a_wrong_delivery_gets_its_exact_code_async(vector: Vector) -> None:
    """Every negative vector gets the same code from the asynchronous form."""
    provider, used, nonces = prepared(vector, MemoryBackend())
    assert [await nonces.ause(nonce) for nonce in used] == ["fresh"] * len(used)
    verdict = await provider.averify(*arguments(vector), now=vector["reference_now"])
    assert (verdict.ok, verdict.code) == (False, vector["expected_outcome"]["error_code"])


@pytest.mark.parametrize("vector", NEGATIVE)
def test_a_receiver_answers_401_with_the_exact_code(vector: Vector) -> None:
    """On the wire every negative vector is a 401 whose header carries the code, and no more."""
    provider, used, nonces = prepared(vector, MemoryStore())
    assert [nonces.use(nonce) for nonce in used] == ["fresh"] * len(used)
    receiver = WebhookReceiver(provider, MemoryStore())
    receiver.on()(lambda event: pytest.fail("handled"))
    answer = receiver.receive(*arguments(vector), now=vector["reference_now"])
    code = vector["expected_outcome"]["error_code"]
    assert (answer.status, answer.code, answer.outcome) == (401, code, "rejected")
    assert answer.headers["WWW-Authenticate"] == f'Signature error="{code}"'


@pytest.mark.parametrize("vector", POSITIVE)
def test_the_second_copy_of_a_delivery_is_a_replay(vector: Vector) -> None:
    """Sent again byte for byte, a delivery that was accepted is refused as replayed."""
    provider, _, _ = prepared(vector, MemoryStore())
    now = vector["reference_now"]
    assert provider.verify(*arguments(vector), now=now).ok
    assert provider.verify(*arguments(vector), now=now).code == "webhook_signature_replayed"


@pytest.mark.parametrize("vector", POSITIVE)
def test_the_signed_bytes_are_those_of_the_vector(
    vector: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signature base is byte for byte the one that the vector expects."""
    bases: list[bytes] = []
    monkeypatch.setattr(
        checklist, "signature_is_right", lambda _key, base, _sig: bases.append(base)
    )
    provider, _, _ = prepared(vector, MemoryStore())
    provider.verify(*arguments(vector), now=vector["reference_now"])
    assert bases == [vector["expected_signature_base"].encode()]


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in CANONICAL["cases"]])
def test_a_url_has_one_canonical_form(case: Vector) -> None:
    """Every URL of the canonicalisation vectors gets its form, or is refused."""
    url = case["input_url"]
    if case.get("reject") or not url.isascii():  # receivers must refuse a host that is not ASCII
        with pytest.raises(ValueError):
            canonical_target(url)
        if case.get("reject"):
            return
    target = canonical_target(with_ascii_host(url))  # and senders must write it in ASCII
    assert (target.uri, target.authority) == (
        case["expected_target_uri"],
        case["expected_authority"],
    )


@pytest.mark.parametrize("vector", PLANS)
def test_a_plan_has_its_hash(vector: Vector) -> None:
    """Every plan has the canonical JSON and the hash of its vector."""
    expected = vector["expected"]
    plan = expected["preimage"]
    assert canonicalize(plan).decode() == expected["jcs_bytes"]
    assert sha256_hex(plan) == expected["sha256_hex"]
    digest = hashlib.sha256(canonicalize(plan)).digest()
    assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == expected["plan_hash"]


def test_a_challenge_is_answered_as_its_schema_asks() -> None:
    """The sender's test of the endpoint has no event id, and gets its value back as JSON."""
    schemas = VECTORS.parents[2] / "_schemas" / "3.2" / "core"
    asked = json.loads((schemas / "webhook-challenge.json").read_text("utf-8"))["properties"]
    wanted = json.loads((schemas / "webhook-challenge-response.json").read_text("utf-8"))
    value = "Zm9yIHRoZSByZWNlaXZlciB0byBzZW5kIGJhY2s.:-_"
    assert re.fullmatch(asked["challenge"]["pattern"], value)
    body = json.dumps({"type": asked["type"]["const"], "challenge": value}).encode()
    provider = adcp_provider(
        allowed_hosts="*",
        signing_key={**SIGNING, "d": SIGNING["_private_d_for_test_only"]},
        key_id="k",
    )
    receiver = WebhookReceiver(provider, MemoryStore())
    receiver.on()(lambda event: pytest.fail("handled"))
    request = provider.sign("POST", "https://buyer.example.com/hooks", {}, body)
    answer = receiver.receive(*request)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    told = json.loads(answer.body)
    assert told == {"challenge": value}
    assert {"required": ["challenge"]} in wanted["anyOf"]
    assert re.fullmatch(wanted["properties"]["challenge"]["pattern"], told["challenge"])
