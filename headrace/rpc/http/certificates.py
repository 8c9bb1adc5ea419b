"""TLS of HTTP ports: the services' certificate, read again when it changes, and what a client's says.

A client of HTTP may show a certificate of the same authority, or none where it has a token.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError
from headrace.rpc.access.caller import Peer
from headrace.rpc.log import log
from headrace.rpc.tls import TlsFolder, listening_context

_LOOK_SECONDS = 0.5


def server_context(folder: TlsFolder, *, needs_certificate: bool) -> ssl.SSLContext:
    """Raises ConfigError for files of no use."""
    renewed = _Renewed(folder, needs_certificate=needs_certificate)
    renewed.context.sni_callback = renewed.take_newest
    return renewed.context


def peer_of(connection: ssl.SSLObject | None) -> Peer:
    """Returns what a connection's certificate says, as gRPC's auth context has it."""
    der = connection.getpeercert(binary_form=True) if connection else None
    if connection is None or der is None:
        return {}
    found: Mapping[str, Any] = connection.getpeercert() or {}
    subject = [value for entry in found.get("subject", ()) for name, value in entry if name == "commonName"]
    uris = [value for kind, value in found.get("subjectAltName", ()) if kind == "URI"]
    return {
        "x509_common_name": [each.encode() for each in subject],
        "peer_uri": [each.encode() for each in uris],
        "x509_pem_cert": [ssl.DER_cert_to_PEM_cert(der).encode()],
    }


class _Renewed:
    """A context whose connections use the files of the folder as they are by then."""

    def __init__(self, folder: TlsFolder, *, needs_certificate: bool) -> None:
        self._folder = folder
        self._needs_certificate = needs_certificate
        self._read = folder.read()
        self.context = self._newest = self._made()
        self._look_at = 0.0

    def take_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL asks it at each handshake, also where the client names no server."""
        self._look()
        connection.context = self._newest

    def _look(self) -> None:
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        try:
            read = self._folder.read()
            if read != self._read:
                self._newest = self._made()
                self._read = read
                log.info("certificate_renewed", folder=str(self._folder.path))
        except ConfigError as error:
            log.warning("certificate_not_read", error=error.message)

    def _made(self) -> ssl.SSLContext:
        made = listening_context(self._folder)
        if not self._needs_certificate:
            made.verify_mode = ssl.CERT_OPTIONAL
        made.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        made.num_tickets = 0  # a resumed session would bring a certificate that was good when it began
        return made


def require_named(folder: TlsFolder, host: str) -> None:
    """Raises ConfigError unless the certificate is for this host: clients of HTTP compare the two."""
    server = server_context(folder, needs_certificate=False)
    client = ssl.create_default_context(cafile=str(folder.authority))
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
