"""What every page has: who looks, what they may do, how it is drawn, and how errors look."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, quote

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from oncekey._version import __version__
from oncekey.errors import InvalidKeyError, OncekeyError, PolicyError, StoreError
from oncekey.http.body import ClientGoneError, asgi_body
from oncekey.server.auth import COOKIE, Session
from oncekey.server.endpoints import ApiError
from oncekey.server.percentiles import said
from oncekey.server.security import is_from_elsewhere, is_genuine_form

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = [
    "HOME",
    "Desk",
    "Form",
    "RefusedError",
    "error_page",
    "page",
    "read_form",
    "render",
    "seen",
]

logger = logging.getLogger("oncekey")

HOME: Final = "/_oncekey"
MOST_FORM: Final = 65_536
MOST_FIELDS: Final = 2000
NAV: Final = (
    ("now", "Now", "n"),
    ("events", "Events", "e"),
    ("issues", "Issues", "i"),
    ("rejected", "Rejected", "r"),
    ("targets", "Targets", "t"),
    ("sources", "Sources", "s"),
    ("keys", "Keys", "k"),
    ("audit", "Audit", "a"),
)
DONE: Final = {
    "replayed": "Queued again: {n}",
    "busy": "Nothing was queued: an attempt is under way, or an earlier event comes first",
    "discarded": "Given up: {n}",
    "bulk": "The bulk replay has begun",
    "cancelled": "The bulk replay was stopped",
    "paused": "The target is paused: nothing is sent, new events queue up",
    "disabled": "The target is disabled: nothing is sent, and nothing is queued for it",
    "active": "The target is active again",
    "tested": "A test event is on its way",
    "sent": "5 copies of one event were sent: one is kept, four are stopped",
    "evicted": "The key is forgotten: the next copy of its event is new",
    "freed": "The claim is freed: the next call of its key runs",
    "left": "Nothing was freed: the claim has changed meanwhile",
    "saved": "The view is saved",
    "forgotten": "The view is forgotten",
}
STATE_ICONS: Final = {
    "delivered": "✓",
    "waiting": "…",
    "running": "▸",
    "parked": "⏸",
    "dead": "✕",
    "discarded": "⌫",
    "retry": "↻",
}


class RefusedError(Exception):
    """A page that is not shown, and why."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status = status


@dataclass(frozen=True, slots=True)
class Desk:
    """One request of somebody who signed in."""

    gateway: Gateway
    request: Request
    session: Session
    form: Form | None = None

    def query(self, name: str, most: int = 1000) -> str:
        """A parameter of the address, cut to what anybody would type."""
        return _storable(self.request.query_params.get(name, ""))[:most]

    def show(self, template: str, status: int = 200, **told: Any) -> Response:
        """A page."""
        done = DONE.get(self.query("done"), "")
        number = self.query("n", 9)
        done = done.format(n=number if number.isdigit() else "")
        return render(template, status, **_frame(self.session), done=done, **told)

    @property
    def base(self) -> str:
        """The gateway's own address, as people and providers reach it."""
        public = self.gateway.settings.public_url
        return (public or str(self.request.base_url)).rstrip("/")

    def sent(self) -> Form:
        """The form that was sent; of a ``do_`` handler there is one.

        Raises:
            RefusedError: There is none.
        """
        if self.form is None:
            raise RefusedError(400, "Send the form of the page.")
        return self.form

    def go(self, path: str, done: str = "", n: int | None = None) -> Response:
        """To another page, after something was done."""
        if done:
            path += ("&" if "?" in path else "?") + f"done={done}"
            path += "" if n is None else f"&n={n}"
        return RedirectResponse(path, 303)


def _frame(session: Session | None) -> dict[str, Any]:
    """What stands around a page; nothing for who is not signed in."""
    if session is None:
        return {}
    return {"person": session.person, "csrf": session.csrf, "nav": NAV}


def _storable(text: str) -> str:
    """Without NUL, which PostgreSQL takes in no text; nobody types it."""
    return text.replace("\0", "")


