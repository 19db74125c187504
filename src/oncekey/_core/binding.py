"""How calls of one function become keys and payloads."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
import inspect
import json
import re
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from types import CodeType
from typing import Any, Final

from oncekey._core.call import Job
from oncekey._core.closures import Around, SharedKeysWarning, around, differs, may_differ
from oncekey._core.codec import Codec
from oncekey._core.drive import Flow, Op
from oncekey._core.fingerprint import fingerprint, form
from oncekey._core.flows import Plan
from oncekey._core.placement import users_level
from oncekey.errors import (
    EXPLAINED_END,
    IdempotencyConflictError,
    InvalidKeyError,
    StoreError,
)
from oncekey.models import Key, Record, Scope, check_text
from oncekey.policy import Policy

__all__ = [
    "Binding",
    "KeySource",
    "PerCallKeyWarning",
    "block_scope",
    "function_scope",
    "key_name",
    "names",
]

KeySource = str | Sequence[str] | Callable[..., object]

_REST: Final = tuple(Job._field_defaults.values())
_REMEMBERED: Final = 100
_REMEMBERED_BYTES: Final = 4096


class PerCallKeyWarning(UserWarning):
    """A key looks as if every call had one of its own, so that no retry would be recognised."""


def key_name(value: object, what: str) -> str:
    """A key from an argument's value: text, or something whose text never changes."""
    if isinstance(value, str):
        return check_text(value, what)
    if isinstance(value, enum.Enum):
        return key_name(value.value, what)
    if isinstance(value, bool) or not isinstance(value, (int, uuid.UUID, decimal.Decimal, dt.date)):
        raise InvalidKeyError(
            f"{what} is a {type(value).__name__}, which can't be a key: use a string, an integer "
            "or a UUID, or a dotted path to one, such as order.id"
        )
    return check_text(str(value), what)


def block_scope(scope: str) -> Scope:
    """The scope of the keys of blocks."""
    return Scope("once", check_text(scope or "default", "scope"))


def function_scope(scope: str, function: Callable[..., Any], name: str | None) -> Scope:
    """The scope of a function's keys: its own name is part of it, or the one that is given.

    ``None``: the scope of blocks, which whoever else says so shares.

    Raises:
        InvalidKeyError: It has no name that tells it apart from others, and none is given.
    """
    if name is None and not scope:
        raise InvalidKeyError("name=None leaves the scope alone: give scope= to Once")
    if name is None:
        return block_scope(scope)
    if scope:
        check_text(scope, "scope")
    if name:
        return Scope("once", scope, check_text(name, "name"))
    what = ""
    while isinstance(function, functools.partial):
        what = "a partial with arguments" if function.args else what
        function = function.func
    if inspect.ismethod(function):
        what = "a method of one object"
    elif not hasattr(function, "__qualname__"):
        what = f"an object, a {type(function).__name__},"
    elif "<lambda>" in function.__qualname__:
        what = "a lambda"
    if what:
        raise InvalidKeyError(
            f"{what} has no name of its own to keep its keys apart from those of others like it: "
            'give name="..." to the decorator, or write a function with def'
        )
    return Scope("once", scope, f"{function.__module__}.{function.__qualname__}")


class _Holder:
    """The function that a name stands for."""

    __slots__ = ("around", "code", "told")

    def __init__(self, code: CodeType, around: Around) -> None:
        self.code = code
        self.around = around
        self.told = False  # that another one may be meant by it


class _Names:
    """Which function a name stands for, in each store: the one that was decorated last."""

    def __init__(self) -> None:
        self._holders: weakref.WeakKeyDictionary[Any, dict[bytes, _Holder]]
        self._holders = weakref.WeakKeyDictionary()

    def take(self, store: Any, scope: Scope, function: Any) -> Callable[[], bool]:
        """Let ``scope`` stand for ``function``. What is given back says whether it still does.

        Asked in calls, not at the next decoration: a module that is loaded again, or a cell of a
        notebook, decorates its functions anew, and nobody calls the old ones.

        Raises:
            InvalidKeyError: It stands for the same code with other values around it.
        """
        holders = self._holders.setdefault(store, {})
        prefix, code = scope.prefix, function.__code__
        mine = _Holder(code, around(function))
        before = holders.get(prefix)
        if before is not None and before.code == code and code.co_freevars:
            _tell_apart(before, mine, function.__qualname__)
        holders[prefix] = mine
        return lambda: holders[prefix] is mine or holders[prefix].code == code


