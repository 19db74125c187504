"""Amazon SNS: RSA over some fields of the message, with a certificate that the message points to.

The certificate's URL comes from the message, so it is fetched only from SNS's own hosts, and
believed only if a trusted chain says that it is SNS's. A message of a topic that is not yours is
refused: SNS signs for everybody. A subscription is confirmed only on your word: ``confirm_url``
gives the address that a verified confirmation names, and nobody here calls it by itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from oncekey.errors import PolicyError
from oncekey.signatures.base import Facts, Proof, Provider, SignedRequest, object_body
from oncekey.signatures.certificates import CertificateCache, Fetch, fetch_certificate
from oncekey.signatures.delivery import Delivery
from oncekey.signatures.keypairs import load_key, need_cryptography, signed_by
from oncekey.signatures.parsing import (
    Rejection,
    decode,
    encode,
    json_body,
    seconds_since_1970,
)
from oncekey.signatures.verdict import Verdict

__all__ = ["SnsProvider", "confirm_url"]

_HOST: Final = r"https://sns\.[a-z]{2}(?:-[a-z]+){1,3}-[0-9]\.amazonaws\.com(?:\.cn)?"
_CERT_URL = re.compile(_HOST + r"/SimpleNotificationService-[0-9a-zA-Z]{16,64}\.pem")
_SUBSCRIBE_URL = re.compile(_HOST + r"/\?Action=ConfirmSubscription&[\x21-\x7e]{1,4096}")
_ARN = re.compile(r"arn:aws[a-z-]*:sns:[\x21-\x7e]{1,255}")
_NOTIFICATION: Final = ("Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type")
_CONFIRMATION: Final = (
    *("Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type"),
)
_SIGNED: Final = {
    "Notification": _NOTIFICATION,
    "SubscriptionConfirmation": _CONFIRMATION,
    "UnsubscribeConfirmation": _CONFIRMATION,
}
_HASHES: Final = {"1": "SHA1", "2": "SHA256"}


class SnsProvider(Provider):
    """Needs no secret but ``topics``: the ARNs of your topics, which are signed too.

    Signature version 1, which uses SHA-1 and is what a topic has by default, is accepted with
    ``sha1=True`` only: set the topic's ``SignatureVersion`` to 2. ``fetch`` and ``trust`` are as
    for PayPal.
    """

    def __init__(
        self,
        facts: Facts,
        *,
        topics: str | Sequence[str] = "",
        sha1: bool = False,
        secret: None = None,
        previous: None = None,
        fetch: Fetch | CertificateCache | None = None,
        trust: bytes | str | None = None,
        signing_key: str | bytes = "",
        cert_url: str = "",
        **common: Any,
    ) -> None:
        super().__init__(facts, **common)
        if secret is not None or previous is not None:
            raise PolicyError("SNS has no secret: pass topics= and no secret=")
        arns = [topics] if isinstance(topics, str) else list(topics)
        if not arns or not all(_ARN.fullmatch(one) for one in arns):
            raise PolicyError("pass topics=, the ARNs of your topics: arn:aws:sns:...; no secret")
        need_cryptography()
        self._topics, self._versions = frozenset(arns), {"1", "2"} if sha1 else {"2"}
        if isinstance(fetch, CertificateCache):
            if trust is not None:
                raise PolicyError("give trust= to the CertificateCache, which reads certificates")
            self._cache = fetch
        else:
            self._cache = CertificateCache(fetch or fetch_certificate, trust=trust)
        self._private = load_key(signing_key, "signing_key", private=True) if signing_key else None
        self._cert_url = cert_url

    def _prove(self, delivery: Delivery, now: float) -> Proof:
        fields = _fields(delivery)
        timestamp = seconds_since_1970(fields["Timestamp"], "iso")
        self._check_clock(timestamp, now)
        if fields["TopicArn"] not in self._topics:
            raise Rejection("claim_mismatch", "the message is of another topic: check topics=")
        version = fields.get("SignatureVersion", "")
        if version not in self._versions:
            raise Rejection(
                "header_malformed",
                "SignatureVersion must be 2: set it on the topic",
            )
        signature = decode(fields.get("Signature"), "base64")
        if signature is None:
            raise Rejection("header_malformed", "Signature must be the base64 of a signature")
        certificate = self._certificate(fields.get("SigningCertURL", ""), now)
        message = _message(fields)
        if not signed_by(certificate.key, signature, message, *_how(version)):
            raise Rejection("signature_mismatch")
        return Proof(encode(signature, "base64"), message, timestamp, json_body(delivery.body))

    def _certificate(self, url: str, now: float) -> Any:
        if not _CERT_URL.fullmatch(url):
            raise Rejection(
                "key_unknown", "SigningCertURL is not a certificate of SNS: never fetched"
            )
        return self._cache.valid(url, "SNS", now)

    async def ajudge(self, delivery: Delivery, now: float | None = None) -> Verdict:
        """``judge`` in a thread, so that no loop waits for the fetch of a certificate."""
        return await asyncio.to_thread(self.judge, delivery, now)

    def _sign(self, request: SignedRequest, now: float) -> SignedRequest:
        if self._private is None or not self._cert_url:
            raise PolicyError(
                "SNS signs with a private key: pass signing_key= with an RSA key of your own, and "
                "cert_url= with the URL that your fetch= knows, for tests"
            )
        import json
        from datetime import UTC, datetime

        payload = object_body(self.facts, request.body)
        stamp = datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        payload = {
            "Type": "Notification",
            "TopicArn": min(self._topics),
            "Message": "",
            **payload,
            "Timestamp": stamp,
            "SignatureVersion": "2",
            "SigningCertURL": self._cert_url,
        }
        payload.setdefault("MessageId", "")
        if str(payload["Type"]) not in _SIGNED:
            raise PolicyError(f"a message of SNS has one of these types: {', '.join(_SIGNED)}")
        signature = self._private.sign(_message(payload), *_how("2"))
        payload["Signature"] = encode(signature, "base64")
        body = json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
        return SignedRequest(request.method, request.url, request.headers, body)


def confirm_url(payload: Mapping[str, Any]) -> str:
    """The address that confirms the subscription of a verified ``SubscriptionConfirmation``.

    Call it, by GET, if you want the subscription. It is SNS's, whatever the payload says.

    Raises:
        PolicyError: The payload is none, or its address is elsewhere.
    """
    url = payload.get("SubscribeURL")
    if payload.get("Type") != "SubscriptionConfirmation" or not isinstance(url, str):
        raise PolicyError("this is no SubscriptionConfirmation: it has nothing to confirm")
    if not _SUBSCRIBE_URL.fullmatch(url):
        raise PolicyError("SubscribeURL is no address of SNS: it must not be called")
    return url


def _fields(delivery: Delivery) -> dict[str, str]:
    """The fields of the message, all of them text."""
    payload = json_body(delivery.body)
    if not isinstance(payload, dict):
        raise Rejection("body_malformed", "a message of SNS is a JSON object")
    found = cast("dict[str, Any]", payload)
    signed = _SIGNED.get(str(found.get("Type")), ())
    missing = [name for name in signed if name not in found and name != "Subject"]
    texts = {
        name: found[name]
        for name in (*signed, "Signature", "SignatureVersion", "SigningCertURL")
        if name in found
    }
    if not signed or missing or not all(isinstance(one, str) for one in texts.values()):
        raise Rejection("body_malformed", "the body is no message of SNS, or lacks a part of it")
    return texts


def _message(fields: Mapping[str, Any]) -> bytes:
    """The signed bytes: names and values, a line each."""
    names = [name for name in _SIGNED[fields["Type"]] if name in fields]
    text = "".join(f"{name}\n{fields[name]}\n" for name in names)
    return text.encode("utf-8", "surrogatepass")


def _how(version: str) -> tuple[Any, ...]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.PKCS1v15(), getattr(hashes, _HASHES[version])()
