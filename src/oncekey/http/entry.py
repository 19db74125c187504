"""What is opened and asked for a guard, in both forms: they differ by what is awaited."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from oncekey._core.drive import arun, run
from oncekey._core.limiter import check_limits
from oncekey._core.switch import switched
from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError, OncekeyError
from oncekey.http.callers import unnamed
from oncekey.http.facts import Facts
from oncekey.http.rules import Rules, settings_of
from oncekey.http.settings import Settings
from oncekey.models import Scope
from oncekey.stores.urls import aconnect, connect, what_is

if TYPE_CHECKING:
    from oncekey.http.options import SettingsOptions

__all__ = ["aidentify", "aready", "identify", "ready"]


S = TypeVar("S", bound=Store | AsyncStore)


def _seen(store: S, settings: Settings) -> tuple[S, Settings]:
    """The store as these settings' word for outages says, and the environment's switch."""
    check_limits(settings.limits, store)
    if settings.on_outage is not None or settings.journal is not None:
        from oncekey.resilience.outage import seen_by

        store = seen_by(store, settings.on_outage, settings.journal)
    used = switched(store)
    return used, settings if used is store else replace(settings, cache_entries=0)


def check_app(app: object, wants: int) -> None:
    """Refuse an app of the other kind, if its parameters tell: ASGI has three, WSGI two.

    Raises:
        BackendMismatchError: It is one.
    """
    try:
        takes = inspect.signature(app).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    plain = [one for one in takes if one.default is one.empty and one.kind in _BY_PLACE]
    if len(plain) != len(takes) or len(plain) != 5 - wants:
        return
    its, here = ("WSGI", "ASGI") if wants == 3 else ("ASGI", "WSGI")
    raise BackendMismatchError(
        f"this app is one of {its}, and this is the middleware for {here}: import "
        f"IdempotencyMiddleware from oncekey.adapters.{its.lower()}"
    )


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def ready(
    store: Store | str, settings: Settings | None, options: SettingsOptions
) -> tuple[Store, Settings]:
    """An open store and checked settings, from what somebody gave.

    Raises:
        PolicyError: An option can't work.
        BackendMismatchError: The store is of the other kind.
    """
    checked = settings_of(settings, options)
    opened = connect(store) if isinstance(store, str) else store
    if isinstance(opened, Store):
        return _seen(opened, checked)
    name = type(store).__name__
    other = name.removeprefix("Async") if isinstance(store, AsyncStore) else "MemoryStore"
    raise BackendMismatchError(
        f"this needs a sync store, got {what_is(store)}: pass a URL, {other}(...) or connect(url)"
    )


def aready(
    store: AsyncStore | str, settings: Settings | None, options: SettingsOptions
) -> tuple[AsyncStore, Settings]:
    """See ``ready``."""
    checked = settings_of(settings, options)
    opened = aconnect(store) if isinstance(store, str) else store
    if isinstance(opened, AsyncStore):
        return _seen(opened, checked)
    name = type(store).__name__
    other = f"Async{name}" if isinstance(store, Store) else "AsyncMemoryStore"
    raise BackendMismatchError(
        f"this needs an async store, got {what_is(store)}: pass a URL, {other}(...) or "
        "aconnect(url)"
    )


# What a scope function raises by mistake. Others may be meant for the framework to answer.
_SLIPS: Final = (AttributeError, LookupError, TypeError)


def identify(rules: Rules, store: Store, facts: Facts) -> Scope:
    """Whose keys these are.

    Raises:
        Refusal: Nobody's that is known, or the store can't be asked.
    """
    known = rules.callers.at_hand(facts.authorization)
    if known is not None:
        return known
    scope = rules.settings.scope
    try:
        named = None if scope is None else scope(facts.source)
    except _SLIPS as error:
        raise unnamed(error) from error
    try:
        return run(rules.callers.scope(named, facts), store)
    except OncekeyError as error:
        raise rules.failure(error) from None


async def aidentify(rules: Rules, store: AsyncStore, facts: Facts) -> Scope:
    """See ``identify``. The scope function may be async."""
    known = rules.callers.at_hand(facts.authorization)
    if known is not None:
        return known
    scope = rules.settings.scope
    try:
        named = None if scope is None else scope(facts.source)
        if inspect.isawaitable(named):
            named = await named
    except _SLIPS as error:
        raise unnamed(error) from error
    try:
        return await arun(rules.callers.scope(named, facts), store)
    except OncekeyError as error:
        raise rules.failure(error) from None
