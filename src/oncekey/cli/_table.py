"""Every command: its group, its module, and a line about it. Nothing of them is imported here."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["COMMANDS", "GROUPS", "START", "Command"]


class Command(NamedTuple):
    """A command and where it lives: ``module`` is in ``oncekey.cli`` and has ``add_to``."""

    group: str
    module: str
    help: str


GROUPS: Final = {
    "gateway": "Run the gateway",
    "look": "Look after a store",
    "set up": "Set up and check",
    "hooks": "Sign and send webhooks",
    "more": "More",
}

# One line a command, in the order in which they are shown.
COMMANDS: Final = {
    "serve": Command("gateway", "serve", "run the gateway: a durable inbox, an API, a dashboard"),
    "proxy": Command("gateway", "proxy", "put the Idempotency-Key rules in front of any service"),
    "init": Command("gateway", "init", "write a config for the gateway"),
    "events": Command("gateway", "events", "list the events of a gateway"),
    "event": Command("gateway", "event", "show one event, with its attempts and copies"),
    "issues": Command("gateway", "issues", "list what a gateway can't deliver, and why"),
    "targets": Command("gateway", "targets", "list the targets of a gateway; pause and resume"),
    "replay": Command("gateway", "replay", "deliver events of a gateway again, or a recording"),
    "listen": Command("gateway", "listen", "bring events to an app on this machine"),
    "password": Command("gateway", "password", "hash a password, for a user of the dashboard"),
    "doctor": Command("look", "doctor", "look for what is set up wrongly"),
    "stats": Command("look", "stats", "count what is in a store"),
    "stuck": Command("look", "stuck", "list claims past their lease, or running for long"),
    "inspect": Command("look", "inspect", "show what a store has of a key"),
    "evict": Command("look", "evict", "make a store forget a key, so that a retry runs"),
    "sweep": Command("look", "sweep", "remove records past their time, now"),
    "reconcile": Command("look", "reconcile", "make a store whole after an outage; what slipped"),
    "plan": Command("set up", "plan", "work out the memory, disk and writes that a load needs"),
    "migrate": Command("set up", "migrate", "make or update the tables of a store"),
    "conformance": Command("set up", "conformance", "check that a store keeps the contract"),
    "lab": Command("set up", "lab", "break things around a receiver or store, and see what holds"),
    "providers": Command("hooks", "providers", "list the webhook providers that are known"),
    "sign": Command("hooks", "sign", "sign a webhook body as a provider would"),
    "send": Command("hooks", "send", "sign webhook bodies and send them to an endpoint"),
    "simulate": Command("hooks", "simulate", "send a sample, and retry as its provider does"),
    "audit": Command("look", "audit", "verify that an audit trail is whole"),
    "explain": Command("more", "explain", "say what an error means, and what to do"),
    "completion": Command("more", "completion", "print the completion script of a shell"),
}

START: Final = {
    "oncekey serve --demo": "a gateway with a dashboard, and nothing to set up",
    "oncekey doctor --url-env STORE_URL": "is the store set up as it should be?",
    "oncekey send http://localhost:8000/hooks stripe event.json --times 2": "a webhook, twice",
}
"""Three lines to start with: what to type, and what it is for."""
