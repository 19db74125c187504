"""FastAPI: what its router and its dependency have that other adapters have not."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, Depends, FastAPI, Form, Request, Response
from tests.adapters.hooks import FORM, Hook, make_hook, signed

from oncekey.adapters.fastapi import as_response, received, webhook_lifespan, webhook_router
from oncekey.errors import PolicyError
from oncekey.receiver import WebhookResponse


async def post(app: FastAPI, hook: Hook, event: str, **headers: str) -> httpx.Response:
    request = signed(hook, event)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x.example") as client:
        return await client.post(
            hook.path, content=request.body, headers={**request.headers, **headers}
        )


def test_openapi() -> None:
    """The route is described as it is: what it takes, what it answers, and in which words."""
    app = FastAPI()
    hook = make_hook("async")
    app.include_router(webhook_router(hook.receiver, "/in", prefix="/hooks", tags=["hooks"]))
    schema = app.openapi()
    assert list(schema["paths"]) == ["/hooks/in"]
    operation = schema["paths"]["/hooks/in"]["post"]
    assert operation["summary"] == "Webhooks of Stripe"
    assert "handled once" in operation["description"]
    assert operation["tags"] == ["hooks"]
    assert set(operation["requestBody"]["content"]) == {
        "application/json",
        "application/x-www-form-urlencoded",
    }
    assert set(operation["responses"]) == {"200", "400", "401", "413", "500", "503"}
    assert "whsec_test" not in json.dumps(schema)


def test_openapi_of_several() -> None:
    """Two receivers in one app have operations of their own."""
    app = FastAPI()
    app.include_router(webhook_router(make_hook("async").receiver, "/a"))
    app.include_router(webhook_router(make_hook("sync").receiver, "/b"))
    operations = [path["post"]["operationId"] for path in app.openapi()["paths"].values()]
    assert len(set(operations)) == 2


def test_left_out_of_openapi() -> None:
    """The route can be kept to oneself."""
    app = FastAPI()
    app.include_router(webhook_router(make_hook("async").receiver, include_in_schema=False))
    assert app.openapi()["paths"] == {}


async def test_router_with_a_lifespan() -> None:
    """A router may bring the end of its receiver along."""
    hook = make_hook("async")
    app = FastAPI()
    lifespan = webhook_lifespan(hook.receiver)
    app.include_router(webhook_router(hook.receiver, hook.path, lifespan=lifespan))
    async with app.router.lifespan_context(app):
        assert (await post(app, hook, "evt_1")).status_code == 200
        assert not hook.store.closed
    assert hook.store.closed


async def test_dependencies_of_the_router_come_first() -> None:
    """One that refuses keeps the receiver out of it."""
    hook = make_hook("async")

    def refuse(request: Request) -> None:
        raise RuntimeError("closed today")

    app = FastAPI()
    app.include_router(webhook_router(hook.receiver, hook.path, dependencies=[Depends(refuse)]))
    with pytest.raises(RuntimeError, match="closed today"):
        await post(app, hook, "evt_1")
    assert hook.outcomes() == []


async def test_dependency_is_done_before_the_endpoint() -> None:
    """An endpoint sees a recorded outcome, and what it raises comes too late to change it."""
    hook = make_hook("async")
    app = FastAPI()
    order: list[str] = []

    async def around() -> AsyncIterator[None]:
        order.append("opened")
        try:
            yield
        finally:
            order.append("closed")

    @app.post(hook.path)
    async def endpoint(
        request: Request,
        around: Annotated[None, Depends(around)],
        result: Annotated[WebhookResponse, Depends(received(hook.receiver))],
    ) -> Response:
        order.extend([result.outcome, *hook.outcomes()])
        if "x-fail" in request.headers:
            raise RuntimeError("too late")
        return as_response(result)

    with pytest.raises(RuntimeError, match="too late"):
        await post(app, hook, "evt_1", **{"x-fail": "1"})
    assert (await post(app, hook, "evt_1")).status_code == 200
    assert order[:4] == ["opened", "handled", "first", "closed"]
    assert order[4:] == ["opened", "duplicate", "duplicate", "closed"]
    assert hook.ids("evt") == ["evt_1"]


@pytest.mark.parametrize("raises", [True, False])
async def test_what_was_not_handled_is_never_a_200(raises: bool) -> None:
    """The receiver's status and headers go out before the endpoint runs, unless that is waived."""
    hook = make_hook("async", per_key=(2, 60))
    hook.failing.add("evt_1")
    app = FastAPI()
    seen: list[str] = []

    @app.post(hook.path)
    async def endpoint(
        result: Annotated[WebhookResponse, Depends(received(hook.receiver, raises=raises))],
    ) -> dict[str, bool]:
        seen.append(result.outcome)
        return {"taken": True}

    failed = await post(app, hook, "evt_1")
    forged = await post(app, hook, "evt_1", **{"Stripe-Signature": f"t=1,v1={'0' * 64}"})
    taken = await post(app, hook, "evt_1")
    limited = await post(app, hook, "evt_1")
    answers = [failed, forged, taken, limited]
    if not raises:
        assert seen == ["failed", "rejected", "handled", "limited"]
        assert [answer.status_code for answer in answers] == [200] * 4
        return
    assert seen == ["handled"]
    assert [answer.status_code for answer in answers] == [500, 401, 200, 429]
    assert failed.json()["detail"]["error"] == "failed"
    assert "Signature" in forged.headers["WWW-Authenticate"]
    assert int(limited.headers["Retry-After"]) >= 1
    assert limited.headers.get_list("content-type") == ["application/json"]


