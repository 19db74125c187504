"""The examples that receive webhooks, each run as its first lines say, by a real server.

Deliveries come in several copies, many at once, and are sent again until they get a 2xx, as senders
do: afterwards there must be as many effects as events.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.process import Served as Gateway
from tests.server.process import until
from tests.servers.fixtures_pg import Databases, sql

from oncekey.signatures import Provider, hmac_provider, provider

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPRESS = EXAMPLES / "express_gateway"
SECRET = "s3cret"
PATIENCE = 60
EVENTS, COPIES, AT_ONCE = 12, 3, 12
JSON = {"Content-Type": "application/json"}

ACME = hmac_provider("acme", secret=SECRET, header="X-Signature", event_id="id")
STRIPE = provider("stripe", secret=SECRET)
SPORTS_STACK = provider("sports-stack", secret=SECRET)


# Servers


class Served:
    """A server that was started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def workers(self) -> list[int]:
        """The processes that it has forked."""
        pid = self.process.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def gunicorn(app: str, folder: Path, code: Path = EXAMPLES, **env: str) -> Iterator[Served]:
    """Serve an example with two workers, whose files are in ``folder``."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        command = [sys.executable, "-m", "gunicorn", "--workers", "2", "--preload"]
        command += ["--bind", f"fd://{listener.fileno()}", "--pythonpath", str(code), app]
        log = folder / "log"
        with log.open("wb") as stream:
            server = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **env},
                pass_fds=[listener.fileno()],
                stdout=stream,
                stderr=stream,
            )
        try:
            yield Served(server, listener.getsockname()[1], log)
        finally:
            server.terminate()
            server.wait(PATIENCE)


def client() -> httpx.Client:
    # Without verify=False every client reads all certificates, which takes longer than the test.
    return httpx.Client(timeout=PATIENCE, trust_env=False, verify=False)


def post(source: Provider, url: str, payload: Any) -> httpx.Response:
    """Send one genuine delivery."""
    request = source.sign("POST", url, JSON, json.dumps(payload).encode())
    with client() as http:
        return http.post(url, content=request.body, headers=request.headers)


def storm(
    source: Provider, url: str, payloads: list[Any], done: Callable[[int], None] = lambda _: None
) -> None:
    """Send copies of all of it at once, each until it gets a 2xx. ``done`` hears how many did."""
    copies = payloads * COPIES
    random.Random(7).shuffle(copies)
    counted, lock = [0], threading.Lock()

    def deliver(payload: Any) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(httpx.TransportError):  # a worker has died
                answer = post(source, url, payload)
                if answer.is_success:
                    break
                assert answer.status_code in (500, 503), answer.text
            assert time.monotonic() < end, "never taken"
        with lock:
            counted[0] += 1
            done(counted[0])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(deliver, copies))


def documented(example: str, pattern: str) -> str:
    """What the first lines of an example say to run."""
    (found,) = re.findall(pattern, (EXAMPLES / example).read_text("utf-8"), re.DOTALL)
    return " ".join(found.split())


@pytest.fixture
def migrated(postgres: Databases) -> str:
    """A database with oncekey's tables, made as the examples say."""
    url = postgres.database()
    subprocess.run([sys.executable, "-m", "oncekey", "migrate", url], check=True)
    return url


# Flask with PostgreSQL


def plays(number: int = EVENTS) -> list[Any]:
    return [
        {"event": {"hash": f"hash-{one}", "game": "g1", "team": "home", "points": one % 4 + 1}}
        for one in range(number)
    ]


