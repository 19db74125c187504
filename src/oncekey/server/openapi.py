"""The OpenAPI document, written from the table of endpoints and the types of their answers."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, Final, get_args, get_origin, get_type_hints

from oncekey._version import __version__
from oncekey.server import desk_views, views
from oncekey.server.endpoints import ENDPOINTS, Endpoint, Parameter

__all__ = ["document"]

_ERRORS: Final = {
    400: "The body can't be read",
    401: "No bearer token, or one that is not known",
    403: "The role is not enough",
    404: "There is no such thing",
    409: "Not in this state",
    413: "The body is too large",
    422: "Something does not fit; the detail says what",
    503: "The inbox can't be reached right now",
}
_ALWAYS: Final = (401, 403, 503)
_PLAIN: Final = {str: "string", int: "integer", float: "number", bool: "boolean"}
_PROBLEM: Final = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
    "required": ["type", "title", "status"],
}
_IN_PATH: Final = {
    "id": {"type": "string", "pattern": "^msg_[0-7][0-9a-f]{15}$"},
    "number": {"type": "integer", "minimum": 1, "maximum": 10**15},
    "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]{0,62}$"},
}


def document() -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        path = f"/_oncekey/api/v1{endpoint.path}"
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    schemas = {name: _schema(kind) for name, kind in _types().items()}
    schemas["Problem"] = dict(_PROBLEM)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "oncekey",
            "version": __version__,
            "description": "The inbox of a gateway: events, deliveries and what goes wrong.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types() -> dict[str, Any]:
    """Every type of an answer by its name in the document."""
    return {
        name.removesuffix("View"): kind
        for room in (views, desk_views)
        for name, kind in vars(room).items()
        if name.endswith("View") and isinstance(kind, type)
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _IN_PATH[name]}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    parameters += [_parameter(one) for one in endpoint.query]
    codes = {*_ALWAYS, *endpoint.errors}
    if endpoint.method == "POST":
        codes |= {400, 413, 422}
    told: dict[str, Any] = {
        "operationId": endpoint.run.__name__,
        "summary": endpoint.summary,
        "description": f"Needs the role `{endpoint.role}`.",
        "tags": [endpoint.tag],
        "parameters": parameters,
        "responses": {
            str(endpoint.status): {
                "description": "Done",
                "content": {"application/json": {"schema": _answer(endpoint.answer)}},
            },
            **{str(code): _error(code) for code in sorted(codes)},
        },
    }
    if endpoint.method == "POST":
        told["requestBody"] = _request(endpoint)
    return told


def _request(endpoint: Endpoint) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {one.name: {**one.schema, "description": one.help} for one in endpoint.body},
        "additionalProperties": False,
    }
    needed = [one.name for one in endpoint.body if one.required]
    if needed:
        schema["required"] = needed
    return {"required": bool(needed), "content": {"application/json": {"schema": schema}}}


def _parameter(one: Parameter) -> dict[str, Any]:
    return {
        "name": one.name,
        "in": "query",
        "required": one.required,
        "description": one.help,
        "schema": dict(one.schema),
    }


def _error(code: int) -> dict[str, Any]:
    problem = {"$ref": "#/components/schemas/Problem"}
    return {
        "description": _ERRORS[code],
        "content": {"application/problem+json": {"schema": problem}},
    }


def _answer(name: str) -> dict[str, Any]:
    kind, _, inner = name.rpartition(" of ")
    ref = {"$ref": f"#/components/schemas/{inner}"}
    if not kind:
        return ref
    properties: dict[str, Any] = {"items": {"type": "array", "items": ref}}
    if kind == "Page":
        properties["next"] = {
            "type": ["string", "null"],
            "description": "what to pass as after; null: there is no more",
        }
    return {"type": "object", "properties": properties, "required": list(properties)}


def _schema(kind: Any) -> dict[str, Any]:
    """The schema of a type of ``views``: plain types, lists, dicts, and others of that module."""
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    origin = get_origin(kind)
    if origin is list:
        return {"type": "array", "items": _inner(get_args(kind)[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _inner(get_args(kind)[1])}
    if origin in (types.UnionType, typing.Union):
        some = [one for one in get_args(kind) if one is not type(None)]
        return {**_schema(some[0]), "type": [_PLAIN[some[0]], "null"]}
    hints = get_type_hints(kind)
    return {
        "type": "object",
        "properties": {name: _inner(hint) for name, hint in hints.items()},
        "required": list(hints),
    }


def _inner(kind: Any) -> dict[str, Any]:
    if typing.is_typeddict(kind):
        return {"$ref": f"#/components/schemas/{kind.__name__.removesuffix('View')}"}
    return _schema(kind)
