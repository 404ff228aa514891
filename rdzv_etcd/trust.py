"""Certificates of an embedded etcd: made from the secret that its hosts share, on each of them.

The secret gives the key of an authority. Whoever has it makes certificates that all others with it
accept, and nobody else can; no host has to send one to another. Knows nothing of etcd. To make them
takes the package ``cryptography``, to use them the standard library.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rdzv_etcd.errors import SettingsError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

SHORTEST_SECRET = 16
GIVE_ALL = "give every node the same RDZV_ETCD_EMBED_SECRET, or embed_secret_file"
_OLD_ONE = "wait for the end of that etcd (about 30 s after its last node), or choose another port"
NO_TLS = (
    "it has no TLS, although this node has a secret for it: if it is an embedded etcd, "
    f"{GIVE_ALL}, and {_OLD_ONE}; if it is not, leave out the secret"
)
ONLY_TLS = (
    f"it speaks only TLS; if it is an embedded etcd, it has a secret: {GIVE_ALL}; if it is not, "
    "write https:// in the endpoint, without embed=1"
)

_SALT = b"rdzv-etcd embedded etcd, version 1"
_ISSUER = "rdzv-etcd secret"
_CLOCKS_APART = timedelta(days=2)
_VALID = timedelta(days=3650)
_ALWAYS = (  # RFC 5280, 4.1.2.5
    datetime(2000, 1, 1, tzinfo=timezone.utc),
    datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc),
)
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_KEY_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)
_TOO_OLD_OR_NEW = (9, 10)  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, …_CERT_HAS_EXPIRED
_OTHER_NAME = (62, 64)  # … _HOSTNAME_MISMATCH, …_IP_ADDRESS_MISMATCH


@dataclass(frozen=True, slots=True)
class Certificates:
    """As PEM, for servers and clients alike."""

    authority: str
    own: str = field(repr=False)
    """A certificate, and its key."""


class CertificateFiles(NamedTuple):
    authority: Path
    own: Path


# --- making them ----------------------------------------------------------------------------------


def make_certificates(
    secret: str, hosts: Iterable[str] = (), *, valid_from: datetime | None = None
) -> Certificates:
    """Make a certificate, for a server at ``hosts``; valid for ten years.

    Raises :class:`SettingsError` if the package ``cryptography`` is missing, or has no scrypt.
    """
    authority = _authority_key(secret)
    from cryptography import x509  # noqa: PLC0415 - only who has a secret pays
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415

    def signed(
        name: str,
        key: EllipticCurvePrivateKey,
        times: tuple[datetime, datetime],
        *extensions: x509.ExtensionType,
    ) -> str:
        issuer, subject = (
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, it)]) for it in (_ISSUER, name)
        )
        builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(times[0]).not_valid_after(times[1])
        for extension in extensions:
            is_critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
            builder = builder.add_extension(extension, is_critical)
        made = builder.sign(authority, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.PEM).decode()

    def alternative_name(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(without_zone(host)))
        except ValueError:
            return x509.DNSName(host)

    begin = valid_from or datetime.now(timezone.utc) - _CLOCKS_APART
    key = ec.generate_private_key(ec.SECP256R1())
    extensions: list[x509.ExtensionType] = [
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
    ]
    if names := [alternative_name(host) for host in sorted(set(hosts)) if host.isascii()]:
        extensions.append(x509.SubjectAlternativeName(names))
    own = signed("rdzv-etcd embedded", key, (begin, begin + _VALID), *extensions)
    own += key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    signs = dict.fromkeys(_KEY_USAGES, False) | {"key_cert_sign": True}
    # Its number and signature differ from host to host; what is checked by it is the same.
    root = signed(
        _ISSUER,
        authority,
        _ALWAYS,
        x509.BasicConstraints(ca=True, path_length=0),
        x509.KeyUsage(**signs),
        x509.SubjectKeyIdentifier.from_public_key(authority.public_key()),
    )
    return Certificates(root, own)


@functools.lru_cache(maxsize=8)
def _authority_key(secret: str) -> EllipticCurvePrivateKey:
    """A stranger who connects sees what this has signed, and may try secrets: each costs time."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.hazmat.primitives.kdf.scrypt import Scrypt  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(
            "a secret for an embedded etcd (RDZV_ETCD_EMBED_SECRET, embed_secret_file) takes the "
            "package cryptography, which makes its certificates: pip install 'rdzv-etcd[embedded]'"
        ) from error
    try:
        # 16 bytes more than the order has: no private key is likelier than another.
        derived = Scrypt(salt=_SALT, length=48, n=1 << 15, r=8, p=1).derive(secret.encode())
    except UnsupportedAlgorithm as error:
        raise SettingsError(
            "certificates cannot be made from the secret of an embedded etcd, as this host's "
            f"OpenSSL refuses scrypt, perhaps in FIPS mode ({error}): use an etcd of your own, "
            "with certificates, or leave out the secret and let only the job's hosts reach the "
            "ports"
        ) from error
    number = int.from_bytes(derived, "big") % (_P256_ORDER - 1) + 1
    return ec.derive_private_key(number, ec.SECP256R1())


