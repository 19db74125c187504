"""What gunicorn calls: see ``metered_shop.py``."""

from __future__ import annotations

from typing import Any

from prometheus_client import multiprocess


def child_exit(server: Any, worker: Any) -> None:
    """What a worker had running does not run any more."""
    multiprocess.mark_process_dead(worker.pid)
