"""Every Python block of the README, the docs and the docstrings runs."""

from __future__ import annotations

import contextvars
import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import alembic.command
import alembic.config
import httpx
import pytest
from tests.docs.pages import FENCE, run_page
from tests.servers.fixtures_pg import Databases

import oncekey
from oncekey import (
    IdempotencyConflictError,
    IdempotencyInFlightError,
    Once,
    PostgresStore,
    StoreConfigError,
    ulid,
)
from oncekey.testing import deliver, deliver_twice, sample

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(  # but for what docs/cookbook.py left there: tests/docs/test_cookbook.py runs those
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.parent.name != "providers" or page.name == "index.md"
    ),
]
RUN = [page for page in PAGES if FENCE.search(page.read_text("utf-8"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(
    r"[Ss]ave this\s+as `(\w+)\.py`.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
ALEMBIC_ENV = """
import os
import sqlalchemy
from alembic import context

url = os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://")
engine = sqlalchemy.create_engine(url)
with engine.connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""
MAKE_TARGET = re.compile(r"\bmake ([a-z][\w.%-]*)")


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(oncekey.__path__, "oncekey."):
        if found.name != "oncekey.__main__":
            yield found.name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, from which files that a page saves can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    forget(tmp_path)


def forget(folder: Path) -> None:
    """Let the modules in ``folder`` be imported anew."""
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


def save_files(page: Path, folder: Path) -> list[str]:
    """Save the blocks that ``page`` says to save; gives their names without ``.py``."""
    saved = SAVED.findall(page.read_text("utf-8"))
    for name, source in saved:
        (folder / f"{name}.py").write_text(source, "utf-8")
    return [name for name, _ in saved]


def give_servers(
    text: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set the variables that ``text`` names to a fresh database and an empty Redis."""
    if "DATABASE_URL" in text:
        monkeypatch.setenv("DATABASE_URL", request.getfixturevalue("postgres").database())
    if "REDIS_URL" in text:
        monkeypatch.setenv("REDIS_URL", request.getfixturevalue("redis_url"))


def run_page_apart(page: Path) -> None:
    """Run the blocks of ``page`` in a process of their own."""
    command = [sys.executable, str(Path(__file__).with_name("pages.py")), str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(
    page: Path,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Python blocks of a page run from top to bottom, and again in the same folder."""
    text = page.read_text("utf-8")
    blocks = "".join(BLOCK.findall(text))
    give_servers(blocks, request, monkeypatch)
    save_files(page, folder)
    for _ in range(2):
        if "django" in text:  # it is set up once a process, in one way
            run_page_apart(page)
        else:
            run_page(page)
        forget(folder)


def test_tutorial_checks_pass_twice(folder: Path) -> None:
    """The tutorial's files, saved as it says, are programs that pass on every run."""
    names = save_files(ROOT / "docs" / "tutorial" / "first-dedup.md", folder)
    assert names[:4] == ["app", "main", "check_app", "behind"]
    assert names[4:] == ["own", "own_api", "check_own", "check_own_api"]
    again = (folder / "check_app.py").read_text("utf-8").replace("from app ", "from main ")
    (folder / "check_main.py").write_text(again, "utf-8")  # as the page says
    for name in ["check_app", "check_main", "check_own", "check_own_api"] * 2:
        command = [sys.executable, f"{name}.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), name


# The README: every block is read alone, so it must work alone.

README_BLOCKS = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))


def readme_block(word: str) -> dict[str, Any]:
    """Run the one block of the README that holds ``word``; gives the names that it defined."""
    found = [block for block in README_BLOCKS if word in block]
    assert len(found) == 1
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(found[0], "README.md", "exec"), names)
    return names


def test_every_readme_block_is_tested() -> None:
    """The tests below run each Python block of the README in a namespace of its own."""
    words = ("Flask(", "FastAPI(", "Once(", "PostgresStore(")
    assert [sum(word in block for word in words) for block in README_BLOCKS] == [1] * len(words)


def test_readme_function_replays(folder: Path) -> None:
    """The guarded function keeps one answer for a key, also in a second run."""
    for _ in range(2):
        assert readme_block("Once(")["charge"]("o-1", 500) == {"order": "o-1", "charged": 500}


def test_readme_payment_is_made_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call gets the answer of the first, one row is there, and a change is refused."""
    import psycopg

    give_servers("DATABASE_URL", request, monkeypatch)
    page = readme_block("PostgresStore(")
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        assert [page["pay"]("evt_1", 500) for _ in range(2)] == [{"paid": 500}] * 2
        with pytest.raises(IdempotencyConflictError):
            page["pay"]("evt_1", 900)
        assert connection.execute("SELECT * FROM payments").fetchall() == [("evt_1", 500)]
    page["store"].close()


def test_readme_flask_receiver(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both copies of an event get a 200 and one is handled; a bad signature gets a 401."""
    page = readme_block("Flask(")
    forger = page["provider"]("stripe", secret="whsec_guessed")
    url = "https://x.example/hooks/stripe"
    forged = sample(forger, type="invoice.paid", url=url)
    assert deliver(page["app"], forged).status == 401
    stripe = page["provider"]("stripe", secret="whsec_test")
    report = deliver_twice(page["app"], sample(stripe, type="invoice.paid", url=url))
    assert report.ok, report.problems
    assert capsys.readouterr().out.count("paid:") == 1
    page["webhooks"].close()


async def test_readme_shop_charges_once(folder: Path) -> None:
    """A retry is replayed, another body conflicts."""
    page = readme_block("FastAPI(")
    transport = httpx.ASGITransport(page["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        key = {"Idempotency-Key": "k-1", "Authorization": "Bearer of-ann"}
        first = await client.post("/charges", json={"cents": 5}, headers=key)
        again = await client.post("/charges", json={"cents": 5}, headers=key)
        other = await client.post("/charges", json={"cents": 6}, headers=key)
    assert first.json() == again.json()
    assert (first.status_code, first.json()["cents"], other.status_code) == (201, 5, 422)
    assert again.headers["Idempotent-Replayed"] == "true"
    await page["app"].store.aclose()


# What the pages show in other languages than Python


def test_postgresql_grants_are_enough(own_postgres: Databases) -> None:
    """The rights that the page grants are all that a role needs, and each line is needed."""
    import psycopg

    page = (ROOT / "docs" / "howto" / "use-postgresql.md").read_text("utf-8")
    (grants,) = re.findall(r"^```sql\n(GRANT.*?)^```$", page, re.MULTILINE | re.DOTALL)
    role = f"app_{os.getpid()}"
    grants = [f"{one} TO {role}" for one in re.split(r"\s+TO app;\s*", grants) if one]

    def use() -> None:
        with PostgresStore(url.replace("postgres@", f"{role}@")) as store:
            once = Once(store)
            with once.transaction(ulid()) as tx, once.guard(ulid()) as claim:
                claim.answer = tx.answer = "done"
            store.sweep()
            name = ulid()
            held = once.guard(name)
            held.__enter__()
            with pytest.raises(IdempotencyInFlightError):
                # Long enough to ask to be told; from elsewhere, as nobody waits for itself.
                contextvars.Context().run(once.guard(name, wait=0.3).__enter__)
            held.__exit__(None, None, None)
            store.clear()

    url = own_postgres.database()
    with PostgresStore(url) as store:
        store.create_schema()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        connection.execute("REVOKE ALL ON SCHEMA public FROM public")
        for missing in grants:
            for grant in grants:
                if grant != missing:
                    connection.execute(grant)
            with pytest.raises(StoreConfigError):
                contextvars.Context().run(use)
            connection.execute(missing)
            contextvars.Context().run(use)
            connection.execute(f"DROP OWNED BY {role}")
        connection.execute(f"DROP ROLE {role}")


def test_alembic_recipe_makes_the_schema(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The revision on the page, beside what ``oncekey migrate --sql`` prints, makes the tables."""
    give_servers("DATABASE_URL", request, monkeypatch)
    page = (ROOT / "docs" / "howto" / "use-postgresql.md").read_text("utf-8")
    (recipe,) = [block for block in BLOCK.findall(page) if "alembic" in block]
    versions = tmp_path / "versions"
    versions.mkdir()
    (versions / "recipe.py").write_text(recipe, "utf-8")
    command = [sys.executable, "-m", "oncekey", "migrate", "--sql"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (versions / "oncekey_001.sql").write_text(printed, "utf-8")
    (tmp_path / "env.py").write_text(ALEMBIC_ENV, "utf-8")
    config = alembic.config.Config()
    config.set_main_option("script_location", str(tmp_path))
    alembic.command.upgrade(config, "head")
    with PostgresStore(os.environ["DATABASE_URL"]) as store:
        assert store.create_schema() == []  # nothing was left to do
        with Once(store).guard("k") as claim:
            claim.answer = "done"
    alembic.command.downgrade(config, "base")
    with PostgresStore(os.environ["DATABASE_URL"]) as store:
        assert store.create_schema() != []


def test_named_files_exist() -> None:
    """The tests, examples and sources that a page names are there."""
    name = re.compile(r"`((?:tests|examples|src)/[\w./-]+\.(?:py|sql))`")
    named = [(page, path) for page in PAGES for path in name.findall(page.read_text("utf-8"))]
    assert [pair for pair in named if not (ROOT / pair[1]).exists()] == []


@pytest.mark.parametrize("name", list(modules()))
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples in a module's docstrings give what they show."""
    monkeypatch.chdir(tmp_path)
    module: ModuleType = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_docstrings_have_examples() -> None:
    """The doctest run above finds the examples: at least the main classes have one."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {
        test.name
        for name in modules()
        for test in finder.find(importlib.import_module(name))
        if test.examples
    }
    assert {
        "oncekey.guard.Once",
        "oncekey.guard.AsyncOnce",
        "oncekey.request.IdempotencyStore",
        "oncekey.webhook.WebhookDedup",
        "oncekey.webhook.AsyncWebhookDedup",
    } <= found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "make " in page.read_text("utf-8")], ids=lambda p: p.name
)
def test_make_targets_exist(page: Path) -> None:
    """Every ``make`` command that a page shows is a target of the Makefile."""
    makefile = ROOT / "Makefile"
    if not makefile.exists():
        pytest.skip("a source distribution has no Makefile")
    targets = set(re.findall(r"^([a-z][\w.%-]*):", makefile.read_text("utf-8"), re.MULTILINE))
    text = page.read_text("utf-8")
    code = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code += re.findall(r"`(make [^`]+)`", text)
    named = {target for block in code for target in MAKE_TARGET.findall(block)}
    assert named <= targets
