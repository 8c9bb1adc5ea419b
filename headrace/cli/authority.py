"""A private authority, and certificates of services and clients, as files.

FOLDER/ca.pem, ca-key.pem   the authority; the key signs, and stays where it was made
FOLDER/cert.pem, key.pem    the services' certificate
FOLDER/clients/NAME/        ca.pem, cert.pem and key.pem of a client
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.disk import atomic_write, file_lock
from headrace.errors import ConfigError
from headrace.rpc.access import Role, urn_of
from headrace.rpc.tls import SERVICE_NAME, TlsFolder

_AUTHORITY_DAYS = 3650
_CLOCK_SKEW = datetime.timedelta(hours=1)
"""A machine whose clock is slow takes a new certificate, too."""
_LONGEST_NAME = 64
"""X.509's own limit of a common name."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that was made, and when it ends."""

    folder: Path
    name: str
    ends: datetime.datetime


def issue_service(folder: Path, hosts: Sequence[str], days: int) -> Issued:
    """Makes, or renews, the services' certificate, and the authority where there is none.

    `hosts` are further names or addresses, for clients that compare them: browsers, HTTP. Raises ConfigError.
    """
    names = [SERVICE_NAME, "localhost", "127.0.0.1", "::1", *hosts]
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in dict.fromkeys(names)])
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _issue(folder, TlsFolder(folder), SERVICE_NAME, usage, [alternatives], days)


def issue_client(folder: Path, name: str, role: Role | None, days: int) -> Issued:
    """Makes, or renews, a client's folder, below the authority's. Raises ConfigError.

    Without a role it opens connections on which a token has to say who calls.
    """
    _require_name(name)
    if role is Role.SERVICE:
        raise ConfigError(
            f"a client's role is not {role}: that is the services' certificate, `headrace certs {folder}`"
        )
    roles = [x509.SubjectAlternativeName([x509.UniformResourceIdentifier(urn_of(role))])] if role else []
    usage = [ExtendedKeyUsageOID.CLIENT_AUTH]
    issued = _issue(folder, TlsFolder(folder / "clients" / name), name, usage, roles, days)
    _write(TlsFolder(issued.folder).authority, TlsFolder(folder).authority.read_bytes(), secret=False)
    return issued


def _require_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]*", name) or len(name) > _LONGEST_NAME or name == SERVICE_NAME:
        raise ConfigError(
            f"a client cannot be named {name[:80]!r}: use up to {_LONGEST_NAME} letters, digits, '.', '_', '-' and "
            f"'@', and not {SERVICE_NAME!r}, which is the services'"
        )


def _issue(
    folder: Path,
    of: TlsFolder,
    name: str,
    usage: Sequence[x509.ObjectIdentifier],
    extensions: Sequence[x509.ExtensionType],
    days: int,
) -> Issued:
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(TlsFolder(folder).authority):
        authority, signing_key = _authority(folder)
        key, ends = ec.generate_private_key(ec.SECP256R1()), _now() + datetime.timedelta(days=days)
        builder = (
            _builder(name, key.public_key(), authority.subject, min(ends, authority.not_valid_after_utc))
            .not_valid_before(_now() - _CLOCK_SKEW)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        signed = builder.sign(signing_key, hashes.SHA256())
        of.path.mkdir(parents=True, exist_ok=True)
        _write(of.key, _pem_of(key), secret=True)
        _write(of.certificate, signed.public_bytes(serialization.Encoding.PEM), secret=False)
        return Issued(of.path, name, signed.not_valid_after_utc)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The folder's authority, a new one where the folder has none. Raises ConfigError for a folder with half of one."""
    certificate, key = TlsFolder(folder).authority, folder / "ca-key.pem"
    if not certificate.exists() and not key.exists():
        _make_authority(folder, certificate, key)
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        signing_key = serialization.load_pem_private_key(key.read_bytes(), None)
        if not isinstance(signing_key, ec.EllipticCurvePrivateKey) or found.public_key() != signing_key.public_key():
            raise ValueError("ca-key.pem is not the key of ca.pem")
        found.verify_directly_issued_by(found)
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        raise ConfigError(
            f"{folder} cannot sign certificates: {error}: use the folder in which the authority was made, or another "
            "folder for a new one"
        ) from error
    if found.not_valid_after_utc <= _now():
        raise ConfigError(f"the authority of {folder} ended at {found.not_valid_after_utc}: make one in a new folder")
    return found, signing_key


def _make_authority(folder: Path, certificate: Path, key_file: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{SERVICE_NAME} authority")])
    signed = (
        _builder(
            f"{SERVICE_NAME} authority", key.public_key(), subject, _now() + datetime.timedelta(days=_AUTHORITY_DAYS)
        )
        .not_valid_before(_now() - _CLOCK_SKEW)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, _pem_of(key), secret=True)
    _write(certificate, signed.public_bytes(serialization.Encoding.PEM), secret=False)


def _builder(
    name: str, key: ec.EllipticCurvePublicKey, issuer: x509.Name, ends: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_after(ends)
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", name):
        raise ConfigError(f"{name!r} is neither a host name nor an address: a name is letters, digits, '-' and '.'")
    return x509.DNSName(name)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(file: Path, data: bytes, *, secret: bool) -> None:
    """A reader finds the old file or the new one. A secret one is its user's alone from the start."""
    with atomic_write(file) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
