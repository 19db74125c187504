"""The same shop in every framework, behind the framework's own authentication.

Each has ``POST /charges``, for users who sign in with the header ``X-Login``, unless they are
banned. Nobody sends ``Authorization``. Annotations are no strings here, since FastAPI and Litestar
read them.
"""

from collections.abc import Callable
from typing import Annotated, Any

USERS = ("ann", "bob")
BANNED: set[str | None] = set()
Charge = Callable[[], dict[str, Any]]


def starlette_app(store: Any, charge: Charge, decorated: bool = True) -> Any:
    from starlette.applications import Starlette
    from starlette.authentication import (
        AuthCredentials,
        AuthenticationBackend,
        BaseUser,
        SimpleUser,
        requires,
    )
    from starlette.middleware import Middleware
    from starlette.middleware.authentication import AuthenticationMiddleware
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from oncekey.adapters.starlette import by_user, idempotency, idempotent

    class Logins(AuthenticationBackend):
        async def authenticate(
            self, conn: HTTPConnection
        ) -> tuple[AuthCredentials, BaseUser] | None:
            name = conn.headers.get("x-login")
            if name not in USERS:
                return None
            scopes = ["authenticated"] if name in BANNED else ["authenticated", "charge"]
            return AuthCredentials(scopes), SimpleUser(name)

    async def charges(request: Request) -> Response:
        return JSONResponse(charge(), 201)

    if decorated:
        guarded = requires("charge")(idempotent(store, scope=by_user)(charges))
        route = Route("/charges", guarded, methods=["POST"])
    else:
        keys = idempotency(store, scope=by_user)
        route = Route("/charges", requires("charge")(charges), methods=["POST"], middleware=[keys])
    login = Middleware(AuthenticationMiddleware, backend=Logins())
    return Starlette(routes=[route], middleware=[login])


def fastapi_app(store: Any, charge: Charge) -> Any:
    from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request

    from oncekey.adapters.fastapi import by_state, idempotent_route

    def login(request: Request, x_login: Annotated[str | None, Header()] = None) -> str:
        if x_login not in USERS:
            raise HTTPException(401, "who are you?")
        request.state.user_id = x_login
        return x_login

    def may_charge(user: Annotated[str, Depends(login)]) -> None:
        if user in BANNED:
            raise HTTPException(403, "not you")

    router = APIRouter(
        route_class=idempotent_route(store, scope=by_state("user_id")),
        dependencies=[Depends(may_charge)],
    )

    @router.post("/charges", status_code=201)
    async def charges() -> dict[str, Any]:
        return charge()

    app = FastAPI()
    app.include_router(router)
    return app


def litestar_app(store: Any, charge: Charge) -> Any:
    from litestar import Litestar, post
    from litestar.connection import ASGIConnection
    from litestar.exceptions import NotAuthorizedException, PermissionDeniedException
    from litestar.handlers import BaseRouteHandler
    from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult

    from oncekey.adapters.litestar import idempotency

    class Logins(AbstractAuthenticationMiddleware):
        async def authenticate_request(self, connection: ASGIConnection) -> AuthenticationResult:
            name = connection.headers.get("x-login")
            if name not in USERS:
                raise NotAuthorizedException
            return AuthenticationResult(user=name, auth=None)

    def may_charge(connection: ASGIConnection, _: BaseRouteHandler) -> None:
        if connection.user in BANNED:
            raise PermissionDeniedException

    keys = idempotency(store, scope=lambda scope: scope["user"])

    @post("/charges", guards=[may_charge], middleware=[keys])
    async def charges() -> dict[str, Any]:
        return charge()

    return Litestar([charges], middleware=[Logins])


def aiohttp_app(store: Any, charge: Charge) -> Any:
    from aiohttp import web

    from oncekey.adapters.aiohttp import idempotent
    from oncekey.http import by_header

    @web.middleware
    async def login(request: web.Request, handler: Any) -> web.StreamResponse:
        name = request.headers.get("X-Login")
        if name not in USERS:
            raise web.HTTPUnauthorized
        if name in BANNED:
            raise web.HTTPForbidden
        return await handler(request)  # type: ignore[no-any-return]

    @idempotent(store, scope=by_header("X-Login"))
    async def charges(request: web.Request) -> web.StreamResponse:
        return web.json_response(charge(), status=201)

    app = web.Application(middlewares=[login])
    app.router.add_post("/charges", charges)
    return app


def flask_app(store: Any, charge: Charge) -> Any:
    import functools

    import flask

    from oncekey.adapters.flask import by_session, idempotent

    app = flask.Flask("shop")
    app.secret_key = "of the shop"

    @app.before_request
    def login() -> None:
        name = flask.request.headers.get("X-Login")
        if name in USERS:
            flask.session["user_id"] = name

    def login_required(view: Any) -> Any:
        @functools.wraps(view)
        def checked() -> Any:
            if "user_id" not in flask.session:
                flask.abort(401)
            if flask.session["user_id"] in BANNED:
                flask.abort(403)
            return view()

        return checked

    @app.post("/charges")
    @login_required
    @idempotent(store, scope=by_session("user_id"))
    def charges() -> Any:
        return charge(), 201

    return app
