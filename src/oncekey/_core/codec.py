"""Answers as bytes: JSON, values that JSON lacks, models and dataclasses, given back as they were.

One tag byte, then JSON. The tags: ``j`` JSON values, ``v`` values with those that JSON lacks (see
``values``), ``r`` an error that is the outcome (see ``failures``), ``z`` one of these compressed
(see ``packing``), ``e`` JSON with the exact time at which it ends (that, a line end, JSON), ``o``
an answer that was not kept (the digest of what it was, or a newline and why).
Read but no longer written: ``d`` a container as the function declares it (``list[Model]``), and
``t`` a typed value (the type's name, a newline, the JSON).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Union, get_args, get_origin

from oncekey._core.failures import FAILED, rebuilt, shown_failure
from oncekey._core.packing import PACKED, unpacked
from oncekey._core.values import (
    HINT,
    TAGGED,
    behind,
    dump,
    enum_named,
    is_dataclass,
    is_json,
    is_model,
    load,
    plain,
    reachable,
    validate,
)
from oncekey._jcs.fast import FAST, attempt_exact
from oncekey.errors import (
    AnswerOmittedError,
    StoreConfigError,
    StoreCorruptError,
    UnsupportedAnswerError,
)

__all__ = [
    "DONE",
    "Codec",
    "decode_json",
    "encode_json",
    "exact_end",
    "is_plain",
    "json_answer",
    "omitted",
]

SEALED: Final = b"\xe1"
"""The first byte of an encrypted answer, which only ``oncekey.encryption`` can open."""
REMOVED: Final = b"n"
"""What an encrypted store gives for an answer that is not there. It is never stored."""

DONE: Final = b"j"
"""The stored answer of work that is done and has none to give: null."""

_SCALARS: Final = (str, int, float, bool, type(None))
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_scan_json: Any = vars(json.JSONDecoder())["scan_once"]  # json.loads without its guesses


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
        raise UnsupportedAnswerError(f"the answer can't be stored: {error}; {HINT}") from error
    if not unchanged:
        raise UnsupportedAnswerError(
            "the answer would come back changed (a tuple as a list, an integer key as a string?); "
            + HINT
        )
    return raw


def json_answer(value: object, ends_at: float | None = None) -> bytes:
    """JSON as a stored answer. With the exact time at which it ends, where that must be kept.

    Raises:
        UnsupportedAnswerError: As ``encode_json`` does.
    """
    tag = DONE if ends_at is None else b"e%b\n" % repr(float(ends_at)).encode()
    return tag + encode_json(value)


def exact_end(raw: bytes) -> float | None:
    """The time at which a stored answer ends, where it says so itself."""
    return float(raw[1 : raw.index(b"\n")]) if raw[:1] == b"e" else None


def is_plain(raw: bytes) -> bool:
    """Whether a stored answer is JSON and no more."""
    return raw[:1] == DONE


def decode_json(raw: bytes) -> Any:
    """The value of a stored answer as plain JSON, whatever type it had."""
    raw = unpacked(raw)
    if raw[:1] == FAILED:
        return shown_failure(raw)
    value = _parsed(raw)
    return plain(value) if raw[:1] == b"v" else value


def _loaded(raw: bytes) -> Any:
    """The JSON behind a tag, as it is written here: ``json.loads`` without guesses."""
    text = raw.decode("utf-8", "surrogatepass")
    try:
        value, end = _scan_json(text, 1)
    except StopIteration:
        raise ValueError("there is none") from None
    if end != len(text):
        raise ValueError("there is more behind it")
    return value


def _parsed(raw: bytes) -> Any:
    """The JSON in a stored answer."""
    tag, body = raw[:1], raw[1:]
    if tag == b"o":
        digest, _, why = body.decode(errors="replace").partition("\n")
        raise AnswerOmittedError(
            f"the call was done, but its answer was not kept: {why or 'it was too large'}; look "
            "the result up where the handler put it",
            digest or None,
        )
    if tag == SEALED:
        raise StoreConfigError(
            "this answer is encrypted: wrap the store with oncekey.encryption.encrypted(...)"
        )
    if tag == REMOVED:
        raise StoreCorruptError(
            "a record is done but has no answer, which no encrypted one is without: it was "
            "removed, or the key was marked by check_and_record. Nothing runs again"
        )
    if tag in (b"t", b"e"):
        body = body.partition(b"\n")[2]
    if tag not in (b"j", b"v", b"e", b"d", b"t", b""):
        raise StoreCorruptError(
            "a stored answer is in a form that is not known here: was it written by another "
            "program, or by a newer version? Else restore the store from a backup"
        )
    try:
        return json.loads(body) if body else None
    except ValueError as error:
        raise StoreCorruptError(
            f"a stored answer is damaged ({type(error).__name__}): restore the store from a "
            "backup, or delete that record if its work may run once more"
        ) from error


def omitted(answer: bytes | None, why: str = "") -> bytes:
    """What is stored in place of an answer that can't be kept."""
    digest = hashlib.sha256(answer).hexdigest() if answer is not None else ""
    return f"o{digest}\n{why}".encode() if why else f"o{digest}".encode()


