"""The shop in FastAPI and Litestar, which read annotations: so they are no strings here."""

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException
from fastapi import Body as FastAPIBody
from fastapi import Response as FastAPIResponse
from fastapi import UploadFile as FastAPIUpload
from fastapi.responses import StreamingResponse
from litestar import Litestar, post
from litestar.datastructures import UploadFile
from litestar.enums import RequestEncodingType
from litestar.exceptions import NotFoundException
from litestar.params import Body
from litestar.response import Response, Stream

from oncekey.adapters.fastapi import idempotent_route
from oncekey.adapters.litestar import idempotency


def litestar_app(store: Any, charge: Any, note: Any, parts: Any, headers: Any) -> Litestar:
    """Handlers that are guarded each by its own middleware."""
    keys = [idempotency(store)]

    @post("/charges", middleware=keys)
    async def charges(data: dict[str, str]) -> Response[dict[str, Any]]:
        return Response(charge(data["order"]), status_code=201, headers=headers)

    @post("/missing", middleware=keys)
    async def missing() -> None:
        note("missing")
        raise NotFoundException

    @post("/broken", middleware=keys)
    async def broken() -> None:
        note("broken")
        raise ZeroDivisionError

    @post("/upload", middleware=keys)
    async def upload(
        data: Annotated[dict[str, UploadFile], Body(media_type=RequestEncodingType.MULTI_PART)],
    ) -> dict[str, int]:
        note("upload")
        return {"size": len(await data["file"].read())}

    @post("/stream", middleware=keys, status_code=200)
    async def stream() -> Stream:
        note("stream")
        return Stream(iter(parts), media_type="text/plain")

    @post("/paths/{rest:path}", middleware=keys, status_code=204)
    async def paths() -> None:
        pass

    return Litestar([charges, missing, broken, upload, stream, paths])


def fastapi_app(store: Any, charge: Any, note: Any, parts: Any, headers: Any) -> FastAPI:
    """A router whose routes are guarded."""
    router = APIRouter(route_class=idempotent_route(store))

    @router.post("/charges", status_code=201)
    def charges(response: FastAPIResponse, order: str = FastAPIBody(embed=True)) -> dict[str, Any]:
        response.headers.update(headers)
        answer: dict[str, Any] = charge(order)
        return answer

    @router.post("/missing")
    async def missing() -> None:
        note("missing")
        raise HTTPException(404)

    @router.post("/broken")
    async def broken() -> None:
        note("broken")
        raise ZeroDivisionError

    @router.post("/upload", status_code=201)
    async def upload(file: FastAPIUpload) -> dict[str, int]:
        note("upload")
        return {"size": len(await file.read())}

    @router.post("/stream")
    async def stream() -> StreamingResponse:
        note("stream")
        return StreamingResponse(iter(parts), media_type="text/plain")

    @router.post("/paths/{rest:path}", status_code=204)
    async def paths() -> None:
        pass

    app = FastAPI()
    app.include_router(router)
    return app
