"""Any bytes give a verdict, and only what was signed is genuine.

The short run is part of every test run. ``ONCEKEY_FUZZ=200000`` sets how many hostile deliveries
each provider gets; Hypothesis draws up to 20,000 of them, and ``random`` the rest.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.signatures.cases import HEX_KEY, OURS, SECRET, WHSEC, keys, make, signed
from tests.signatures.hostile import Hostile, hostile, seeded

from oncekey.signatures import CODES, CertificateCache, Provider, Verdict

pytest.importorskip("cryptography")

MANY = int(os.environ.get("ONCEKEY_FUZZ", "0"))
DRAWN = min(MANY, 20_000) or 100
SEEDED = MANY or 400
SECRETS = (SECRET, WHSEC[6:], HEX_KEY)
# Signed, in these, is not the raw body: other bytes can carry the same fields.
FREE_BODY = {"mailgun", "adyen", "twilio"}


def provider_of(name: str) -> Provider:
    if name == "paypal":
        cache = CertificateCache(lambda _url: keys().certificate, per_minute=10**9)
        return make(name, fetch=cache)
    return make(name)


PROVIDERS = {name: provider_of(name) for name in OURS}


def check(name: str, case: Hostile) -> Verdict:
    """What must hold for every delivery that anybody can make up."""
    maker = PROVIDERS[name]
    verdict = maker.verify(case.method, case.url, case.headers, case.body, now=case.now)
    assert type(verdict) is Verdict
    assert verdict.ok == (verdict.code == "ok")
    assert verdict.code in CODES or verdict.code == "url_malformed"
    assert not any(one in repr(verdict) or one in verdict.message for one in SECRETS)
    if verdict.ok:
        assert verdict.sender == maker.sender
        assert case.body == signed(name).body or name in FREE_BODY
        items = maker.items(case.headers, case.body)
        assert items
        if maker.batch is None:
            assert items[0].event_id == verdict.event_id
    else:
        assert verdict.sender is None
        assert verdict.event_id is None
        assert verdict.message
    maker.handshake(case.body)
    return verdict


@pytest.mark.parametrize("name", OURS)
def test_hostile_deliveries_give_verdicts(name: str) -> None:
    """Drawn by Hypothesis, so that a failure comes out small."""

    @settings(
        max_examples=DRAWN,
        deadline=None,
        database=None,
        derandomize=not MANY,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile(name))
    def run(case: Hostile) -> None:
        check(name, case)

    run()


@pytest.mark.parametrize("name", OURS)
def test_many_hostile_deliveries_give_verdicts(name: str) -> None:
    """Drawn by ``random``: the seed of a failure is in its message."""
    seed = random.SystemRandom().randrange(2**32) if MANY else 20261116
    chance = random.Random(f"{name}-{seed}")
    codes: dict[str, int] = {}
    for number in range(SEEDED):
        case = seeded(name, chance)
        try:
            verdict = check(name, case)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}, number {number}: {case!r}") from error
        codes[verdict.code] = codes.get(verdict.code, 0) + 1
    # A fuzzer that only ever hits the first check would prove little.
    assert len(codes) >= 3, codes
    assert codes.get("ok", 0) < SEEDED / 2, codes


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.sampled_from(OURS),
    st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=5),
    st.binary(max_size=200),
    st.text(max_size=50),
)
def test_pure_noise_gives_verdicts(
    name: str, headers: dict[str, str], body: bytes, url: str
) -> None:
    """Nothing of it is genuine, and nothing raises."""
    verdict = PROVIDERS[name].verify("POST", url, headers, body)

    assert not verdict.ok
    assert verdict.code in ("header_missing", "body_malformed", "timestamp_missing")
