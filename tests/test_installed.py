"""What is tested is the built wheel, and importing it is cheap."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

import oncekey


@pytest.mark.skipif(
    "ONCEKEY_TEST_INSTALLED" not in os.environ, reason="run by make test on the built wheel"
)
def test_the_wheel_is_tested_and_not_the_source_tree() -> None:
    """The package under test is the installed wheel, whole."""
    home = pathlib.Path(oncekey.__file__).parent
    assert "site-packages" in home.parts
    assert (home / "py.typed").exists()
    assert (home / "stores" / "sqlite" / "statements.sql").exists()
    assert list((home / "stores" / "sqlite" / "migrations").glob("*.sql"))


def test_import_brings_no_framework_driver_or_crypto() -> None:
    """``import oncekey`` loads nothing but itself and a little of the standard library."""
    code = (
        "import sys, oncekey\n"
        "heavy = {'asyncio', 'sqlite3', 'orjson', 'pydantic', 'cryptography', 'flask', 'fastapi',"
        " 'django', 'redis', 'psycopg', 'asyncpg', 'ssl', 'http'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    """Everything in ``__all__`` can be imported, and nothing else is promised."""
    for name in oncekey.__all__:
        assert getattr(oncekey, name) is not None, name
    assert set(dir(oncekey)) == set(oncekey.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        oncekey.nonsense  # noqa: B018