def without_zone(host: str) -> str:
    """An interface is this machine's matter, and in no certificate."""
    return host.partition("%")[0]


# --- using them -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def client_files(secret: str) -> CertificateFiles:
    """Return a certificate for clients, in memory; raises as :func:`make_certificates`."""
    return in_memory(make_certificates(secret))


def in_memory(certificates: Certificates) -> CertificateFiles:
    """Return files that only this process and its user have, and that end with it: both gRPC's
    users and OpenSSL take certificates as files.

    Raises :class:`SettingsError` if the system does not allow that.
    """
    descriptors = []
    try:
        for text in (certificates.authority, certificates.own):
            descriptor = os.memfd_create("certificate")
            os.write(descriptor, text.encode())
            descriptors.append(Path(f"/proc/self/fd/{descriptor}"))
            descriptors[-1].stat()
    except OSError as error:
        raise SettingsError(
            f"the certificates of an embedded etcd cannot be kept in memory ({error}): allow "
            "memfd_create (see its seccomp profile, and vm.memfd_noexec) and /proc/self/fd, and "
            "enough open files (`ulimit -n`)"
        ) from error
    return CertificateFiles(*descriptors)


def tls_context(files: CertificateFiles, *, is_server: bool = False) -> ssl.SSLContext:
    """Return a context that lets only those in who have a certificate from the same secret."""
    protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.authority)
    context.load_cert_chain(files.own)
    return context


@functools.lru_cache(maxsize=8)
def client_context(secret: str) -> ssl.SSLContext:
    return tls_context(client_files(secret))


def connected(host: str, port: int, limit_s: float, secret: str | None = None) -> socket.socket:
    """Connect, over TLS with a secret. Raises OSError, of which :class:`ssl.SSLError` is one."""
    return secured(socket.create_connection((host, port), limit_s), host, secret)


def secured(connection: socket.socket, host: str, secret: str | None) -> socket.socket:
    """Go over to TLS, if there is a secret; raises as :func:`connected`."""
    if secret is None:
        return connection
    try:
        return client_context(secret).wrap_socket(connection, server_hostname=without_zone(host))
    except BaseException:
        connection.close()
        raise


def why_refused(error: BaseException) -> str:
    """Return why two ends do not trust each other, and what to do; empty if ``error`` is about
    something else."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _TOO_OLD_OR_NEW:
            return (
                f"its certificate is not valid at this time ({error.verify_message}): set the "
                "clocks of both hosts; a certificate is made at the start, and valid for ten years"
            )
        if error.verify_code in _OTHER_NAME:
            return (
                "its certificate is for other names: give every node the --rdzv-endpoint with "
                "which it was started"
            )
        return f"it has another secret: {GIVE_ALL}, and {_OLD_ONE}"
    reason = (isinstance(error, ssl.SSLError) and error.reason) or ""
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return f"it refuses this host's certificate ({reason}): set the clocks of both hosts"
    return ""


def speaks_tls(host: str, port: int, limit_s: float) -> bool:
    """Return whether a handshake gets an answer in TLS, even a refusal.

    Raises OSError if there is no connection.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only the protocol matters
    with socket.create_connection((host, port), limit_s) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=host):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
        except (OSError, ValueError):
            return False
