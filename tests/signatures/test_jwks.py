"""Key sets that are given or fetched, and lists of revoked keys."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from tests.signatures.rsa_for_tests import rsa_key

from oncekey.adcp.signatures import adcp_provider
from oncekey.errors import BackendMismatchError, PolicyError
from oncekey.signatures.algorithms import load_key, sign_bytes, signature_is_right
from oncekey.signatures.asking import arun_checks, run_checks
from oncekey.signatures.jwks import FetchedKeys, KeySet, Revocations, as_keys
from oncekey.testing import ManualClock

NOW = 1_790_000_000.0


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def jwk(key_id: str, **members: Any) -> dict[str, Any]:
    public = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    return {"kid": key_id, "kty": "OKP", "crv": "Ed25519", "x": b64(public), **members}


class Source:
    """A key set that can change, and that counts how often it was fetched."""

    def __init__(self, *key_ids: str) -> None:
        self.keys = [jwk(key_id) for key_id in key_ids]
        self.fetched = 0
        self.error: Exception | None = None
        self.document: Any = None

    def __call__(self) -> Any:
        self.fetched += 1
        if self.error is not None:
            raise self.error
        return {"keys": self.keys} if self.document is None else self.document


def has(keys: KeySet | FetchedKeys, key_id: str) -> bool:
    return run_checks(keys.find(key_id)).key is not None


# --- fetched keys ------------------------------------------------------------------------------


def test_keys_are_fetched_once_and_kept(clock: ManualClock) -> None:
    """The first look fetches, the next hundred don't."""
    source = Source("a")
    keys = FetchedKeys(source, clock=clock)
    assert source.fetched == 0
    assert all(has(keys, "a") for _ in range(100))
    assert source.fetched == 1


def test_an_unknown_key_is_fetched_for_once(clock: ManualClock) -> None:
    """A key that the sender has just begun to use is found by one refetch."""
    source = Source("a")
    keys = FetchedKeys(source, clock=clock)
    assert has(keys, "a")
    source.keys.append(jwk("b"))
    assert not has(keys, "b")
    clock.advance(30)
    assert has(keys, "b")
    assert source.fetched == 2


def test_made_up_key_ids_can_not_cause_many_fetches(clock: ManualClock) -> None:
    """However many unknown ids come, there is one fetch in a cool-down."""
    source = Source("a")
    keys = FetchedKeys(source, clock=clock)
    for _ in range(10):
        for n in range(50):
            assert not has(keys, f"made-up-{n}")
        clock.advance(29)
    assert source.fetched == 5  # at 0, 58, 116, 174 and 232 s
    assert has(keys, "a")


def test_a_failed_fetch_cools_down_too(clock: ManualClock, caplog: Any) -> None:
    """A sender that is down is not asked again and again, and its error's text is not logged."""
    source = Source("a")
    source.error = ValueError("https://user:secret@keys.example failed")
    keys = FetchedKeys(source, clock=clock)
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert not has(keys, "a")
        assert not has(keys, "a")
    assert source.fetched == 1
    assert "secret" not in caplog.text
    assert "ValueError" in caplog.text
    source.error = None
    clock.advance(30)
    assert has(keys, "a")


def test_old_keys_are_fetched_again(clock: ManualClock) -> None:
    """A key that the sender removed is gone after max_age."""
    source = Source("a", "b")
    keys = FetchedKeys(source, clock=clock, max_age=100)
    assert has(keys, "b")
    source.keys.pop()
    clock.advance(99)
    assert has(keys, "b")
    clock.advance(1)
    assert not has(keys, "b")
    assert has(keys, "a")
    assert source.fetched == 2


def test_old_keys_outlive_a_short_outage(clock: ManualClock) -> None:
    """While the set can't be fetched, the old one is used for max_age more, and then no longer."""
    source = Source("a")
    keys = FetchedKeys(source, clock=clock, max_age=100)
    assert has(keys, "a")
    source.error = OSError("down")
    clock.advance(199)
    assert has(keys, "a")
    clock.advance(1)
    assert not has(keys, "a")
    source.error = None
    clock.advance(30)
    assert has(keys, "a")