class Codec:
    """Encodes and decodes the answers of one function, by its return annotation if it has one.

    Attributes:
        checked: ``check`` has nothing more to say.
        errors: The types of errors that are outcomes, and may be built.
    """

    checked = False
    errors: tuple[type[Exception], ...] = ()

    def __init__(self, annotation: object = Any) -> None:
        self._annotation = annotation
        self._problem: str | bool | None = True  # not looked at yet
        self._types: dict[str, type] = {}

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
            self._roots = [annotation]
            if annotation is Any and isinstance(self._annotation, _Deferred):
                self._roots += self._annotation.named()
            self._types = reachable(self._roots) if problem is None else {}
            self._problem = problem
            self.checked = problem is None  # last: another thread may be looking
        if self._problem:
            raise UnsupportedAnswerError(f"{self._problem}; {HINT}")

    def encode(self, value: Any) -> bytes:
        """The bytes to store.

        Raises:
            UnsupportedAnswerError: The value can't be stored and given back as it was.
        """
        if not self.checked:
            self.check()
        raw = attempt_exact(value) if FAST else None
        if raw is not None:
            return DONE + raw
        kind = type(value).__name__
        try:
            if is_json(value):
                return DONE + _bytes(value)
            form = dump(value)
            raw = (b"v" if _tagged(form) else DONE) + _bytes(form)
            unchanged = load(form, self._find) == value
        except UnsupportedAnswerError:
            raise
        except Exception as error:  # its text may hold part of the answer
            raise UnsupportedAnswerError(
                f"a {kind} can't be stored ({type(error).__name__}); {HINT}"
            ) from error
        if not unchanged:
            raise UnsupportedAnswerError(
                f"a {kind} would come back changed (an excluded, secret or private field? NaN?); "
                + HINT
            )
        return raw

    def decode(self, raw: bytes) -> Any:
        """The answer, a fresh object each time.

        Raises:
            AnswerOmittedError: The work was done but its answer was not kept.
            Exception: The work failed with it, and the guard declares it as an outcome.
            UnsupportedAnswerError: It can't be rebuilt here; the message says why.
            StoreCorruptError: The stored bytes are no answer.
        """
        tag = raw[:1]
        if tag == DONE and len(raw) > 1:
            try:
                return _loaded(raw)
            except ValueError:
                pass  # told below
        elif tag == PACKED:
            return self.decode(unpacked(raw))
        elif tag == FAILED:
            raise rebuilt(raw, self.errors)
        value = _parsed(raw)
        if tag in (DONE, b"e", b""):
            return value
        if not self.checked:
            self.check()
        try:
            if tag == b"v":
                return load(value, self._find)
            if tag == b"t":
                return _decoder(self._find(raw[1 : raw.index(b"\n")].decode()))(value)
            return _decoder(self._roots[0])(value)
        except UnsupportedAnswerError as error:
            raise UnsupportedAnswerError(f"the stored answer can't be rebuilt: {error}") from error
        except Exception as error:
            raise UnsupportedAnswerError(
                f"the stored answer can't be rebuilt ({type(error).__name__}): a type that it is "
                "made of has changed since, or what it needs is not there"
            ) from error

    def _find(self, name: str) -> Any:
        """The type that a stored name means: only one that the annotation speaks of.

        Or that its code names, where it has none. Else whoever can write to the store could have
        anything built that is imported. Enums are found among the imported modules as well: their
        members are there already, and nothing is built.
        """
        found = self._types.get(name)
        if found is None:  # or a subclass that was imported since
            found = reachable(self._roots).get(name) or enum_named(name)
        if found is None:
            raise UnsupportedAnswerError(
                f"{name} is no type that the function says it returns: write it as its return "
                "annotation, or as returns= of the block"
            )
        return found


