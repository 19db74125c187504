"""Sign in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from oncekey.errors import StoreError
from oncekey.server.auth import COOKIE, SESSION_SECONDS, TooManyLoginsError
from oncekey.server.pages.desk import HOME, Desk, RefusedError, page, read_form, render
from oncekey.server.security import is_from_elsewhere

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["routes"]


def routes(gateway: Gateway) -> list[Route]:
    """Of the login page."""

    async def login(request: Request) -> Response:
        if request.method == "GET":
            return _page(gateway, _way_back(request.query_params.get("next", "")))
        try:
            return await _signed_in(gateway, request)
        except TooManyLoginsError as error:
            answer = _page(gateway, HOME, 429, f"Too many tries: wait {error.retry_after} s.")
            answer.headers["Retry-After"] = str(error.retry_after)
            return answer
        except RefusedError as error:
            return _page(gateway, HOME, error.status, str(error))
        except StoreError:
            return _page(gateway, HOME, 503, "The inbox can't be reached right now.")

    return [
        Route(f"{HOME}/login", login, methods=["GET", "POST"]),
        page(gateway, "/logout", do_sign_out),
    ]


async def _signed_in(gateway: Gateway, request: Request) -> Response:
    if is_from_elsewhere(request.headers, gateway.settings.public_url):
        raise RefusedError(403, "This form was sent by another site.")
    form = await read_form(request)
    name = form.one("name", 64)
    address = request.client.host if request.client else ""
    session = await gateway.doorman.sign_in(name, form.one("password", 2000), address)
    if session is None:
        await gateway.inbox.record("sign in failed", name[:64], "", actor="nobody")
        raise RefusedError(403, "Name and password don't fit, or nobody has this token.")
    await gateway.inbox.record("sign in", session.person.name, "", actor=session.person.name)
    answer = RedirectResponse(_way_back(form.one("next")), 303)
    secure = request.url.scheme == "https" or gateway.settings.public_url.startswith("https:")
    answer.set_cookie(
        COOKIE,
        session.token,
        max_age=SESSION_SECONDS,
        path=HOME,
        secure=secure,
        httponly=True,
        samesite="lax",
    )
    return answer


def _page(gateway: Gateway, back: str, status: int = 200, told: str = "") -> Response:
    return render("login.html", status, back=back, told=told, anybody=gateway.doorman.knows_anybody)


def _way_back(path: str) -> str:
    """A page of this dashboard; never another site."""
    inside = path == HOME or path.startswith((f"{HOME}/", f"{HOME}?"))
    safe = inside and path.isprintable() and "\\" not in path and "//" not in path.partition("?")[0]
    return path if safe else HOME


async def do_sign_out(desk: Desk) -> Response:
    """End the session."""
    await desk.gateway.doorman.sign_out(desk.session)
    name = desk.session.person.name
    await desk.gateway.inbox.record("sign out", name, "", actor=name)
    answer = RedirectResponse(f"{HOME}/login", 303)
    answer.delete_cookie(COOKIE, path=HOME)
    return answer
