"""Who is calling: passwords by argon2, sessions kept on the server, bearer tokens, roles.

A session is a note in the inbox, under the SHA-256 of what the cookie holds: every node
knows it, and who reads the database can't sign in with what is there. Nothing here trusts a header
that a proxy may or may not have set, but for the address that a login is counted under.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final

from oncekey._core.limiter import InsertLimiter
from oncekey.errors import PolicyError
from oncekey.inbox.abc import AsyncInbox
from oncekey.server.settings import ROLES, ApiToken, ServerSettings, User

__all__ = ["COOKIE", "Doorman", "Person", "Session", "TooManyLoginsError", "hash_password"]

COOKIE: Final = "oncekey_session"
SESSION_SECONDS: Final = 12 * 3600
_MOST_PASSWORD: Final = 1024  # characters; a longer one is only there to cost time
_AT_ONCE: Final = 2  # argon2 takes 64 MB for each
_PER_ADDRESS: Final = ((10, 60), (60, 3600))
_PER_NAME: Final = ((50, 60), (300, 3600))
"""From all addresses together: so many can only come from several. Where somebody has signed in
before it does not hold, so that strangers elsewhere keep nobody out.
"""
_KNOWN_MS: Final = 30 * 86_400_000
_LEAST_PASSWORD: Final = 10
_ONE_NETWORK: Final = 64  # bits of an IPv6 address; the others are its owner's to choose


class TooManyLoginsError(Exception):
    """Too many failed logins of one address or name.

    Attributes:
        retry_after: Whole seconds until the next may be tried.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many logins: try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Person:
    """Who acts: a user or a token, and what they may do."""

    name: str
    role: str

    def may(self, role: str) -> bool:
        """Whether this one may do what ``role`` may."""
        return ROLES.index(self.role) >= ROLES.index(role)


@dataclass(frozen=True, slots=True)
class Session:
    """A person who signed in with a browser."""

    person: Person
    csrf: str = field(repr=False)
    token: str = field(repr=False)


