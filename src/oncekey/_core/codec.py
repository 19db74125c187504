"""Answers as bytes: JSON values, Pydantic models and dataclasses, given back as the same type.

One tag byte, then JSON. The tags: ``j`` a JSON value, ``d`` a container as the function declares it
(``list[Model]``), ``t`` a typed value (the type's name, a newline, the JSON), ``e`` a JSON value
with the exact time at which it ends (that, a newline, the JSON), ``o`` an answer that was not kept
(the digest of what it was, or nothing).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Union, get_args, get_origin

from oncekey.errors import AnswerOmittedError, StoreConfigError, UnsupportedAnswerError

__all__ = ["Codec", "decode_json", "encode_json", "omitted"]

SEALED: Final = b"\xe1"
"""The first byte of an encrypted answer, which only ``oncekey.encryption`` can open."""

_SCALARS: Final = (str, int, float, bool, type(None))
_HINT = (
    "return JSON values (dict with string keys, list, str, int, float, bool, None), a Pydantic "
    "model or a dataclass of those"
)
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_json(value: object) -> bytes:
    """JSON bytes that decode to an equal value.

    Raises:
        UnsupportedAnswerError: ``value`` is not made of JSON values, or would come back changed
            (a tuple, a dict with integer keys, a NaN).
    """
    try:
        # Half a surrogate pair can stand in a Python string; json.loads takes it back.
        raw = _encoder.encode(value).encode("utf-8", "surrogatepass")
        unchanged = json.loads(raw) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedAnswerError(f"the answer can't be stored: {error}; {_HINT}") from error
    if not unchanged:
        raise UnsupportedAnswerError(
            "the answer would come back changed (a tuple as a list, an integer key as a string?); "
            + _HINT
        )
    return raw


def decode_json(raw: bytes) -> Any:
    """The value of what ``encode_json`` or a typed answer stored, as plain JSON."""
    tag, body = raw[:1], raw[1:]
    if tag == b"o":
        raise AnswerOmittedError(
            "the call was done, but its answer was too large or of a kind that can't be kept: "
            "look the result up where the handler put it",
            body.decode() or None,
        )
    if tag == SEALED:
        raise StoreConfigError(
            "this answer is encrypted: wrap the store with oncekey.encryption.encrypted(...)"
        )
    if tag in (b"t", b"e"):
        body = body.split(b"\n", 1)[1]
    return json.loads(body) if body else None


def omitted(answer: bytes | None) -> bytes:
    """What is stored in place of an answer that can't be kept."""
    return b"o" + (hashlib.sha256(answer).hexdigest().encode() if answer is not None else b"")


def _is_model(kind: object) -> bool:
    return (
        isinstance(kind, type) and hasattr(kind, "model_validate") and hasattr(kind, "model_dump")
    )


def _is_dataclass(kind: object) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