@pytest.mark.parametrize(
    "document",
    [
        b"{",
        b"[]",
        b'{"keys": {}}',
        b'{"keys": [1]}',
        b"{}",
        b'{"keys": [], "keys": []}',
        b'{"keys": []' + b" " * 65_525 + b"}",
        [],
        None,
        5,
        {"keys": [{"kid": f"k{n}"} for n in range(257)]},
    ],
)
def test_a_document_that_is_none_is_a_failed_fetch(document: Any, clock: ManualClock) -> None:
    """What can't be a key set changes nothing, whatever it is."""
    source = Source("a")
    keys = FetchedKeys(source, clock=clock)
    assert has(keys, "a")
    source.document = document if document is not None else "null"
    clock.advance(30)
    assert not has(keys, "b")
    assert source.fetched == 2
    assert has(keys, "a")


@pytest.mark.parametrize(
    "form", [json.dumps, lambda one: json.dumps(one).encode(), lambda one: one]
)
def test_a_document_may_be_text_bytes_or_an_object(form: Callable[[Any], Any]) -> None:
    """Whatever an HTTP client gives is taken."""
    document = form({"keys": [jwk("a")]})
    assert has(FetchedKeys(lambda: document), "a")


def test_entries_that_can_not_be_used_hurt_no_others() -> None:
    """Keys of other kinds, without an id or with broken material may stand in the set."""
    entries: list[Any] = [
        jwk("a"),
        jwk("twice"),
        jwk("twice"),
        {"kid": "p384", "kty": "EC", "crv": "P-384", "x": "AA", "y": "AA"},
        {"kid": "broken", "kty": "OKP", "crv": "Ed25519", "x": ["AA"]},
        {"kid": "list", "kty": ["OKP"], "crv": {}},
        {"kid": 7},
        {"kid": ""},
        {},
    ]
    keys = FetchedKeys(lambda: {"keys": entries})
    assert has(keys, "a")
    assert not has(keys, "twice")
    assert not has(keys, "")
    for key_id in ("p384", "broken", "list"):
        assert run_checks(keys.find(key_id)).key.algorithm == ""


def test_a_published_secret_is_no_key() -> None:
    """A symmetric key in a set that anybody can fetch would let anybody sign."""
    entry = {"kid": "s", "kty": "oct", "k": b64(bytes(32))}
    assert not has(FetchedKeys(lambda: {"keys": [entry]}), "s")
    assert has(KeySet({"keys": [entry]}), "s")