def _tell_apart(before: _Holder, mine: _Holder, name: str) -> None:
    """Refuse one of several functions that a function makes, or warn where they may be the same."""
    other = differs(before.around, mine.around)
    if other:
        raise InvalidKeyError(
            f"{name} was guarded before with another {other[0]!r} around it, and has no name of "
            'its own to keep its keys apart from those of others like it: give name="..." to the '
            "decorator, one for each of them"
        )
    mine.told = before.told
    perhaps = [] if mine.told else may_differ(before.around, mine.around)
    if perhaps:
        mine.told = True
        warnings.warn(
            f"{name} was guarded before with another {perhaps[0]!r} around it, and both share "
            'their keys: give name="..." to the decorator, one for each of them if they do '
            "different things, or one for all",
            SharedKeysWarning,
            stacklevel=users_level(),
        )


names = _Names()


def _follow(value: Any, path: list[str], what: str) -> Any:
    for part in path:
        missing = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if missing is None:
            raise InvalidKeyError(f"{what} has no {part!r}, so there is no key to run it under")
        value = missing
    return value


class Binding:
    """How calls of one function become keys and payloads."""

    def __init__(
        self,
        function: Callable[..., Any],
        key: KeySource,
        ignore: Iterable[str],
        scope: Scope,
        policy: Policy,
    ) -> None:
        self.signature = inspect.signature(function)
        self.operation = getattr(function, "__qualname__", repr(function))
        self.codec = Codec.for_function(function)
        self.codec.errors = policy.replay_errors
        self.plan = Plan.of(policy)
        self.scope = scope
        self.key = key
        self.recent: dict[bytes, bytes] = {}  # payloads that were seen lately, by their marks
        self.before = self.recent  # and those before these
        self.alone: Callable[[], bool] = lambda: True  # no other function has its name
        names = list(self.signature.parameters)
        left_out = {ignore} if isinstance(ignore, str) else set(ignore)
        if names and names[0] in ("self", "cls") and names[0] not in left_out:
            self._must_tell_apart(names[0])
            left_out.add(names[0])
        unknown = left_out - set(names)
        self.paths: list[tuple[str, str, list[str]]] = []  # the name, its argument, the way in
        if not callable(key):
            for path in [key] if isinstance(key, str) else key:
                root, *rest = path.split(".")
                self.paths.append((path, root, rest))
                if root not in names:
                    unknown.add(root)
                if not rest:
                    left_out.add(root)
        if unknown:
            raise InvalidKeyError(
                f"{self.operation} has no argument {', '.join(sorted(map(repr, unknown)))}; "
                f"it has {', '.join(names) or 'none'}"
            )
        self.payload = [name for name in names if name not in left_out]
        self.what = f"the key {key!r} of {self.operation}"
        self.single = self.paths[0][1:] if isinstance(key, str) else None
        parameters = self.signature.parameters.values()
        # Functions whose arguments have one place and one name each are bound without inspect's
        # help, at a tenth of its cost.
        plain = all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters)
        self.places = dict.fromkeys(names) if plain else None
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        suspect = _looks_per_call(key)
        self.proven = bool(suspect) or not callable(key)  # or it is asked twice, in the first call
        if suspect:
            self._warn(f"its key is made of {suspect}, which looks new in every call")

    def _must_tell_apart(self, first: str) -> None:
        """Refuse a method whose objects would get each other's answers."""
        paths = [] if callable(self.key) else [self.key] if isinstance(self.key, str) else self.key
        if not callable(self.key) and all(path.split(".")[0] != first for path in paths):
            raise InvalidKeyError(
                f"{self.operation} is a method, and its key does not tell objects apart: one would "
                f'get the answers of another. Write key=["{first}.id", ...] with what makes them '
                f'differ, or ignore=["{first}"] if they may share'
            )

    def _warn(self, what: str) -> None:
        """Say so once for each function."""
        warnings.warn(
            f"{self.operation}: {what}, so that a retry would run again. Use an id of what is to "
            "be done, such as an order's: made once, and sent with every retry. If it is one, "
            "filter oncekey.guard.PerCallKeyWarning",
            PerCallKeyWarning,
            stacklevel=users_level(),
        )

    def job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        """What a call with these arguments is to do once."""
        if not self.alone():
            raise InvalidKeyError(
                f"another function named {self.operation} is guarded in the same store and scope, "
                'and they would get each other\'s answers: give one of them name="..."'
            )
        values = self._bound(args, kwargs)
        name = self._name(args, kwargs, values)
        text = form({part: values[part] for part in self.payload})
        mark = sha256(text).hexdigest().encode()
        if mark not in self.recent:
            self._remember(mark, text)
        made = (Key(self.scope, name), mark, self.plan, self.codec, self.operation, *_REST)
        return tuple.__new__(Job, made)  # without a named tuple's keyword machinery

    def _remember(self, mark: bytes, text: bytes) -> None:
        """Keep a payload for a while, to say which part of another differs from it."""
        if len(text) <= _REMEMBERED_BYTES:
            if len(self.recent) >= _REMEMBERED:
                self.before, self.recent = self.recent, {}
            self.recent[mark] = text

    def explain(self, error: IdempotencyConflictError, job: Job) -> Flow[None]:
        """Name the function's own key and arguments in a conflict that is this function's.

        Which argument differs is known if this process has seen the first ones lately: the store
        has no more of them than their digest. Their values are never told.
        """
        if error.operation != self.operation or error.message != type(error).message:
            return  # of something that the function called
        differs = ""
        try:
            found: Record | None = yield Op("read", (job.key,))
        except StoreError:
            found = None  # the conflict is what counts
        lately = {**self.before, **self.recent}
        first = None if found is None else lately.get(found.fingerprint)
        now = lately.get(job.fingerprint)
        if first is not None and now is not None:
            was, given = json.loads(first), json.loads(now)
            names = [name for name in self.payload if was.get(name) != given.get(name)]
            differs = f": {', '.join(names)} differ{'s' if len(names) == 1 else ''}"
        key = "its key function" if callable(self.key) else f"the key {self.key!r}"
        error.explain(
            f"{key} gave a key that was used before with other arguments{differs}",
            f"Compared are {', '.join(self.payload) or 'none'}: {EXPLAINED_END}",
        )

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, with defaults. Raises TypeError as the function would."""
        places = self.places
        if places is not None:
            values = dict(zip(places, args, strict=False))
            if len(values) == len(args) and values.keys().isdisjoint(kwargs):
                values = {**self.defaults, **values, **kwargs}
                if values.keys() == places.keys():
                    return values
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _name(self, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Any]) -> str:
        what = self.what
        if self.single is not None:
            root, rest = self.single
            value = values[root]
            return key_name(_follow(value, rest, what) if rest else value, what)
        if not callable(self.key):
            parts = {path: _follow(values[root], rest, what) for path, root, rest in self.paths}
            return fingerprint(parts).decode()
        what = f"the key of {self.operation}"
        name = key_name(self._asked(self.key, args, kwargs), what)
        if not self.proven:
            self.proven = True
            if key_name(self.key(*args, **kwargs), what) != name:
                self._warn("its key function gave two keys for the same arguments")
        return name

    def _asked(
        self, key: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """What the key function gives; its own mistakes are told as such."""
        try:
            return key(*args, **kwargs)
        except (TypeError, LookupError, AttributeError) as error:
            plain = [
                one.replace(annotation=inspect.Parameter.empty)
                for one in self.signature.parameters.values()
            ]
            takes = str(inspect.Signature(plain))[1:-1]
            raise InvalidKeyError(
                f"the key function of {self.operation} failed with {type(error).__name__} "
                f"({str(error)[:200]}), and nothing was run. It gets the arguments as the function "
                f"was called with them, defaults not filled in: write key=lambda {takes}: ..., "
                "which gives a text, an integer or a UUID"
            ) from error


# Ids that something makes anew for every call or message. Names that an application gives its own
# things (order_id, event_id, job_id, delivery_id) are not among them, whatever made those.
_PER_CALL: Final = re.compile(
    "(request|req|call|toolcall|tooluse|message|msg|task|trace|span|invocation|attempt|execution)id"
    "|progresstoken"
)
# What key functions call to make such an id themselves.
_MAKERS: Final = frozenset(
    ("uuid1", "uuid4", "uuid7", "ulid", "token_hex", "token_urlsafe", "urandom")
)


def _looks_per_call(key: KeySource) -> str:
    """Which part of a key changes with every call, going by its name. Empty: none."""
    if not callable(key):
        paths = [key] if isinstance(key, str) else key
        return next((repr(path) for path in paths if _is_per_call(path.split("."))), "")
    code: CodeType | None = getattr(key, "__code__", None)
    names = list(code.co_names) if code is not None else []
    for at, name in enumerate(names, 1):
        if name in _MAKERS or _is_per_call(names[:at]):
            return repr(name)
    return ""


def _is_per_call(path: list[str]) -> bool:
    """``ctx.request_id``, ``toolCallId``; and ``request.id``, as Celery and others have it."""
    last = re.sub("[_-]", "", path[-1]).lower()
    return _PER_CALL.fullmatch(last) is not None or path[-2:] == ["request", "id"]