class Codec:
    """Encodes and decodes the answers of one function, by its return annotation if it has one."""

    def __init__(self, annotation: object = Any) -> None:
        self._annotation = annotation
        self._problem: str | bool | None = True  # not looked at yet
        self._decode: Callable[[Any], Any] | None = None
        self._known: dict[str, type] = {}  # types that this process has stored

    @classmethod
    def for_function(cls, function: Callable[..., Any]) -> Codec:
        """The codec for what ``function`` says that it returns, looked at on first use."""
        return cls(_Deferred(function))

    def check(self) -> None:
        """Fail now, before the work runs, if its declared answer could not be given back.

        Raises:
            UnsupportedAnswerError: The return annotation names a type that can't be stored.
        """
        if self._problem is True:
            annotation = self._annotation
            if isinstance(annotation, _Deferred):
                annotation = annotation.resolve()
            problem = _problem(annotation, frozenset())
            if problem is None and annotation is not Any:
                self._decode = _decoder(annotation)
            self._problem = problem  # last: another thread may be looking
        if self._problem:
            raise UnsupportedAnswerError(f"{self._problem}; {_HINT}")

    def encode(self, value: Any) -> bytes:
        """The bytes to store.

        Raises:
            UnsupportedAnswerError: The value can't be stored and given back as it was.
        """
        kind = type(value)
        if kind in (dict, list, str, int, float, bool, type(None)) and not _holds_typed(value):
            return b"j" + encode_json(value)
        try:
            raw = self._encode_typed(kind, value)
            unchanged = self.decode(raw) == value
        except UnsupportedAnswerError:
            raise
        except Exception as error:
            raise UnsupportedAnswerError(f"the answer can't be stored: {error}; {_HINT}") from error
        if not unchanged:
            raise UnsupportedAnswerError(
                f"a {kind.__name__} would come back changed (an excluded, secret or private "
                f"field? a union inside a container?); {_HINT}"
            )
        return raw

    def _encode_typed(self, kind: type, value: Any) -> bytes:
        if _is_model(kind) or _is_dataclass(kind):
            problem = _problem(kind, frozenset())
            if problem:
                raise UnsupportedAnswerError(f"{problem}; {_HINT}")
            name = f"{kind.__module__}:{kind.__qualname__}"
            self._known[name] = kind
            return b"t" + name.encode() + b"\n" + encode_json(_plain(value))
        if self._decode is not None:  # list[Model], dict[str, Model], tuple[...], as declared
            return b"d" + encode_json(_plain(value))
        raise UnsupportedAnswerError(f"a {kind.__name__} can't be stored; {_HINT}")

    def decode(self, raw: bytes) -> Any:
        """The answer, a fresh object each time.

        Raises:
            AnswerOmittedError: The work was done but its answer was not kept.
            UnsupportedAnswerError: The type it had can't be found in this process.
        """
        value = decode_json(raw)
        if self._problem is True:
            self.check()
        if raw[:1] == b"t":
            name = raw[1 : raw.index(b"\n")].decode()
            return _decoder(self._known.get(name) or _find(name, self._annotation))(value)
        return self._decode(value) if raw[:1] == b"d" and self._decode is not None else value


class _Deferred:
    """A return annotation that may name types defined later, or inside another function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        while isinstance(function, functools.partial):
            function = function.func
        self.function = inspect.unwrap(function)
        self._found: Any = None
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith("oncekey."):
            frame = frame.f_back
        self._try(frame.f_locals)  # where the decorator stands; kept only if it resolves

    def _try(self, names: Mapping[str, Any]) -> None:
        raw = (getattr(self.function, "__annotations__", None) or {}).get("return", Any)
        if not isinstance(raw, str):
            self._found = type(None) if raw is None else raw
            return
        try:
            hints = typing.get_type_hints(self.function, localns=dict(names), include_extras=True)
            self._found = hints.get("return", Any)
        except (NameError, TypeError, AttributeError):
            self._found = None

    def resolve(self) -> Any:
        """The annotation, or ``Any`` where its names can't be found: the value decides then."""
        if self._found is None:
            code, cells = getattr(self.function, "__code__", None), ()
            cells = getattr(self.function, "__closure__", None) or ()
            enclosed = dict(zip(code.co_freevars if code else (), cells, strict=False))
            names = {}
            for name, cell in enclosed.items():
                with contextlib.suppress(ValueError):  # not bound yet
                    names[name] = cell.cell_contents
            self._try(names)
        return Any if self._found is None else self._found


def _find(name: str, annotation: object) -> type:
    """The model or dataclass that a stored name means, among modules already imported.

    Nothing is ever imported because a stored record says so.
    """
    resolved = annotation.resolve() if isinstance(annotation, _Deferred) else annotation
    for candidate in (resolved, *get_args(resolved)):
        if (
            isinstance(candidate, type)
            and f"{candidate.__module__}:{candidate.__qualname__}" == name
        ):
            return candidate
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (_is_model(found) or _is_dataclass(found)):
        raise UnsupportedAnswerError(
            f"the stored answer is a {name}, which this process can't find: import its module, or "
            "annotate the function's return type"
        )
    return typing.cast(type, found)


