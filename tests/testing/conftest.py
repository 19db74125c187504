"""A server whose network the tests can break."""

from __future__ import annotations

from tests.servers.redis import _plain_server, redis_server, redis_url

__all__ = ["_plain_server", "redis_server", "redis_url"]