def test_sports_stack_adds_every_score_once(migrated: str, tmp_path: Path) -> None:
    """The score is the sum of all events, though copies come at once and a worker is killed."""
    sql(migrated, documented("sports_stack_flask.py", r"-c '(CREATE TABLE .*?)'"))
    with gunicorn(
        "sports_stack_flask:create_app()",
        tmp_path,
        DATABASE_URL=migrated,
        SPORTSSTACK_SECRET=SECRET,
    ) as served:
        hook = f"{served.url}/webhooks/sports-stack"

        def kill(count: int) -> None:
            if count == EVENTS:  # a third of the way
                os.kill(served.workers()[0], signal.SIGKILL)

        storm(SPORTS_STACK, hook, plays(), kill)
        total = sum(play["event"]["points"] for play in plays())
        assert sql(migrated, "SELECT * FROM scores") == [("g1", "home", total)]

        (tmp_path / "event.json").write_text(
            documented("sports_stack_flask.py", r"echo '(\{.*?\})' >")
        )
        command = documented("sports_stack_flask.py", r"oncekey (send \$HOOK [^\n]*)")
        words = command.replace("$HOOK", hook).split()
        env = {**os.environ, "SPORTSSTACK_SECRET": SECRET}
        subprocess.run([sys.executable, "-m", "oncekey", *words], cwd=tmp_path, env=env, check=True)
        assert sql(migrated, "SELECT points FROM scores") == [(total + 3,)]

        assert post(SPORTS_STACK, hook, {"event": {"hash": "empty"}}).status_code == 200
        assert "event empty can't be handled: PermanentError: no score" in served.log.read_text()
        other = provider("sports-stack", secret="another")
        assert post(other, hook, plays(1)[0]).status_code == 401
        assert sql(migrated, "SELECT points FROM scores") == [(total + 3,)]


def payments(number: int = EVENTS) -> list[Any]:
    return [{"id": f"evt_{one}", "cents": one + 1} for one in range(number)]


def rows(number: int = EVENTS) -> list[Any]:
    return [(f"evt_{one}", one + 1) for one in range(number)]


def test_the_steps_in_flask_pay_every_event_once(migrated: str, tmp_path: Path) -> None:
    """As many payments as events, though copies come at once."""
    sql(migrated, documented("exactly_once_flask_postgres.py", r"-c '(CREATE TABLE .*?)'"))
    app = "exactly_once_flask_postgres:create_app()"
    with gunicorn(app, tmp_path, DATABASE_URL=migrated, WEBHOOK_SECRET=SECRET) as served:
        storm(ACME, f"{served.url}/webhook", payments())
    assert sql(migrated, "SELECT * FROM payments ORDER BY cents") == rows()


# Flask and Django with SQLite


def test_flask_pays_every_event_once(tmp_path: Path) -> None:
    """As many payments as events, though copies come at once to two processes."""
    with gunicorn("flask_webhook:create_app()", tmp_path, WEBHOOK_SECRET=SECRET) as served:
        storm(ACME, f"{served.url}/webhook", payments())
    with contextlib.closing(sqlite3.connect(tmp_path / "webhooks.db")) as db:
        assert db.execute("SELECT * FROM payments ORDER BY cents").fetchall() == rows()


def test_django_pays_every_event_once(tmp_path: Path) -> None:
    """The sum of all payments is that of all events, though copies come at once."""
    events = [
        {
            "id": f"evt_{one}",
            "type": "invoice.paid",
            "data": {"object": {"amount_paid": one + 1}},
        }
        for one in range(EVENTS)
    ]
    with gunicorn("django_webhook:application", tmp_path, WEBHOOK_SECRET=SECRET) as served:
        hook = f"{served.url}/hooks/stripe"
        storm(STRIPE, hook, events)
        assert post(STRIPE, hook, {"id": "evt_other", "type": "other"}).status_code == 200
        with client() as http:
            assert http.get(f"{served.url}/total").json() == {"cents": sum(range(EVENTS + 1))}
            assert http.post(f"{served.url}/total").status_code == 403  # CSRF checks are on
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.sqlite3")) as db:
        found = db.execute("SELECT event, cents FROM shop_payment ORDER BY cents").fetchall()
    assert found == rows()


