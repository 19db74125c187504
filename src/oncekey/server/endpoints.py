"""The API, an endpoint a function, and the table of them that the OpenAPI document is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from oncekey.errors import InvalidKeyError
from oncekey.inbox.filters import Filter
from oncekey.inbox.models import DeliveryState, EventDetail, Issue, TargetStatus, event_key
from oncekey.server import desk_views, upkeep, views
from oncekey.server.auth import Person

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = [
    "ENDPOINTS",
    "LIMIT",
    "RATE",
    "TARGETS",
    "TEXT",
    "ApiError",
    "Call",
    "Endpoint",
    "Parameter",
    "check_id",
    "issue_query",
    "known_targets",
]

MOST_A_PAGE: Final = 500
MOST_MINUTES: Final = 7 * 24 * 60
MOST_RATE: Final = 10_000


class ApiError(Exception):
    """A request that is answered with a problem document."""

    def __init__(self, status: int, title: str, detail: str = "") -> None:
        super().__init__(detail or title)
        self.status, self.title, self.detail = status, title, detail


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the API, checked against its endpoint."""

    person: Person
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a request may say: in the query, or a field of its JSON body."""

    name: str
    schema: Mapping[str, Any]
    help: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table."""

    method: str
    path: str
    run: Callable[[Gateway, Call], Awaitable[Any]]
    role: str
    answer: str  # the name of a schema; "Page of X" and "List of X" too
    summary: str
    query: tuple[Parameter, ...] = ()
    body: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    status: int = 200
    tag: str = field(default="events")


_PLAIN: Final = "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"  # no control characters
TEXT: Final = {"type": "string", "maxLength": 1000, "pattern": _PLAIN}
_TARGET: Final = {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]{0,62}$"}
_NAMES: Final = {"type": "array", "items": _TARGET, "maxItems": 100}
_Q: Final = Parameter(
    "q", TEXT, "a search, such as source:stripe type:invoice.* state:dead age:>1h"
)
LIMIT: Final = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": MOST_A_PAGE, "default": 50},
    "how many at most",
)
_AFTER: Final = Parameter("after", TEXT, "the next of the page before")
_PAGED: Final = (LIMIT, _AFTER)
TARGETS: Final = Parameter("targets", _NAMES, "to whom; all that it went to if not given")


def _page(found: Any, view: Callable[[Any], Any]) -> dict[str, Any]:
    return {"items": [view(one) for one in found.items], "next": found.next}


def _paging(call: Call) -> dict[str, Any]:
    return {"limit": call.query.get("limit", 50), "after": call.query.get("after") or None}


def _found(value: Any, what: str) -> Any:
    if value is None:
        raise ApiError(404, f"no such {what}")
    return value


# Events


async def events(gateway: Gateway, call: Call) -> Any:
    """Events, newest first."""
    asked = Filter.parse(call.query.get("q", ""))
    return _page(await gateway.inbox.search(asked, **_paging(call)), views.event_view)


async def event(gateway: Gateway, call: Call) -> Any:
    """One event with its deliveries, attempts and copies."""
    return views.detail_view(_found(await gateway.inbox.event(call.path["id"]), "event"))


async def copies(gateway: Gateway, call: Call) -> Any:
    """The copies of an event, with the bodies of those that differ."""
    found = _found(await gateway.inbox.event(call.path["id"]), "event")
    return {"items": desk_views.copy_views(found)}


async def replay(gateway: Gateway, call: Call) -> Any:
    """Deliver an event again."""
    names = known_targets(gateway, call.body.get("targets"))
    found = _found(await gateway.inbox.event(call.path["id"]), "event")
    queued = await gateway.inbox.replay(call.path["id"], names, actor=call.person.name)
    return {"queued": queued, "left_out": left_out(found, names, queued)}


def left_out(found: EventDetail, names: list[str] | None, queued: int) -> dict[str, str]:
    """Targets for which a replay queued nothing, with how their deliveries stood before it."""
    asked = {one.target for one in found.deliveries} if names is None else set(names)
    if queued >= len(asked):
        return {}
    busy = (DeliveryState.RUNNING, DeliveryState.PARKED)
    return {
        one.target: str(one.state)
        for one in found.deliveries
        if one.target in asked and one.state in busy
    }


async def discard(gateway: Gateway, call: Call) -> Any:
    """Give up an event's deliveries."""
    _found(await gateway.inbox.event(call.path["id"]), "event")
    names = known_targets(gateway, call.body.get("targets"))
    return {"queued": await gateway.inbox.discard(call.path["id"], names, actor=call.person.name)}


