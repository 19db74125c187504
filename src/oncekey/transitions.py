"""The state machine for authors of stores: read a record, decide with these, write the result."""

from oncekey._core.transitions import *  # noqa: F403
from oncekey._core.transitions import __all__ as __all__  # noqa: PLC0414
