"""Values that JSON lacks, as JSON: an object with one name that begins with ``$`` says what it is.

The same value has the same form always. An object that is a value itself has no such name: one that
would, or whose keys are not text, is a list of pairs under ``$dict``.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import json
import sys
import typing
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast, get_args, get_origin

from oncekey.errors import UnsupportedAnswerError

__all__ = [
    "HINT",
    "TAGGED",
    "behind",
    "dump",
    "enum_named",
    "is_dataclass",
    "is_json",
    "is_model",
    "load",
    "name_of",
    "plain",
    "reachable",
    "subclasses",
    "validate",
]

TAGGED: Final = (
    decimal.Decimal,
    dt.datetime,
    dt.date,
    dt.time,
    dt.timedelta,
    uuid.UUID,
    bytes,
    tuple,
)
"""The types that JSON lacks and that come back as they were, beside enums."""

HINT: Final = (
    "return JSON values (dict, list, str, int, float, bool, None), tuples, bytes, decimals, dates "
    "and times, UUIDs, enums, or a Pydantic model or dataclass that the return annotation names"
)
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))
_TEXT: Final = frozenset((str,))
Find = Callable[[str], Any]


def is_model(kind: object) -> bool:
    """Whether ``kind`` is a Pydantic model."""
    return (
        isinstance(kind, type) and hasattr(kind, "model_validate") and hasattr(kind, "model_dump")
    )


def is_dataclass(kind: object) -> bool:
    """Whether ``kind`` is a dataclass, and not an instance of one."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def name_of(kind: type) -> str:
    """What a type is stored as."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_json(value: Any) -> bool:
    """Whether ``value`` is made of JSON values of the very types that JSON gives back."""
    kind = type(value)
    if kind is dict:
        if not _TEXT.issuperset(map(type, value)):
            return False
        parts = value.values()
    elif kind is list:
        parts = value
    else:
        return kind in _SCALARS
    return _SCALARS.issuperset(map(type, parts)) or all(map(is_json, parts))


def dump(value: Any) -> Any:
    """``value`` as JSON values.

    Raises:
        UnsupportedAnswerError: Part of it has no form. The message names its type, never a value.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, enum.Enum):
        if value.name not in kind.__members__:
            raise UnsupportedAnswerError(f"a combination of flags of {kind.__name__} has no name")
        return {"$enum": [name_of(kind), value.name]}
    if is_model(kind):
        return _dump_model(kind, value)
    if is_dataclass(kind):
        fields = {f.name: dump(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"$data": [name_of(kind), fields]}
    if isinstance(value, dict):
        if all(type(key) is str and key[:1] != "$" for key in value):
            return {key: dump(item) for key, item in value.items()}
        return {"$dict": [[dump(key), dump(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [dump(item) for item in value]
    if kind is tuple:
        return {"$tuple": [dump(item) for item in value]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    # A subclass, which is equal to what comes back.
    if isinstance(value, str):
        return str.__str__(value)
    for base in (bool, int, float):
        if isinstance(value, base):
            return base(value)
    return _dump_rest(value)


def _dump_rest(value: Any) -> Any:
    if isinstance(value, decimal.Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, uuid.UUID):
        return {"$uuid": str(value)}
    if isinstance(value, dt.datetime):
        zone = value.tzinfo
        if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
            return {"$datetime": [value.replace(tzinfo=None).isoformat(), value.fold, zone.key]}
        return {"$datetime": [value.isoformat(), value.fold]}
    if isinstance(value, dt.date):
        return {"$date": value.isoformat()}
    if isinstance(value, dt.time) and isinstance(value.tzinfo, (dt.timezone, type(None))):
        return {"$time": [value.isoformat(), value.fold]}
    if isinstance(value, dt.timedelta):
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    raise UnsupportedAnswerError(f"a {type(value).__name__} can't be stored; {HINT}")


def _dump_model(kind: type, value: Any) -> Any:
    try:
        fields = json.loads(value.model_dump_json(round_trip=True))
    except ValueError:  # bytes that are no text
        return {"$fields": [name_of(kind), dump(value.model_dump(round_trip=True))]}
    return {"$model": [name_of(kind), fields]}


def _tag(value: dict[str, Any]) -> tuple[str, Any]:
    return next(iter(value.items())) if len(value) == 1 else ("", None)


def load(value: Any, find: Find) -> Any:
    """The value of what ``dump`` gave. ``find`` gives the type for a name, or raises."""
    if type(value) is list:
        return [load(item, find) for item in value]
    if type(value) is not dict:
        return value
    tag, body = _tag(value)
    if tag[:1] != "$":
        return {key: load(item, find) for key, item in value.items()}
    if tag == "$dict":
        return {load(key, find): load(item, find) for key, item in body}
    if tag == "$tuple":
        return tuple(load(item, find) for item in body)
    if tag in _LOADERS:
        return _LOADERS[tag](body)
    kind = find(body[0])
    if tag == "$enum":
        return kind.__members__[body[1]]
    if tag == "$model":
        return validate(kind, json.dumps(body[1]), "model_validate_json")
    if tag == "$fields":
        return validate(kind, load(body[1], find), "model_validate")
    if tag == "$data":
        names = {f.name for f in dataclasses.fields(kind)}
        return kind(**{key: load(item, find) for key, item in body[1].items() if key in names})
    raise UnsupportedAnswerError(f"it has a part of a kind, {tag[:20]!r}, that is not known here")


def _load_datetime(body: list[Any]) -> dt.datetime:
    text, fold, *zone = body
    made = dt.datetime.fromisoformat(text).replace(fold=fold)
    return made.replace(tzinfo=zoneinfo.ZoneInfo(zone[0])) if zone else made


_LOADERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$decimal": decimal.Decimal,
    "$uuid": uuid.UUID,
    "$bytes": lambda body: base64.b64decode(body, validate=True),
    "$datetime": _load_datetime,
    "$date": dt.date.fromisoformat,
    "$time": lambda body: dt.time.fromisoformat(body[0]).replace(fold=body[1]),
    "$timedelta": lambda body: dt.timedelta(*body),
}


def plain(value: Any) -> Any:
    """What ``dump`` gave, with the tags taken off: for readers that want JSON, whatever it was."""
    if type(value) is list:
        return [plain(item) for item in value]
    if type(value) is not dict:
        return value
    tag, body = _tag(value)
    if tag[:1] != "$":
        return {key: plain(item) for key, item in value.items()}
    if tag == "$dict":
        return {str(plain(key)): plain(item) for key, item in body}
    if tag in ("$fields", "$data"):
        return plain(body[1])
    if tag in ("$model", "$enum", "$datetime", "$time"):
        return body[0 if "time" in tag else 1]
    return plain(body)


def validate(kind: Any, value: Any, how: str) -> Any:
    """A model of what it was dumped as: by field names, not aliases, as strictly as from a wire."""
    method = getattr(kind, how)
    try:
        return method(value, by_alias=False, by_name=True)
    except TypeError:  # Pydantic before 2.11
        return method(value)


def reachable(roots: Iterable[Any]) -> dict[str, type]:
    """The models, dataclasses and enums that annotations speak of, by their stored names."""
    found: dict[str, type] = {}
    seen: list[Any] = []

    def walk(kind: Any) -> None:
        if any(kind is other for other in seen):
            return
        seen.append(kind)
        if is_model(kind) or is_dataclass(kind) or isinstance(kind, enum.EnumMeta):
            found[name_of(kind)] = kind
        if is_dataclass(kind) or typing.is_typeddict(kind):
            try:
                hints = typing.get_type_hints(kind)
            except (NameError, TypeError):
                hints = {}
            for hint in hints.values():
                walk(hint)
        for part in (*get_args(kind), get_origin(kind), behind(kind)):
            walk(part)

    for root in roots:
        walk(root)
    for kind in list(found.values()):
        if not kind.__module__.startswith("pydantic"):  # a model of any kind would be everything
            for derived in subclasses(kind):
                found.setdefault(name_of(derived), derived)
    return found


def behind(kind: Any) -> Any:
    """What a ``NewType`` or a ``type`` alias stands for, else ``None``."""
    if isinstance(kind, typing.NewType):
        return kind.__supertype__
    return kind.__value__ if type(kind).__name__ == "TypeAliasType" else None


def subclasses(kind: type) -> Iterator[type]:
    """All classes that are made of ``kind``, as far as they are imported."""
    derived: list[type] = type.__subclasses__(kind)
    for inner in derived:
        yield inner
        yield from subclasses(inner)


def enum_named(name: str) -> type[enum.Enum] | None:
    """An enum among the modules that are imported already. To find one runs no code of anybody."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        try:
            found = vars(found).get(part)
        except TypeError:
            return None
    return cast("type[enum.Enum]", found) if isinstance(found, enum.EnumMeta) else None
