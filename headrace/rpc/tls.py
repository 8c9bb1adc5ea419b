"""TLS of gRPC connections: a private authority vouches for both sides, and each shows its certificate.

A folder has ca.pem (whom to trust), cert.pem and key.pem (who one is); `headrace certs` makes it. A service's
certificate is for the name `headrace`, whatever the address, so that addresses may change; a client's has no name that
a service could use. Files are read again when they change: a renewed certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from headrace.errors import ConfigError
from headrace.rpc.log import log
from headrace.rpc.net import Address

SERVICE_NAME = "headrace"
"""The name in each service's certificate."""

OPERATOR = "operator"
"""The client that `headrace certs` makes beside the services' certificate: commands about a run are its."""

_HANDSHAKE_SECONDS = 2.0

VARIABLE = "HEADRACE_TLS_DIR"
"""Names the folder to clients: the option of a job, in the environment of all that a run starts."""


@dataclass(frozen=True, slots=True)
class TlsFolder:
    """The folder of one side."""

    path: Path

    @property
    def authority(self) -> Path:
        return self.path / "ca.pem"

    @property
    def certificate(self) -> Path:
        return self.path / "cert.pem"

    @property
    def key(self) -> Path:
        return self.path / "key.pem"

    def read(self) -> tuple[bytes, bytes, bytes]:
        """The authority's certificate, this side's, and its key. Raises ConfigError as `load_into` does."""
        return self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load_into(self, context: ssl.SSLContext) -> tuple[bytes, bytes, bytes]:
        """Has the context use the three files, and returns them.

        Raises ConfigError for one that is not there or damaged, and for a key of another certificate.
        """
        with self._explained("ca.pem is no certificate"):
            files = self.authority.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes()
            context.load_verify_locations(self.authority)
        with self._explained("key.pem is not the key of cert.pem, or one of them is damaged"):
            context.load_cert_chain(self.certificate, self.key)
        return files

    @contextmanager
    def _explained(self, damage: str) -> Iterator[None]:
        try:
            yield
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_dir {self.path}: {damage} ({error.reason or error}): `headrace certs {self.path}` renews "
                "cert.pem and key.pem, and ca.pem is that of the folder in which the authority was made",
                field="tls_dir",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"tls_dir {self.path}: {error}: `headrace certs {self.path}` makes what is needed, and ca.pem, "
                "cert.pem and key.pem are what other machines need of it",
                field="tls_dir",
            ) from error


def tls_of(environment: Mapping[str, str] = os.environ) -> TlsFolder | None:
    """The folder that a client of this process uses; None where connections are not encrypted."""
    named = environment.get(VARIABLE)
    return TlsFolder(Path(named)) if named else None


def use_tls(folder: Path | None) -> TlsFolder | None:
    """Connections of this process, and of those that it starts, use the folder's certificate from now on."""
    if folder is None:
        return None
    os.environ[VARIABLE] = str(Path(folder).absolute())
    return tls_of()


def channel_credentials(folder: TlsFolder) -> grpc.ChannelCredentials:
    """Raises ConfigError for files of no use."""
    authority, certificate, key = folder.read()
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(folder: TlsFolder) -> grpc.ServerCredentials:
    """Asks each client for a certificate. Raises ConfigError for files of no use."""
    files = _Files(folder)
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], files.changed)  # its type forgets None
    return grpc.dynamic_ssl_server_credentials(files.first, fetch, require_client_authentication=True)


def listening_context(folder: TlsFolder) -> ssl.SSLContext:
    """Returns a server's context outside gRPC, which asks for certificates. Raises ConfigError for files of no use."""
    return _context(folder, ssl.PROTOCOL_TLS_SERVER)


def connecting_context(folder: TlsFolder) -> ssl.SSLContext:
    """Returns the context of a connection to such a listener, with the server name SERVICE_NAME."""
    return _context(folder, ssl.PROTOCOL_TLS_CLIENT)


def _context(folder: TlsFolder, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    folder.load_into(context)
    return context


async def speaks_tls(address: str) -> bool:
    """True when the first place of an address takes part in a handshake; it sends nothing else."""
    place = Address.parse(address.partition("|")[0])
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(_HANDSHAKE_SECONDS):
            _, writer = await asyncio.open_connection(place.host, place.port, ssl=anybody)
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return False
    writer.close()
    return True


class _Files:
    """A server's files, as gRPC asks for them at each new connection."""

    def __init__(self, folder: TlsFolder) -> None:
        self._folder = folder
        self._read = folder.read()
        self.first = _configuration(self._read)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """None while they are as before, or while one is missing or half written."""
        try:
            now = self._folder.read()
        except ConfigError as error:
            log.warning("certificate_not_read", error=error.message)
            return None
        if now == self._read:
            return None
        self._read = now
        log.info("certificate_renewed", folder=str(self._folder.path))
        return _configuration(now)


def _configuration(files: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    authority, certificate, key = files
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
