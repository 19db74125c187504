"""Models as JSON values, whole: with what Pydantic masks, drops or leaves out of a dump.

A dump is for showing, and hides what tells two payloads apart: secrets are masked, a field that is
declared as a base class loses what a subclass adds, and excluded fields are gone. Here the dump is
walked beside the model, and only what is missing is put back: a model without any of that has the
form that its dump has. What an author's own serializer gives is taken at its word.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["is_secret", "whole"]

_LEAVES: Final = frozenset((str, int, float, bool, type(None)))
_ROWS: Final = (list, tuple, set, frozenset, deque)
_OWN_WORD: Final = frozenset(("PlainSerializer", "WrapSerializer"))
_NOT_THERE: Final = object()


def whole(model: Any, secret: Callable[[Any], Any], **said: bool) -> Any:
    """A model as JSON values; what has no such form is left in it as it is.

    Args:
        model: A Pydantic model, or what has ``model_dump`` as one does.
        secret: What stands for the value of a secret.
        **said: ``exclude_unset`` and ``exclude_defaults``, as ``model_dump`` takes them.
    """
    dumped = model.model_dump(mode="json", **said)
    if not isinstance(getattr(type(model), "model_fields", None), dict):
        return _Walk(secret, said).value(dumped, model.model_dump(**said))
    return _Walk(secret, said).value(dumped, model)


def is_secret(value: Any) -> bool:
    """Whether a value hides another, as Pydantic's ``Secret`` types do."""
    return hasattr(type(value), "get_secret_value")


class _Walk:
    """What of a dump differs from the values that it was made of is put right."""

    def __init__(self, secret: Callable[[Any], Any], said: dict[str, bool]) -> None:
        self._secret = secret
        self._said = said

    def value(self, dumped: Any, real: Any) -> Any:
        """``dumped``, whole."""
        kind = type(real)
        if kind in _LEAVES:
            return dumped
        if isinstance(real, Mapping):
            return self._mapping(dumped, real)
        if isinstance(real, _ROWS):
            return self._row(dumped, real)
        if is_secret(real):
            return self._left_out(real.get_secret_value(), self._secret)
        if isinstance(getattr(kind, "model_fields", None), dict):
            return self._model(dumped, real)
        if dataclasses.is_dataclass(real):
            return self._fields(dumped, real, getattr(kind, "__pydantic_fields__", {}))
        return dumped

    def _mapping(self, dumped: Any, real: Mapping[Any, Any]) -> Any:
        if any(map(is_secret, real)):  # all alike in the dump, where one is left of them
            pairs = [[self._left_out(one) for one in pair] for pair in real.items()]
            return sorted(pairs, key=_text)
        if type(dumped) is not dict:
            return dumped
        if all(isinstance(name, str) for name in real):
            named = {str.__str__(name): value for name, value in real.items()}
            return {
                name: self.value(one, named[name]) if name in named else one
                for name, one in dumped.items()
            }
        if len(dumped) != len(real):
            return dumped
        pairs = zip(dumped.items(), real.values(), strict=True)  # type: ignore[assignment]
        return {name: self.value(one, value) for (name, one), value in pairs}

    def _row(self, dumped: Any, real: Any) -> Any:
        if type(dumped) is not list or len(dumped) != len(real):
            return dumped
        found = [self.value(*pair) for pair in zip(dumped, real, strict=True)]
        if isinstance(real, (set, frozenset)) and found != dumped:
            found.sort(key=_text)  # they have no order that another process would give them
        return found

    def _model(self, dumped: Any, real: Any) -> Any:
        kind, said = type(real), self._said
        if _decorated(kind, "model_serializers"):
            return self.value(real.model_dump(mode="json", **said), real.model_dump(**said))
        if getattr(kind, "__pydantic_root_model__", False):
            return self.value(dumped, real.root)
        return self._fields(dumped, real, kind.model_fields)

    def _fields(self, dumped: Any, real: Any, declared: Mapping[str, Any]) -> Any:
        """A model's or a dataclass's: those of the dump, and those that it lacks."""
        kind = type(real)
        if type(dumped) is not dict or _decorated(kind, "model_serializers"):
            return dumped
        found = dict(dumped)
        written = _written(kind, declared)
        plain: dict[str, Any] | None = None  # as its own serializers have it, and
        own: dict[str, Any] | None = None  # as its own type has it
        for name, value, set_here in self._held(real, dumped):
            info = declared.get(name)
            key = _shown(kind, name, info)
            if key in dumped and (name in written or "*" in written):
                plain = _dump(real, self._said) if plain is None else plain
                found[key] = self.value(dumped[key], plain.get(key, _NOT_THERE))
            elif key in dumped:
                found[key] = self.value(dumped[key], value)
            elif set_here and (_hidden(info) or not hasattr(kind, "model_dump")):
                found[key] = self._left_out(value)
            elif set_here:  # unless it is a default, which need not be said
                own = _dump(real, {**self._said, "mode": "json"}) if own is None else own
                if key in own:
                    found[key] = self.value(own[key], value)
        return found

    def _held(self, real: Any, dumped: dict[str, Any]) -> list[tuple[str, Any, bool]]:
        """What a model or dataclass holds: names, values, and whether they count if not dumped."""
        kind, short = type(real), self._said.get("exclude_defaults", False)
        if not hasattr(kind, "model_fields"):
            return [
                (one.name, value, one.init and not (short and _is_default(value, one)))
                for one in dataclasses.fields(real)
                if (value := getattr(real, one.name, _NOT_THERE)) is not _NOT_THERE
            ]
        inside = vars(real)
        given = real.model_fields_set if self._said.get("exclude_unset") else inside.keys()
        held = [
            (name, inside[name], name in given and not (short and _is_default(inside[name], one)))
            for name, one in kind.model_fields.items()
            if name in inside
        ]
        extra = getattr(real, "__pydantic_extra__", None) or {}
        held += [(name, value, True) for name, value in extra.items()]
        made = getattr(kind, "model_computed_fields", {})
        seen = [name for name in made if _shown(kind, name, None) in dumped]
        return held + [(name, getattr(real, name), False) for name in seen]

    def _left_out(self, value: Any, shown: Callable[[Any], Any] | None = None) -> Any:
        """A value that has no place in the dump. As it is, if it can't be dumped."""
        if shown is not None and isinstance(value, (str, bytes)):
            return shown(value)
        try:
            dumped = sys.modules["pydantic_core"].to_jsonable_python(value)
        except Exception:  # noqa: BLE001 - whatever its serializer raises: it is told as no value
            return value
        found = self.value(dumped, value)
        return found if shown is None else shown(found)