def _holds_typed(value: Any) -> bool:
    """Whether a container directly holds models or dataclasses, as a list[Model] does."""
    if type(value) is list:
        return any(_is_model(type(v)) or _is_dataclass(type(v)) for v in value)
    if type(value) is dict:
        return any(_is_model(type(v)) or _is_dataclass(type(v)) for v in value.values())
    return False


def _plain(value: Any) -> Any:
    """A model, dataclass or declared container as JSON values."""
    if _is_model(type(value)):
        return json.loads(value.model_dump_json(round_trip=True))
    if _is_dataclass(type(value)):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _problem(kind: Any, seen: frozenset[Any]) -> str | None:
    """Why a value of the declared type can't be stored, or ``None`` if it can."""
    if get_origin(kind) is typing.Annotated:
        return _problem(get_args(kind)[0], seen)
    if kind in (Any, object, None, typing.NoReturn, *_SCALARS, list, dict) or kind in seen:
        return None
    if isinstance(kind, typing.TypeVar):
        return None
    if typing.is_typeddict(kind):
        return None
    if _is_model(kind):
        return None
    if _is_dataclass(kind):
        try:
            hints = typing.get_type_hints(kind)
        except NameError as error:
            return f"the types of {kind.__name__} can't be resolved ({error})"
        for item in dataclasses.fields(kind):
            if not item.init:
                return f"{kind.__name__}.{item.name} is not set by __init__"
            inner = _problem(hints.get(item.name, Any), seen | {kind})
            if inner:
                return f"{kind.__name__}.{item.name}: {inner}"
        return None
    origin, args = get_origin(kind), get_args(kind)
    if origin is typing.Literal:
        return None if all(isinstance(a, _SCALARS) for a in args) else f"{kind} can't be stored"
    if origin in (Union, types.UnionType):
        typed = [a for a in args if _is_model(a) or _is_dataclass(a)]
        if len(typed) > 1:
            return None  # told apart by the stored name when it is the answer itself
        return next((p for p in (_problem(a, seen) for a in args) if p), None)
    if origin in (dict, Mapping):
        if args and args[0] not in (str, Any):
            return f"{kind} has keys that are not strings"
        return _problem(args[1], seen) if args else None
    if origin in (list, tuple, Sequence):
        return next((p for p in (_problem(a, seen) for a in args if a is not Ellipsis) if p), None)
    name = getattr(kind, "__name__", str(kind))
    return f"an answer of type {name} can't be stored"


def _validate(kind: Any, value: Any) -> Any:
    """A model from its own JSON: by field names, not aliases, and as strictly as from a wire."""
    raw = json.dumps(value)
    try:
        return kind.model_validate_json(raw, by_alias=False, by_name=True)
    except TypeError:  # Pydantic before 2.11
        return kind.model_validate_json(raw)


def _decoder(kind: Any) -> Callable[[Any], Any]:
    """A function that turns JSON values back into ``kind``."""
    if _is_model(kind):
        return functools.partial(_validate, kind)
    if _is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind)]

        def build(value: Any) -> Any:
            parts = {n: _decoder(hints.get(n, Any))(value[n]) for n in names if n in value}
            return kind(**parts)

        return build
    origin, args = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return _decoder(args[0])
    if origin in (Union, types.UnionType):
        typed = next((a for a in args if _is_model(a) or _is_dataclass(a)), None)
        if typed is not None:
            decode = _decoder(typed)
            return lambda value: decode(value) if isinstance(value, dict) else value
        return lambda value: value
    if origin in (list, Sequence) and args:
        decode = _decoder(args[0])
        return lambda value: [decode(item) for item in value]
    if origin is tuple and args:
        if len(args) == 2 and args[1] is Ellipsis:
            decode = _decoder(args[0])
            return lambda value: tuple(decode(item) for item in value)
        decoders = [_decoder(arg) for arg in args]
        return lambda value: tuple(d(v) for d, v in zip(decoders, value, strict=True))
    if origin in (dict, Mapping) and len(args) == 2:
        decode = _decoder(args[1])
        return lambda value: {key: decode(item) for key, item in value.items()}
    return lambda value: value
