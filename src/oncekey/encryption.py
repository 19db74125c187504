"""Stored answers encrypted at rest: AES-256-GCM around any store, with keys that can be rotated.

A sealed answer is one byte of version, eight that say which key it was, a random nonce of twelve,
and the ciphertext with its tag. The record that it belongs to is authenticated with it, so that an
answer that was moved to another record does not open.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Iterable
from typing import Any, Final, overload

from oncekey.abc import AsyncStore, Store
from oncekey.errors import BackendMismatchError, PolicyError, StoreConfigError, StoreCorruptError
from oncekey.signatures.keypairs import MissingCryptographyError
from oncekey.stores._encrypted import VERSION, AsyncEncryptedStore, EncryptedStore, encrypted_store

__all__ = ["AsyncEncryptedStore", "EncryptedStore", "Keyring", "encrypted"]

KEY_BYTES: Final = 32
ID_BYTES: Final = 8
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
HEAD_BYTES: Final = 1 + ID_BYTES + NONCE_BYTES
VARIABLE: Final = "ONCEKEY_ENCRYPTION_KEYS"
_ID_DOMAIN: Final = b"oncekey key id 1"
_ANSWER_DOMAIN: Final = b"oncekey answer 1"


class Keyring:
    """The keys of encrypted stores. The first one encrypts, all of them decrypt.

    To rotate, add a new key at the end, everywhere; then move it to the front; and take the old one
    out when the answers that it encrypted have expired. One key is good for four billion answers.

    Args:
        keys: Each 32 random bytes, or those as base64 text. ``Keyring.generate()`` makes one.

    Raises:
        PolicyError: There is no key, or one is not 32 bytes, or is there twice.
        MissingCryptographyError: The package ``cryptography`` is not installed.

    Example:
        >>> from oncekey.encryption import Keyring
        >>> ring = Keyring([Keyring.generate()])
        >>> ring.open(ring.seal(b"paid", b"record 1"), b"record 1")
        b'paid'
    """

    def __init__(self, keys: Iterable[bytes | str]) -> None:
        if isinstance(keys, (bytes, str)):
            raise PolicyError("pass a list of keys, also for one: Keyring([key])")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise MissingCryptographyError(
                "encryption needs the package cryptography: run pip install 'oncekey[crypto]'"
            ) from None
        self._refused: type[Exception] = InvalidTag
        # Only the ciphers are kept, which don't give their keys away.
        self._ciphers: dict[bytes, Any] = {}
        for number, key in enumerate(keys, 1):
            raw = _key_bytes(key, number)
            name = hashlib.sha256(_ID_DOMAIN + raw).digest()[:ID_BYTES]
            if name in self._ciphers:
                raise PolicyError(f"key {number} is in the keyring already: remove it")
            self._ciphers[name] = AESGCM(raw)
        if not self._ciphers:
            raise PolicyError("a keyring needs a key: make one with Keyring.generate()")
        self._first, self._cipher = next(iter(self._ciphers.items()))

    @staticmethod
    def generate() -> str:
        """A new random key as base64 text, for a secret manager or the environment."""
        return base64.b64encode(os.urandom(KEY_BYTES)).decode()

    @classmethod
    def from_env(cls, variable: str = VARIABLE) -> Keyring:
        """The keys in an environment variable, as base64 with commas or spaces between them.

        Raises:
            PolicyError: The variable is not set, or holds something else.
        """
        text = os.environ.get(variable, "")
        if not text.strip():
            raise PolicyError(
                f"{variable} is not set: put a key from Keyring.generate() there, the newest first"
            )
        return cls(re.split(r"[,\s]+", text.strip(" ,\t\r\n")))

    @property
    def ids(self) -> list[str]:
        """What stands for the keys in errors and in sealed answers, the first one first."""
        return [name.hex() for name in self._ciphers]

    def __repr__(self) -> str:
        """The ids alone."""
        return f"Keyring(ids={self.ids})"

    def seal(self, answer: bytes, identity: bytes) -> bytes:
        """Encrypt ``answer`` with the first key, bound to ``identity``."""
        head = VERSION + self._first
        nonce = os.urandom(NONCE_BYTES)
        sealed: bytes = self._cipher.encrypt(nonce, answer, _ANSWER_DOMAIN + head + identity)
        return head + nonce + sealed

    def open(self, sealed: bytes, identity: bytes) -> bytes:
        """Decrypt what ``seal`` made for the same ``identity``.

        Raises:
            StoreConfigError: The key that it was encrypted with is not here.
            StoreCorruptError: It was changed, cut, or sealed for another identity.
        """
        if sealed[:1] != VERSION or len(sealed) < HEAD_BYTES + TAG_BYTES:
            raise StoreCorruptError("what is stored is not an encrypted answer: it was changed")
        head, nonce, rest = sealed[: 1 + ID_BYTES], sealed[1 + ID_BYTES : HEAD_BYTES], HEAD_BYTES
        cipher = self._ciphers.get(head[1:])
        if cipher is None:
            raise StoreConfigError(
                f"this answer was encrypted with key {head[1:].hex()}, the keyring has "
                f"{', '.join(self.ids)}: add that key at its end until its answers have expired"
            )
        try:
            answer: bytes = cipher.decrypt(nonce, sealed[rest:], _ANSWER_DOMAIN + head + identity)
        except self._refused:
            raise StoreCorruptError(
                "a stored answer does not decrypt: it was changed, or belongs to another record"
            ) from None
        return answer


def _key_bytes(key: object, number: int) -> bytes:
    """A key as bytes. No message shows any of it."""
    if isinstance(key, str):
        text = key.strip().replace("-", "+").replace("_", "/").rstrip("=")
        try:
            key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise PolicyError(
                f"key {number} is not base64: make one with Keyring.generate()"
            ) from None
    if not isinstance(key, (bytes, bytearray)):
        raise PolicyError(
            f"key {number} is a {type(key).__name__}: pass {KEY_BYTES} bytes or their base64 text"
        )
    if len(key) != KEY_BYTES:
        raise PolicyError(
            f"key {number} has {len(key)} bytes, AES-256 needs {KEY_BYTES} random ones: make one "
            "with Keyring.generate(), a password won't do"
        )
    return bytes(key)


@overload
def encrypted(store: Store, keyring: Keyring, *, allow_plain: bool = False) -> EncryptedStore: ...
@overload
def encrypted(
    store: AsyncStore, keyring: Keyring, *, allow_plain: bool = False
) -> AsyncEncryptedStore: ...
def encrypted(
    store: Store | AsyncStore, keyring: Keyring, *, allow_plain: bool = False
) -> EncryptedStore | AsyncEncryptedStore:
    """A store that keeps its answers encrypted in ``store``, and can do what that one can.

    Answers and the notes of ``before_call`` are encrypted. Keys and payloads are kept as digests
    anyway; scopes, times, sizes and how often a key was tried stay readable.

    An answer that can't be decrypted is an error, and the work does not run again.

    Args:
        store: Any store, sync or async.
        keyring: The keys.
        allow_plain: Also take answers that are not encrypted, from before it was switched on.

    Raises:
        BackendMismatchError: ``store`` is something else.

    Example:
        >>> from oncekey import MemoryStore, Once
        >>> from oncekey.encryption import Keyring, encrypted
        >>> once = Once(encrypted(MemoryStore(), Keyring([Keyring.generate()])))
    """
    if not isinstance(keyring, Keyring):
        raise PolicyError(f"pass a Keyring, got a {type(keyring).__name__}: Keyring([key])")
    if not isinstance(store, (Store, AsyncStore)):
        raise BackendMismatchError(
            f"only a store can be encrypted, got {type(store).__name__}: pass connect(url) or "
            "aconnect(url); a backend with only get and put has to encrypt for itself"
        )
    return encrypted_store(store, keyring, allow_plain)
