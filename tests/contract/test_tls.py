"""Calls between services are encrypted, and both sides show a certificate of the same authority."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.cli.authority import issue_client, issue_service
from headrace.errors import ConfigError
from headrace.launch.health import is_serving
from headrace.rpc.access import Role
from headrace.rpc.client import connect
from headrace.rpc.server import RpcServer
from headrace.rpc.tls import VARIABLE, TlsFolder, endpoint_context, listening_context
from tests.support.refusals import refused

SOON = 60.0


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    folder = tmp_path / "tls"
    issue_service(folder, (), 30)
    return folder


@asynccontextmanager
async def serving(folder: Path, address: str = "127.0.0.1:0") -> AsyncIterator[RpcServer]:
    server = RpcServer("x", address, [], metrics_address="127.0.0.1:0", tls=TlsFolder(folder))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)


async def answers(address: str) -> bool:
    """Whether a call succeeds; else the handshake failed, which gRPC says as UNAVAILABLE."""
    async with connect(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SOON)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return False
    return True


async def test_services_and_named_clients_of_one_authority_reach_a_service_and_nobody_else(
    authority: Path, tmp_path: Path, monkeypatch
) -> None:
    stranger = tmp_path / "stranger"
    issue_service(stranger, (), 30)
    client = issue_client(authority, "producer-7", Role.PRODUCER, 30).folder
    mixed = tmp_path / "mixed"  # trusts the service, and shows a stranger's certificate
    mixed.mkdir()
    for name, source in (("ca.pem", authority), ("cert.pem", stranger), ("key.pem", stranger)):
        (mixed / name).write_bytes((source / name).read_bytes())
    async with serving(authority) as server:
        for folder, reached in ((authority, True), (client, True), (stranger, False), (mixed, False)):
            monkeypatch.setenv(VARIABLE, str(folder))
            assert await answers(server.address) is reached, folder
        monkeypatch.delenv(VARIABLE)
        assert not await answers(server.address)
        assert not await is_serving(server.address)


async def test_a_clients_certificate_cannot_be_used_as_a_services(authority: Path, monkeypatch) -> None:
    client = issue_client(authority, "producer", Role.PRODUCER, 30).folder
    monkeypatch.setenv(VARIABLE, str(authority))
    async with serving(client) as server:
        assert not await answers(server.address)


async def test_a_renewed_certificate_is_used_without_a_restart(authority: Path, tmp_path: Path, monkeypatch) -> None:
    """Also one of another authority. While its files do not fit together, a server goes on with those before."""
    other = tmp_path / "other"
    issue_service(other, (), 30)
    async with serving(authority) as server:
        monkeypatch.setenv(VARIABLE, str(authority))
        assert await answers(server.address)
        issue_service(authority, (), 30)
        assert await answers(server.address)
        half, whole = (other / "cert.pem").read_bytes(), (authority / "cert.pem").read_bytes()
        (authority / "cert.pem").write_bytes(half)
        with refused(ConfigError, "key.pem"):
            connect(server.address)
        (authority / "cert.pem").write_bytes(whole)
        for name in ("ca.pem", "key.pem", "cert.pem"):
            (authority / name).write_bytes((other / name).read_bytes())
        monkeypatch.setenv(VARIABLE, str(other))
        assert await answers(server.address)


async def test_metrics_are_encrypted_too(authority: Path) -> None:
    async with serving(authority) as server:
        url = f"https://localhost:{server.metrics_port}/metrics"
        trusting = ssl.create_default_context(cafile=str(authority / "ca.pem"))
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(_read, url, trusting)
        trusting.load_cert_chain(authority / "cert.pem", authority / "key.pem")
        assert b"headrace_rpc_calls" in await asyncio.to_thread(_read, url, trusting)


def _read(url: str, context: ssl.SSLContext) -> bytes:
    with urllib.request.urlopen(url, timeout=30, context=context) as reply:  # noqa: S310  # https, by the caller
        return bytes(reply.read())


def test_a_folder_without_a_file_is_refused_with_the_command_that_makes_it(authority: Path, monkeypatch) -> None:
    (authority / "key.pem").unlink()
    monkeypatch.setenv(VARIABLE, str(authority))
    with refused(ConfigError, "key.pem", "headrace certs"):
        connect("127.0.0.1:1")


@pytest.mark.parametrize("damaged", ["ca.pem", "cert.pem", "key.pem"])
@pytest.mark.parametrize("used", [TlsFolder.read, listening_context, endpoint_context])
def test_a_damaged_file_is_refused_with_its_name_and_the_way_out(
    authority: Path, damaged: str, used: Callable[[TlsFolder], object]
) -> None:
    (authority / damaged).write_text("half of")
    with refused(ConfigError, damaged, "headrace certs") as caught:
        used(TlsFolder(authority))
    assert caught.value.field == "tls_dir"


async def test_with_certificates_a_service_may_listen_where_others_reach(authority: Path) -> None:
    RpcServer("x", "0.0.0.0:0", [], tls=TlsFolder(authority))
    with refused(ConfigError, "headrace certs", "--tls-dir", "--insecure"):
        RpcServer("x", "0.0.0.0:0", [])