def test_threads_wait_for_one_fetch() -> None:
    """Deliveries that come while the first fetch is under way wait for it; none is refused."""
    source = Source("a")
    gate = threading.Event()

    def fetch() -> Any:
        gate.wait(30)
        return source()

    keys = FetchedKeys(fetch)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(has(keys, "a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    assert source.fetched == 1


async def test_tasks_wait_for_one_fetch() -> None:
    """The same for tasks of one loop."""
    source = Source("a")

    async def fetch() -> Any:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return source()

    keys = FetchedKeys(fetch)
    assert keys.is_async
    found = await asyncio.gather(*[arun_checks(keys.find("a")) for _ in range(8)])
    assert all(found)
    assert source.fetched == 1


def test_one_source_serves_several_loops() -> None:
    """Each event loop may fetch with the same object, one after the other."""

    async def fetch() -> Any:
        return {"keys": [jwk("a")]}

    keys = FetchedKeys(fetch)
    for _ in range(3):
        assert asyncio.run(arun_checks(keys.find("a"))).key is not None


async def test_a_failed_async_fetch_is_an_unknown_key() -> None:
    """An error while awaiting is a failed fetch; a cancellation comes through."""

    async def fails() -> Any:
        raise OSError("down")

    async def hangs() -> Any:
        await asyncio.Event().wait()

    assert await arun_checks(FetchedKeys(fails).find("a")) == (None, False)
    task = asyncio.create_task(arun_checks(FetchedKeys(hangs).find("a")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_client_that_hangs_up_takes_no_keys_away(clock: ManualClock) -> None:
    """A cancelled first fetch is begun anew by the next; a later one cools down as usual."""
    source = Source("a")
    hang = asyncio.Event()

    async def fetch() -> Any:
        document = source()
        await hang.wait()
        return document

    async def cancelled(key_id: str) -> None:
        task = asyncio.create_task(arun_checks(keys.find(key_id)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    keys = FetchedKeys(fetch, clock=clock)
    await cancelled("a")
    hang.set()
    assert (await arun_checks(keys.find("a"))).key is not None
    assert source.fetched == 2
    hang.clear()
    clock.advance(30)
    await cancelled("made-up")
    assert source.fetched == 3
    assert (await arun_checks(keys.find("made-up"))).key is None
    assert source.fetched == 3


def test_an_awaitable_from_a_plain_function_is_named() -> None:
    """A lambda around an async function says what to pass instead."""

    async def fetch() -> Any:
        return {}

    with pytest.raises(BackendMismatchError, match="is_async=True"):
        has(FetchedKeys(lambda: fetch()), "a")
    keys = FetchedKeys(lambda: fetch(), is_async=True)
    with pytest.raises(BackendMismatchError, match="averify"):
        has(keys, "a")


async def test_fetched_keys_verify() -> None:
    """A provider with a function for jwks= verifies, sync or async as the function is."""
    private = ed25519.Ed25519PrivateKey.generate()
    signer = adcp_provider(allowed_hosts="*", signing_key=private, key_id="k")
    request = signer.sign("POST", "https://x.example/", {}, b"{}", now=NOW)
    purpose = {"use": "sig", "key_ops": ["verify"], "adcp_use": "webhook-signing"}
    entry = jwk("k", x=b64(private.public_key().public_bytes_raw()), **purpose)

    async def fetch() -> Any:
        return {"keys": [entry]}

    assert (
        adcp_provider(allowed_hosts="*", jwks=lambda: {"keys": [entry]})
        .verify(*request, now=NOW)
        .ok
    )
    provider = adcp_provider(allowed_hosts="*", jwks=fetch)
    assert (await provider.averify(*request, now=NOW)).ok
    with pytest.raises(BackendMismatchError, match="averify"):
        provider.verify(*request, now=NOW)
    nowhere = adcp_provider(allowed_hosts="*", jwks=lambda: {"keys": []})
    assert nowhere.verify(*request, now=NOW).code == "webhook_signature_key_unknown"


@pytest.mark.parametrize("options", [{"cool_down": 0}, {"max_age": 1}])
def test_fetching_must_be_bounded(options: dict[str, Any]) -> None:
    """No cool-down, or an age below it, is refused."""
    with pytest.raises(PolicyError):
        FetchedKeys(Source("a"), **options)


# --- keys that are given -----------------------------------------------------------------------


def test_a_set_with_nothing_to_use_is_refused() -> None:
    """Keys for other uses may be in a set, but not only such."""
    unfit = {"kid": "x", "kty": "EC", "crv": "P-521"}
    assert has(KeySet({"keys": [unfit, jwk("a")]}), "a")
    with pytest.raises(PolicyError, match="supported kind"):
        KeySet({"keys": [unfit]})
    with pytest.raises(PolicyError, match="supported kind"):
        KeySet({"x": unfit, "a": jwk("a")})
    with pytest.raises(PolicyError, match="list"):
        KeySet({"keys": 5})
    with pytest.raises(PolicyError, match="function"):
        as_keys(5)


def test_a_key_set_is_taken_as_it_is() -> None:
    """An object that is a key set already stays the same one."""
    keys, fetched = KeySet({"a": jwk("a")}), FetchedKeys(Source("a"))
    assert as_keys(keys) is keys
    assert as_keys(fetched) is fetched


@pytest.mark.parametrize(
    "value",
    [
        b"short",
        "text",
        5,
        None,
        {},
        {"kty": "oct", "k": "AAAA"},
        {"kty": "oct"},
        {"kty": "OKP", "crv": "Ed25519"},
        {"kty": "OKP", "crv": "Ed25519", "x": "AA"},
        {"kty": "OKP", "crv": "Ed25519", "x": "=" * 43},
        {"kty": "OKP", "crv": "Ed25519", "x": b64(bytes(32)), "alg": "ES256"},
        {"kty": "EC", "crv": "P-256", "x": b64(bytes(32)), "y": b64(bytes(32))},
        {"kty": "RSA", "n": b64(b"\xff" * 128), "e": "AQAB"},
        {"kty": "RSA", "n": "A" * 4096, "e": "AQAB"},
    ],
)
def test_what_is_no_key_is_refused(value: Any) -> None:
    """Broken, short and foreign keys raise one kind of error, with no material in it."""
    with pytest.raises(ValueError) as caught:
        load_key(value)
    assert b64(bytes(32)) not in str(caught.value)


def test_curves_and_sizes_are_limited() -> None:
    """Only P-256 and P-384, and RSA of 2048 bits or more."""
    with pytest.raises(ValueError, match="P-256 or P-384"):
        load_key(ec.generate_private_key(ec.SECP521R1()))
    with pytest.raises(ValueError, match="2048"):
        load_key(rsa.generate_private_key(65537, 1024))


@pytest.mark.parametrize(
    "private",
    [
        ed25519.Ed25519PrivateKey.generate(),
        ec.generate_private_key(ec.SECP256R1()),
        rsa_key(),
        b"a shared secret of many bytes",
    ],
    ids=["ed25519", "p256", "rsa", "hmac"],
)
def test_every_algorithm_signs_and_verifies(private: Any) -> None:
    """A signature is right for its message and key alone, and any bytes may be asked about."""
    signer = load_key(private)
    public = load_key(private if isinstance(private, bytes) else private.public_key())
    signature = sign_bytes(signer, b"message")
    assert signature_is_right(public, b"message", signature)
    assert not signature_is_right(public, b"another", signature)
    longer = signature[:32] + b"\0" + signature[32:]  # for P-256, the same numbers
    for wrong in (b"", bytes(64), signature[:-1], signature + b"\0", longer, bytes(len(signature))):
        assert not signature_is_right(public, b"message", wrong)
    if not isinstance(private, bytes):
        with pytest.raises(ValueError, match="public key can't sign"):
            sign_bytes(public, b"message")


# --- revocation --------------------------------------------------------------------------------


def standing(revocations: Revocations, key_id: str = "k", now: float = NOW) -> str | None:
    return run_checks(revocations.check(key_id, now))


def test_a_list_of_revoked_keys_is_obeyed_and_ages() -> None:
    """Past next_update and the grace nobody can tell, so every key is refused."""
    listed = Revocations({"revoked_kids": ["bad"], "next_update": "2026-09-21T14:13:20Z"}, grace=60)
    assert NOW == 1_790_000_000
    assert standing(listed) is None
    assert standing(listed, "bad") == "revoked"
    assert standing(listed, now=NOW + 60) is None
    assert standing(listed, now=NOW + 61) == "stale"
    assert standing(listed, "bad", NOW + 61) == "revoked"
    assert standing(Revocations({"revoked_kids": []}), now=NOW * 9) is None


def test_a_list_is_fetched_when_it_is_due(clock: ManualClock) -> None:
    """It is asked again after next_update, not more than once a minute, at least each 15."""
    fetched = 0
    document: dict[str, Any] = {"revoked_kids": [], "next_update": NOW + 300}

    def fetch() -> Any:
        nonlocal fetched
        fetched += 1
        return document

    listed = Revocations(fetch, clock=clock)
    assert standing(listed) is None
    assert standing(listed, now=NOW + 299) is None
    assert fetched == 1
    document = {"revoked_kids": ["k"], "next_update": NOW + 9_000}
    clock.advance(59)
    assert standing(listed, now=NOW + 301) is None
    assert fetched == 1
    clock.advance(1)
    assert standing(listed, now=NOW + 301) == "revoked"
    clock.advance(899)
    assert standing(listed, now=NOW + 1200) == "revoked"
    assert fetched == 2
    clock.advance(1)
    assert standing(listed, now=NOW + 1201) == "revoked"
    assert fetched == 3


@pytest.mark.parametrize(
    "document",
    [
        {"revoked_kids": []},
        {"revoked_kids": [7], "next_update": NOW},
        {"revoked_kids": "k", "next_update": NOW},
        {"next_update": "soon"},
        {"next_update": float("nan")},
        {"next_update": True},
        {"next_update": 10**400},
        b"no",
    ],
)
def test_a_list_that_is_none_leaves_the_keys_refused(document: Any) -> None:
    """Without a list that can be read, nobody can tell."""
    assert standing(Revocations(lambda: document)) == "stale"
    if isinstance(document, dict) and len(document) > 1:
        with pytest.raises(PolicyError):
            Revocations(document)


async def test_a_list_may_be_awaited() -> None:
    """An async function for the list makes the provider async."""

    async def fetch() -> Any:
        return {"revoked_kids": ["k"], "next_update": NOW}

    listed = Revocations(fetch)
    assert await arun_checks(listed.check("k", NOW)) == "revoked"
    provider = adcp_provider(allowed_hosts="*", keys={"a": jwk("a")}, revocations=fetch)
    assert provider.is_async
