"""The older path of ``oncekey.adcp.signatures``: importing it gives that module."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.adcp.signatures import *  # noqa: F403

sys.modules[__name__] = import_module("oncekey.adcp.signatures")
