"""Whatever the API is asked: no 5xx, and no answer that the OpenAPI document does not have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from tests.server.process import TOKEN, Served, config, event

from oncekey.server.openapi import document

DOCUMENT = document()
WAYS = [(path, method) for path, ways in DOCUMENT["paths"].items() for method in ways]
SMALL = some.text(max_size=5)
JUNK = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.floats(),
    some.text(max_size=30),
    some.lists(SMALL, max_size=3),
    some.dictionaries(SMALL, some.integers(), max_size=2),
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    file = config(folder, "http://127.0.0.1:9/events")
    with Served("--config", str(file), "--port", "0") as one:
        one.deliver(event("evt_1", one.address))
        yield one


@given(data=some.data())
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
def test_every_answer_is_documented(gateway: Served, data: Any) -> None:
    """Paths, parameters and bodies of any kind are answered as the document says."""
    path, method = data.draw(some.sampled_from(WAYS))
    way = DOCUMENT["paths"][path][method]
    query = {}
    for one in way["parameters"]:
        if one["in"] == "path":
            known = {
                "id": gateway.api("GET", "/events")["items"][0]["id"],
                "name": "app",
                "number": "1",
            }
            value = data.draw(some.one_of(some.just(known[one["name"]]), some.text(min_size=1)))
            path = path.replace("{" + one["name"] + "}", quote(value, safe=""))
        elif data.draw(some.booleans()):
            value = data.draw(some.one_of(some.text(), some.integers().map(str), some.just("50")))
            query[one["name"]] = value
    body = None
    if "requestBody" in way:
        schema = way["requestBody"]["content"]["application/json"]["schema"]
        fields = some.fixed_dictionaries({}, optional=dict.fromkeys(schema["properties"], JUNK))
        body = data.draw(
            some.one_of(fields.map(lambda one: json.dumps(one).encode()), some.binary())
        )
    asked = urlencode(query, errors="replace")
    status, headers, raw = gateway.call(
        method.upper(), f"{path}?{asked}", body, authorization=f"Bearer {TOKEN}"
    )
    if status == 404 and "application/json" not in headers["content-type"] and b"{" not in raw:
        return  # a slash in a name is another path, which is none
    assert str(status) in way["responses"], (method, path, query, body, raw)
    assert status < 500
    kind = headers["content-type"].partition(";")[0]
    assert kind in way["responses"][str(status)]["content"]
