"""The page of metrics under clients that are slow, wrong, or half through a handshake."""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from headrace.cli.authority import issue_client, issue_service, revoke_client
from headrace.rpc.access.roles import Role
from headrace.rpc.http import door
from headrace.rpc.http.page import MetricsPage
from headrace.rpc.net import Address
from headrace.rpc.tls import TlsFolder
from tests.support.processes.ipv6 import needs_both_families

SOON = 60.0
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("boats", "Boats.", registry=made).inc(3)
    return made


@pytest.fixture
def port(registry: CollectorRegistry) -> Iterator[int]:
    page = MetricsPage(registry, None)
    yield page.start(Address("127.0.0.1", 0))
    page.stop()


async def said(port: int, request: bytes, tls: ssl.SSLContext | None = None, *, host: str = "127.0.0.1") -> str:
    """All that is answered until the end of the connection."""
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    writer.write(request)
    async with asyncio.timeout(SOON):
        answer = await reader.read()
    writer.close()
    return answer.decode()


async def test_it_answers_a_get_and_refuses_all_else(port: int) -> None:
    assert "boats_total 3.0" in await said(port, GET)
    assert "# EOF" in await said(port, GET[:-2] + b"Accept: application/openmetrics-text; version=1.0.0\r\n\r\n")
    assert "boats_total" not in await said(port, GET.replace(b"/metrics", b"/metrics?name[]=other"))
    for request, status in (
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /other HTTP/1.1\r\n\r\n", 404),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (GET[:-2] + b"Accept: application/openmetrics-text; version=a.b\r\n\r\n", 400),
    ):
        assert (await said(port, request)).startswith(f"HTTP/1.1 {status} "), request[:60]


@needs_both_families
async def test_a_page_on_every_ipv6_address_answers_ipv4_too(registry: CollectorRegistry) -> None:
    page = MetricsPage(registry, None)
    port = page.start(Address("::", 0))
    try:
        for host in ("127.0.0.1", "::1"):
            assert "boats_total 3.0" in await said(port, GET, host=host)
    finally:
        page.stop()


async def test_a_head_that_never_ends_is_cut_off_although_bytes_come(port: int, monkeypatch) -> None:
    monkeypatch.setattr(door, "MAX_HTTP_HEADER_SECONDS", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started, reading = time.monotonic(), asyncio.create_task(reader.read())
    while not reading.done():
        assert time.monotonic() < started + SOON
        writer.write(b"x")
        await asyncio.wait({reading}, timeout=0.05)
    assert reading.exception() or reading.result() == b""
    assert "boats_total" in await said(port, GET)


async def test_half_a_handshake_holds_up_nobody_and_a_renewed_certificate_counts(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    issue_service(tmp_path, (), 30)
    client = issue_client(tmp_path, "prometheus", Role.VIEWER, 30).folder
    page = MetricsPage(registry, TlsFolder(tmp_path))
    port = page.start(Address("127.0.0.1", 0))
    half = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    try:
        for _, writer in half:
            writer.write(b"\x16\x03\x01\x02\x00\x01")
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        assert await refused(port, trusting), "it showed no certificate"
        trusting.load_cert_chain(client / "cert.pem", client / "key.pem")
        assert "boats_total" in await said(port, GET, trusting)
        issue_service(tmp_path, (), 30)
        renewed = ssl.PEM_cert_to_DER_cert((tmp_path / "cert.pem").read_text())
        end = time.monotonic() + SOON
        while await shown(port, trusting) != renewed:
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
    finally:
        for _, writer in half:
            writer.close()
        page.stop()


async def test_a_revoked_certificate_is_shown_nothing_and_the_next_one_is(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    issue_service(tmp_path, (), 30)
    page = MetricsPage(registry, TlsFolder(tmp_path))
    port = page.start(Address("127.0.0.1", 0))

    def new_client() -> ssl.SSLContext:
        folder = issue_client(tmp_path, "prometheus", Role.VIEWER, 30).folder
        shown = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        shown.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        return shown

    try:
        client = new_client()
        assert "boats_total" in await said(port, GET, client)
        revoke_client(tmp_path, "prometheus")
        end = time.monotonic() + SOON
        while "boats_total" in (answer := await said(port, GET, client)):
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        assert answer.startswith("HTTP/1.1 401 ")
        while "boats_total" not in await said(port, GET, new_client()):  # valid from a later second
            assert time.monotonic() < end
            await asyncio.sleep(0.2)
    finally:
        page.stop()


async def refused(port: int, context: ssl.SSLContext) -> bool:
    try:
        return await said(port, GET, context) == ""
    except OSError:  # ssl.SSLError is one
        return True


async def shown(port: int, context: ssl.SSLContext) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return certificate


def test_the_port_is_free_after_the_end(registry: CollectorRegistry) -> None:
    page = MetricsPage(registry, None)
    port = page.start(Address("127.0.0.1", 0))
    page.stop()
    end = time.monotonic() + SOON
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).close()  # ours
        except OSError:
            break
        assert time.monotonic() < end
    again = MetricsPage(registry, None)
    assert again.start(Address("127.0.0.1", port)) == port
    again.stop()