def known_targets(gateway: Gateway, names: list[str] | None) -> list[str] | None:
    """Names of targets that are all configured.

    Raises:
        ApiError: One is not.
    """
    for name in names or ():
        if name not in gateway.settings.targets:
            raise ApiError(422, "no such target", "targets has a name that is not configured")
    return names


async def dead_letters(gateway: Gateway, call: Call) -> Any:
    """Deliveries that were given up."""
    asked = Filter.parse(call.query.get("q", ""))
    return _page(await gateway.inbox.dead_letters(asked, **_paging(call)), views.dead_view)


# What goes wrong


def issue_query(issue: Issue) -> str:
    """The search that finds an issue's events."""
    error = issue.error or None
    return str(Filter(target=issue.target, status=issue.status or None, error=error))


async def issues(gateway: Gateway, call: Call) -> Any:
    """Failures that are alike."""
    found = await gateway.inbox.issues()
    return {"items": [views.issue_view(one, issue_query(one)) for one in found]}


async def rejected(gateway: Gateway, call: Call) -> Any:
    """Requests that became no event."""
    return _page(await gateway.inbox.rejected(**_paging(call)), views.rejected_view)


async def bulk_replays(gateway: Gateway, call: Call) -> Any:
    """The latest bulk replays."""
    return {"items": [views.bulk_view(one) for one in await gateway.inbox.bulk_replays()]}


async def begin_bulk_replay(gateway: Gateway, call: Call) -> Any:
    """Replay all that match; with ``dry_run``, say how many deliveries they are."""
    asked = Filter.parse(call.body.get("q", ""))
    rate = float(call.body.get("rate", 20))
    if call.body.get("dry_run", True):
        total = await gateway.inbox.count_replays(asked)
        return {
            "id": None,
            "at": None,
            "actor": call.person.name,
            "query": str(asked),
            "rate": rate,
            "total": total,
            "done": 0,
            "state": "dry run",
        }
    begun = await gateway.inbox.begin_bulk_replay(asked, rate=rate, actor=call.person.name)
    return views.bulk_view(begun)


async def cancel_bulk_replay(gateway: Gateway, call: Call) -> Any:
    """Stop a bulk replay."""
    number = int(call.path["id"])
    if not await gateway.inbox.cancel_bulk_replay(number, actor=call.person.name):
        raise ApiError(404, "no such bulk replay is running")
    found = [one for one in await gateway.inbox.bulk_replays(500) if one.id == number]
    return views.bulk_view(_found(found[0] if found else None, "bulk replay"))


# Sources, targets, keys


async def sources(gateway: Gateway, call: Call) -> Any:
    """What is taken, and where."""
    return {"items": await gateway.source_views()}


async def targets(gateway: Gateway, call: Call) -> Any:
    """Who gets deliveries."""
    return {"items": await gateway.target_views()}


async def set_target(gateway: Gateway, call: Call) -> Any:
    """Pause, disable or resume a target, on every node."""
    name = call.path["name"]
    _found(gateway.settings.targets.get(name), "target")
    status = TargetStatus(call.body["status"])
    reason = call.body.get("reason", "")
    await gateway.inbox.set_target(name, status, actor=call.person.name, reason=reason)
    return next(one for one in await gateway.target_views() if one["name"] == name)


async def test_target(gateway: Gateway, call: Call) -> Any:
    """Send a signed test event to one target."""
    _found(gateway.settings.targets.get(call.path["name"]), "target")
    kept = await gateway.send_test(call.path["name"], call.person)
    return {"id": kept.id}


async def target_secret(gateway: Gateway, call: Call) -> Any:
    """What deliveries to a target are signed with; who asked is in the audit."""
    name = call.path["name"]
    settings = _found(gateway.settings.targets.get(name), "target")
    await gateway.inbox.record("show secret", name, "", actor=call.person.name)
    return {"secret": await gateway.deliveries.secret(settings)}


async def key(gateway: Gateway, call: Call) -> Any:
    """Whether a key is known, and which event it is."""
    source, name = call.query["source"], call.query["key"]
    return await _key(gateway, source, name)


async def _key(gateway: Gateway, source: str, name: str) -> views.KeyView:
    known = await gateway.knows_key(event_key(source, name))
    found = await gateway.inbox.search(Filter(source=source, text=name), limit=1)
    event = found.items[0].id if found.items and found.items[0].key == name else None
    return {"source": source, "key": name, "known": known, "event": event}