def test_django_project_is_sound(tmp_path: Path) -> None:
    """The file is a ``manage.py`` too, and Django finds nothing to complain about."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "django_webhook.py"), "check", "--fail-level", "WARNING"],
        cwd=tmp_path,
        env={**os.environ, "WEBHOOK_SECRET": SECRET},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# Express, behind what stands in for the gateway

NODE_ALONE = """
const http = require("http");
const { handle } = require(process.argv[1] + "/deliveries");
const server = http.createServer((request, response) => {
  const pieces = [];
  request.on("data", (piece) => pieces.push(piece));
  request.on("end", () => {
    const { status, text } = handle(request.headers, Buffer.concat(pieces));
    response.writeHead(status).end(text);
  });
});
server.listen(0, "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
"""


@contextlib.contextmanager
def listening(command: list[str], cwd: Path) -> Iterator[tuple[str, list[str]]]:
    """Run a server that says where it listens; gives that, and what it says later."""
    node = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, "PORT": "0"}, stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    said: list[str] = []
    try:
        where = node.stdout.readline().strip()
        assert where.startswith("listening on "), where
        yield f"{where.removeprefix('listening on ')}/webhooks", said
    finally:
        node.terminate()
        said.extend(node.stdout.read().splitlines())
        node.stdout.close()
        node.wait(PATIENCE)


def node_modules() -> Path:
    """Where Express is installed: in the user's cache, from npm's registry once."""
    if os.environ.get("ONCEKEY_TEST_NPM") == "0" or shutil.which("npm") is None:
        pytest.skip("Express needs npm")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncekey-tests"
    folder = cache / "express-5"
    if folder.is_dir():
        return folder / "node_modules"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as made:
        shutil.copy(EXPRESS / "package.json", made)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
        try:
            subprocess.run(
                ["npm", "install", "--no-package-lock", *options],
                cwd=made,
                capture_output=True,
                timeout=120,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"npm could not install Express: {error}")
        with contextlib.suppress(OSError):  # another process was faster
            Path(made).rename(folder)
    return folder / "node_modules"


@pytest.fixture(params=["node", "express"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """How to start the app: with Express, and with Node alone where there is no npm."""
    if shutil.which("node") is None:
        pytest.skip("Node is not installed")
    if request.param == "node":
        return lambda: listening(["node", "-e", NODE_ALONE, str(EXPRESS)], tmp_path)
    app = tmp_path / "app"
    app.mkdir()
    for file in ("package.json", "server.js", "deliveries.js"):
        shutil.copy(EXPRESS / file, app)
    (app / "node_modules").symlink_to(node_modules())
    return lambda: listening(["node", "server.js"], app)


def test_express_takes_deliveries_with_the_documented_headers(shop: Any) -> None:
    """A copy is answered 2xx too and changes nothing; what names no event is refused."""
    names = re.findall(r"^\| `([\w-]+)` \|", (EXPRESS / "README.md").read_text(), re.MULTILINE)
    assert names == ["webhook-id", "oncekey-source", "oncekey-type"]
    headers = {**JSON, **dict(zip(names, ["msg_1", "shop", "invoice.paid"], strict=True))}
    with shop() as (url, said), client() as http:
        answers = [http.post(url, content=b'{"id": "evt_1"}', headers=headers) for _ in range(2)]
        assert [(one.status_code, one.text) for one in answers] == [
            (200, "done\n"),
            (200, "done before\n"),
        ]
        assert http.post(url, content=b"{}", headers=JSON).status_code == 400
    assert said == ["invoice.paid msg_1 of shop: 15 bytes", "again: msg_1 of shop"]


def test_express_behind_the_gateway_gets_every_event_once(shop: Any, tmp_path: Path) -> None:
    """Copies at once, events while the app is away, a wrong secret: each event has one effect."""
    events = [{"id": f"evt_{one}", "type": "invoice.paid"} for one in range(EVENTS)]
    environ = {
        "SHOP_SECRET": SECRET,
        "ONCEKEY__STORE": f"sqlite:///{tmp_path}/inbox.db",
        "ONCEKEY__TARGETS__APP__FIRST_DELAY": "0.1",
        "ONCEKEY__TARGETS__APP__FACTOR": "1",
        "ONCEKEY__TARGETS__APP__BREAKER_AFTER": "0",
        "ONCEKEY__TARGETS__APP__TRIES": "1000",
    }
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}/webhooks"
    words = ("--config", str(EXPRESS / "gateway.toml"), "--port", "0")
    away = {**environ, "ONCEKEY__TARGETS__APP__URL": nowhere}
    with Gateway(*words, environ=away) as served:
        assert post(STRIPE, f"{served.address}/hooks/shop", events[0]).status_code == 200
        served.stop()
    with shop() as (url, said):
        there = {**environ, "ONCEKEY__TARGETS__APP__URL": url}
        with Gateway(*words, environ=there) as served:
            storm(STRIPE, f"{served.address}/hooks/shop", events)
            other = provider("stripe", secret="another")
            refused = post(other, f"{served.address}/hooks/shop", {"id": "evt_x"})
            assert refused.status_code == 401
            until(
                lambda: served.api("GET", "/stats")["totals"].get("delivered", 0) >= EVENTS,
                "every delivery",
            )
            served.stop()
    effects = [line for line in said if line.startswith("invoice.paid msg_")]
    assert len(effects) == EVENTS
    assert len({line.split()[1] for line in effects}) == EVENTS
