"""Providers whose checks may have to ask somebody: who has the key, or whether a nonce was used.

The checks are a generator that yields what it asks for, so that they are written once for
``verify`` and ``averify``, and neither hides a loop or a thread.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
from abc import abstractmethod
from collections.abc import Generator
from typing import Any, NoReturn, Self, TypeVar

from oncekey._core.drive import Op, adrive, drive
from oncekey.errors import BackendMismatchError, StoreError
from oncekey.signatures.algorithms import SignatureKey
from oncekey.signatures.base import Facts, Provider
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.jwks import FetchedKeys, KeySet
from oncekey.signatures.nonces import NonceOutcome, Nonces
from oncekey.signatures.parsing import Rejection
from oncekey.signatures.verdict import CODES, Nonce, Verdict

__all__ = ["AskingProvider", "Checks", "arun_checks", "run_checks"]

logger = logging.getLogger("oncekey")

T = TypeVar("T")
Checks = Generator[Op, Any, T]


def run_checks(checks: Checks[T]) -> T:
    """Run checks that ask only what can be answered at once.

    Raises:
        BackendMismatchError: Something must be awaited.
    """
    return drive(checks, _ask)


def _ask(step: Op) -> Any:
    answer = getattr(step.on, step.method)(*step.args)
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise BackendMismatchError("this must be awaited: use averify")
    return answer


async def arun_checks(checks: Checks[T]) -> T:
    """Run checks, awaiting what must be awaited."""
    return await adrive(checks, _aask)


async def _aask(step: Op) -> Any:
    answer = getattr(step.on, step.method)(*step.args)
    return await answer if inspect.isawaitable(answer) else answer


class AskingProvider(Provider):
    """A provider whose checks are written once, for ``verify`` and ``averify``."""

    def __init__(
        self,
        facts: Facts,
        *,
        keys: KeySet | FetchedKeys,
        nonces: Nonces | None,
        signing_key: SignatureKey | None,
        key_id: str,
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        self._keys, self._nonces = keys, nonces
        self.signing_key, self.key_id = signing_key, key_id

    def with_nonces(self, nonces: Nonces) -> Self:
        """The same provider with a place to keep nonces, unless it has one."""
        if self._nonces is not None:
            return self
        bound = copy.copy(self)
        bound._nonces = nonces
        return bound

    @property
    def is_async(self) -> bool:
        """Whether something must be awaited, so that only ``averify`` works."""
        return self._keys.is_async or (self._nonces is not None and self._nonces.is_async)

    def judge(self, delivery: Delivery, now: float | None = None) -> Verdict:
        """``verify`` a delivery that is put together already.

        Raises:
            BackendMismatchError: Keys or nonces must be awaited: use ``averify``.
        """
        if self.is_async:
            raise BackendMismatchError(
                f"{self.name}: the keys or the nonces must be awaited: use averify"
            )
        return run_checks(self._verdict(delivery, time.time() if now is None else now))

    async def ajudge(self, delivery: Delivery, now: float | None = None) -> Verdict:
        """``averify`` a delivery that is put together already."""
        return await arun_checks(self._verdict(delivery, time.time() if now is None else now))

    def _verdict(self, delivery: Delivery, now: float) -> Checks[Verdict]:
        try:
            return (yield from self._checks(delivery, now))
        except Rejection as found:
            return Verdict.rejected(found.code, found.message, transient=found.transient)

    @abstractmethod
    def _checks(self, delivery: Delivery, now: float) -> Checks[Verdict]:
        """All checks, in their order.

        Raises:
            Rejection: With the code of the first thing that is wrong.
        """

    def _use(self, nonces: Nonces, nonce: Nonce) -> Checks[NonceOutcome]:
        """Use a nonce up.

        Raises:
            Rejection: ``store_unavailable``, transient: nobody can tell whether it is a replay, so
                it is not accepted, and it is not the sender's fault either.
        """
        try:
            return (yield from nonces.using(nonce))
        except BackendMismatchError:
            raise
        except Exception as error:
            known = isinstance(error, StoreError)
            logger.warning(
                "%s: nonces can't be looked up, the sender is told to retry: %s",
                self.name,
                error if known else type(error).__name__,
                exc_info=None if known else error,
            )
            raise Rejection(
                "store_unavailable", CODES["store_unavailable"], transient=True
            ) from None

    def _prove(self, delivery: Delivery, now: float) -> NoReturn:
        raise NotImplementedError("_checks stands in its place")
