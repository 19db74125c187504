"""Wrong URLs, options, clients and servers: a typed error that names the fix, and no secrets."""

from __future__ import annotations

import os
import pathlib
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from tests.servers.redis import Server, eventually, synced

from oncekey import aconnect, connect
from oncekey.errors import (
    StoreClosedError,
    StoreConfigError,
    StoreCorruptError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from oncekey.models import Key, Scope, State, Terms, Verdict
from oncekey.stores.redis import RedisBackend, RedisStore
from oncekey.stores.redis.errors import unreachable

TERMS = Terms(lease_ms=30_000, ttl_ms=86_400_000)


def key(name: object = "") -> Key:
    return Key(Scope("once", "redis"), str(name) or os.urandom(8).hex())


# URLs and arguments


@pytest.mark.parametrize(
    "url, told",
    [
        ("redis://host:notaport", "port"),
        ("redis://host:99999", "1 to 65535"),
        ("redis://host/zero", "must be a number"),
        ("redis://host/1?db=2", "two databases"),
        ("redis://a,b", "redis\\+cluster"),
        ("redis://[::1", "brackets"),
        ("redis://host?colour=red", "; there are check, db, min_replicas"),
        ("redis://host?timout=1", r"'timout'; did you mean 'timeout'\? There are check, db"),
        ("redis://host?prefix=", "needs one value"),
        ("redis://host?timeout=1&timeout=2", "needs one value"),
        ("redis://host?timeout=soon", "timeout must be a number"),
        ("redis://host?timeout=-1", "seconds above 0"),
        ("redis://host?min_replicas=-1", "from 0"),
        ("redis://host?check=maybe", "'warn', 'refuse' or 'off'"),
        ("redis://host?ssl_ca_certs=x", "no option 'ssl_ca_certs'"),
        ("rediss://host?ssl_cert_reqs=perhaps", "required, optional or none"),
        ("rediss://host?ssl_check_hostname=maybe", "true or false"),
        ("redis+cluster://host/0", "no databases"),
        ("redis+cluster://host?db=0", "no option 'db'"),
        ("redis+sentinel://host", "redis\\+sentinel://host1,host2/service"),
        ("unix://relative.sock", "unix:///path"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, told: str) -> None:
    """A URL that can't be understood is refused before anything is opened."""
    with pytest.raises(StoreConfigError, match=told):
        connect(url)
    with pytest.raises(StoreConfigError, match=told):
        aconnect(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cr%40t@host:6379/0?colour=red",
        "redis://user:s3cr%40t@host:port",
        "rediss+sentinel://user:s3cr%40t@host",
        "redis+cluster://user:s3cr%40t@host/7",
        # Special characters that are not encoded put the password elsewhere.
        "redis://user:s3cret",
        "redis://user:s3cret:6379",
        "redis://user:s3cret/0@host:port",
        "redis://user:pass?s3cret@host/0",
        "redis://user:pass?s3cret=x@host/0",
        "redis://user:pass@host?s3cret!word",
        "redis+sentinel://user:s3cret@host:26379",
        "unix://user:s3cret@redis.sock",
    ],
)
def test_errors_hold_no_password(url: str) -> None:
    """No message shows what stands between the colon and the at sign, wherever they stand."""
    for opener in (connect, aconnect):
        with pytest.raises(StoreConfigError) as caught:
            opener(url)
        assert "s3cr" not in str(caught.value)
        assert "s3cr" not in repr(caught.value.__cause__)


def test_unknown_keyword_options_are_refused() -> None:
    """An option that the class does not have is named."""
    with pytest.raises(StoreConfigError, match="colour"):
        connect("redis://host", colour="red")


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "rediss://host?ssl_cert_reqs=none",
        "valkey://host:1/3",
        "valkeys://host",
        "redis+cluster://a:1,b:2",
        "rediss+cluster://a",
        "redis+sentinel://a,b:1,[::1]:5/name?db=1&sentinel_password=x",
        "rediss+sentinel://a/name/2",
        "unix:///tmp/x.sock?db=2",
        "unix://user:pw@/tmp/x.sock",
    ],
)
async def test_every_scheme_opens(url: str) -> None:
    """Opening connects to nothing, and closing what was never used is fine, twice as well."""
    store = connect(url)
    assert isinstance(store, RedisStore)
    store.close()
    store.close()
    backend = aconnect(url)
    assert isinstance(backend, RedisBackend)
    await backend.aclose()
    await backend.aclose()


