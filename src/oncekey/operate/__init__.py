"""For operators: ``inspect``, ``evict``, ``stuck``, ``sweep``, ``stats`` and ``plan``.

The commands of the same names print what these give. Each takes a store; those that start with
``a`` are for asynchronous stores. Keys come as a ``Key``, made from its scope and name, or as the
digest that listings and records show.
"""

from oncekey.operate.evicting import Eviction, aevict, evict
from oncekey.operate.inspecting import Inspection, ainspect, inspect
from oncekey.operate.listing import Listing
from oncekey.operate.planning import Plan, plan
from oncekey.operate.sizing import GatewayLoad, GatewayPlan, plan_gateway
from oncekey.operate.statistics import Stats, astats, stats
from oncekey.operate.stuck import astuck, stuck
from oncekey.operate.sweeping import Swept, asweep, sweep

__all__ = [
    "Eviction",
    "GatewayLoad",
    "GatewayPlan",
    "Inspection",
    "Listing",
    "Plan",
    "Stats",
    "Swept",
    "aevict",
    "ainspect",
    "astats",
    "astuck",
    "asweep",
    "evict",
    "inspect",
    "plan",
    "plan_gateway",
    "stats",
    "stuck",
    "sweep",
]