def _dump(real: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    dump = getattr(real, "model_dump", None)
    dumped = {} if dump is None else dump(**said)
    return dumped if isinstance(dumped, dict) else {}


def _decorated(kind: Any, what: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(getattr(kind, "__pydantic_decorators__", None), what, {})
    return found


def _written(kind: Any, declared: Mapping[str, Any]) -> set[str]:
    """The fields that their author wrote a serializer for."""
    found = {
        name for one in _decorated(kind, "field_serializers").values() for name in one.info.fields
    }
    for name, info in declared.items():
        if any(type(one).__name__ in _OWN_WORD for one in getattr(info, "metadata", ())):
            found.add(name)
    return found


def _shown(kind: Any, name: str, info: Any) -> str:
    """What a field is called in a dump."""
    settings = getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None)
    if not settings or not settings.get("serialize_by_alias"):
        return name
    if info is None:  # computed, or extra
        info = getattr(kind, "model_computed_fields", {}).get(name)
        return getattr(info, "alias", None) or name
    return getattr(info, "serialization_alias", None) or name


def _hidden(info: Any) -> bool:
    """Whether a field is left out of its own type's dump, or has none."""
    return info is None or info.exclude is True or getattr(info, "exclude_if", None) is not None


def _is_default(value: Any, field: Any) -> bool:
    make = field.default_factory
    try:
        return bool(value == (make() if callable(make) else field.default))
    except Exception:  # noqa: BLE001 - an array has no one answer, and a factory may want more
        return False


def _text(form: Any) -> str:
    return json.dumps(form, sort_keys=True, default=str)
