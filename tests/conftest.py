"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator

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
    "tests/examples/",
    "tests/faults/",
    "tests/functions/",
    "tests/interop/",
    "tests/receiver/test_refusals",
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the heavy tests out where that is asked for."""
    if not os.environ.get("ONCEKEY_TEST_LIGHT"):
        return
    left_out = [
        item
        for item in items
        if item.nodeid.startswith(HEAVY) and not item.nodeid.startswith(LIGHT)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules, tests and their parameters stay: collecting garbage need not look at them again.

    There are some ten thousand tests, so that each look costs most of a second.
    """
    gc.collect()
    gc.freeze()


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
