"""Help for tests of code that uses oncekey, and of any webhook receiver.

Importing this imports nothing else; each part is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncekey.testing._clock import ManualClock
    from oncekey.testing._crash import (
        acrash_after_effect,
        crash_after_effect,
        kill_after_effect,
    )
    from oncekey.testing._deliveries import (
        adeliver,
        adeliver_concurrently,
        adeliver_twice,
        deliver,
        deliver_concurrently,
        deliver_twice,
    )
    from oncekey.testing._kill import killed_at
    from oncekey.testing._proxy import Proxy
    from oncekey.testing._recording import Recorder, recorded
    from oncekey.testing._replay import areplay, replay
    from oncekey.testing._report import Report, assert_handled_once
    from oncekey.testing._samples import SignedDelivery, sample, sample_provider, signed
    from oncekey.testing._storm import astorm, storm
    from oncekey.testing._targets import Answer, WorkerKilled

__all__ = [
    "Answer",
    "ManualClock",
    "Proxy",
    "Recorder",
    "Report",
    "SignedDelivery",
    "WorkerKilled",
    "acrash_after_effect",
    "adeliver",
    "adeliver_concurrently",
    "adeliver_twice",
    "areplay",
    "assert_handled_once",
    "astorm",
    "crash_after_effect",
    "deliver",
    "deliver_concurrently",
    "deliver_twice",
    "kill_after_effect",
    "killed_at",
    "recorded",
    "replay",
    "sample",
    "sample_provider",
    "signed",
    "storm",
]

_HOMES = {
    "_clock": ("ManualClock",),
    "_crash": ("acrash_after_effect", "crash_after_effect", "kill_after_effect"),
    "_deliveries": (
        "adeliver",
        "adeliver_concurrently",
        "adeliver_twice",
        "deliver",
        "deliver_concurrently",
        "deliver_twice",
    ),
    "_kill": ("killed_at",),
    "_proxy": ("Proxy",),
    "_recording": ("Recorder", "recorded"),
    "_replay": ("areplay", "replay"),
    "_report": ("Report", "assert_handled_once"),
    "_samples": ("SignedDelivery", "sample", "sample_provider", "signed"),
    "_storm": ("astorm", "storm"),
    "_targets": ("Answer", "WorkerKilled"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'oncekey.testing' has no attribute {name!r}")
    value = getattr(import_module(f"oncekey.testing.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
