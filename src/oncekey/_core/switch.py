"""The switch that turns all guards of a process off, for development: ``ONCEKEY_GUARDING``.

It is looked at when a guard is made, and here only. Nothing but one long word turns guards off; on
a platform that is no developer's machine that word is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, TypeVar

from oncekey.errors import PolicyError

__all__ = ["OFF", "VARIABLE", "GuardingOffWarning", "guarding_is_off", "switched"]

VARIABLE: Final = "ONCEKEY_GUARDING"
OFF: Final = "off-in-development"

# What platforms set where programs run for others. A machine that has none may be one all the same.
_PLATFORMS: Final = {
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "AWS_LAMBDA_FUNCTION_NAME": "AWS Lambda",
    "ECS_CONTAINER_METADATA_URI_V4": "Amazon ECS",
    "K_SERVICE": "Cloud Run",
    "WEBSITE_INSTANCE_ID": "Azure App Service",
    "DYNO": "Heroku",
    "FLY_APP_NAME": "Fly.io",
    "RENDER_SERVICE_ID": "Render",
    "RAILWAY_ENVIRONMENT_ID": "Railway",
}

S = TypeVar("S")


class GuardingOffWarning(UserWarning):
    """Guarding is turned off by the environment: every copy of a call runs."""


def guarding_is_off(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment turns guards off.

    Raises:
        PolicyError: It says something else than the two words; or turns them off where others
            depend on this process.
    """
    word = environ.get(VARIABLE)
    if not word or word == "on":
        return False
    if word != OFF:
        raise PolicyError(
            f"{VARIABLE} is {word!r}, which is no word for it: unset it, which leaves every guard "
            f"on, or write {VARIABLE}={OFF} on your own machine"
        )
    where = next((name for sign, name in _PLATFORMS.items() if environ.get(sign)), "")
    if where:
        raise PolicyError(
            f"{VARIABLE}={OFF} would let every copy of a call run, and this is {where}, no "
            "developer's machine: unset it"
        )
    return True


def switched(store: S) -> S:
    """The store as a guard is to see it: itself, or one that lets every call run.

    Raises:
        PolicyError: See ``guarding_is_off``.
    """
    if VARIABLE not in os.environ or not guarding_is_off():
        return store
    from oncekey._core.unguarded import unguarded

    return unguarded(store)  # type: ignore[no-any-return]
