"""Errors as outcomes: kept in the store, and raised again for later callers.

``r``, then JSON: the name of the type, its arguments, attributes and notes, values in the form of
``values``. Only types that the guard declares are built, and their subclasses, without a call of
``__init__``: whoever can write to the store can have nothing built that the code does not name. The
cause, the context and the traceback are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from oncekey._core.values import dump, enum_named, load, name_of, plain, subclasses
from oncekey.errors import OncekeyError, StoreCorruptError, UnsupportedAnswerError

__all__ = ["FAILED", "failure", "is_outcome", "rebuilt", "shown_failure"]

FAILED: Final = b"r"
"""The first byte of an outcome that is an error."""

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_REPLAYED: Final = "Replayed by oncekey: raised first by an earlier call with the same key."


def is_outcome(error: BaseException, declared: tuple[type[Exception], ...]) -> bool:
    """Whether an error is the outcome of the work. One of oncekey's own never is."""
    return isinstance(error, declared) and not isinstance(error, OncekeyError)


def failure(error: BaseException) -> bytes:
    """An error as it is stored.

    Raises:
        UnsupportedAnswerError: It could not be raised again as it was.
    """
    kind = type(error)
    state, lost = {}, []
    for name, value in vars(error).items():
        if name.startswith("__"):
            continue
        try:
            state[name] = _kept(value)
        except Exception:  # noqa: BLE001 - whatever it is: a response, a lock, an open file
            lost.append(name)
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    if lost:
        notes.append(f"Not kept by oncekey: {', '.join(sorted(lost))}.")
    form: dict[str, Any] = {"type": name_of(kind), "state": state, "notes": notes}
    try:
        form["args"] = _kept(list(error.args))
        raw = FAILED + _encoder.encode(form).encode("utf-8", "surrogatepass")
        again = rebuilt(raw, (kind,))  # type: ignore[arg-type]
        same = again.args == error.args and str(again) == str(error)
    except Exception as why:
        raise UnsupportedAnswerError(_changed(kind, type(why).__name__)) from why
    if not same:
        raise UnsupportedAnswerError(_changed(kind, "its text or arguments would differ"))
    return raw


def _changed(kind: type, why: str) -> str:
    return (
        f"{kind.__name__} could not be raised again as it was ({why}): give it arguments that are "
        "JSON values, decimals, dates, UUIDs or bytes, and make its text of them"
    )


def _kept(value: Any) -> Any:
    """A value as JSON that gives it back."""
    form = dump(value)
    if load(form, _no_type) != value:
        raise ValueError("it would come back changed")
    return form


def _no_type(name: str) -> Any:
    """No type is found but an enum, whose members are there already."""
    found = enum_named(name)
    if found is not None:
        return found
    raise UnsupportedAnswerError(f"{name} is a type of its own, which an error can't hold")


def rebuilt(raw: bytes, declared: tuple[type[Exception], ...]) -> Exception:
    """The error that was stored, to be raised.

    Raises:
        UnsupportedAnswerError: Its type is not among those that are declared, or has changed.
        StoreCorruptError: The stored bytes are none.
    """
    try:
        form = json.loads(raw[1:])
        name, notes = str(form["type"]), list(map(str, form["notes"]))
        args, state = load(form["args"], _no_type), load(form["state"], _no_type)
        args, state = tuple(args), {str(key): value for key, value in state.items()}
    except UnsupportedAnswerError:
        raise
    except Exception as error:
        raise StoreCorruptError(
            "a stored error can't be read: restore the store from a backup, or delete that record "
            "if its work may run once more"
        ) from error
    kind = next((one for one in _with_subclasses(declared) if name_of(one) == name), None)
    if kind is None:
        raise UnsupportedAnswerError(
            f"the recorded outcome of this key is an error of the type {name}, which replay_errors "
            f"does not name here: write replay_errors=({name.rpartition(':')[2]},), or its base. "
            "Nothing runs again"
        )
    try:
        again = kind.__new__(kind, *args)
        again.args = args
        for key, value in state.items():
            if not key.startswith("__"):
                again.__dict__[key] = value
    except Exception as error:
        raise UnsupportedAnswerError(
            f"the recorded outcome of this key is an error of the type {name}, which can't be "
            f"built any more ({type(error).__name__}): has the type changed since?"
        ) from error
    for note in (*notes, *(() if _REPLAYED in notes else (_REPLAYED,))):
        again.add_note(note)
    return again


def _with_subclasses(kinds: Iterable[type[Exception]]) -> Iterable[type[Exception]]:
    for kind in kinds:
        yield kind
        yield from subclasses(kind)


def shown_failure(raw: bytes) -> Any:
    """What stands for a stored error where its type can't be built: as plain JSON."""
    form = json.loads(raw[1:])
    return {"error": form["type"], "args": plain(form["args"])}