async def evict(gateway: Gateway, call: Call) -> Any:
    """Forget a key: the next copy of its event is taken as new."""
    source, name = call.query["source"], call.query["key"]
    if not await gateway.knows_key(event_key(source, name)):
        raise ApiError(404, "no such key")
    await gateway.evict_key(event_key(source, name), call.person)
    return await _key(gateway, source, name)


async def claims(gateway: Gateway, call: Call) -> Any:
    """Claims of apps that use this store, which nobody finishes."""
    asked = _paging(call)
    found = await upkeep.stuck_claims(gateway, asked["after"] or "", asked["limit"])
    return {"items": [desk_views.claim_view(one) for one in found.found], "next": found.cursor}


async def free_claim(gateway: Gateway, call: Call) -> Any:
    """Take a claim from its worker: the next call of its key runs."""
    digest = call.query["digest"]
    if not await upkeep.free_claim(gateway, digest, call.person):
        raise ApiError(404, "no such claim is under way", "nothing was freed")
    return {"digest": digest}


# All of it


async def proxies(gateway: Gateway, call: Call) -> Any:
    """Routes of proxies, with what was answered."""
    found = gateway.proxies.views(gateway.figures().proxied)
    return {"items": [desk_views.proxy_view(one) for one in found]}


async def saved(gateway: Gateway, call: Call) -> Any:
    """The searches that the caller gave a name."""
    found = await upkeep.views_of(gateway.inbox, call.person)
    return {"items": [{"name": name, "q": query} for name, query in found]}


async def save(gateway: Gateway, call: Call) -> Any:
    """Give a search a name."""
    name, query = call.body["name"].strip(), call.body["q"]
    return {"name": name, "q": await upkeep.save_view(gateway.inbox, call.person, name, query)}


async def forget(gateway: Gateway, call: Call) -> Any:
    """Forget a saved view."""
    if not await upkeep.forget_view(gateway.inbox, call.person, call.query["name"]):
        raise ApiError(404, "no such view")
    return await saved(gateway, call)


async def audit(gateway: Gateway, call: Call) -> Any:
    """Who did what."""
    return _page(await gateway.inbox.audit(**_paging(call)), views.audit_view)


async def stats(gateway: Gateway, call: Call) -> Any:
    """What happened in each minute, and what waits."""
    since = await gateway.inbox.now() - call.query.get("minutes", 60) * 60_000
    counts = await gateway.inbox.counts(since)
    return views.stats_view(since, counts, await gateway.inbox.depths())


_STATUS: Final = Parameter(
    "status",
    {"type": "string", "enum": [str(one) for one in TargetStatus]},
    "what it becomes",
    True,
)
RATE: Final = Parameter(
    "rate",
    {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_RATE, "default": 20},
    "replays a second",
)
_DRY: Final = Parameter("dry_run", {"type": "boolean", "default": True}, "only count")
_MINUTES: Final = Parameter(
    "minutes",
    {"type": "integer", "minimum": 1, "maximum": MOST_MINUTES, "default": 60},
    "how far back",
)
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": _PLAIN}
_WHOSE: Final = (
    Parameter("source", _NAME, "which source", True),
    Parameter("key", _NAME, "the key, such as the provider's id of the event", True),
)

_DIGESTS: Final = "^([0-9a-f]{2}){1,32}$"
_DIGEST: Final = Parameter(
    "digest", {"type": "string", "pattern": _DIGESTS}, "which claim, as it is listed", True
)
_CURSOR: Final = Parameter(
    "after", {"type": "string", "pattern": "^([0-9a-f]{2}){0,64}$"}, "the next of the page before"
)
_VIEW: Final = Parameter(
    "name", {"type": "string", "minLength": 1, "maxLength": upkeep.MOST_NAME, "pattern": _PLAIN},
    "what the view is called", True,
)  # fmt: skip

