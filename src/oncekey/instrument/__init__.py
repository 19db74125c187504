"""What oncekey tells about itself: one stream of frozen events, and exporters for it."""

from oncekey.instrument.events import Event, EventKind, Subscription, subscribe

__all__ = ["Event", "EventKind", "Subscription", "subscribe"]
