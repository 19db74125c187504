"""The way in, the same for every adapter: who calls, and whether the request runs now.

Everything that ends a request here is a ``Refusal``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

from oncekey._core.call import Job, aopen_claim, open_claim
from oncekey._core.drive import arun, run
from oncekey._core.flows import Claim
from oncekey.abc import AsyncStore, Store
from oncekey.errors import OncekeyError
from oncekey.http.answer import Answer
from oncekey.http.facts import Facts
from oncekey.http.rules import Rules
from oncekey.models import ClaimReply

__all__ = ["aenter", "aidentify", "enter", "identify"]


@contextlib.contextmanager
def _refusing(rules: Rules) -> Iterator[None]:
    try:
        yield
    except OncekeyError as error:
        raise rules.failure(error) from None


def identify(rules: Rules, store: Store, facts: Facts) -> tuple[str, str]:
    """Who is calling.

    Raises:
        Refusal: Nobody that is known, or the store can't be asked.
    """
    scope = rules.settings.scope
    named = None if scope is None else scope(facts.source)
    with _refusing(rules):
        return run(rules.callers.caller(named, facts.authorization), store)


async def aidentify(rules: Rules, store: AsyncStore, facts: Facts) -> tuple[str, str]:
    """See ``identify``. The scope function may be async."""
    scope = rules.settings.scope
    named = None if scope is None else scope(facts.source)
    if inspect.isawaitable(named):
        named = await named
    with _refusing(rules):
        return await arun(rules.callers.caller(named, facts.authorization), store)


def enter(rules: Rules, store: Store, job: Job, facts: Facts) -> Claim | Answer:
    """The right to run, or what to answer instead.

    Raises:
        Refusal: Another request has the key, there are too many new ones, or the store fails.
    """
    at_hand = _at_hand(rules, job, facts)
    if at_hand is not None:
        return at_hand
    with _refusing(rules):
        run(rules.limits.check(job), store)
        return _opened(rules, job, open_claim(store, job), facts)


async def aenter(rules: Rules, store: AsyncStore, job: Job, facts: Facts) -> Claim | Answer:
    """See ``enter``."""
    at_hand = _at_hand(rules, job, facts)
    if at_hand is not None:
        return at_hand
    with _refusing(rules):
        await arun(rules.limits.check(job), store)
        return _opened(rules, job, await aopen_claim(store, job), facts)


def _at_hand(rules: Rules, job: Job, facts: Facts) -> Answer | None:
    found = None if rules.local is None else rules.local.get(job)
    return None if found is None else rules.replay(found, facts)


def _opened(rules: Rules, job: Job, claim: Claim | ClaimReply, facts: Facts) -> Claim | Answer:
    if isinstance(claim, Claim):
        rules.limits.count(job, claim)
        return claim
    answer = rules.stored(job, claim)
    if rules.local is not None:
        rules.local.put(job, answer)
    return rules.replay(answer, facts)
