"""The JSON API under ``/_oncekey/api/v1``: who may call, what was asked, and how errors read."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey.errors import InvalidKeyError, OncekeyError, PolicyError, StoreError
from oncekey.http.body import ClientGoneError, asgi_body
from oncekey.server.auth import COOKIE, Person
from oncekey.server.endpoints import ENDPOINTS, ApiError, Call, Endpoint, Parameter, check_id
from oncekey.server.openapi import document
from oncekey.server.security import is_from_elsewhere, is_genuine_form

if TYPE_CHECKING:
    from oncekey.server.gateway import Gateway

__all__ = ["CHALLENGE", "CSRF_HEADER", "api_routes", "caller", "checked_fields", "problem"]

logger = logging.getLogger("oncekey")

MOST_BODY: Final = 65_536
_BODY_SECONDS: Final = 10
_WHOLE: Final = re.compile(r"-?[0-9]{1,15}")
CSRF_HEADER: Final = "x-oncekey-csrf"


def problem(status: int, title: str, detail: str = "", **headers: str) -> Response:
    """An error as RFC 9457 has it."""
    told = {"type": "about:blank", "title": title, "status": status}
    if detail:
        told["detail"] = detail
    return JSONResponse(told, status, headers, media_type="application/problem+json")


def api_routes(gateway: Gateway) -> list[Route]:
    """The routes of every endpoint, and of the document that describes them."""
    ways: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        path = f"/_oncekey/api/v1{endpoint.path}"
        ways.setdefault(path, {})[endpoint.method] = _serving(gateway, endpoint)
    routes = [
        Route(path, _by_method(serves), methods=list(serves)) for path, serves in ways.items()
    ]
    described = document()

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    return [*routes, Route("/_oncekey/api/openapi.json", openapi, methods=["GET"])]


def _by_method(serves: dict[str, Any]) -> Any:
    """One route a path, so that a 405 names every method that it has."""

    async def serve(request: Request) -> Response:
        answer: Response = await serves["GET" if request.method == "HEAD" else request.method](
            request
        )
        return answer

    return serve


async def caller(gateway: Gateway, request: Request) -> Person | None:
    """Who calls: by bearer token, or from a page of the dashboard by its session.

    Raises:
        ApiError: A session is not enough: the request may have been made by another site.
    """
    given = request.headers.get("authorization")
    if given is not None:
        kind, _, token = given.partition(" ")
        return gateway.doorman.by_token(token.strip()) if kind.lower() == "bearer" else None
    session = await gateway.doorman.session(request.cookies.get(COOKIE, ""))
    if session is None:
        return None
    if request.method not in ("GET", "HEAD"):
        genuine = is_genuine_form(session, request.headers.get(CSRF_HEADER, ""))
        if is_from_elsewhere(request.headers, gateway.settings.public_url) or not genuine:
            raise ApiError(
                403, "not from this dashboard", "send a bearer token, or the CSRF header"
            )
    return session.person


def _serving(gateway: Gateway, endpoint: Endpoint) -> Any:
    async def serve(request: Request) -> Response:
        try:
            person = await caller(gateway, request)
            if person is None:
                return problem(401, "who are you", "send Authorization: Bearer TOKEN", **CHALLENGE)
            if not person.may(endpoint.role):
                return problem(403, "not allowed", f"this needs the role {endpoint.role}")
            call = Call(
                person, _path(request), _query(endpoint, request), await _body(endpoint, request)
            )
            return JSONResponse(await endpoint.run(gateway, call), endpoint.status)
        except ApiError as error:
            return problem(error.status, error.title, error.detail)
        except (PolicyError, InvalidKeyError) as error:
            return problem(422, "that can't be meant", str(error))
        except StoreError as error:
            logger.warning("the API can't reach the inbox: %s", error)
            return problem(503, "the inbox can't be reached", **{"Retry-After": "5"})
        except OncekeyError as error:
            return problem(409, "not now", str(error))

    return serve


CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="oncekey"'}


def _path(request: Request) -> dict[str, str]:
    given: dict[str, str] = dict(request.path_params)
    if "id" in given:
        check_id(given["id"])
    if "number" in given:
        if not re.fullmatch(r"[0-9]{1,18}", given["number"]):
            raise ApiError(422, "no number", "a bulk replay has a number")
        given["id"] = given.pop("number")
    return given


def _query(endpoint: Endpoint, request: Request) -> dict[str, Any]:
    known = {one.name: one for one in endpoint.query}
    read: dict[str, Any] = {}
    for name, raw in request.query_params.multi_items():
        if name not in known:
            raise ApiError(422, "no such parameter", f"there are {', '.join(known) or 'none'}")
        if name in read:
            raise ApiError(422, "a parameter came twice", f"give {name} once")
        value: Any = raw
        if known[name].schema["type"] == "integer":
            if not _WHOLE.fullmatch(raw):
                raise ApiError(422, "no number", f"{name} must be a whole number")
            value = int(raw)
        read[name] = _checked(known[name], value)
    _complete(endpoint.query, read)
    return read


async def _body(endpoint: Endpoint, request: Request) -> dict[str, Any]:
    if endpoint.method in ("GET", "DELETE"):
        return {}
    declared = request.headers.get("content-length")
    try:
        raw = await asgi_body(
            request.receive, MOST_BODY, (declared or "").encode() or None, _BODY_SECONDS
        )
    except ClientGoneError:
        raise ApiError(400, "the body is not whole") from None
    if len(raw) > MOST_BODY:
        raise ApiError(413, "the body is too large", f"at most {MOST_BODY} bytes are taken")
    try:
        given = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON") from None
    if not isinstance(given, dict):
        raise ApiError(422, "the body is no JSON object")
    return checked_fields(endpoint.body, given)


def checked_fields(wanted: tuple[Parameter, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, if it is what is wanted.

    Raises:
        ApiError: It is not.
    """
    known = {one.name: one for one in wanted}
    if unknown := sorted(set(given) - set(known)):
        raise ApiError(
            422, "no such field", f"{len(unknown)} unknown; there are {', '.join(known)}"
        )
    read = {name: _checked(known[name], value) for name, value in given.items()}
    _complete(wanted, read)
    return read


def _complete(wanted: tuple[Parameter, ...], read: dict[str, Any]) -> None:
    for one in wanted:
        if one.required and one.name not in read:
            raise ApiError(422, f"{one.name} is missing", one.help)


def _checked(one: Parameter, value: Any) -> Any:
    """A value that its schema takes: the few words of JSON Schema that the table uses."""
    if not _fits(one.schema, value):
        wanted = {key: what for key, what in one.schema.items() if key != "default"}
        raise ApiError(422, f"{one.name} does not fit", f"give {json.dumps(wanted)}")
    return value


def _is_unicode(text: str) -> bool:
    """Whether it can be stored: JSON may have half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fits(schema: Any, value: Any) -> bool:
    kind = schema["type"]
    if kind == "string":
        return (
            isinstance(value, str)
            and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
            and re.fullmatch(schema.get("pattern", "(?s:.*)"), value) is not None
            and _is_unicode(value)
            and value in schema.get("enum", (value,))
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and len(value) <= schema["maxItems"]
            and all(_fits(schema["items"], one) for one in value)
        )
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if kind == "integer" and not isinstance(value, int):
        return False
    return bool(
        value >= schema.get("minimum", -math.inf)
        and value > schema.get("exclusiveMinimum", -math.inf)
        and value <= schema.get("maximum", math.inf)
    )
