"""Our store under a platform of the ``adcp`` package, which looks for its own decorator."""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from importlib.util import find_spec

import pytest
from tests.interop.serving import serving

if find_spec("adcp") is None:
    if os.environ.get("CI"):
        raise RuntimeError("the adcp package is the peer of this test: install adcp==9.2.0")
    pytest.skip("adcp is not installed: pip install adcp==9.2.0", allow_module_level=True)

BUY = {
    "idempotency_key": "key-0123456789abcdef",
    "account": {"account_id": "acct-1"},
    "brand": {"domain": "acme.example"},
    "start_time": "2099-06-01T00:00:00Z",
    "end_time": "2099-07-31T23:59:59Z",
    "packages": [{"product_id": "p", "budget": 5000, "pricing_option_id": "cpm"}],
}
UPDATE = {
    "idempotency_key": "key-0123456789abcdeg",
    "account": {"account_id": "acct-1"},
    "media_buy_id": "mb-1",
    "revision": 1,
    "paused": True,
}


async def test_a_platform_says_that_it_is_guarded_elsewhere() -> None:
    """The package refuses a platform that our store wraps, until that says so; then all works."""
    from mcp import Client

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        peer = import_module("tests.interop.peer")
        platforms = import_module("tests.interop.peer_platform")
        with pytest.raises(Exception, match="_adcp_idempotency_external = True") as refusal:
            platforms.handler_of(platforms.Platform())
        assert type(refusal.value).__name__ == "AdcpError"

        class Guarded(platforms.Platform):  # type: ignore[misc,name-defined]
            _adcp_idempotency_external = True

        platform = Guarded()
        app = peer.app_of(platforms.handler_of(platform))
    with serving(app) as base:
        async with Client(f"{base}/mcp") as client:
            for tool, request in (("create_media_buy", BUY), ("update_media_buy", UPDATE)):
                first = await client.call_tool(tool, request)
                again = await client.call_tool(tool, request)
                assert again.structured_content == {**first.structured_content, "replayed": True}
                other = await client.call_tool(tool, {**request, "ext": {"changed": 1}})
                assert other.structured_content["adcp_error"]["code"] == "IDEMPOTENCY_CONFLICT"
    assert platform.runs == ["create", "update"]
