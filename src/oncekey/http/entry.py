"""Who calls, asked in both forms: they differ by what is awaited."""

from __future__ import annotations

import inspect

from oncekey._core.drive import arun, run
from oncekey.abc import AsyncStore, Store
from oncekey.errors import OncekeyError
from oncekey.http.facts import Facts
from oncekey.http.rules import Rules
from oncekey.models import Scope

__all__ = ["aidentify", "identify"]


def identify(rules: Rules, store: Store, facts: Facts) -> Scope:
    """Whose keys these are.

    Raises:
        Refusal: Nobody's that is known, or the store can't be asked.
    """
    known = rules.callers.at_hand(facts)
    if known is not None:
        return known
    scope = rules.settings.scope
    named = None if scope is None else scope(facts.source)
    try:
        return run(rules.callers.scope(named, facts), store)
    except OncekeyError as error:
        raise rules.failure(error) from None


async def aidentify(rules: Rules, store: AsyncStore, facts: Facts) -> Scope:
    """See ``identify``. The scope function may be async."""
    known = rules.callers.at_hand(facts)
    if known is not None:
        return known
    scope = rules.settings.scope
    named = None if scope is None else scope(facts.source)
    if inspect.isawaitable(named):
        named = await named
    try:
        return await arun(rules.callers.scope(named, facts), store)
    except OncekeyError as error:
        raise rules.failure(error) from None
