"""AdCP over Agent2Agent (A2A), for servers of ``a2a-sdk``.

A request is a message with a data part ``{"skill": ..., "parameters": {...}}``. Its answer is a
completed task whose artifact holds the answer as a data part; an error is a failed task whose
artifact holds ``{"adcp_error": ...}``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from oncekey.adapters._webhooks import missing
from oncekey.adcp.serving import Handler, answer_to, check_handlers
from oncekey.adcp.wire import error_envelope
from oncekey.errors import InvalidRequestError
from oncekey.request import ToolContext

try:
    from a2a.server.agent_execution import AgentExecutor, RequestContext
    from a2a.server.events import EventQueue
    from a2a.types import Artifact, Part, Task, TaskState, TaskStatus
    from a2a.utils.errors import UnsupportedOperationError
    from google.protobuf.json_format import MessageToDict, ParseDict
    from google.protobuf.struct_pb2 import Value
except ImportError as error:
    raise missing("a2a-sdk, version 1 or later", "a2a") from error

__all__ = ["SkillExecutor", "authenticated_caller", "error_parts", "fail_task"]

_EXACT = 2**53


def authenticated_caller(request: RequestContext) -> ToolContext:
    """The caller as the SDK's own authentication knows it; nobody, where there is none."""
    user = request.call_context.user
    name = user.user_name if user.is_authenticated else None
    return ToolContext(caller_identity=name or None, tenant_id=request.tenant or None)


def error_parts(error: BaseException, context: Any = None) -> list[Part]:
    """An error as the parts of a message or artifact: data, then words for people.

    Args:
        error: What was raised.
        context: The ``context`` of the request that failed. Default: that of the error.
    """
    return _parts(error_envelope(error, context))


async def fail_task(
    error: BaseException, request: RequestContext, events: EventQueue, context: Any = None
) -> None:
    """Publish a failed task that carries ``adcp_error``, from an executor of your own.

    Args:
        error: What was raised.
        request: What ``execute`` was given.
        events: What ``execute`` was given.
        context: The AdCP ``context`` of the request that failed. Default: that of the error.
    """
    await events.enqueue_event(_task(request, error_envelope(error, context), failed=True))


class SkillExecutor(AgentExecutor):
    """An executor for handlers ``handler(params, caller)``, one for each skill.

    Errors of oncekey become failed tasks that carry ``adcp_error``, and so do answers that say
    ``errors``. Of any other error the client learns nothing but that a retry with the same key is
    safe; it is logged.

    Args:
        handlers: A handler for each skill, sync or async, such as ``IdempotencyStore.wrap`` gives.
        caller: Says who is calling, from verified credentials: a ``ToolContext``, or anything else
            that names the principal. It may be async. ``None``, or a ``PermissionError``, is for
            nobody that is known: requests with a key are then refused, with the second all are.

    Raises:
        PolicyError: ``handlers`` or ``caller`` is something else.

    Example:
        >>> async def get_products(params, caller):
        ...     return {"products": []}
        >>> executor = SkillExecutor({"get_products": get_products})
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        caller: Callable[[RequestContext], Any] = authenticated_caller,
    ) -> None:
        check_handlers(handlers, caller)
        self._handlers = handlers
        self._caller = caller

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Run the skill that the message names and publish the task."""
        calls = _calls(context)
        if len(calls) != 1 or calls[0][0] not in self._handlers:
            known = ", ".join(sorted(self._handlers))
            refusal = InvalidRequestError(
                f"send one data part with a skill and its parameters; the skills are {known}",
                "skill",
            )
            echoed = calls[0][1].get("context") if len(calls) == 1 else None
            await fail_task(refusal, context, event_queue, echoed)
            return
        skill, params = calls[0]
        answer, failed = await answer_to(
            self._handlers[skill], params, lambda: self._caller(context), skill
        )
        await event_queue.enqueue_event(_task(context, answer, failed))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Refuse: a task is first heard of when it is over.

        Raises:
            UnsupportedOperationError: Always.
        """
        raise UnsupportedOperationError("a skill of this agent can't be canceled")


def _calls(request: RequestContext) -> list[tuple[str, dict[str, Any]]]:
    """The skills that a message asks for."""
    found = []
    for part in request.message.parts if request.message is not None else ():
        data = _integers(MessageToDict(part.data)) if part.HasField("data") else None
        if isinstance(data, dict) and isinstance(data.get("skill"), str):
            params = data.get("parameters", data.get("input", {}))
            found.append((data["skill"], params if isinstance(params, dict) else {}))
    return found


def _integers(value: Any) -> Any:
    """The numbers of a data part are doubles; whole ones were integers to whoever sent them."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _EXACT else value
    if isinstance(value, dict):
        return {name: _integers(item) for name, item in value.items()}
    return [_integers(item) for item in value] if isinstance(value, list) else value


def _parts(answer: dict[str, Any]) -> list[Part]:
    parts = [Part(data=ParseDict(answer, Value()))]
    error = answer.get("adcp_error")
    if isinstance(error, Mapping):
        parts.append(Part(text=f"{error.get('code')}: {error.get('message')}"))
    return parts


def _task(request: RequestContext, answer: dict[str, Any], failed: bool) -> Task:
    state = TaskState.TASK_STATE_FAILED if failed else TaskState.TASK_STATE_COMPLETED
    return Task(
        id=request.task_id or str(uuid.uuid4()),
        context_id=request.context_id or str(uuid.uuid4()),
        status=TaskStatus(state=state),
        artifacts=[Artifact(artifact_id=str(uuid.uuid4()), parts=_parts(answer))],
    )
