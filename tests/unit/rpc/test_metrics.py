"""Metrics over HTTP and HTTPS, as Prometheus asks for them."""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli.authority import issue_client, issue_service
from headrace.errors import Unavailable
from headrace.rpc.access import Role
from headrace.rpc.interceptor import RpcMetrics
from headrace.rpc.net import Address
from headrace.rpc.tls import TlsFolder
from tests.support.processes.ipv6 import needs_both_families

SOON = 60.0
LOOPBACK = Address("127.0.0.1", 0)
IN_PROGRESS = b"headrace_rpc_in_progress 3.0"


@contextmanager
def showing(address: Address = LOOPBACK, tls: TlsFolder | None = None) -> Iterator[int]:
    metrics = RpcMetrics(lambda: 3)
    try:
        yield metrics.serve(address, tls)
    finally:
        metrics.stop()


async def shown(port: int, trusting: ssl.SSLContext | None = None, *, host: str = "localhost") -> bytes:
    def read() -> bytes:
        url = f"{'https' if trusting else 'http'}://{host}:{port}/metrics"
        with urllib.request.urlopen(url, timeout=SOON, context=trusting) as reply:  # noqa: S310  # ours
            return bytes(reply.read())

    return await asyncio.to_thread(read)


@needs_both_families
async def test_metrics_on_every_ipv6_address_are_shown_over_ipv4_too() -> None:
    with showing(Address("::", 0)) as port:
        for host in ("127.0.0.1", "[::1]"):
            assert IN_PROGRESS in await shown(port, host=host)


async def test_half_a_handshake_holds_up_nobody_and_a_renewed_certificate_counts(tmp_path: Path) -> None:
    issue_service(tmp_path, (), 30)
    client = issue_client(tmp_path, "prometheus", Role.VIEWER, 30).folder
    with showing(tls=TlsFolder(tmp_path)) as port:
        half = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in half:
            writer.write(b"\x16\x03\x01\x02\x00\x01")
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        with pytest.raises(OSError):  # it shows no certificate
            await shown(port, trusting)
        trusting.load_cert_chain(client / "cert.pem", client / "key.pem")
        assert IN_PROGRESS in await shown(port, trusting)
        issue_service(tmp_path, (), 30)
        renewed = ssl.PEM_cert_to_DER_cert((tmp_path / "cert.pem").read_text())
        assert await certificate(port, trusting) == renewed
        for _, writer in half:
            writer.close()


async def certificate(port: int, context: ssl.SSLContext) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


async def test_a_port_that_somebody_has_is_refused_and_free_after_the_end() -> None:
    with showing() as port, pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
        RpcMetrics(lambda: 0).serve(Address("127.0.0.1", port))
    with showing(Address("127.0.0.1", port)) as again:
        assert again == port
