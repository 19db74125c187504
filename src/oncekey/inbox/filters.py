"""What to search for, as people write it: ``source:stripe type:invoice.* state:dead age:>1h``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from oncekey.errors import PolicyError
from oncekey.inbox.models import DeliveryState, event_number

__all__ = ["Filter"]

_TOKEN = re.compile(r'(?:(\w+):)?(?:"((?:[^"\\]|\\.)*)"|(\S+))')
_AGE = re.compile(r"([<>])(\d{1,9})([smhdw])")
_UNITS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_QUALIFIERS: Final = ("source", "type", "state", "target", "status", "error", "age")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events are meant. What is ``None`` does not matter.

    Attributes:
        source: Exactly this source.
        type: This type; a ``*`` at its end stands for anything.
        state: At least one of its deliveries stands so.
        target: It goes to this target, or did.
        status: A delivery failed last with this status.
        error: A delivery failed last with this cause.
        older_ms: It arrived longer ago than this.
        newer_ms: It arrived less long ago than this.
        text: An event's id or the beginning of one, or the whole key of an event.

    Example:
        >>> Filter.parse("source:stripe type:invoice.* state:dead age:>1h").type
        'invoice.*'
    """

    source: str | None = None
    type: str | None = None
    state: DeliveryState | None = None
    target: str | None = None
    status: int | None = None
    error: str | None = None
    older_ms: int | None = None
    newer_ms: int | None = None
    text: str | None = None

    @classmethod
    def parse(cls, query: str) -> Filter:
        """Read a search.

        Raises:
            PolicyError: Something in it can't be meant; says what can be written instead.
        """
        found = cls()
        for token in _TOKEN.finditer(query):
            name, quoted, bare = token.groups()
            if quoted is None and bare.startswith('"'):
                raise PolicyError('a " is not closed: write error:"no route"')
            value = bare if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            if not name:
                if found.text is not None:
                    raise PolicyError("search for one id at a time: write one word without a colon")
                found = replace(found, text=value)
            elif name == "age":
                found = found._with_age(value)
            else:
                found = replace(found, **{name: _value(name, value)})
        return found

    def __str__(self) -> str:
        """The search that reads as this."""
        parts = [
            f"{name}:{_quoted(str(value))}"
            for name in ("source", "type", "state", "target", "status", "error")
            if (value := getattr(self, name)) is not None
        ]
        parts += [f"age:>{_age(self.older_ms)}"] if self.older_ms is not None else []
        parts += [f"age:<{_age(self.newer_ms)}"] if self.newer_ms is not None else []
        parts += [_quoted(self.text)] if self.text is not None else []
        return " ".join(parts)

    def _with_age(self, value: str) -> Filter:
        read = _AGE.fullmatch(value)
        if read is None:
            raise PolicyError(f"age:{value} can't be read: write age:>1h, age:<30m or age:>2d")
        side, number, unit = read.groups()
        ms = int(number) * _UNITS[unit]
        return replace(self, older_ms=ms) if side == ">" else replace(self, newer_ms=ms)

    def numbers(self, now: int) -> tuple[int, int]:
        """The least and the greatest number that an event of this age or id may have."""
        least, most = 0, 2**63 - 1
        if self.newer_ms is not None:
            least = max(least, max(now - self.newer_ms, 0) << 20)
        if self.older_ms is not None:
            most = min(most, max(now - self.older_ms, 0) << 20)
        prefix = self.id_prefix
        if prefix is not None:
            least = max(least, event_number(f"msg_{prefix:0<16}"))
            most = min(most, event_number(f"msg_{prefix:f<16}"))
        return least, most

    @property
    def id_prefix(self) -> str | None:
        """The digits of an event's id that the text is or begins."""
        text = (self.text or "").lower()
        read = re.fullmatch(r"msg_([0-7][0-9a-f]{0,15})?", text)
        return (read.group(1) or "0") if read else None

    @property
    def key(self) -> str | None:
        """The key that the text is, where it is no id of ours."""
        return self.text if self.id_prefix is None else None


def _value(name: str, value: str) -> Any:
    if name == "state":
        try:
            return DeliveryState(value)
        except ValueError:
            known = ", ".join(DeliveryState)
            raise PolicyError(f"state:{value} is no state: there are {known}") from None
    if name == "status":
        if not re.fullmatch(r"[0-9]{1,5}", value):
            raise PolicyError(f"status:{value} is no number: write status:500")
        return int(value)
    if name not in _QUALIFIERS:
        known = ", ".join(f"{one}:" for one in _QUALIFIERS)
        raise PolicyError(f"{name}: is nothing to search by: there are {known} and the text of ids")
    return value


def _age(ms: int) -> str:
    unit = next(unit for unit in "wdhms" if ms % _UNITS[unit] == 0 or unit == "s")
    return f"{-(-ms // _UNITS[unit])}{unit}"


def _quoted(value: str) -> str:
    """As it reads back: a word with a colon would be a qualifier."""
    if value and not re.search(r'[\s":\\]', value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
