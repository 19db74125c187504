"""What tests of the gateway share."""

from __future__ import annotations

import httpx
from argon2 import PasswordHasher

from oncekey.testing import SignedDelivery

SECRET = "whsec_of_the_shop"
TOKENS = {
    "read": "token-of-a-reader",
    "operate": "token-of-an-operator",
    "admin": "token-of-an-admin",
}
PASSWORD = "correct horse battery"
HASH = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(PASSWORD)  # quick
HOST = "http://gateway.test"

CONFIG = f"""
store = "{{store}}"
[sources.shop]
provider = "stripe"
secret_env = "SHOP_SECRET"
targets = ["app"]
[sources.code]
provider = "github"
secret_env = "SHOP_SECRET"
targets = ["app", "other"]
[sources.talk]
provider = "slack"
secret_env = "SHOP_SECRET"
verify_token_env = "TALK_TOKEN"
targets = ["app"]
[targets.app]
url = "http://127.0.0.1:9/events"
allow_private = true
[targets.other]
url = "http://127.0.0.1:9/other"
allow_private = true
types = ["nothing.*"]
[users.rita]
password_hash = "{HASH}"
role = "read"
[users.olga]
password_hash = "{HASH}"
role = "operate"
[users.anna]
password_hash = "{HASH}"
role = "admin"
[tokens.reader]
token_env = "TOKEN_READ"
[tokens.operator]
token_env = "TOKEN_OPERATE"
role = "operate"
"""
ENVIRON = {
    "SHOP_SECRET": SECRET,
    "TALK_TOKEN": "a-token-of-talk",
    "TOKEN_READ": TOKENS["read"],
    "TOKEN_OPERATE": TOKENS["operate"],
    "ONCEKEY_TOKEN": TOKENS["admin"],
}


def bearer(role: str) -> dict[str, str]:
    """The header of a caller with a role."""
    return {"Authorization": f"Bearer {TOKENS[role]}"}


async def deliver(http: httpx.AsyncClient, one: SignedDelivery, path: str = "") -> httpx.Response:
    """Send a delivery as its provider would."""
    headers = dict(one.headers)
    return await http.request(one.method, path or one.url, headers=headers, content=one.body)


async def sign_in(http: httpx.AsyncClient, name: str, password: str = PASSWORD) -> httpx.Response:
    """Sign in; the client keeps the cookie."""
    form = {"name": name, "password": password, "next": "/_oncekey"}
    return await http.post("/_oncekey/login", data=form)


async def csrf_of(http: httpx.AsyncClient) -> str:
    """The token of the session, as a page has it."""
    page = (await http.get("/_oncekey/events")).text
    return page.split('name="oncekey-csrf" content="')[1].split('"')[0]
