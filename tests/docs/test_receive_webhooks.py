"""What the page on webhooks says of providers, and its project of Django."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from oncekey.signatures import Provider, providers
from oncekey.testing import sample

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "receive-webhooks.md").read_text("utf-8")

SETTINGS = """
SECRET_KEY = "secret"
ALLOWED_HOSTS = ["shop.example"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["shop"]
ROOT_URLCONF = "urls"
"""
MODELS = """
from django.db import models

class Payment(models.Model):
    event = models.TextField()
"""
CHECK = """
import os
import django

os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
django.setup()

from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from oncekey.testing import deliver_twice, sample

call_command("migrate", run_syncdb=True, verbosity=0)

from shop.models import Payment
from urls import receiver

delivery = sample(
    receiver.provider, type="invoice.paid", url="https://shop.example/hooks/stripe"
)
report = deliver_twice(get_wsgi_application(), delivery)
assert report.ok, report.problems
assert Payment.objects.count() == 1
receiver.close()
"""


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    return re.split(r"^#+ ", PAGE.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def named(text: str) -> set[str]:
    """The providers that a text names."""
    return {name for name, title in TITLES.items() if re.search(rf"\b{re.escape(title)}\b", text)}


# As the page calls them: Jira and not Jira Cloud, Telegram and not Telegram bots.
TITLES = {
    name: re.sub(r" (Cloud|bots|push)$", "", facts.title) for name, facts in providers().items()
}


@pytest.fixture(scope="module")
def made() -> dict[str, Provider]:
    pytest.importorskip("cryptography")
    return {name: sample(name).provider for name in providers()}


def test_providers_whose_ids_nobody_signs_are_named(made: dict[str, Provider]) -> None:
    """All of them, and no other; in the list, and in the table of what to do."""
    unsigned = {name for name, one in made.items() if not one.id_is_signed}
    text = section("Ids that nobody signed")
    listed = "\n".join(re.findall(r"^- [^\n]+(?:\n  [^\n]+)*", text, re.MULTILINE))
    rows = "\n".join(re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE))
    assert named(listed) == unsigned
    assert named(rows) == unsigned


def test_providers_whose_bodies_nobody_signs_are_named(made: dict[str, Provider]) -> None:
    """All of them, and no other, before the page says how to accept that."""
    unsigned = {name for name, one in made.items() if not one.body_is_signed}
    assert named(section("Providers that don't sign the body").partition("```")[0]) == unsigned


def test_notes_and_page_agree_on_the_guard() -> None:
    """``per-type`` is in the rows of those providers whose own notes ask for it."""
    asked = {name for name, one in providers().items() if "replay_guard='per-type'" in one.notes}
    rows = re.findall(r"^\| ([^|]+) \|.*`replay_guard=\"per-type\"`", PAGE, re.MULTILINE)
    assert asked
    assert named("\n".join(rows)) == asked


def test_the_django_block_handles_an_event_once(tmp_path: Path) -> None:
    """The page's ``urls.py``, in a project: one payment for two copies, both answered 2xx."""
    pytest.importorskip("django")
    (block,) = re.findall(r"^```py\n(# urls\.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "shop").mkdir()
    files = {
        "settings.py": SETTINGS,
        "shop/__init__.py": "",
        "shop/models.py": MODELS,
        "urls.py": block,
        "check.py": CHECK,
    }
    for name, source in files.items():
        (tmp_path / name).write_text(source, "utf-8")
    command = [sys.executable, "-W", "error", "check.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
