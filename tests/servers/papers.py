"""Certificates for this machine, by an authority of the tests' own."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Papers(NamedTuple):
    """The files of a server, and the authority that its clients trust."""

    certificate: Path
    key: Path
    root: Path


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """A certificate for this machine, by an authority of the tests' own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("papers")
    now = dt.datetime.now(dt.UTC)
    pem = serialization.Encoding.PEM

    def made(name: str, issuer: Any, signer: Any, own: Any, authority: bool) -> Any:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(own.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
            # Python 3.13 refuses a certificate that names no keys, or an authority without a use.
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), False)
        )
        if authority:
            uses = dict.fromkeys(
                [
                    "digital_signature",
                    "content_commitment",
                    "key_encipherment",
                    "data_encipherment",
                    "key_agreement",
                    "encipher_only",
                    "decipher_only",
                ],
                False,
            )
            usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **uses)
            builder = builder.add_extension(usage, critical=True)
        else:
            names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(signer, hashes.SHA256())

    root_key, own_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = made("tests", None, root_key, root_key, True)
    own = made("localhost", root.subject, root_key, own_key, False)
    found = Papers(folder / "server.crt", folder / "server.key", folder / "root.crt")
    found.root.write_bytes(root.public_bytes(pem))
    found.certificate.write_bytes(own.public_bytes(pem))
    plain = serialization.NoEncryption()
    found.key.write_bytes(own_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return found