class Doorman:
    """Knows people by password, cookie and token."""

    def __init__(self, settings: ServerSettings, inbox: AsyncInbox) -> None:
        self._inbox = inbox
        self._by_address = InsertLimiter(_PER_ADDRESS, time.monotonic)
        self._by_name = InsertLimiter(_PER_NAME, time.monotonic)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._hasher = _hasher()
        self._nobody = ""  # a hash that nobody's password has
        self._users: dict[str, User] = {}
        self._tokens: tuple[ApiToken, ...] = ()
        self.use(settings)

    def use(self, settings: ServerSettings) -> None:
        """Go by other settings from now on. Sessions end with what they were opened by."""
        self._users, self._tokens = dict(settings.users), tuple(settings.tokens)

    @property
    def knows_anybody(self) -> bool:
        """Whether there is anybody who could sign in."""
        return bool(self._users or self._tokens)

    # Tokens

    def by_token(self, token: str) -> Person | None:
        """Whose bearer token this is. Takes as long for a wrong one."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for one in self._tokens:
            if hmac.compare_digest(one.digest, digest):
                found = Person(one.name, one.role)
        return found

    # Passwords and sessions

    async def sign_in(self, name: str, password: str, address: str) -> Session | None:
        """A new session; ``None`` if name and password don't fit. Without a name: a token.

        Raises:
            TooManyLoginsError: Too many failed before.
        """
        address = _whose(address)
        await self._check_limits(name, address)
        self._count(name, address, 1)  # before it is known: many at once are as many
        person = await self._known(name, password)
        if person is None:
            return None
        self._count(name, address, -1)
        if name:
            await self._inbox.put_note(self._known_at(name, address), b"1", _KNOWN_MS)
        return await self._open(person, by_token=not name)

    async def _check_limits(self, name: str, address: str) -> None:
        waits = [self._by_address.retry_after(address)]
        if name:  # a token can't be guessed, and has no name that others could be kept out by
            wait = self._by_name.retry_after(name[:64])
            if wait and await self._inbox.get_note(self._known_at(name, address)) is None:
                waits.append(wait)
        if longest := max((wait for wait in waits if wait is not None), default=0):
            raise TooManyLoginsError(longest)

    def _known_at(self, name: str, address: str) -> str:
        """The note that somebody has signed in from there, with the password of now."""
        by = self.credential(name, by_token=False)
        told = "\0".join((name, address, by or ""))
        return f"known:{hashlib.sha256(told.encode('utf-8', 'surrogateescape')).hexdigest()}"

    def _count(self, name: str, address: str, number: int) -> None:
        self._by_address.count(address, number)
        if name:
            self._by_name.count(name[:64], number)

    async def _known(self, name: str, password: str) -> Person | None:
        if not password or len(password) > _MOST_PASSWORD:
            return None
        if not name:
            return self.by_token(password)
        user = self._users.get(name)
        async with self._turns:  # somebody unknown takes as long
            if user is None and not self._nobody:
                self._nobody = await asyncio.to_thread(self._hasher.hash, secrets.token_hex(16))
            hashed = user.password_hash if user else self._nobody
            fits = await asyncio.to_thread(_fits, self._hasher, hashed, password)
        return Person(user.name, user.role) if user is not None and fits else None

    async def _open(self, person: Person, *, by_token: bool) -> Session:
        token, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(24)
        told = {
            "name": person.name,
            "by_token": by_token,
            "csrf": csrf,
            "by": self.credential(person.name, by_token=by_token),
        }
        await self._inbox.put_note(_note(token), json.dumps(told).encode(), SESSION_SECONDS * 1000)
        return Session(person, csrf, token)

    async def session(self, token: str) -> Session | None:
        """The session of a cookie, with the role that its user has now."""
        if not token or len(token) > 64:
            return None
        kept = await self._inbox.get_note(_note(token))
        if kept is None:
            return None
        told: dict[str, Any] = json.loads(kept)
        name, by_token = told["name"], told["by_token"]
        by = self.credential(name, by_token=by_token)
        if by is None or not hmac.compare_digest(by, told["by"]):
            return None  # gone, or changed: whoever knew the old one is out
        role = self._token(name).role if by_token else self._users[name].role
        return Session(Person(name, role), told["csrf"], token)

    def _token(self, name: str) -> ApiToken:
        return next(one for one in self._tokens if one.name == name)

    def credential(self, name: str, *, by_token: bool) -> str | None:
        """A digest of what somebody signs in with now; ``None``: they can't."""
        if by_token:
            secret = next((one.digest for one in self._tokens if one.name == name), None)
        else:
            secret = self._users[name].password_hash.encode() if name in self._users else None
        return None if secret is None else hashlib.sha256(secret).hexdigest()

    async def sign_out(self, session: Session) -> None:
        """End a session, on every node."""
        await self._inbox.drop_note(_note(session.token))


def hash_password(password: str) -> str:
    """An argon2id hash for ``password_hash`` in the config.

    Raises:
        PolicyError: It is too short, or too long.
    """
    if not _LEAST_PASSWORD <= len(password) <= _MOST_PASSWORD:
        raise PolicyError(f"a password has {_LEAST_PASSWORD} to {_MOST_PASSWORD} characters")
    return str(_hasher().hash(password))


def _hasher() -> Any:
    try:
        from argon2 import PasswordHasher
    except ImportError:
        raise PolicyError("the gateway needs argon2-cffi: pip install 'oncekey[serve]'") from None
    return PasswordHasher()


def _fits(hasher: Any, hashed: str, password: str) -> bool:
    from argon2.exceptions import InvalidHashError, VerificationError

    try:
        return bool(hasher.verify(hashed, password))
    except (InvalidHashError, VerificationError):
        return False


def _whose(address: str) -> str:
    """What a login is counted under: of IPv6 the network, whose owner has all its addresses."""
    try:
        read = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(read, ipaddress.IPv4Address):
        return str(read)
    if read.ipv4_mapped is not None:
        return str(read.ipv4_mapped)
    return str(ipaddress.ip_network((int(read), _ONE_NETWORK), strict=False))


def _note(token: str) -> str:
    digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
    return f"session:{digest}"