def test_a_store_needs_a_client_of_its_kind() -> None:
    """An async client for the sync store, or no client at all, is refused."""
    with pytest.raises(StoreConfigError, match="this one is for AsyncRedisStore"):
        RedisStore(redis.asyncio.Redis())
    with pytest.raises(StoreConfigError, match="this one is for RedisStore"):
        RedisBackend(redis.Redis())
    with pytest.raises(StoreConfigError, match="a URL or a client"):
        RedisStore(42)


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package redis the error says what to install, from connect and the class."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis"] or ["redis"]:
        monkeypatch.setitem(sys.modules, name, None)
    for opener in (connect, aconnect, RedisStore, RedisBackend):
        with pytest.raises(StoreConfigError, match=r"pip install 'oncekey\[redis\]'"):
            opener("redis://host")


# Servers


def test_no_server_is_unavailable(open_redis: Callable[..., Any]) -> None:
    """A server that is not there is an error that may pass, and names the address."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        store = open_redis(f"redis://127.0.0.1:{port}")
        with pytest.raises(StoreUnavailableError, match=f"127.0.0.1:{port}") as caught:
            store.claim(key(), b"o", b"f", TERMS)
    assert caught.value.retryable


def test_a_server_that_hangs_is_unavailable(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """A server that does not answer is given up, and works again when it goes on."""
    server = make_server()
    store = open_redis(server.url, timeout=0.2)
    assert store.first_seen(key("before"), TERMS) is True
    server.pause()
    try:
        with pytest.raises(StoreUnavailableError, match="no answer within"):
            store.first_seen(key("during"), TERMS)
    finally:
        server.resume()
    eventually(lambda: store.now(), "the server's going on")
    assert store.first_seen(key("after"), TERMS) is True


def test_a_server_that_comes_back_is_used_again(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """After a restart the same store goes on, and what was on disk is still known."""
    server = make_server(appendfsync="always")
    store = open_redis(server.url)
    assert store.first_seen(key("one"), TERMS) is True
    server.kill()
    with pytest.raises(StoreUnavailableError):
        store.first_seen(key("two"), TERMS)
    server.start()
    assert store.first_seen(key("one"), TERMS) is False
    assert store.first_seen(key("two"), TERMS) is True


def test_a_wrong_password_is_a_wrong_configuration(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """No password, a wrong one, and the right one with special characters."""
    server = make_server()
    server.run("CONFIG SET", "requirepass", "p@ss:w/rd")
    try:
        for login in ("", ":wrong@", "nobody:wrong@"):
            store = open_redis(f"redis://{login}{server.address}")
            with pytest.raises(StoreConfigError, match="user name or password"):
                store.first_seen(key(), TERMS)
        store = open_redis(f"redis://:p%40ss%3Aw%2Frd@{server.address}/2")
        assert store.first_seen(key(), TERMS) is True
    finally:
        server.run("CONFIG SET", "requirepass", "", password="p@ss:w/rd")


def test_missing_permission_names_what_to_grant(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """A user that may not run scripts is told which rights a store needs."""
    redis_server.run("ACL SETUSER", "weak", "on", ">pw", "~*", "&*", "+@all", "-@scripting")
    store = open_redis(f"redis://weak:pw@{redis_server.address}")
    with pytest.raises(StoreConfigError, match="ACL SETUSER"):
        store.claim(key(), b"o", b"f", TERMS)


def test_a_user_with_the_named_permissions_can_do_everything(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """The rights that the error names are enough, for the store's prefix alone."""
    redis_server.run(
        *("ACL SETUSER", "able", "reset", "on", ">pw", "~mine:*", "resetchannels", "&mine:*"),
        *(
            "+@read",
            "+@write",
            "+@scripting",
            "+@pubsub",
            "+@connection",
            "+time",
            "+info",
            "+wait",
        ),
    )
    store = open_redis(f"redis://able:pw@{redis_server.address}", prefix="mine", check="off")
    owner = b"o" * 16
    won = store.claim(key("k"), owner, b"f", TERMS)
    store.wait(key("k"), 0.01)
    assert store.renew(key("k"), owner, won.fence, TERMS)
    assert store.complete(key("k"), owner, won.fence, b"j", TERMS)
    assert store.first_seen(key(), TERMS)
    assert store.read(key("k")).answer == b"j"
    store.clear()
    other = open_redis(f"redis://able:pw@{redis_server.address}", prefix="others", check="off")
    with pytest.raises(StoreConfigError, match="ACL SETUSER"):
        other.claim(key(), owner, b"f", TERMS)


