"""What becomes of calls while their store is away, and of what was done then when it is back.

``resilient(store)`` puts a breaker in front of a store; with ``on_outage="open"`` and a journal,
calls go on without it, and it is made whole afterwards. ``reconcile`` does that for journals of
processes that are gone; ``Findings`` is the queue of what somebody has to look at.
"""

from oncekey.policy import OnOutage
from oncekey.resilience.breaker import Breaker, BreakerState
from oncekey.resilience.findings import Finding, Findings, Side
from oncekey.resilience.outage import resilient
from oncekey.resilience.reconcile import Reconciled, areconcile, reconcile
from oncekey.resilience.stores import AsyncResilientStore, ResilientStore

__all__ = [
    "AsyncResilientStore",
    "Breaker",
    "BreakerState",
    "Finding",
    "Findings",
    "OnOutage",
    "Reconciled",
    "ResilientStore",
    "Side",
    "areconcile",
    "reconcile",
    "resilient",
]
