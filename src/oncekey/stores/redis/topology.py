"""Where the keys are: one server, the master that Sentinel names, or the nodes of a Cluster.

Pure: what has to be asked is yielded and its answer sent back, so that threads and event loops
share this.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

from oncekey.errors import StoreError, StoreUnavailableError
from oncekey.stores.redis.errors import code_of, unreachable
from oncekey.stores.redis.operations import command

__all__ = [
    "Address",
    "Asks",
    "Cluster",
    "Replies",
    "Send",
    "Sentinels",
    "Single",
    "Topology",
    "redirect",
    "shown",
    "slot",
]

Address = tuple[str, int] | str
"""Host and port, or the path of a socket."""

SLOTS: Final = 16_384
TELLER_SHARE: Final = 0.5  # of the time left, for one that is asked where the keys are


class Send(NamedTuple):
    """Bytes for a server, and how many replies will come.

    Attributes:
        calls: What the bytes stand for.
        sentinel: Whether the server is a Sentinel.
        share: How much of the time that is left may be spent on it.
    """

    address: Address
    payload: bytes
    expect: int = 1
    calls: Sequence[Any] = ()
    sentinel: bool = False
    share: float = 1.0


Replies = list[Any] | BaseException
"""What came back: a reply each (errors of the server among them), or why nothing did."""

Asks = Generator[Sequence[Send], list[Replies], Any]


def shown(address: Address) -> str:
    """An address in a message."""
    if isinstance(address, str):
        return f"Redis at {address}"
    host, port = address
    return f"Redis at [{host}]:{port}" if ":" in host else f"Redis at {host}:{port}"


def slot(key: bytes) -> int:
    """The slot of a key in a Cluster: only what stands in the first braces counts, if any."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


class Topology:
    """Where the keys are.

    Attributes:
        sharded: Whether one call can't touch several keys.
        located: Whether the servers are known. If not, ``locate`` finds them.
        only: The one server that has all keys, if there is one and it is known.
    """

    sharded = False
    located = True
    only: Address | None = None

    def locate(self) -> Asks:
        """Find the servers.

        Raises:
            StoreUnavailableError: Nobody told.
        """
        raise NotImplementedError

    def route(self, key: bytes) -> Address:
        """The server of a key.

        Raises:
            StoreUnavailableError: It is not known.
        """
        if self.only is None:
            raise StoreUnavailableError("the master that Sentinel names is not known: try again")
        return self.only

    def lane(self, key: bytes) -> Address | None:
        """Whose calls may wait for each other: those of one server. ``None``: of all of them."""
        return None

    def masters(self) -> list[Address]:
        """Every server that holds keys."""
        return [self.route(b"")]

    def failed(self, address: Address) -> None:
        """A server did not answer, or is not what it was: look anew before the next call."""

    def moved(self, number: int, address: Address) -> None:
        """A slot is somewhere else."""

    def seen(self, address: tuple[str, int]) -> Address:
        """An address that a server named, as this process can reach it."""
        return address


class Single(Topology):
    """One server."""

    def __init__(self, address: Address) -> None:
        self.only = address


class Sentinels(Topology):
    """The master of a service, as Sentinel names it."""

    located = False

    def __init__(self, seeds: Sequence[Address], service: str) -> None:
        self.seeds = list(seeds)
        self.service = service

    def locate(self) -> Asks:
        ask = command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self.service.encode())
        problem: StoreError | None = None
        for seed in list(self.seeds):
            (replies,) = yield [Send(seed, ask, sentinel=True, share=TELLER_SHARE)]
            reply = replies if isinstance(replies, BaseException) else replies[0]
            if isinstance(reply, BaseException):
                problem = unreachable(reply, shown(seed))
            elif isinstance(reply, list) and len(reply) == 2:
                self.only = (reply[0].decode(), int(reply[1]))
                self.located = True
                self.seeds.remove(seed)
                self.seeds.insert(0, seed)  # this one answers: ask it first next time
                return
        if problem is not None and not problem.retryable:
            raise problem
        raise StoreUnavailableError(
            f"no Sentinel names a master for {self.service!r}: make sure that the Sentinels run "
            "and that the service has this name"
        ) from problem

    def failed(self, address: Address) -> None:
        self.located = False
        self.only = None


class Cluster(Topology):
    """The nodes of a Redis Cluster, by slot."""

    sharded = True
    located = False

    def __init__(
        self,
        seeds: Sequence[Address],
        remap: Callable[[tuple[str, int]], tuple[str, int]] | None = None,
    ) -> None:
        self.seeds = list(seeds)
        self.remap = remap
        self.slots: list[Address | None] = []
        self.tellers: list[Address] = []  # masters that we heard of by a redirection
        self.suspects: set[Address] = set()  # those that did not answer: asked last

    def locate(self) -> Asks:
        found: list[Address | None] = [*self.tellers, *self.slots, *self.seeds]
        known = [address for address in dict.fromkeys(found) if address is not None]
        problem: StoreError | None = None
        for seed in sorted(known, key=self.suspects.__contains__):
            (replies,) = yield [Send(seed, command(b"CLUSTER", b"SLOTS"), share=TELLER_SHARE)]
            if isinstance(replies, BaseException):
                self.suspects.add(seed)
                problem = unreachable(replies, shown(seed))
            elif isinstance(replies[0], BaseException):
                problem = unreachable(replies[0], shown(seed))
            elif replies[0]:
                self._learn(replies[0], seed)
                return
        if problem is not None and not problem.retryable:
            raise problem
        raise StoreUnavailableError(
            "no node of the Redis Cluster can be reached, or none knows its slots: make sure that "
            "it runs with cluster-enabled yes and that the addresses are right"
        ) from problem

    def _learn(self, ranges: list[Any], teller: Address) -> None:
        slots: list[Address | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            # A node may not know what others call it.
            name = teller[0] if host in (None, b"", b"?") else host.decode()
            slots[first : last + 1] = [self.seen((name, int(port)))] * (last + 1 - first)
        self.slots = slots
        self.tellers.clear()
        self.suspects.discard(teller)
        self.located = True

    def seen(self, address: tuple[str, int]) -> Address:
        return self.remap(address) if self.remap else address

    def route(self, key: bytes) -> Address:
        address = self.lane(key)
        if address is None:
            self.located = False
            raise StoreUnavailableError(
                f"no node of the Redis Cluster serves slot {slot(key)}: wait until the cluster "
                "is whole again"
            )
        return address

    def lane(self, key: bytes) -> Address | None:
        return self.slots[slot(key)] if self.slots else None

    def masters(self) -> list[Address]:
        found = [address for address in dict.fromkeys(self.slots) if address is not None]
        if not found:
            raise StoreUnavailableError("the nodes of the Redis Cluster are not known: try again")
        return found

    def failed(self, address: Address) -> None:
        self.suspects.add(address)
        self.located = False

    def moved(self, number: int, address: Address) -> None:
        if address not in self.slots:  # it took over from another: it knows what else it has
            self.tellers.append(address)
            self.located = False
        elif self.slots:
            self.slots[number] = address


def redirect(error: BaseException, asked: Address) -> tuple[bool, int, tuple[str, int]] | None:
    """Where a reply sends us: for good or for once, the slot, the address."""
    code = code_of(error)
    if code not in ("MOVED", "ASK"):
        return None
    # "MOVED 3999 host:port"; redis-py takes the first word off.
    number, place = str(error).removeprefix(code + " ").split(" ")[:2]
    host, _, port = place.rpartition(":")
    return code == "MOVED", int(number), (host or asked[0], int(port))