def test_a_replica_is_read_only(
    redis_server: Server, make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """A replica refuses to be written with an error that says to use the master."""
    replica = make_server(replicaof=f"127.0.0.1 {redis_server.port}")
    eventually(lambda: synced(replica), "the replica")
    store = open_redis(replica.url)
    for call in (
        lambda: store.claim(key(), b"o", b"f", TERMS),
        lambda: store.first_seen(key(), TERMS),
        lambda: store.write(key(), b"f", b"j", 10**13),
    ):
        with pytest.raises(StoreReadOnlyError, match="replica"):
            call()
    assert store.read(key()) is None


@pytest.fixture
def full(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> tuple[Server, Any, Callable[[], None]]:
    """A server, a store on it, and what fills the server's memory."""
    server = make_server()
    store = open_redis(server.url)

    def fill() -> None:
        used = server.run("INFO", "memory")["used_memory"]
        server.run("CONFIG SET", "maxmemory", used // 2)

    return server, store, fill


def test_owners_can_settle_when_memory_is_full(
    full: tuple[Server, Any, Callable[[], None]],
) -> None:
    """At maxmemory new keys are refused; owners renew, complete and release, duplicates replay."""
    server, store, fill = full
    names = [key(n) for n in range(3)]
    owner = b"o" * 16
    won = [store.claim(name, owner, b"f", TERMS) for name in names]
    assert store.first_seen(key("seen"), TERMS) is True
    fill()
    for call in (
        lambda: store.claim(key("new"), owner, b"f", TERMS),
        lambda: store.first_seen(key("fresh"), TERMS),
        lambda: store.write(key("put"), b"f", b"j", 10**13),
    ):
        with pytest.raises(StoreFullError, match="maxmemory"):
            call()
    together = store.together([("first_seen", key(f"m{n}"), TERMS) for n in range(8)])
    assert {type(result) for result in together} == {StoreFullError}
    assert store.renew(names[0], owner, won[0].fence, TERMS) is True
    assert store.complete(names[0], owner, won[0].fence, b"j" + b"x" * 5_000, TERMS) is True
    assert store.release(names[1], owner, won[1].fence) is True
    assert store.claim(names[0], b"p" * 16, b"f", TERMS).verdict is Verdict.REPLAY
    assert store.claim(names[2], b"p" * 16, b"f", TERMS).verdict is Verdict.IN_FLIGHT
    assert store.first_seen(key("seen"), TERMS) is False
    assert store.together([("first_seen", key("seen"), TERMS)] * 4) == [False] * 4
    store.wait(names[2], 0.01)
    server.run("CONFIG SET", "maxmemory", 0)
    assert store.claim(key("new"), owner, b"f", TERMS).verdict is Verdict.WON


def test_a_bad_key_does_not_take_its_neighbours_down(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """In a batch, the key that holds something else fails alone."""
    store = open_redis(redis_server.url, prefix="odd")
    with redis_server.client() as client:
        client.rpush(b"odd:" + key("list").digest, "x")
        client.set(b"odd:" + key("text").digest, "hello")
    names = ["list", "a", "text", "b"]
    for make in (
        lambda name: ("first_seen", key(name), TERMS),
        lambda name: ("claim", key(f"{name}"), os.urandom(16), b"", TERMS),
        lambda name: ("read", key(name)),
    ):
        results = store.together([make(name) for name in names])
        kinds = [isinstance(result, StoreCorruptError) for result in results]
        assert kinds == [True, False, True, False], results


# The look at the server


def test_a_server_that_evicts_is_warned_about(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """A policy that evicts and a missing log are warned about once, with what to run."""
    server = make_server(maxmemory_policy="allkeys-lru", appendonly="no")
    store = open_redis(server.url)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert store.first_seen(key(), TERMS) is True
        assert store.first_seen(key(), TERMS) is True
    told = [str(warning.message) for warning in caught]
    assert len(told) == 2
    assert "CONFIG SET maxmemory-policy noeviction" in told[0]
    assert "CONFIG SET appendonly yes" in told[1]
    assert "restart forgets every key" in told[1]


def test_a_server_that_evicts_is_refused_by_option(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """With check='refuse' nothing is done until the server is set right."""
    server = make_server(maxmemory_policy="volatile-ttl")
    store = open_redis(server.url, check="refuse")
    for _ in range(2):
        with pytest.raises(StoreConfigError, match="maxmemory-policy noeviction"):
            store.first_seen(key("k"), TERMS)
    server.run("CONFIG SET", "maxmemory-policy", "noeviction")
    assert store.first_seen(key("k"), TERMS) is True


def test_a_server_that_evicts_is_left_alone_by_option(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """With check='off' nothing is asked and nothing told."""
    server = make_server(maxmemory_policy="allkeys-lru", appendonly="no")
    assert open_redis(server.url, check="off").first_seen(key(), TERMS) is True


def test_snapshots_alone_are_warned_about(
    make_server: Callable[..., Server], open_redis: Callable[..., Any]
) -> None:
    """Without the append-only file a crash forgets what came after the snapshot."""
    server = make_server(appendonly="no", save="3600 1")
    with pytest.warns(UserWarning, match="since the last snapshot"):
        open_redis(server.url).first_seen(key(), TERMS)


def test_what_can_not_be_looked_at_is_said(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """Where neither INFO nor CONFIG is permitted, the warning says that nothing was checked."""
    redis_server.run("ACL SETUSER", "blind", "on", ">pw", "~*", "&*", "+@all", "-info", "-config")
    store = open_redis(f"redis://blind:pw@{redis_server.address}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert store.first_seen(key(), TERMS) is True
    assert len(caught) == 3
    assert all("could not be checked" in str(warning.message) for warning in caught)


def test_info_is_enough_to_look(redis_server: Server, open_redis: Callable[..., Any]) -> None:
    """Where only CONFIG is forbidden, as on hosted servers, INFO tells enough."""
    redis_server.run("ACL SETUSER", "hosted", "on", ">pw", "~*", "&*", "+@all", "-config")
    store = open_redis(f"redis://hosted:pw@{redis_server.address}", check="refuse")
    assert store.first_seen(key(), TERMS) is True


# Clients and closing


def test_a_store_uses_the_settings_of_a_client(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """A client with one connection and decoded replies serves; its pool is left alone."""
    module: Any = redis.asyncio if open_redis.is_async else redis  # type: ignore[attr-defined]
    client = module.Redis(
        port=redis_server.port, db=3, decode_responses=True, max_connections=1, client_name="shop"
    )
    store = open_redis(client, prefix="given")
    results = store.together([("first_seen", key(n), TERMS) for n in range(300)])
    assert results == [True] * 300
    won = store.claim(key("k"), b"o", b"f", TERMS)
    assert store.complete(key("k"), b"o", won.fence, b"\xff\x00", TERMS)
    assert store.read(key("k")).answer == b"\xff\x00"
    with redis_server.client(db=3) as other:
        assert other.dbsize() == 301
        named = [each for each in other.client_list() if each["name"] == "shop"]
    assert len(named) == 1
    assert client.connection_pool._available_connections == []


def test_a_unix_socket_serves(
    make_server: Callable[..., Server], open_redis: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    """A socket in the file system works as an address does, with a database of its own."""
    path = tmp_path / "r.sock"
    server = make_server(unixsocket=path)
    store = open_redis(f"unix://{path}?db=5")
    assert store.first_seen(key("k"), TERMS) is True
    assert store.first_seen(key("k"), TERMS) is False
    assert server.run("DBSIZE", db=5) == 1
    path.unlink()
    with pytest.raises(StoreUnavailableError, match=r"r\.sock"):
        open_redis(f"unix://{path}").first_seen(key(), TERMS)


def test_closing_leaves_the_given_client_open(redis_server: Server) -> None:
    """A store closes what it opened, never the client that it was given."""
    with redis_server.client() as client:
        assert client.ping()
        store = RedisStore(client, prefix="x")
        assert store.first_seen(key(), TERMS)
        before = len(client.client_list())
        store.close()
        eventually(lambda: len(client.client_list()) == before - 1, "the store's leaving")
        assert client.ping()


def test_a_closed_store_says_so(redis_server: Server, open_redis: Callable[..., Any]) -> None:
    """After close every operation says that the store is closed."""
    store = open_redis(redis_server.url)
    assert store.first_seen(key(), TERMS)
    closing = store.close if hasattr(store.backend, "close") else store.aclose
    closing()
    for call in (
        lambda: store.first_seen(key(), TERMS),
        lambda: store.now(),
        lambda: store.wait(key(), 0.01),
    ):
        with pytest.raises(StoreClosedError):
            call()
    closing()


def test_clear_removes_what_has_the_prefix(
    redis_server: Server, open_redis: Callable[..., Any]
) -> None:
    """Clearing takes every record of the store, and nothing with another prefix."""
    store, other = open_redis(redis_server.url, prefix="a*[b]"), open_redis(redis_server.url)
    store.together([("first_seen", key(n), TERMS) for n in range(400)])
    other.first_seen(key("k"), TERMS)
    redis_server.run("SET", "axb:not-ours", 1)
    store.clear()
    assert redis_server.run("DBSIZE") == 2
    assert store.first_seen(key(1), TERMS) is True
    assert other.first_seen(key("k"), TERMS) is False


def test_a_record_is_small(redis_server: Server, open_redis: Callable[..., Any]) -> None:
    """A mark takes 17 bytes, a completed record 59 bytes more than its payload and answer."""
    store = open_redis(redis_server.url, prefix="small")
    assert store.first_seen(key("m"), TERMS)
    won = store.claim(key("c"), b"o" * 16, b"f" * 64, TERMS)
    assert store.complete(key("c"), b"o" * 16, won.fence, b"j" * 100, TERMS)
    with redis_server.client() as client:
        assert client.strlen(b"small:" + key("m").digest) == 17
        assert client.strlen(b"small:" + key("c").digest) == 59 + 64 + 100
    assert store.read(key("c")).state is State.COMPLETED


def test_the_drivers_reason_ends_in_one_full_stop() -> None:
    """What redis-py says of a server that is away is a sentence among ours."""
    told = str(unreachable(ConnectionError("Error 111 connecting to h:1. Refused."), "Redis"))
    assert "connecting to h:1. Refused. Make sure that it runs" in told
