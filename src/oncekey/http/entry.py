"""The way in, the same for every adapter: who calls, and whether the request runs now.

Everything that ends a request here is a ``Refusal``. The two forms differ by what they await.
"""

from __future__ import annotations

import inspect

from oncekey._core.call import Job, aopen_claim, open_claim
from oncekey._core.drive import arun, run
from oncekey._core.flows import Claim
from oncekey.abc import AsyncStore, Store
from oncekey.errors import OncekeyError
from oncekey.http.answer import Answer
from oncekey.http.facts import Facts
from oncekey.http.rules import Rules
from oncekey.models import Scope

__all__ = ["aadmit", "admit", "aenter", "aidentify", "enter", "identify"]


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


def admit(rules: Rules, store: Store, job: Job) -> None:
    """Let a request pass whose caller may make a new key, or that has an old one.

    Raises:
        Refusal: There are too many new ones, or the store fails.
    """
    wait = rules.limits.wait(job)
    if wait is not None:
        try:
            run(rules.limits.check(job, wait), store)
        except OncekeyError as error:
            raise rules.failure(error) from None


async def aadmit(rules: Rules, store: AsyncStore, job: Job) -> None:
    """See ``admit``."""
    wait = rules.limits.wait(job)
    if wait is not None:
        try:
            await arun(rules.limits.check(job, wait), store)
        except OncekeyError as error:
            raise rules.failure(error) from None


def enter(rules: Rules, store: Store, job: Job, facts: Facts) -> Claim | Answer:
    """The right to run, or what to answer instead.

    Raises:
        Refusal: Another request has the key, there are too many new ones, or the store fails.
    """
    at_hand = rules.at_hand(job, facts)
    if at_hand is not None:
        return at_hand
    admit(rules, store, job)
    try:
        return rules.opened(job, open_claim(store, job), facts)
    except OncekeyError as error:
        raise rules.failure(error) from None


async def aenter(rules: Rules, store: AsyncStore, job: Job, facts: Facts) -> Claim | Answer:
    """See ``enter``."""
    at_hand = rules.at_hand(job, facts)
    if at_hand is not None:
        return at_hand
    await aadmit(rules, store, job)
    try:
        return rules.opened(job, await aopen_claim(store, job), facts)
    except OncekeyError as error:
        raise rules.failure(error) from None
