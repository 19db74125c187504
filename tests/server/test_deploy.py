"""The files of ``deploy/``: they read, and what they call is there."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from oncekey.cli._parser import parse
from oncekey.server.config import settings_from

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_unit_calls_commands_that_exist() -> None:
    """Each command of the systemd unit is one of ours, with options that it takes."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "oncekey.service")
    for key in ("ExecStartPre", "ExecStart"):
        words = unit["Service"][key].split()
        assert words[0].endswith("/bin/oncekey")
        assert parse(words[1:]).config == "/etc/oncekey/oncekey.toml"
    assert unit["Service"]["ExecReload"].split()[1] == "-HUP"


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "kubernetes.yaml"])
def test_containers_call_commands_that_exist(name: str) -> None:
    """Each list of words that starts with a command of ours is taken by it."""
    text = (DEPLOY / name).read_text("utf-8")
    calls = [json.loads(one) for one in re.findall(r'\["(?:serve|migrate)".*?\]', text)]
    assert calls
    for words in calls:
        parse(words)


def test_the_config_of_the_containers_reads() -> None:
    """With the secrets that the files name, it has no fault."""
    text = (DEPLOY / "oncekey.toml").read_text("utf-8")
    settings = settings_from(text, "oncekey.toml", {"SHOP_SECRET": "whsec_x"})
    assert list(settings.sources) == ["shop"]


def read_yaml(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf-8")))


def test_the_manifests_fit_together() -> None:
    """The probes are paths that the gateway has; every name that is used is given somewhere."""
    deployment, service, budget = read_yaml("kubernetes.yaml")
    assert [one["kind"] for one in (deployment, service, budget)] == [
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    ]
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    mounted = [one["name"] for one in container["volumeMounts"]]
    assert mounted == [one["name"] for one in pod["spec"]["volumes"]]
    for one in (*pod["spec"]["initContainers"], container):
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
    assert "/tmp" in [one["mountPath"] for one in container["volumeMounts"]]  # workers need it
    assert pod["spec"]["securityContext"]["runAsUser"] == int(last_stage()["USER"])


def test_the_compose_file_fits_together() -> None:
    """Services, volumes and files that are named are there; what waits, waits for one of them."""
    (compose,) = read_yaml("compose.yaml")
    services = compose["services"]
    assert set(services) == {"database", "tables", "gateway"}
    for one in services.values():
        assert set(one.get("depends_on", {})) <= set(services)
        for volume in one.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_file(), source
        if "build" in one:
            folder = DEPLOY / one["build"]["context"]
            assert (folder / one["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    (port,) = services["gateway"]["ports"]
    assert port.rpartition(":")[2] == last_stage()["EXPOSE"]


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of the Dockerfile, a list for each ``FROM``."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: list[list[tuple[str, str]]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        assert found, "an instruction before FROM"
        found[-1].append((word, rest.strip()))
    return found


def last_stage() -> dict[str, str]:
    """What the image is, by instruction; the last of a kind counts."""
    return dict(stages()[-1])


def test_the_dockerfile_is_one() -> None:
    """Instructions that there are; what is copied is in the sources, or in a stage of before."""
    known = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL",
             "HEALTHCHECK", "ENTRYPOINT", "CMD", "ENV", "ARG", "LABEL"}  # fmt: skip
    names: set[str] = set()
    for stage in stages():
        assert {word for word, _ in stage} <= known
        base = stage[0][1].split()
        assert re.fullmatch(r"[a-z./-]+:[\w.-]+", base[0]), "an image has a tag"
        for rest in (rest for word, rest in stage if word == "COPY"):
            *given, _ = rest.split()
            origin = re.fullmatch("--from=(.+)", given[0])
            if origin:
                assert origin[1] in names
            else:
                assert all((DEPLOY.parent / one).exists() for one in given)
        names |= {base[2]} if base[1:2] == ["AS"] else set()


def test_the_image_is_run_as_nobody_and_ends_by_signal() -> None:
    """Commands are lists, so that no shell stands between a signal and the gateway."""
    image = last_stage()
    assert int(image["USER"]) > 0
    entry, command = json.loads(image["ENTRYPOINT"]), json.loads(image["CMD"])
    assert entry == ["/opt/oncekey/bin/oncekey"]
    assert command[command.index("--port") + 1] == image["EXPOSE"]
    health = json.loads(image["HEALTHCHECK"].partition("CMD ")[2])
    compile(health[2], "the health check", "exec")
    assert f"127.0.0.1:{image['EXPOSE']}/healthz" in health[2]
    (installed,) = [rest for word, rest in stages()[0] if word == "RUN"]
    wanted = re.findall(r"\.\[([\w,]+)\]", installed)[0].split(",")
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(wanted) <= set(project["optional-dependencies"])


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """systemd's own checker has nothing to say about it."""
    checker = shutil.which("systemd-analyze")
    if checker is None:
        pytest.skip("systemd-analyze is not here")
    unit = (DEPLOY / "oncekey.service").read_text("utf-8")
    here = tmp_path / "oncekey.service"
    here.write_text(unit.replace("/opt/oncekey/bin/oncekey", sys.executable))
    done = subprocess.run(
        [checker, "verify", "--man=no", str(here)], capture_output=True, text=True, check=False
    )
    told = [line for line in (done.stdout + done.stderr).splitlines() if here.name in line]
    assert told == []  # a key that it does not know is no error to it
