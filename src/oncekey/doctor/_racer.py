"""One of the processes of a race; see ``racing``. Told what to do by standard input."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any, Final

from oncekey._core.flows import new_owner
from oncekey.errors import OncekeyError
from oncekey.models import ClaimVerdict, Key, Scope, Terms
from oncekey.stores.urls import connect

_TERMS: Final = Terms(lease_ms=30_000, ttl_ms=60_000)


def _tell(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _main() -> None:
    task = json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore")  # the doctor says it better
    try:
        with connect(task["url"]) as store:
            store.now()
            _tell({"ready": True})
            sys.stdin.readline()
            scope = Scope("oncekey", "doctor", task["scope"])
            won: dict[int, tuple[Key, bytes, int]] = {}
            for number in range(task["keys"]):
                key, owner = Key(scope, str(number)), new_owner()
                reply = store.claim(key, owner, b"", _TERMS)
                if reply.verdict is ClaimVerdict.WON:
                    won[number] = (key, owner, reply.fence)
            _tell({"won": list(won)})
            sys.stdin.readline()  # all have told
            for held in won.values():
                store.release(*held)
    except OncekeyError as error:
        _tell({"error": str(error)})


if __name__ == "__main__":
    _main()