async def test_the_body_stays_readable_after_the_dependency() -> None:
    """An endpoint may read the request once more, for a first copy and for every retry."""
    hook = make_hook("async", max_body_bytes=100)
    app = FastAPI()

    @app.post(hook.path)
    async def endpoint(
        request: Request,
        result: Annotated[WebhookResponse, Depends(received(hook.receiver))],
    ) -> dict[str, Any]:
        assert await request.body() == signed(hook, "evt_1").body
        return {"id": (await request.json())["id"], "outcome": result.outcome}

    answers = [await post(app, hook, "evt_1") for _ in range(2)]
    assert [answer.json() for answer in answers] == [
        {"id": "evt_1", "outcome": "handled"},
        {"id": "evt_1", "outcome": "duplicate"},
    ]
    assert (await post(app, hook, "evt_" + "2" * 100)).status_code == 413


async def test_dependency_in_several_places() -> None:
    """Asked for twice in one request, the receiver gets the delivery once."""
    hook = make_hook("async")
    app = FastAPI()

    def outcome(
        result: Annotated[WebhookResponse, Depends(received(hook.receiver), use_cache=False)],
    ) -> str:
        return result.outcome

    @app.post(hook.path)
    async def endpoint(
        result: Annotated[WebhookResponse, Depends(received(hook.receiver))],
        name: Annotated[str, Depends(outcome)],
    ) -> Response:
        assert name == result.outcome
        return as_response(result)

    assert (await post(app, hook, "evt_1")).status_code == 200
    assert hook.outcomes() == ["first"]
    assert (await post(app, hook, "evt_1")).status_code == 200
    assert hook.outcomes() == ["duplicate"]


async def test_dependency_next_to_a_parsed_body() -> None:
    """FastAPI may read and parse the JSON first; the receiver still gets the raw bytes."""
    hook = make_hook("async", max_body_bytes=100)
    app = FastAPI()

    @app.post(hook.path)
    async def endpoint(
        payload: Annotated[dict[str, Any], Body()],
        result: Annotated[WebhookResponse, Depends(received(hook.receiver))],
    ) -> Response:
        assert payload["type"] == "paid"
        return as_response(result)

    assert (await post(app, hook, "evt_1")).status_code == 200
    assert hook.handled[0].body == signed(hook, "evt_1").body
    assert (await post(app, hook, "evt_" + "2" * 100)).status_code == 413


async def test_body_that_a_form_parameter_took() -> None:
    """A body that was parsed and is lost is an error that says what to do, and handles nothing."""
    hook = make_hook("async")
    app = FastAPI()

    @app.post(hook.path)
    async def endpoint(
        a: Annotated[str, Form()],
        result: Annotated[WebhookResponse, Depends(received(hook.receiver))],
    ) -> Response:
        return as_response(result)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x.example") as client:
        with pytest.raises(PolicyError, match="leave form and file parameters out"):
            await client.post(hook.path, content=b"a=1", headers=FORM)
    assert hook.outcomes() == []


async def test_answer_that_says_when_to_retry() -> None:
    """Every field of the receiver's answer is sent."""
    hook = make_hook("async", per_key=(1, 60))
    app = FastAPI()
    app.include_router(webhook_router(hook.receiver, hook.path))
    answers = [await post(app, hook, "evt_1") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert int(answers[1].headers["Retry-After"]) >= 1
    assert answers[1].headers.get_list("content-type") == ["application/json"]
