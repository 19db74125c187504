"""Ask a gateway's API everything that its OpenAPI document allows, and much that it does not.

Starts ``oncekey serve`` on a fresh SQLite file with events, copies and dead letters in it, and lets
schemathesis loose on it: no answer of 500 or above, no status, media type or body that the document
does not have, nothing without a token. Run it by ``make test-api``; options go to schemathesis.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from oncekey.signatures import provider
from oncekey.testing import sample

CONFIG = """
store = "sqlite:///{folder}/inbox.db"
[sources.shop]
provider = "stripe"
secret_env = "SHOP_SECRET"
targets = ["app"]
[targets.app]
url = "http://127.0.0.1:9/events"
allow_private = true
tries = 1
"""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,response_headers_conformance,negative_data_rejection,ignored_auth,"
    "unsupported_method"
)
# Without bounds of its own the phase that follows links from answer to answer has no end.
ASKED = """
headers = { Authorization = "Bearer ${ONCEKEY_TOKEN}" }
[phases.stateful]
max-steps = 4
generation.max-examples = 20
"""


def main() -> int:
    """Start the gateway, ask, stop it; gives schemathesis' exit code."""
    environ = {
        **os.environ,
        "SHOP_SECRET": secrets.token_urlsafe(16),
        "ONCEKEY_TOKEN": secrets.token_urlsafe(24),
    }
    with tempfile.TemporaryDirectory(prefix="oncekey-api-") as folder:
        config = Path(folder, "gateway.toml")
        config.write_text(CONFIG.format(folder=folder))
        # The token is in no command line, which others on the machine could read.
        asked = Path(folder, "schemathesis.toml")
        asked.write_text(ASKED)
        serve = [sys.executable, "-m", "oncekey", "serve", "--config", str(config), "--port", "0"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=environ) as gateway:
            try:
                assert gateway.stdout is not None
                line = gateway.stdout.readline()
                address = "http://" + line.partition("http://")[2].partition(",")[0]
                send(address, environ["SHOP_SECRET"])
                where = f"{address}/_oncekey/api/openapi.json"
                command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(asked)]
                options = ["run", where, "--checks", CHECKS, "--generation-database", "none"]
                command += [*options, *sys.argv[1:]]
                # What it keeps for another run goes with the folder.
                found = subprocess.run(command, check=False, env=environ, cwd=folder)
                done = acted(address, environ["ONCEKEY_TOKEN"])
            finally:
                gateway.terminate()
    if not done:
        print("nothing was ever done: was the token taken?", file=sys.stderr)
    return found.returncode or (0 if done else 1)


def acted(address: str, token: str) -> bool:
    """Whether the gateway still answers, and somebody was let in and did something."""
    request = urllib.request.Request(
        f"{address}/_oncekey/api/v1/audit", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bool(json.load(answer)["items"])


def send(address: str, secret: str) -> None:
    """A few events, one of them three times. Nobody is at the target: they are dead letters."""
    stripe = provider("stripe", secret=secret)
    for number in (1, 2, 2, 2, 3):
        one = sample(stripe, id=f"evt_{number}", url=f"{address}/hooks/shop")
        request = urllib.request.Request(one.url, one.body, dict(one.headers))
        with urllib.request.urlopen(request, timeout=30):
            pass


if __name__ == "__main__":
    raise SystemExit(main())
