"""Every error has a section, and says where it is."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import re
import traceback
from pathlib import Path

import pytest

import oncekey
from oncekey._core.binding import PerCallKeyWarning
from oncekey._core.closures import SharedKeysWarning
from oncekey._core.placement import UnguardedWarning
from oncekey._core.switch import GuardingOffWarning
from oncekey.cli import main
from oncekey.cli.explain import sections
from oncekey.errors import OncekeyError, PolicyError, StoreTimeoutError
from oncekey.http.problems import PROBLEMS
from oncekey.receiver.settings import RetentionWarning
from oncekey.signatures import UnpinnedHostWarning
from oncekey.signatures.verdict import CODES, OK

REFUSALS = {code: told for code, told in CODES.items() if code != OK}
WARNINGS = {
    kind.__name__: kind
    for kind in (
        GuardingOffWarning,
        PerCallKeyWarning,
        SharedKeysWarning,
        UnguardedWarning,
        UnpinnedHostWarning,
        RetentionWarning,
    )
}


def test_no_warning_is_forgotten() -> None:
    """Each class of warnings in the source is one of those above."""
    source = Path(inspect.getfile(oncekey)).parent.rglob("*.py")
    found = {
        name
        for path in source
        for name in re.findall(r"^class (\w+Warning)\(", path.read_text("utf-8"), re.MULTILINE)
    }
    assert found == WARNINGS.keys()


def public_errors() -> dict[str, type[OncekeyError]]:
    """The classes that are raised to callers: of ``oncekey.errors``, and those of other modules."""
    importlib.import_module("oncekey.instrument.audit")
    found, todo = {}, [OncekeyError]
    while todo:
        kind = todo.pop()
        todo.extend(kind.__subclasses__())
        if kind.__module__ in ("oncekey.errors", "oncekey.instrument.audit"):
            found[kind.__name__] = kind
    return found


def test_every_error_has_a_section_with_its_code() -> None:
    """No class is missing, no section is about one that is gone, and each has the class's code.

    ``LookupError`` is Python's own, and says nothing of where to read more.
    """
    known = sections()
    errors = public_errors()
    others = WARNINGS.keys() | PROBLEMS.keys() | REFUSALS.keys() | {"LookupError"}
    assert known.keys() == errors.keys() | others
    for name, text in known.items():
        assert len(text) > 60, name
        assert name not in REFUSALS or REFUSALS[name] in " ".join(text.split())
        assert name not in PROBLEMS or f"status {PROBLEMS[name][0]})" in " ".join(text.split())
        told = re.match(r"Code `(\w+)`(, retryable)?", text)
        if told is not None:
            assert told[1] == errors[name].code, name
            assert bool(told[2]) == errors[name].retryable, name


def test_a_traceback_ends_with_where_to_read_more() -> None:
    """Also of an error that came from another process; a note of somebody's own comes behind it."""
    error = StoreTimeoutError("no answer", outcome_known=True)
    for one in (error, pickle.loads(pickle.dumps(error))):
        text = "".join(traceback.format_exception(one))
        assert text.endswith("Help: oncekey explain StoreTimeoutError\n")
        assert one.outcome_known
    error.add_note("mine")
    assert error.__notes__[-1] == "mine"
    assert PolicyError("x").__notes__ == ["Help: oncekey explain PolicyError"]


def every_error() -> list[type[OncekeyError]]:
    """All classes of the package, those of single modules too."""
    for module in (
        "oncekey.instrument.audit",
        "oncekey.server.problems",
        "oncekey.signatures.base",
        "oncekey.signatures.keypairs",
        "oncekey.stores.postgres.async_connections",
        "oncekey.testing",
    ):
        importlib.import_module(module)
    found: set[type[OncekeyError]] = set()
    todo: list[type[OncekeyError]] = [OncekeyError]
    while todo:
        kind = todo.pop()
        todo.extend(kind.__subclasses__())
        if kind.__module__.startswith("oncekey."):
            found.add(kind)
    return sorted(found, key=lambda kind: (kind.__module__, kind.__name__))


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_ends_with_a_name_that_is_explained(
    kind: type[OncekeyError], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own, or that of the class that it is a kind of; what the command prints is that one."""
    text = "".join(traceback.format_exception(kind.__new__(kind, "x")))
    last = text.splitlines()[-1]
    name = last.removeprefix("Help: oncekey explain ")
    assert last != name
    assert name in sections()
    assert name in {base.__name__ for base in kind.__mro__}
    if kind.__name__ in sections():
        assert name == kind.__name__
    assert main(["explain", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}\n---")


def test_a_kind_of_error_of_ones_own_is_explained_by_its_base() -> None:
    """A user's subclass sends nobody to a name that the command does not know."""

    class ShopError(PolicyError):
        pass

    assert ShopError("x").__notes__ == ["Help: oncekey explain PolicyError"]


@pytest.mark.parametrize(
    "asked, name",
    [
        ("signature_mismatch", "signature_mismatch"),
        ("key-reused", "key-reused"),
        ("urn:oncekey:problem:key-reused", "key-reused"),
        ("oncekey.guard.PerCallKeyWarning", "PerCallKeyWarning"),
        ("ConfigError", "StoreConfigError"),
    ],
)
def test_what_is_no_error_has_a_section_too(
    asked: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Codes of refused deliveries, problems, warnings; and the end of a class's name will do."""
    assert main(["explain", asked]) == 0
    assert capsys.readouterr().out.startswith(f"{name}\n---")


@pytest.mark.parametrize(
    "asked", ["StoreTimeoutError", "oncekey.errors.StoreTimeoutError", "STORE_TIMEOUT"]
)
def test_a_section_is_found_by_class_and_by_code(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints it."""
    assert main(["explain", asked]) == 0
    said = capsys.readouterr().out
    assert said.startswith("StoreTimeoutError\n---")
    assert "outcome_known=False" in said


def test_a_code_of_several_classes_gives_all(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, too."""
    assert main(["explain", "invalid_request", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {
        "InvalidKeyError",
        "InvalidRequestError",
        "CanonicalJSONError",
        "IdempotencyScopeError",
    }


def test_no_name_lists_them_and_a_wrong_one_names_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody has to guess."""
    assert main(["explain"]) == 0
    assert "ClaimLostError" in capsys.readouterr().out.splitlines()
    assert main(["explain", "StoreTimeout"]) == 2
    assert "is it StoreTimeoutError?" in capsys.readouterr().err
