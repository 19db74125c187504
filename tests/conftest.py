"""Fixtures that all tests share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import settings

from oncekey.testing import ManualClock

# The same examples every time: a property that fails does so on every machine.
settings.register_profile("oncekey", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("oncekey")


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