ENDPOINTS: Final = (
    Endpoint("GET", "/events", events, "read", "Page of Event", "Search events, newest first",
             query=(_Q, *_PAGED), errors=(422,)),
    Endpoint("GET", "/events/{id}", event, "read", "EventDetail",
             "One event with its deliveries, attempts and duplicates", errors=(404, 422)),
    Endpoint("GET", "/events/{id}/copies", copies, "read", "List of Copy",
             "The copies of an event that were stopped, with the bodies of those that differ",
             errors=(404, 422)),
    Endpoint("POST", "/events/{id}/replay", replay, "operate", "Replayed",
             "Deliver an event again; its history stays. Left out is what is in hand just now",
             body=(TARGETS,), errors=(404, 422)),
    Endpoint("POST", "/events/{id}/discard", discard, "operate", "Queued",
             "Give up an event's deliveries for good", body=(TARGETS,), errors=(404, 422)),
    Endpoint("GET", "/dead-letters", dead_letters, "read", "Page of DeadLetter",
             "Deliveries that were given up, with the cause", query=(_Q, *_PAGED), errors=(422,)),
    Endpoint("GET", "/issues", issues, "read", "List of Issue",
             "Failures grouped by target, status and cause", tag="issues"),
    Endpoint("GET", "/rejected", rejected, "read", "Page of Rejected",
             "Requests that became no event, with the cause", query=_PAGED, errors=(422,),
             tag="issues"),
    Endpoint("GET", "/bulk-replays", bulk_replays, "read", "List of BulkReplay",
             "The latest bulk replays", tag="issues"),
    Endpoint("POST", "/bulk-replays", begin_bulk_replay, "operate", "BulkReplay",
             "Replay all dead letters that match a search, or with state:delivered what was "
             "delivered, at a rate; counts only, if not told",
             body=(_Q, RATE, _DRY), errors=(422,), tag="issues"),
    Endpoint("POST", "/bulk-replays/{number}/cancel", cancel_bulk_replay, "operate", "BulkReplay",
             "Stop a bulk replay", errors=(404, 422), tag="issues"),
    Endpoint("GET", "/sources", sources, "read", "List of Source", "Who is taken, and where",
             tag="routes"),
    Endpoint("GET", "/targets", targets, "read", "List of Target", "Who gets deliveries",
             tag="routes"),
    Endpoint("POST", "/targets/{name}/status", set_target, "operate", "Target",
             "Pause, disable or resume a target on every node",
             body=(_STATUS, Parameter("reason", TEXT, "for the audit")), errors=(404, 422),
             tag="routes"),
    Endpoint("POST", "/targets/{name}/secret", target_secret, "admin", "Secret",
             "What deliveries to a target are signed with; audited", errors=(404, 422),
             tag="routes"),
    Endpoint("POST", "/targets/{name}/test", test_target, "operate", "Sent",
             "Send a test event to one target", errors=(404, 422), tag="routes"),
    Endpoint("GET", "/proxies", proxies, "read", "List of Proxy",
             "Routes of proxies, and what this node answered there", tag="routes"),
    Endpoint("GET", "/keys", key, "read", "Key", "Whether a key is known, and which event it is",
             query=_WHOSE, errors=(422,), tag="keys"),
    Endpoint("DELETE", "/keys", evict, "admin", "Key",
             "Forget a key: the next copy of its event is new", query=_WHOSE, errors=(404, 422),
             tag="keys"),
    Endpoint("GET", "/claims", claims, "read", "Page of Claim",
             "Claims of apps that use this store, which nobody finishes; a part of it at a time",
             query=(LIMIT, _CURSOR), errors=(422,), tag="keys"),
    Endpoint("DELETE", "/claims", free_claim, "admin", "Freed",
             "Take a claim from its worker: the next call of its key runs", query=(_DIGEST,),
             errors=(404, 422), tag="keys"),
    Endpoint("GET", "/views", saved, "read", "List of Saved", "The caller's saved searches",
             tag="views"),
    Endpoint("POST", "/views", save, "read", "Saved",
             "Save a search, in place of one of the same name", tag="views",
             body=(_VIEW, Parameter("q", TEXT, "the search", True)), errors=(422,)),
    Endpoint("DELETE", "/views", forget, "read", "List of Saved", "Forget a saved search",
             query=(_VIEW,), errors=(404, 422), tag="views"),
    Endpoint("GET", "/audit", audit, "read", "Page of Audit", "Who did what", query=_PAGED,
             errors=(422,), tag="audit"),
    Endpoint("GET", "/stats", stats, "read", "Stats", "Counts a minute, and what waits",
             query=(_MINUTES,), errors=(422,), tag="stats"),
)  # fmt: skip
"""Every endpoint, under ``/_oncekey/api/v1``."""


def check_id(text: str) -> str:
    """An id of an event as it stands in a path.

    Raises:
        ApiError: It is none.
    """
    from oncekey.inbox.models import event_number

    try:
        event_number(text)
    except InvalidKeyError as error:
        raise ApiError(422, "no event id", str(error)) from None
    return text
