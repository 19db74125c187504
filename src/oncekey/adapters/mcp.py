"""The older path of ``oncekey.adcp.mcp``."""

from oncekey.adcp.mcp import *  # noqa: F403
