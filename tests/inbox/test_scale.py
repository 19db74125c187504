"""The arithmetic of sizing, beside a simulation that does not know it: ``scripts/scale.py``."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/scale.py"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oncekey_scale", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_attempts_and_slots_are_what_is_simulated(scale: ModuleType) -> None:
    """Retries and attempts at a time come out as the arithmetic says, for many and few failures."""
    for fails in (0.0, 0.02, 0.3):
        load = scale.Load(100, fails=fails)
        size = scale.sized(load)
        (lane,) = scale.Simulation(load, size.slots).run(30.0)
        assert lane.attempts / (len(lane.done) + lane.dead) == pytest.approx(
            size.attempts, rel=0.05
        )
        assert lane.busy / 30.0 == pytest.approx(size.in_flight, rel=0.15)


def test_a_delivery_that_always_fails_is_tried_as_often_as_the_policy_says(
    scale: ModuleType,
) -> None:
    """No event is lost: each is delivered or dead, after all of its tries."""
    load = scale.Load(20, fails=1.0)
    (lane,) = scale.Simulation(load, 1_000).run(5.0)
    assert lane.done == []
    assert lane.attempts == 12 * lane.dead
    assert scale.attempts_of(1.0, 12) == 12


def test_a_backlog_is_as_long_and_lasts_as_long_as_computed(scale: ModuleType) -> None:
    """After an outage the slots that are left over work off what came meanwhile."""
    load = scale.Load(100)
    waits, drains = scale.backlog_after(load, 30.0, 20)
    (lane,) = scale.Simulation(load, 20, away=(10.0, 40.0)).run(150.0)
    assert lane.most_waiting == pytest.approx(waits, rel=0.1)
    assert lane.drained_at - 40.0 == pytest.approx(drains, rel=0.3)
    assert scale.backlog_after(load, 30.0, 10)[1] == math.inf  # too few slots: it never ends


def test_a_slow_target_keeps_its_queue_to_itself(scale: ModuleType) -> None:
    """A healthy target's delays are the same beside one that takes a hundred times as long."""
    load = scale.Load(100, targets=2)
    calm = scale.Simulation(load, 20).run(10.0)[1]
    slow, healthy = scale.Simulation(load, 20, slow=1).run(10.0)
    assert slow.most_waiting > 500
    assert healthy.most_waiting < 100
    assert scale.percentile(healthy.done, 90) < 1.5 * scale.percentile(calm.done, 90)


def test_the_same_seed_gives_the_same_run(scale: ModuleType) -> None:
    """A figure of the page can be made again."""
    load = scale.Load(50)
    runs = [scale.Simulation(load, 10, seed).run(10.0)[0].done for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
