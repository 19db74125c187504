"""Tasks for a real Celery worker. The tests import it too, to send them."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import task_postrun
from workers import Place

from oncekey import Once, SQLiteStore, current_claim, current_transaction
from oncekey.adapters.celery import once_task

place = Place(os.environ["PLACE"])
app = Celery("tests", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)
store = SQLiteStore(place.database)
store.now()
once = Once(store, scope="celery")
with once.guard("opened before the workers are forked") as claim:
    assert claim.replayed in (True, False)  # this module is imported once more by the worker


@task_postrun.connect
def ended(task: Any = None, args: Any = None, state: Any = None, **more: Any) -> None:
    place.effect(f"{task.name.rpartition('.')[2]} {args[0]} {state}")


@app.task
@once_task(once, key="order_id", retry_seconds=0.2)
def charge(order_id: str, cents: int) -> dict[str, Any]:
    place.effect(order_id)
    return {"order": order_id, "charged": cents}


@app.task
@once(key="order_id")
def plain(order_id: str) -> str:
    place.effect(order_id)
    return f"plain {order_id}"


@app.task(bind=True, default_retry_delay=0)
@once_task(once, key="order_id")
def retries(self: Any, order_id: str) -> list[int]:
    place.effect(order_id)
    if self.request.retries < 2:
        raise self.retry()
    return [self.request.retries, current_claim().attempts]


@app.task(autoretry_for=(ConnectionError,), retry_kwargs={"countdown": 0})
@once_task(once, key="order_id")
def autoretries(order_id: str) -> int:
    place.effect(order_id)
    if current_claim().attempts == 1:
        raise ConnectionError
    return current_claim().attempts


@app.task(bind=True, max_retries=0)
@once_task(once, key="order_id", retry_seconds=0.2)
def slow(self: Any, order_id: str) -> str:
    place.pass_gate(order_id)
    place.effect(order_id)
    return f"slow {order_id}"


@app.task
@once_task(once, key="order_id", in_flight="drop")
def dropping(order_id: str) -> str:
    place.pass_gate(order_id)
    place.effect(order_id)
    return "done"


@app.task(bind=True, soft_time_limit=1, max_retries=2, default_retry_delay=0)
def runs_out_of_time(self: Any, order_id: str) -> list[int]:
    @once_task(once, key="order_id", name="runs_out_of_time")
    def work(order_id: str) -> int:
        place.effect(order_id)
        if current_claim().attempts == 1:
            place.pass_gate(order_id)  # for ever: nobody opens it
        return int(current_claim().attempts)

    try:
        return [self.request.retries, work(order_id)]
    except SoftTimeLimitExceeded:
        raise self.retry() from None


@app.task(acks_late=True)
@once_task(once, key="order_id", lease=1)
def dies(order_id: str) -> bool:
    place.effect(order_id)
    place.die_at_first(order_id)
    return current_claim().takeover


@app.task(acks_late=True)
@once_task(once, key="order_id", transactional=True, retry_seconds=0.2)
def dies_in_transaction(order_id: str) -> str:
    place.effect(order_id)
    current_transaction().connection.execute("INSERT INTO effects VALUES (?)", (order_id,))
    place.die_at_first(order_id)
    return "done"
