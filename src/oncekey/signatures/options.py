"""What a provider is made with, checked once: secrets, and what its user must say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oncekey.errors import PolicyError

if TYPE_CHECKING:
    from oncekey.signatures.base import Facts

__all__ = ["Secrets", "as_bytes", "as_secrets", "check_accepted"]

Secrets = str | bytes | Sequence[str | bytes]


def check_accepted(facts: Facts, accepted: str) -> None:
    """Have the user say what a provider does not sign, where that is what handlers go by.

    Raises:
        PolicyError: It was not said, or something else was.
    """
    what = facts.unsigned.get("what", "")
    if accepted != what:
        raise PolicyError(
            f"{facts.title}: {facts.unsigned['why']}. Pass accept_unsigned={what!r} to say that "
            "you know"
            if what
            else f"{facts.title} signs its deliveries: leave accept_unsigned= out"
        )


def as_secrets(
    facts: Facts, secret: Secrets | None, previous: Secrets | None = None
) -> list[str | bytes]:
    """All secrets in one list, the current ones first.

    Raises:
        PolicyError: None was given, or one is empty or of another type.
    """
    found: list[str | bytes] = []
    for name, given in (("secret", secret), ("previous", previous)):
        if given is None and name == "previous":
            continue
        several = [given] if isinstance(given, (str, bytes)) or given is None else list(given)
        if not several or any(not one for one in several):
            raise PolicyError(
                f"{name}= is empty: pass {facts.secret} of {facts.title}. An environment variable "
                "that is not set is the usual cause"
            )
        for one in several:
            if not isinstance(one, (str, bytes)):
                raise PolicyError(f"{name}= must be text or bytes, got {type(one).__name__}")
            if isinstance(one, str) and "-----BEGIN " in one:
                one = one.strip()  # PEM ends with a line break, as every file of one does
            if isinstance(one, str) and one != one.strip():
                raise PolicyError(f"{name}= has white space around it; strip it, a line end mostly")
            found.append(one)
    return found


def as_bytes(facts: Facts, secret: str | bytes) -> bytes:
    """A secret's UTF-8 bytes.

    Raises:
        PolicyError: It can't be encoded.
    """
    if isinstance(secret, bytes):
        return secret
    try:
        return secret.encode()
    except UnicodeEncodeError:
        raise PolicyError(f"the secret of {facts.title} is not valid text") from None
