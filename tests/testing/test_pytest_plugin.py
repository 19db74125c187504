"""The pytest plugin: its fixtures in a project of somebody else's, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]

# By its entry point where the package is installed, by its module from the source tree. Nobody
# else's plugins: they cost time, and have warnings of their own.
INSTALLED = any(one.name == "oncekey" for one in entry_points(group="pytest11"))
OPTIONS = ["-p", "oncekey" if INSTALLED else "oncekey.pytest_plugin", "-W", "error"]


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(pytester: pytest.Pytester, *more: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*OPTIONS, "-p", "no:cacheprovider", *more)


def test_fixtures_work_together(pytester: pytest.Pytester) -> None:
    """A clock, stores on it, and the kit."""
    pytester.makepyfile(
        """
        import sqlite3
        import pytest
        from oncekey.receiver import AsyncWebhookReceiver, WebhookReceiver

        @pytest.fixture
        def receiver(oncekey_store, webhook_kit):
            receiver = WebhookReceiver(webhook_kit.sample_provider("stripe"), oncekey_store)
            receiver.charged = []
            receiver.on("invoice.paid")(lambda event: receiver.charged.append(event.id))
            return receiver

        def test_once(receiver, webhook_kit):
            found = webhook_kit.deliver_twice(
                receiver, webhook_kit.sample("stripe"), effects=receiver.charged
            )
            webhook_kit.assert_handled_once(found)

        def test_the_store_is_on_the_clock(receiver, webhook_kit, oncekey_clock):
            before = oncekey_clock()
            found = webhook_kit.crash_after_effect(
                receiver, webhook_kit.sample("stripe"), effects=receiver.charged
            )
            assert found.effects == 2
            assert oncekey_clock() == before + 300

        def test_sqlite_has_transactions(oncekey_sqlite, oncekey_clock, webhook_kit, tmp_path):
            with sqlite3.connect(oncekey_sqlite.path) as own:
                own.execute("CREATE TABLE charges (event TEXT)")
            own.close()
            receiver = WebhookReceiver(
                webhook_kit.sample_provider("stripe"), oncekey_sqlite, transactional=True
            )
            receiver.on()(
                lambda event, tx: tx.connection.execute(
                    "INSERT INTO charges VALUES (?)", (event.id,)
                )
            )
            def charges():
                own = sqlite3.connect(oncekey_sqlite.path)
                number = own.execute("SELECT count(*) FROM charges").fetchone()[0]
                own.close()
                return number
            found = webhook_kit.crash_after_effect(
                receiver, webhook_kit.sample("stripe"), effects=charges
            )
            assert webhook_kit.assert_handled_once(found).effects == 1

        def test_async(oncekey_async_store, webhook_kit):
            charged = []
            receiver = AsyncWebhookReceiver(
                webhook_kit.sample_provider("stripe"), oncekey_async_store
            )
            @receiver.on()
            async def paid(event):
                charged.append(event.id)
            found = webhook_kit.deliver_concurrently(
                receiver, webhook_kit.sample("stripe"), effects=charged
            )
            webhook_kit.assert_handled_once(found)

        def test_stores_are_fresh(oncekey_store, oncekey_async_store, oncekey_clock):
            assert oncekey_store.now() == oncekey_clock() * 1000
        """
    )
    run(pytester).assert_outcomes(passed=5)


def test_a_failure_is_shown_at_the_line_of_the_test(pytester: pytest.Pytester) -> None:
    """What to fix, and no frame of the kit's."""
    pytester.makepyfile(
        """
        def test_once(webhook_kit):
            told = iter([200, 409])
            found = webhook_kit.deliver_twice(
                lambda m, u, h, b: next(told), webhook_kit.sample("stripe")
            )
            webhook_kit.assert_handled_once(found)
        """
    )
    found = run(pytester)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        [
            ">*webhook_kit.assert_handled_once(found)",
            "E*the duplicate was answered 409: senders treat that as a failure*",
            "test_a_failure_is_shown_at_the_line_of_the_test.py:6: AssertionError",
        ]
    )
    assert "_report.py" not in found.stdout.str()


def test_the_fixtures_are_listed_with_what_they_are(pytester: pytest.Pytester) -> None:
    """Few, all named alike, each with a sentence."""
    found = run(pytester, "--fixtures").stdout.str()
    ours = found.partition("fixtures defined from oncekey.pytest_plugin")[2]
    names = re.findall(r"^(\w+) -- .*oncekey/pytest_plugin.py:\d+\n    (.+)\.$", ours, re.MULTILINE)
    assert sorted(name for name, _ in names) == [
        "oncekey_async_store",
        "oncekey_clock",
        "oncekey_lab",
        "oncekey_proxy",
        "oncekey_sqlite",
        "oncekey_store",
        "webhook_kit",
    ]


def test_loading_the_plugin_is_cheap() -> None:
    """Every pytest run loads it where oncekey is installed: nothing of ours comes with it."""
    code = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import oncekey.pytest_plugin\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['oncekey', 'oncekey._version', 'oncekey.pytest_plugin']"


def test_importing_the_kit_loads_nothing_of_it() -> None:
    """``ManualClock`` alone brings no signatures, sockets or stores."""
    code = (
        "import sys\n"
        "from oncekey.testing import ManualClock\n"
        "heavy = {'asyncio', 'http', 'ssl', 'sqlite3', 'subprocess', 'oncekey.signatures',"
        " 'oncekey.receiver', 'cryptography'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_of_the_kit_is_there() -> None:
    """Functions and classes, never the module that they are in."""
    import types

    import oncekey.testing as kit

    for _ in range(2):
        for name in kit.__all__:
            assert not isinstance(getattr(kit, name), types.ModuleType), name
    assert dir(kit) == sorted(kit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kit.nonsense  # noqa: B018


def test_the_laboratory_keeps_reports(pytester: pytest.Pytester) -> None:
    """``oncekey_lab`` is the laboratory, and ``--oncekey-lab-html`` a folder of its pages."""
    pytester.makepyfile(
        """
        def test_store(oncekey_lab, oncekey_proxy):
            assert oncekey_lab(store="memory://").run(["claims at once"]).check().ok
            assert oncekey_proxy("127.0.0.1:1").port
        """
    )
    run(pytester, "--oncekey-lab-html", "pages").assert_outcomes(passed=1)
    assert [path.suffix for path in (pytester.path / "pages").iterdir()] == [".html"]
