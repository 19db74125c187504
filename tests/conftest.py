"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.scale import SHORT
from tests.servers.fixtures_pg import (
    _given,
    _own,
    _timed,
    own_postgres,
    own_url,
    pg_url,
    postgres,
    timed_postgres,
    timed_url,
)
from tests.servers.papers import papers
from tests.servers.redis import (
    _plain_cluster,
    _plain_sentinel,
    _plain_server,
    make_proxy,
    make_server,
    open_redis,
    redis_cluster,
    redis_sentinel,
    redis_server,
    redis_url,
)

from oncekey.testing import ManualClock

# Servers are here and nowhere else: a module that imports a fixture of a session has its own.
__all__ = [
    "_given",
    "_own",
    "_plain_cluster",
    "_plain_sentinel",
    "_plain_server",
    "_timed",
    "make_proxy",
    "make_server",
    "open_redis",
    "own_postgres",
    "own_url",
    "papers",
    "pg_url",
    "postgres",
    "redis_cluster",
    "redis_sentinel",
    "redis_server",
    "redis_url",
    "timed_postgres",
    "timed_url",
]

# The same examples every time: a property that fails does so on every machine.
settings.register_profile(
    "oncekey",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # on a busy machine everything is
)
settings.load_profile("oncekey")


# What takes minutes and depends on servers and drivers more than on the version of Python: run in
# full on one version, left out on others (make test-all runs it on all).
HEAVY = (
    "tests/adapters/",
    "tests/contract/test_contract_encrypted",
    "tests/contract/test_contract_postgres",
    "tests/contract/test_contract_redis",
    "tests/contract/test_model_servers",
    "tests/core/test_canonical_fuzz",
    "tests/core/test_model",
    "tests/core/test_races",
    "tests/core/test_scheduler",
    "tests/docs/",
    "tests/doctor/",
    "tests/examples/",
    "tests/faults/",
    "tests/functions/",
    "tests/inbox/test_consume",
    "tests/inbox/test_kill",
    "tests/instrument/test_prometheus",
    "tests/interop/",
    "tests/operate/",
    "tests/receiver/test_refusals",
    "tests/resilience/test_outage",
    "tests/resilience/test_shared_limits",
    "tests/server/test_api_fuzz",
    "tests/server/test_commands",
    "tests/server/test_proxy",
    "tests/server/test_serve",
    "tests/server/test_storm",
    "tests/server/test_wire",
    "tests/server/test_workers",
    "tests/signatures/",
    "tests/stores/test_postgres",
    "tests/stores/test_redis",
    "tests/stores/test_sqlite_bad_input",
    "tests/stores/test_sqlite_durability",
    "tests/testing/",
    "tests/test_release",
    "tests/transactions/",
)
LIGHT = (
    "tests/functions/test_encryption",
    "tests/interop/test_mcp",
    "tests/signatures/test_every_provider",
    "tests/signatures/test_official_sdks",
    "tests/testing/test_samples",
    "tests/transactions/test_every_driver",
)

# What `make faults` and `make test-all` run and `make test` does not: long forms of what shorter
# tests show too.
LONGER = (
    "tests/docs/test_demo.py::test_demo_finds_what_a_wrong_receiver_does[unmarked",
    "tests/faults/test_delivery_storm.py::test_storm_on_postgresql[lease",
    "tests/faults/test_delivery_storm.py::test_storm_on_sqlite[lease",
    "tests/faults/test_first_seen_processes",
    "tests/faults/test_kill_storm",
    "tests/faults/test_laboratory.py::test_a_known_race_is_found[check-then-put",
    "tests/faults/test_laboratory.py::test_a_transaction_holds",
    "tests/faults/test_laboratory.py::test_our_receiver_holds",
    "tests/faults/test_laboratory.py::test_our_stores_hold[postgresql",
    "tests/faults/test_laboratory.py::test_our_stores_hold[redis",
    "tests/faults/test_many_rows",
    "tests/faults/test_protocol_model.py::test_a_known_mistake_is_found",
    "tests/faults/test_protocol_model.py::test_no_interleaving",
    "tests/inbox/test_kill.py::test_a_node_killed_whose_app_is_elsewhere",
    "tests/instrument/test_prometheus.py::test_two_workers_have_one_set_of_metrics[postgres",
    "tests/instrument/test_prometheus.py::test_two_workers_have_one_set_of_metrics[redis",
    "tests/interop/test_seller.py::test_a_killed_seller_leaves_one_buy[postgresql-written",
    "tests/interop/test_seller.py::test_a_killed_seller_leaves_one_buy[sqlite",
    "tests/interop/test_seller.py::test_parallel_copies_to_two_sellers_make_one_buy[sqlite",
    "tests/interop/test_storyboard.py::test_the_storyboard_has_no_failed_step[sqlite",
    "tests/resilience/test_outage_load",
    "tests/stores/test_postgres_race",
    "tests/stores/test_postgres_sweep.py::test_a_step_of_sweeping_stays_cheap[4",
    *(  # one step before the server has promised anything, and one after, stay
        f"tests/transactions/test_crashes.py::test_server_that_crashes_leaves_all_or_nothing[{step}"
        for step in ("claimed", "written", "joined")
    ),
)


# What comes first, in this order. With several workers the first begins with these, and nobody
# takes them from it: importing adcp costs half a minute of processor time in each process that does
# it, npm installs twice at the same time otherwise, and the longest must not be left for the end.
FIRST = (
    "tests/interop/test_adcp_package",
    "tests/interop/test_adcp_platform",
    "tests/signatures/test_adcp_peer",
    "tests/signatures/test_adcp_contract.py::test_a_host_has_the_ascii_form",
    "tests/signatures/test_adcp_requests.py::test_its_signer_is_accepted",
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put those that are best begun with first, and leave the longer ones out of `make test`."""
    if SHORT:
        longer = [item for item in items if item.nodeid.startswith(LONGER)]
        config.hook.pytest_deselected(items=longer)
        items[:] = [item for item in items if not item.nodeid.startswith(LONGER)]
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
