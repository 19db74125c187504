"""Brokers for these tests: a RabbitMQ of this machine, and moto, which emulates AWS."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RABBIT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the distribution's, without its `su`


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a RabbitMQ that is ours alone."""
    if not RABBIT.exists():
        if os.environ.get("CI"):
            pytest.fail("RabbitMQ is needed in CI: apt-get install rabbitmq-server")
        pytest.skip("no RabbitMQ here: apt-get install rabbitmq-server")
    home, port, names = tmp_path_factory.mktemp("rabbit"), _free_port(), _free_port()
    env = {
        **os.environ,
        "HOME": str(home),
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"oncekey{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(_free_port()),
        "RABBITMQ_MNESIA_BASE": str(home / "data"),
        "RABBITMQ_LOG_BASE": str(home / "logs"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(home / "none"),
        "RABBITMQ_PID_FILE": str(home / "pid"),
    }
    (home / "plugins").write_text("[].\n")
    with (home / "output").open("wb") as output:
        server = subprocess.Popen([RABBIT], env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        _await(port, server, home)
        yield port
    finally:
        server.terminate()
        server.wait(60)
        epmd = shutil.which("epmd")
        if epmd is not None:
            subprocess.run([epmd, "-port", str(names), "-kill"], check=False, capture_output=True)


def _await(port: int, server: subprocess.Popen[bytes], home: Path) -> None:
    import pika

    for _ in range(1200):
        with contextlib.suppress(pika.exceptions.AMQPError, OSError):
            pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)).close()
            return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    pytest.fail("RabbitMQ did not start:\n" + (home / "output").read_text()[-2000:])


@pytest.fixture(scope="session")
def aws() -> Iterator[str]:
    """The address of moto's server: an emulator, not AWS.

    It answers one request at a time: its conditional writes are not atomic between threads.
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def client(aws: str) -> Any:
    """boto3's client of a service: ``client("sqs")``."""
    import boto3

    def make(service: str) -> Any:
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        return boto3.client(service, endpoint_url=aws, region_name="eu-west-1", **keys)

    return make
