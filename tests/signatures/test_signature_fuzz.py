"""Any bytes give a verdict, and only what was signed is genuine.

The short run is part of every test run. ``make fuzz`` runs 200,000 for each scheme, and
``ONCEKEY_FUZZ=200000`` sets how many Hypothesis and ``random`` draw here (Hypothesis at most
20,000).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

pytest.importorskip("cryptography")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.signatures.hostile import Chooser, Hostile, check, hostile, seeded
from tests.signatures.schemes import NAMES, TOKENS, scheme

MANY = int(os.environ.get("ONCEKEY_FUZZ", "0"))
DRAWN = min(MANY, 20_000) or 60
SEEDED = MANY or 400


@st.composite
def drawn(draw: Any, name: str) -> Hostile:
    """Drawn by Hypothesis, which finds the smallest one that fails."""
    return hostile(
        name,
        Chooser(
            lambda low, high: draw(st.integers(low, high)),
            lambda: draw(st.text(st.characters(), max_size=6)),
            lambda: draw(st.binary(max_size=6)),
        ),
    )


@pytest.mark.parametrize("name", [*NAMES, *TOKENS])
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
    @given(drawn(name))
    def run(case: Hostile) -> None:
        check(scheme(name), case)

    run()


@pytest.mark.parametrize("name", [*NAMES, *TOKENS])
def test_many_hostile_deliveries_give_verdicts(name: str) -> None:
    """Drawn by ``random``: the seed of a failure is in its message."""
    seed = random.SystemRandom().randrange(2**32) if MANY else 20261116
    choose = seeded(random.Random(f"{name}-{seed}"))
    codes: dict[str, int] = {}
    for number in range(SEEDED):
        case = hostile(name, choose)
        try:
            verdict = check(scheme(name), case)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}, number {number}: {case!r}") from error
        codes[verdict.code] = codes.get(verdict.code, 0) + 1
    # A fuzzer that only ever hits the first check would prove little.
    assert len(codes) >= 4, codes
    assert 0 < codes.get("ok", 0) < SEEDED * 0.7, codes


@pytest.mark.parametrize("name", [*NAMES, *TOKENS])
def test_no_stranger_is_taken_for_the_sender(name: str) -> None:
    """The same hostile deliveries, held against another secret: not one is genuine."""
    one = scheme(name)
    choose = seeded(random.Random(f"{name}-stranger"))
    for _ in range(SEEDED // 4):
        case = hostile(name, choose)
        assert not one.stranger.verify(*case[:4], now=case.now).ok, case


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.sampled_from(NAMES),
    st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=5),
    st.binary(max_size=200),
    st.text(max_size=50),
)
def test_pure_noise_gives_verdicts(
    name: str, headers: dict[str, str], body: bytes, url: str
) -> None:
    """Nothing of it is genuine, and nothing raises."""
    verdict = scheme(name).provider.verify("POST", url, headers, body)

    assert not verdict.ok
    # Hypothesis finds names of headers in the source: one of another scheme may be among them.
    assert verdict.code.endswith(("_missing", "_malformed", "mode_mismatch", "params_incomplete"))
