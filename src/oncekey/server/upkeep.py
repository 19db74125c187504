"""What pages and the API do alike: saved views, and claims in the store that nobody finishes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from oncekey.errors import PolicyError
from oncekey.inbox.filters import Filter
from oncekey.operate import aevict, ainspect, astuck
from oncekey.operate.listing import Listing
from oncekey.server.auth import Person

if TYPE_CHECKING:
    from oncekey.inbox.abc import AsyncInbox
    from oncekey.server.gateway import Gateway

__all__ = ["MOST_NAME", "forget_view", "free_claim", "save_view", "stuck_claims", "views_of"]

MOST_VIEWS: Final = 20
MOST_NAME: Final = 40
_KEPT_MS: Final = 10 * 365 * 86_400_000
MOST_LOOKED_AT: Final = 20_000
"""Records that one look for stuck claims goes through."""
_UNDER_WAY: Final = ("in flight", "lapsed")

# Saved views: each person has their own, on every node


def _note(person: Person) -> str:
    return f"views:{person.name}"


async def views_of(inbox: AsyncInbox, person: Person) -> list[tuple[str, str]]:
    """Names and searches, in the order in which they were saved."""
    kept = await inbox.get_note(_note(person))
    return [(str(name), str(query)) for name, query in json.loads(kept or b"[]")]


async def _keep(
    inbox: AsyncInbox, person: Person, views: list[tuple[str, str]], action: str, name: str
) -> None:
    await inbox.put_note(_note(person), json.dumps(views).encode(), _KEPT_MS)
    await inbox.record(action, name, "", actor=person.name)


async def save_view(inbox: AsyncInbox, person: Person, name: str, query: str) -> str:
    """Save a search, in place of one of the same name; gives it as it is kept.

    Raises:
        PolicyError: Name or search can't be, or there are too many.
    """
    name, query = name.strip(), str(Filter.parse(query))
    if not 1 <= len(name) <= MOST_NAME or not name.isprintable():
        raise PolicyError(f"give the view a name of 1 to {MOST_NAME} characters")
    if not query:
        raise PolicyError("there is nothing to save: search for something first")
    views = await views_of(inbox, person)
    if name in dict(views):
        views = [(one, query if one == name else asked) for one, asked in views]
    elif len(views) < MOST_VIEWS:
        views.append((name, query))
    else:
        raise PolicyError(f"{MOST_VIEWS} views are saved already: forget one first")
    await _keep(inbox, person, views, "save view", name)
    return query


async def forget_view(inbox: AsyncInbox, person: Person, name: str) -> bool:
    """Forget one. False: there is none of that name."""
    before = await views_of(inbox, person)
    views = [(one, query) for one, query in before if one != name]
    if len(views) == len(before):
        return False
    await _keep(inbox, person, views, "forget view", name)
    return True


# Claims of whatever uses this store


async def stuck_claims(gateway: Gateway, cursor: str, limit: int) -> Listing:
    """Claims that nobody finishes, a part of the store at a time."""
    return await astuck(gateway.store, cursor=cursor, limit=limit, most=MOST_LOOKED_AT)


async def free_claim(gateway: Gateway, digest: str, person: Person) -> bool:
    """Take a claim from its worker. False: it is under way no more, and was left as it is.

    Raises:
        PolicyError: That is no digest.
    """
    try:
        key = bytes.fromhex(digest)
    except ValueError:
        raise PolicyError("which claim?") from None
    # What has ended since it was listed has an outcome, which nobody asked to forget.
    if (await ainspect(gateway.store, key)).situation not in _UNDER_WAY:
        return False
    found = await aevict(gateway.store, key)
    if found.evicted:
        await gateway.inbox.record("free claim", digest, "", actor=person.name)
    return found.evicted
