"""Targets, sources and keys: who gets events, who sends them, and how copies are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from oncekey.errors import PolicyError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import TargetStatus, event_key
from oncekey.operate.listing import Listing
from oncekey.server.pages.desk import HOME, Desk, page
from oncekey.server.upkeep import free_claim, stuck_claims

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes"]


def routes(gateway: Gateway) -> list[Route]:
    """Of all three."""
    return [
        page(gateway, "/targets", targets),
        page(gateway, "/targets/{name}/status", do_set, "operate"),
        page(gateway, "/targets/{name}/test", do_test, "operate"),
        page(gateway, "/sources", sources),
        page(gateway, "/keys", keys),
        page(gateway, "/keys/evict", do_evict, "admin"),
        page(gateway, "/keys/free", do_free, "admin"),
    ]


async def targets(desk: Desk) -> Response:
    """Who gets deliveries, and how they stand."""
    return desk.show(
        "targets.html",
        here="targets",
        targets=await desk.gateway.target_views(),
        can_set=desk.session.person.may("operate"),
    )


def _target(desk: Desk) -> str:
    name: str = desk.request.path_params["name"]
    if name not in desk.gateway.settings.targets:
        raise PolicyError("there is no such target")
    return name


async def do_set(desk: Desk) -> Response:
    """Pause, disable or resume one."""
    wanted = desk.sent().one("status")
    if wanted not in set(TargetStatus):
        raise PolicyError("a target is active, paused or disabled")
    await desk.gateway.inbox.set_target(
        _target(desk), TargetStatus(wanted), actor=desk.session.person.name
    )
    return desk.go(f"{HOME}/targets", wanted)


async def do_test(desk: Desk) -> Response:
    """Send it a test event."""
    kept = await desk.gateway.send_test(_target(desk), desk.session.person)
    return desk.go(f"{HOME}/events/{kept.id}", "tested")


async def sources(desk: Desk) -> Response:
    """Who sends, and the address to give them."""
    gateway = desk.gateway
    return desk.show(
        "sources.html",
        here="sources",
        sources=await gateway.source_views(),
        proxies=gateway.proxies.views(gateway.figures().proxied),
        base=desk.base,
    )


async def keys(desk: Desk) -> Response:
    """Whether a key is known."""
    source, key = desk.query("source", 63), desk.query("key", 255)
    found: dict[str, Any] | None = None
    if source and key:
        events = await desk.gateway.inbox.search(Filter(source=source, text=key), limit=5)
        found = {
            "known": await desk.gateway.knows_key(event_key(source, key)),
            "events": [one for one in events.items if one.key == key],
        }
    return desk.show(
        "keys.html",
        here="keys",
        source=source,
        key=key,
        found=found,
        sources=list(desk.gateway.settings.sources),
        moment=await desk.gateway.inbox.now(),
        can_evict=desk.session.person.may("admin"),
        stuck=await _stuck(desk),
    )


async def _stuck(desk: Desk) -> Listing | None:
    """Claims that nobody finishes, of whatever uses this store; a part of them at a time."""
    if not desk.query("stuck"):
        return None
    return await stuck_claims(desk.gateway, desk.query("cursor"), 50)


async def do_free(desk: Desk) -> Response:
    """Take a stuck claim from its worker."""
    freed = await free_claim(desk.gateway, desk.sent().one("digest", 64), desk.session.person)
    return desk.go(f"{HOME}/keys?stuck=1", "freed" if freed else "left")


async def do_evict(desk: Desk) -> Response:
    """Forget a key."""
    form = desk.sent()
    source, key = form.one("source", 63), form.one("key", 255)
    if not source or not key:
        raise PolicyError("which key of which source?")
    await desk.gateway.evict_key(event_key(source, key), desk.session.person)
    return desk.go(f"{HOME}/keys?source={quote(source)}&key={quote(key)}", "evicted")
