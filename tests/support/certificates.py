"""A throw-away certificate authority for TLS tests: good, foreign and combined certificates."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AGE = datetime.timedelta(days=9)
_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Certificates:
    """PEM files. ``foreign_*`` belong to a CA that the server does not know."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path
    client_combined: Path
    """Client certificate and key in one file."""
    foreign_ca: Path
    foreign_cert: Path
    foreign_key: Path


_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


def make_certificates(
    folder: Path,
    *,
    client_name: str = "",
    hosts: tuple[str, ...] = _HOSTS,
    expired: tuple[str, ...] = (),
) -> Certificates:
    """Write a CA, a server certificate for 127.0.0.1, ::1 and localhost, and client certificates.

    ``hosts``: addresses or names for the server's instead; ``expired``: ``server``, ``client``.

    ``client_name`` becomes the client certificate's common name, which etcd takes for the user
    when authentication is on. It is empty by default, as is the server's: the gateway calls its
    own server with that certificate, and etcd refuses a common name there when users are on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.pem" for name in Certificates.__dataclass_fields__}
    ca, ca_key = _authority("rdzv-etcd test CA")
    foreign, foreign_key = _authority("somebody else's CA")
    _write(files["ca"], ca)
    _write(files["foreign_ca"], foreign)
    for stem, issuer, issuer_key, name in (
        ("server", ca, ca_key, ""),
        ("client", ca, ca_key, client_name),
        ("foreign", foreign, foreign_key, "foreign"),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        past = _AGE if stem in expired else datetime.timedelta()
        _write(files[f"{stem}_cert"], _leaf(name, key, issuer, issuer_key, hosts, past))
        _write(files[f"{stem}_key"], key)
    combined = files["client_cert"].read_bytes() + files["client_key"].read_bytes()
    files["client_combined"].write_bytes(combined)
    files["client_combined"].chmod(0o600)
    return Certificates(**files)


def _authority(name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, key, _name(name))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    # From Python 3.13 on, ssl requires an authority's key usage and a key identifier.
    builder = builder.add_extension(_SIGNS_CERTIFICATES, True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(identifier, False)
    return builder.sign(key, hashes.SHA256()), key


def _leaf(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate,
    issuer_key: ec.EllipticCurvePrivateKey,
    hosts: tuple[str, ...],
    past: datetime.timedelta,
) -> x509.Certificate:
    alternatives = [_alternative(host) for host in hosts]
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(name, key, issuer.subject, past)
    builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), False)
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), False)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = builder.add_extension(issued_by, False)
    return builder.sign(issuer_key, hashes.SHA256())


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    past: datetime.timedelta = datetime.timedelta(),
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc) - past
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
    )


def _name(common_name: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "rdzv-etcd tests")]
    if common_name:
        parts.append(x509.NameAttribute(NameOID.COMMON_NAME, common_name))
    return x509.Name(parts)


def _write(path: Path, item: x509.Certificate | ec.EllipticCurvePrivateKey) -> None:
    if isinstance(item, x509.Certificate):
        path.write_bytes(item.public_bytes(serialization.Encoding.PEM))
        return
    pem = item.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(pem)
    path.chmod(0o600)
