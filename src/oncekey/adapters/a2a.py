"""The older path of ``oncekey.adcp.a2a``."""

from oncekey.adcp.a2a import *  # noqa: F403
