"""The laboratory, on receivers of ours and on ones that are known to be wrong."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.servers.redis import Server

from oncekey.cli import main
from oncekey.errors import PolicyError
from oncekey.lab import Lab, LabReport
from oncekey.testing import Recorder, recorded, sample

RECEIVER = str(Path(__file__).with_name("lab_receiver.py"))
NETWORK = ["copies", "race", "slow network", "lost answers", "reset connections", "partition"]
WORKER = ["killed worker", "stopped worker", "moved clock"]
STORE = ["store blackhole", "store partition", "store replies lost", "store connections reset"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Place:
    """A receiver that a laboratory may start, and the effects that it leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.file = folder / "effects"
        self.file.touch()
        self.database = folder / "shop.db"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks"

    def command(self, kind: str) -> list[str]:
        return [sys.executable, RECEIVER, str(self.port), str(self.file), kind]

    def is_served(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def effects(self) -> int:
        return len(self.file.read_text().splitlines())

    def rows(self) -> int:
        with closing(sqlite3.connect(self.database)) as own:
            return int(own.execute("SELECT count(*) FROM effects").fetchone()[0])

    def lab(self, kind: str, store: str, **options: object) -> Lab:
        settings = {"effects": self.effects, "events": 6, "workers": 4, **options}
        delivery = sample("stripe", type="invoice.paid", url="/hooks")
        return Lab(
            self.url,
            delivery,
            command=self.command(kind),
            store=store,
            store_env="STORE_URL",
            **settings,  # type: ignore[arg-type]
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def results(report: LabReport) -> dict[str, str]:
    return {one.name: one.result for one in report.findings}


def test_our_receiver_holds_while_networks_and_workers_fail(place: Place) -> None:
    """On SQLite: copies, races, lost answers, kills, stops and moved clocks."""
    report = place.lab("ours", f"sqlite:///{place.database}").run([*NETWORK, *WORKER]).check()
    assert set(results(report).values()) == {"held"}


def test_a_transaction_holds_exactly_once_while_workers_are_killed(place: Place) -> None:
    """Effects in the mark's transaction: not even a kill repeats one."""
    with closing(sqlite3.connect(place.database)) as own:
        own.execute("CREATE TABLE effects (event TEXT)")
        own.commit()
    url = f"sqlite:///{place.database}"
    lab = place.lab("ours-transactional", url, effects=place.rows, exactly_once=True)
    report = lab.run(["killed worker"]).check()
    told = [fact.statement for fact in report.findings[0].invariants]
    assert "no effect happened twice" in told


def test_our_receiver_holds_while_its_store_fails(place: Place, redis_server: Server) -> None:
    """On Redis: silence, a partition, lost replies and broken connections."""
    url = f"{redis_server.url}?check=off&timeout=2&prefix={place.port}"
    report = place.lab("ours", url).run(STORE).check()
    assert results(report) == dict.fromkeys(STORE, "held")


@pytest.mark.parametrize("kind, experiment", [("forgetful", "copies"), ("check-then-put", "race")])
def test_a_known_race_is_found(place: Place, kind: str, experiment: str) -> None:
    """A receiver that remembers nothing, or looks first and marks later, is told."""
    report = place.lab(kind, "memory://").run([experiment])
    assert not report.ok
    [finding] = report.findings
    broken = [fact.statement for fact in finding.invariants if not fact.held]
    assert broken == ["no effect happened twice"]
    with pytest.raises(AssertionError, match="no effect happened twice"):
        report.check()


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgresql", "redis"])
def test_our_stores_hold(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """Races, zombies, lost replies, broken connections and silence, on each store."""
    if kind == "memory":
        url = "memory://"
    elif kind == "sqlite":
        url = f"sqlite:///{tmp_path}/store.db"
    elif kind == "postgresql":
        url = f"{request.getfixturevalue('own_url')}?timeout=2"
    else:
        url = f"{request.getfixturevalue('redis_server').url}?check=off&timeout=2"
    report = Lab(store=url).run().check()
    done = {one.name for one in report.findings if one.result == "held"}
    networked = {"lost replies", "reset store", "silent store"}
    assert done == {"claims at once", "zombie"} | (
        networked if kind in ("postgresql", "redis") else set()
    )


def test_recorded_deliveries_are_made_again(place: Place, tmp_path: Path) -> None:
    """Doubled and shuffled, signed anew."""
    file = tmp_path / "recording.jsonl"
    with Recorder(file) as recorder:
        target = recorder.wrap(lambda method, url, headers, body: 200)
        for _ in range(4):
            target(*sample("stripe", type="invoice.paid", url="/hooks"))
    assert len(recorded(file)) == 4
    lab = place.lab("ours", f"sqlite:///{place.database}", recording=file)
    lab.run(["recording"]).check()
    assert place.effects() == 4


def test_reports_stand_by_themselves(place: Place, tmp_path: Path) -> None:
    """The page loads nothing and has charts; the XML has a case for each invariant."""
    report = place.lab("forgetful", "memory://").run(["copies", "moved clock", "recording"])
    report.write_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 2
    assert "no effect happened twice" in page
    for word in ("<script", "src=", "href=", "@import", "url("):
        assert word not in page
    report.write_junit(tmp_path / "report.xml")
    suites = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert [suite.get("name") for suite in suites] == ["copies", "recording", "moved clock"]
    first, last, _ = suites
    assert int(first.get("failures", "0")) >= 1
    assert [case.get("name") for case in first.iter("testcase")] == [
        fact.statement for fact in report.findings[0].invariants
    ]
    assert last.find("testcase/skipped") is not None
    report.write_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is False


def test_the_command(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``oncekey lab`` starts a receiver, counts effects by a command, and exits with 1 or 0."""
    monkeypatch.setenv("STORE_URL", f"sqlite:///{place.database}")
    monkeypatch.setenv("HOOK_SECRET", "whsec_of_the_tests")
    counting = f"{sys.executable} -c \"print(len(open('{place.file}').readlines()))\""
    common = ["lab", "--receiver", place.url, "--provider", "stripe", "--secret-env", "HOOK_SECRET"]
    common += ["--type", "invoice.paid", "--store-env", "STORE_URL", "--effects", counting]
    common += ["--events", "3", "--workers", "2", "--only", "copies", "--json"]
    page = tmp_path / "page.html"
    assert main([*common, "--run", " ".join(place.command("ours")), "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert page.exists()
    assert main([*common, "--run", " ".join(place.command("forgetful"))]) == 1
    assert json.loads(capsys.readouterr().out)["experiments"][0]["result"] == "broken"
    assert main(["lab", "--list"]) == 0
    assert "killed worker" in capsys.readouterr().out
    assert main(["lab", "--receiver", place.url]) == 2
    assert "--provider" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_receiver_too(place: Place, number: signal.Signals) -> None:
    """``oncekey lab`` that is told to end leaves none of the processes behind that it started."""
    shell = place.folder / "start.sh"
    group = place.folder / "group"
    serve = shlex.join(place.command("busy"))
    shell.write_text(f"echo $$ > {shlex.quote(str(group))}\n{serve} &\nwait\n")
    words = ["--receiver", place.url, "--provider", "stripe", "--secret-env", "HOOK_SECRET"]
    words += ["--type", "invoice.paid", "--run", f"sh {shell}", "--only", "copies"]
    env = {**os.environ, "HOOK_SECRET": "whsec_of_the_tests"}
    lab = subprocess.Popen(
        [sys.executable, "-m", "oncekey", "lab", *words, "--events", "2", "--patience", "3600"],
        env=env,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # whoever runs us may ignore it
    )
    try:
        until = time.monotonic() + 60
        while not place.effects():
            assert lab.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        lab.send_signal(number)
        assert lab.wait(60) == 128 + number
        until = time.monotonic() + 60
        while place.is_served():
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        lab.kill()
        lab.wait()
        with suppress(ProcessLookupError):
            os.killpg(int(group.read_text()), signal.SIGKILL)


def test_wrong_laboratories_are_refused(place: Place) -> None:
    """With what to do."""
    with pytest.raises(PolicyError, match="nothing to test"):
        Lab()
    with pytest.raises(PolicyError, match="pass a delivery"):
        Lab(place.url)
    with pytest.raises(PolicyError, match="no experiment magic; there are copies"):
        Lab(store="memory://").run(["magic"])
    broken = Lab(place.url, sample("stripe"), command=[sys.executable, "-c", "print('no port')"])
    with pytest.raises(PolicyError, match="ended with 0: no port"):
        broken.run()
