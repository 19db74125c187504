"""What to tell a person about an answer or an effect that is not as it should be."""

from __future__ import annotations

from typing import Final, Literal

from oncekey.testing._targets import Answer

__all__ = [
    "EFFECT_LOST",
    "EFFECT_TWICE",
    "HANDLED_TWICE",
    "Kind",
    "about_copy",
    "about_first",
    "about_retry",
]

Kind = Literal["once", "twice", "at once", "crash", "replay", "storm"]

_NOT_KNOWN: Final = (
    "copies are not recognised. Record the event's id, and look for it before the effect"
)
_RACE: Final = (
    "copies that came at once all went ahead. The look-up and the mark must be one atomic step, "
    "before the effect: a claim (INSERT ... ON CONFLICT DO NOTHING, SET NX), not a check and then "
    "a mark"
)
EFFECT_TWICE: Final[dict[Kind, str]] = {
    "once": "one delivery did it more than once",
    "twice": _NOT_KNOWN,
    "at once": _RACE,
    "replay": f"{_NOT_KNOWN}, in one atomic step",
    "storm": _RACE,
    "crash": "the worker died after the effect and before the mark, so the retry did it again. "
    "Commit both in one transaction (transactional=True), or give the effect a key of its own "
    "that makes it happen once (the event's id as the idempotency key of the call)",
}
HANDLED_TWICE: Final[dict[Kind, str]] = {
    kind: f"more than one copy was handled: {text}" for kind, text in EFFECT_TWICE.items()
}
_LOST: Final = (
    "the sender does not send it again, so it is lost. Answer 2xx only when the effect is done"
)
EFFECT_LOST: Final[dict[Kind, str]] = {
    "once": _LOST,
    "twice": _LOST,
    "at once": _LOST,
    "replay": _LOST,
    "storm": _LOST,
    "crash": "the event was marked as done before its effect, and the worker died between them. "
    "Mark it after the effect, or in the same transaction; before it, only claim it for a while "
    "(a lease)",
}

_FIRST: Final = {
    301: "senders do not follow redirects: give the final URL, with or without a slash at its end",
    400: "it was taken for malformed: is the body read as raw bytes, and is the id where the "
    "provider puts it?",
    401: "the signature was refused: has the target the secret that the sample was signed with "
    "(pass your own provider to sample()), and does it verify the raw bytes?",
    403: "something refused it before your code: a login, a firewall, or a CSRF check "
    "(csrf_exempt in Django)",
    404: "nothing is at this path: pass the path of your endpoint, sample(..., url='/hooks')",
    405: "the endpoint does not take this method: route POST to it",
    409: "it counts as a conflict, but nobody sent it before: use a fresh id, or an empty store",
    413: "the body is too large for the target: raise the limit",
    415: "the content type is not taken: accept application/json",
    422: "a validator refused it before your code: take the raw body, not a parsed model",
    429: "a rate limit struck: raise it for the test",
}
_GIVES_UP: Final = "senders treat that as a failure and retry for days; answer 2xx"


_OLD: Final = (
    "the signature was refused: one that was recorded is too old by now; pass provider= to have "
    "the deliveries signed anew"
)


def about_first(answer: Answer, kind: Kind = "once") -> str:
    """What is wrong where no copy was handled."""
    if answer.outcome in ("ignored", "unhandled"):
        return (
            "nobody handles it: the receiver has no handler for its type. Pass type= to sample(), "
            "or register one"
        )
    if answer.outcome == "dead":
        return "the handler gave the event up with PermanentError: it is with the dead letters"
    if not answer.status:
        return f"no answer came ({answer.excerpt}): is the server running, and is this its address?"
    status = answer.status
    if status >= 500:
        why = "the handler failed"
        if answer.outcome == "in_flight":
            why = "another worker has the event in hand, and did not end"
        if answer.outcome == "unavailable":
            why = "the store failed"
    elif status == 401 and kind == "replay":
        why = _OLD
    else:
        why = _FIRST.get(301 if 300 <= status < 400 else status, "that is no answer to a delivery")
    return _shown(f"the delivery was answered {_status(answer)}: {why}", answer)


def about_copy(answer: Answer) -> str:
    """What is wrong with the answer to a copy of an event that was handled."""
    status = answer.status
    if not status:
        return f"a copy of a handled event got no answer ({answer.excerpt})"
    said = f"the duplicate was answered {_status(answer)}"
    if status == 429:
        return f"{said}: a rate limit struck; copies of handled events should pass it"
    if status == 503:
        return (
            f"{said}, though its event was handled: the sender retries for nothing; answer 2xx as "
            "soon as the event is marked as done"
        )
    if status >= 500:
        return _shown(
            f"{said}: the sender retries for nothing. An error of a unique constraint that nobody "
            "catches is the usual cause: it means that the event is known; answer 2xx",
            answer,
        )
    if status == 401:
        return _shown(
            f"{said}: a retry is signed anew, and must be verified anew; answer 2xx", answer
        )
    return _shown(f"{said}: {_GIVES_UP}", answer)


def about_retry(answer: Answer) -> str:
    """What is wrong if the retry after a crash is not taken."""
    if answer.retryable:
        return _shown(
            f"the retry after the crash was answered {_status(answer)}, and so were all that "
            "followed: nothing frees the event of a worker that died. Give its claim an end (a "
            "lease); if it has one, pass clock= with the store's ManualClock, or a shorter lease",
            answer,
        )
    return about_first(answer)


def _status(answer: Answer) -> str:
    return f"{answer.status} ({answer.code})" if answer.code else str(answer.status or "nothing")


def _shown(text: str, answer: Answer) -> str:
    return f"{text} [{answer.excerpt}]" if answer.excerpt else text
