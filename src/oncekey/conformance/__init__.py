"""The contract that every store must keep, as checks that run on sync and async stores alike.

From pytest::

    import pytest
    from oncekey.conformance import CHECKS, run_check

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        run_check(check, lambda: connect("mine://..."))

and for async stores ``await arun_check(check, lambda: aconnect("mine://..."))``. From a shell:
``oncekey conformance URL``.

Each check is a generator: it yields operations of the store and gets their results back.
"""

from oncekey.conformance.checks import CHECKS
from oncekey.conformance.run import Conformance, arun_all, arun_check, run_all, run_check
from oncekey.conformance.steps import Can, Check, Elapse, Race

__all__ = [
    "CHECKS",
    "Can",
    "Check",
    "Conformance",
    "Elapse",
    "Race",
    "arun_all",
    "arun_check",
    "run_all",
    "run_check",
]