class Form:
    """The fields of a form that was sent."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        self._fields = fields

    def one(self, name: str, most: int = 1000) -> str:
        """A field's value, or nothing."""
        return _storable((self._fields.get(name) or [""])[0])[:most]

    def all(self, name: str) -> list[str]:
        """Every value of a field."""
        return self._fields.get(name, [])


async def read_form(request: Request) -> Form:
    """The form of a request.

    Raises:
        RefusedError: It is too large, or no form.
    """
    try:
        raw = await asgi_body(request.receive, MOST_FORM, None, 10)
    except ClientGoneError:
        raise RefusedError(400, "The form did not arrive as a whole.") from None
    if len(raw) > MOST_FORM:
        raise RefusedError(413, "The form is too large.")
    text = raw.decode("utf-8", "replace")
    try:
        return Form(parse_qs(text, keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        raise RefusedError(413, "The form has too many fields.") from None


Handler = Callable[[Desk], Awaitable[Response]]


def page(gateway: Gateway, path: str, handler: Handler, role: str = "read") -> Route:
    """A route that is for people who signed in. What changes something is a POST."""
    changes = handler.__name__.startswith("do_")

    async def serve(request: Request) -> Response:
        session: Session | None = None
        try:
            session = await gateway.doorman.session(request.cookies.get(COOKIE, ""))
            if session is None:
                return _to_login(request)
            if not session.person.may(role):
                raise RefusedError(
                    403, f"This needs the role {role}; yours is {session.person.role}."
                )
            form = None
            if changes:
                form = await read_form(request)
                elsewhere = is_from_elsewhere(request.headers, gateway.settings.public_url)
                if elsewhere or not is_genuine_form(session, form.one("csrf")):
                    raise RefusedError(
                        403, "This form is not of this session: load the page again."
                    )
            return await handler(Desk(gateway, request, session, form))
        except (RefusedError, ApiError) as error:
            return error_page(error.status, str(error), request, session)
        except (PolicyError, InvalidKeyError) as error:
            return error_page(422, str(error), request, session)
        except StoreError as error:
            logger.warning("the dashboard can't reach the inbox: %s", error)
            return error_page(503, "The inbox can't be reached right now.", request, session)
        except OncekeyError as error:
            return error_page(409, str(error), request, session)

    return Route(f"{HOME}{path}", serve, methods=["POST" if changes else "GET"])


def _asked_for(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def _to_login(request: Request) -> Response:
    if request.headers.get("x-oncekey-live"):
        return Response(status_code=401)
    back = f"?next={quote(_asked_for(request), safe='')}" if request.method == "GET" else ""
    return RedirectResponse(f"{HOME}/login{back}", 303)


def error_page(
    status: int, told: str, request: Request, session: Session | None = None
) -> Response:
    """What went wrong, when, and a way on."""
    at = f"{datetime.now(UTC):%H:%M:%S} UTC"
    again = _asked_for(request) if request.method == "GET" else HOME
    around = {**_frame(session), "here": ""}
    return render("error.html", status, code=status, told=told, at=at, again=again, **around)


# Drawing


def seen(ms: int | None, now: int) -> str:
    """How long ago, as people say it."""
    if ms is None:
        return "never"
    seconds = max(0, now - ms) / 1000
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago" if seconds >= 1 else "just now"


def _at(ms: int | None) -> str:
    if ms is None:
        return "never"
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _iso(ms: int | None) -> str:
    return "" if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat()


def _bytes(number: int) -> str:
    return f"{number} B" if number < 1000 else f"{number / 1000:.1f} KB"


_ENVIRONMENT: Final = Environment(
    loader=PackageLoader("oncekey.server"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"at": _at, "iso": _iso, "bytes": _bytes, "ago": seen, "span": said}
_ENVIRONMENT.globals |= {"home": HOME, "icons": STATE_ICONS, "version": __version__}


def render(template: str, status: int = 200, **told: Any) -> Response:
    """A template as an answer."""
    return HTMLResponse(_ENVIRONMENT.get_template(template).render(**told), status)


def static_file(name: str) -> bytes:
    """A file of ``static``."""
    return files("oncekey.server").joinpath("static", name).read_bytes()
