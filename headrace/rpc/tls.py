"""TLS of a run's connections: a private authority vouches for both sides, and each shows its certificate.

A folder has ca.pem (whom to trust), cert.pem and key.pem (who one is); `headrace certs` makes it. A service's
certificate is for the name `headrace`, whatever the address, so that addresses may change; a client's has no name that
a service could use. Files are read again when they change: a renewed certificate needs no restart. A client of HTTP
compares the host's name as well, and may show no certificate where it has a token.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import ssl
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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


AUTHORITY_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Name the file of trusted authorities to OpenSSL, httpx, aiohttp and requests."""

Peer = Mapping[str, Iterable[bytes]]
"""What a connection's certificate says, as gRPC's auth context has it."""

_Files = tuple[bytes, bytes, bytes]


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

    def read(self) -> _Files:
        """The authority's certificate, this side's, and its key. Raises ConfigError as `load_into` does."""
        return self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load_into(self, context: ssl.SSLContext) -> _Files:
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
    watched = _WatchedFiles(folder)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """GRPC asks at each new connection."""
        changed = watched.changed(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return _configuration(changed) if changed else None

    typed = cast(Callable[[], grpc.ServerCertificateConfiguration], fetch)  # gRPC's type forgets None
    return grpc.dynamic_ssl_server_credentials(_configuration(watched.files), typed, require_client_authentication=True)


def listening_context(folder: TlsFolder) -> ssl.SSLContext:
    """Returns a server's context outside gRPC, which asks for certificates. Raises ConfigError for files of no use."""
    return _context(folder, ssl.PROTOCOL_TLS_SERVER)


def connecting_context(folder: TlsFolder) -> ssl.SSLContext:
    """Returns the context of a connection to such a listener, with the server name SERVICE_NAME."""
    return _context(folder, ssl.PROTOCOL_TLS_CLIENT)


def _context(folder: TlsFolder, side: int) -> ssl.SSLContext:
    context = _empty_context(side, ssl.CERT_REQUIRED)
    folder.load_into(context)
    return context


def _empty_context(side: int, verify_mode: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = verify_mode
    return context


def renew_at_handshakes(context: ssl.SSLContext, folder: TlsFolder) -> None:
    """Has a listener's connections use the folder's files as they are by then. `context` has loaded them before."""
    watched, newest = _WatchedFiles(folder), context

    def take_newest(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """OpenSSL asks it at each handshake, also where the client names no server."""
        nonlocal newest
        fresh = _empty_context(ssl.PROTOCOL_TLS_SERVER, context.verify_mode)
        if watched.changed(fresh):
            newest = fresh
        connection.context = newest

    context.sni_callback = take_newest


def endpoint_context(folder: TlsFolder) -> ssl.SSLContext:
    """The context of an HTTP port whose clients may show a certificate. Raises ConfigError for files of no use."""
    context = _empty_context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)
    folder.load_into(context)
    renew_at_handshakes(context, folder)
    return context


def peer_of(connection: ssl.SSLObject | None) -> Peer:
    """Returns what a connection's certificate says; nothing where it has shown none."""
    found: Mapping[str, Any] = (connection.getpeercert() if connection else None) or {}
    subject = [value for entry in found.get("subject", ()) for name, value in entry if name == "commonName"]
    uris = [value for kind, value in found.get("subjectAltName", ()) if kind == "URI"]
    return {
        "x509_common_name": [each.encode() for each in subject],
        "peer_uri": [each.encode() for each in uris],
    }


def require_named(folder: TlsFolder, host: str) -> None:
    """Raises ConfigError unless the certificate is for this host: clients of HTTP compare the two."""
    server, client = endpoint_context(folder), ssl.create_default_context(cafile=str(folder.authority))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    calling = client.wrap_bio(to_client, to_server, server_hostname=host)
    try:
        for side in (calling, serving, calling):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        raise ConfigError(
            f"the certificate of {folder.path} is not for {host}, as HTTP clients want it ({error.reason}): `headrace "
            f"certs {folder.path} --host {host}` makes one that is, or name another --openai-host",
            field="rollout.openai_host",
        ) from error


def trust_authority(folder: TlsFolder) -> None:
    """Makes processes that this one starts from now on trust it, besides the authorities that they trusted before.

    Agents know nothing of headrace, and their URL is https.
    """
    trusted = [path.read_bytes() for path in (*_trusted_before(), folder.authority)]
    descriptor, name = tempfile.mkstemp(prefix="headrace-trusted-", suffix=".pem")
    with os.fdopen(descriptor, "wb") as out:
        out.write(b"\n".join(trusted))
    atexit.register(Path(name).unlink, missing_ok=True)
    os.environ.update(dict.fromkeys(AUTHORITY_VARIABLES, name))


def _trusted_before() -> Sequence[Path]:
    """The files that the environment names, else certifi's, which httpx and requests use, else the system's."""
    if named := dict.fromkeys(os.environ[each] for each in AUTHORITY_VARIABLES if os.environ.get(each)):
        return [Path(each) for each in named]
    certifi = importlib.util.find_spec("certifi")
    if certifi is not None and certifi.origin is not None:
        return [Path(certifi.origin).with_name("cacert.pem")]
    system = ssl.get_default_verify_paths().cafile
    return [Path(system)] if system else []


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


class _WatchedFiles:
    """A listener's files, looked at when a connection begins."""

    def __init__(self, folder: TlsFolder) -> None:
        self._folder = folder
        self.files = folder.read()

    def changed(self, context: ssl.SSLContext) -> _Files | None:
        """Loads the files into the context; None while they are as before, or one is missing or half written."""
        try:
            now = self._folder.load_into(context)
        except ConfigError as error:
            log.warning("certificate_not_read", error=error.message)
            return None
        if now == self.files:
            return None
        self.files = now
        log.info("certificate_renewed", folder=str(self._folder.path))
        return now


def _configuration(files: _Files) -> grpc.ServerCertificateConfiguration:
    authority, certificate, key = files
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
