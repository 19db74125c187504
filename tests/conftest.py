"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from oncekey.testing import ManualClock

# The same examples every time: a property that fails does so on every machine.
settings.register_profile("oncekey", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("oncekey")


# What takes minutes and depends on servers and drivers more than on the version of Python: run in
# full on one version, left out on others (make test-all runs it on all).
HEAVY = (
    "tests/adapters/",
    "tests/contract/test_model_servers",
    "tests/core/test_canonical_fuzz",
    "tests/core/test_model",
    "tests/core/test_races",
    "tests/docs/test_demo",
    "tests/docs/test_examples",
    "tests/docs/test_snippets",
    "tests/examples/",
    "tests/faults/",
    "tests/functions/",
    "tests/interop/",
    "tests/receiver/test_refusals",
    "tests/resilience/test_outage",
    "tests/signatures/",
    "tests/stores/test_postgres",
    "tests/stores/test_redis",
    "tests/testing/",
    "tests/transactions/",
)
LIGHT = (
    "tests/adapters/test_keyed",
    "tests/functions/test_encryption",
    "tests/interop/test_mcp",
    "tests/signatures/test_every_provider",
    "tests/signatures/test_official_sdks",
    "tests/testing/test_samples",
    "tests/contract/test_contract_redis",
    "tests/transactions/test_every_driver",
)


# What comes first, in this order. With several workers the first begins with these, and nobody
# takes them from it: importing adcp costs half a minute of processor time in each process that does
# it, npm installs twice at the same time otherwise, and the longest must not be left for the end.
FIRST = (
    "tests/interop/test_adcp_package",
    "tests/interop/test_adcp_platform",
    "tests/signatures/test_adcp_peer",
    "tests/signatures/test_adcp_contract.py::test_a_host_has_the_ascii_form",
    "tests/interop/test_storyboard",
    "tests/examples/",
    "tests/contract/test_model_servers",
    "tests/core/test_model",
    "tests/faults/test_kill_storm",
    "tests/faults/test_delivery_storm",
)


def pytest_configure() -> None:
    """What is made while tests are collected stays: do not look for garbage in it."""
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the heavy tests out where that is asked for, unread."""
    if not os.environ.get("ONCEKEY_TEST_LIGHT") or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(config.rootpath).as_posix()
    return True if name.startswith(HEAVY) and not name.startswith(LIGHT) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put those that are best begun with first; leave the others in their order."""
    ranks = {prefix: rank for rank, prefix in enumerate(FIRST)}

    def rank(item: pytest.Item) -> int:
        found = next(filter(item.nodeid.startswith, FIRST), None)
        return len(FIRST) if found is None else ranks[found]

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Modules, tests and their parameters stay: collecting garbage need not look at them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    import oncekey

    return f"oncekey {oncekey.__version__} from {os.path.dirname(oncekey.__file__)}"


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still."""
    return ManualClock()


@pytest.fixture
def no_warnings() -> Iterator[None]:
    """Any warning is an error, also where a test collects warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