def _bytes(value: Any) -> bytes:
    # Half a surrogate pair can stand in a Python string; json.loads takes it back.
    return _encoder.encode(value).encode("utf-8", "surrogatepass")


def _tagged(form: Any) -> bool:
    """Whether a form has a tag, so that it must be loaded and not only read."""
    if type(form) is list:
        return any(map(_tagged, form))
    if type(form) is not dict:
        return False
    return any(key[:1] == "$" or _tagged(item) for key, item in form.items())


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

    def named(self) -> list[Any]:
        """The types that the code of a function names, for one whose annotation says nothing."""
        if type(self.function) not in (types.FunctionType, types.MethodType):  # not even a mock
            return []
        code = self.function.__code__
        known = inspect.getclosurevars(self.function)
        values = [*known.globals.values(), *known.nonlocals.values()]
        values += [  # models.Receipt
            vars(module).get(name)
            for module in values
            if isinstance(module, types.ModuleType)
            for name in code.co_names
        ]
        return [kind for kind in values if is_model(kind) or is_dataclass(kind)]


def _problem(kind: Any, seen: frozenset[Any]) -> str | None:
    """Why a value of the declared type can't be stored, or ``None`` if it can."""
    if get_origin(kind) is typing.Annotated:
        return _problem(get_args(kind)[0], seen)
    if kind in (Any, object, None, typing.NoReturn, *_SCALARS, list, dict) or kind in seen:
        return None
    if isinstance(kind, (typing.TypeVar, enum.EnumMeta)) or kind in TAGGED:
        return None
    if behind(kind) is not None:
        return _problem(behind(kind), seen)
    if typing.is_typeddict(kind):
        return None
    if is_model(kind):
        return None
    if is_dataclass(kind):
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
        return next((p for p in (_problem(type(a), seen) for a in args) if p), None)
    if origin in (Union, types.UnionType):
        typed = [a for a in args if is_model(a) or is_dataclass(a)]
        if len(typed) > 1:
            return None  # told apart by the stored name when it is the answer itself
        return next((p for p in (_problem(a, seen) for a in args) if p), None)
    if origin in (dict, Mapping, list, tuple, Sequence):
        return next((p for p in (_problem(a, seen) for a in args if a is not Ellipsis) if p), None)
    name = getattr(kind, "__name__", str(kind))
    return f"an answer of type {name} can't be stored"


def _decoder(kind: Any) -> Callable[[Any], Any]:
    """A function that turns JSON values back into ``kind``."""
    if is_model(kind):
        return lambda value: validate(kind, json.dumps(value), "model_validate_json")
    if is_dataclass(kind):
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
        typed = next((a for a in args if is_model(a) or is_dataclass(a)), None)
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
