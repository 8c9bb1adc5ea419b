"""Calls that are reset as soon as they are made (CVE-2023-44487): gRPC keeps them until the service has begun them."""

from __future__ import annotations

import socket
import threading

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.limits import MAX_STREAMS_PER_CONNECTION
from headrace.rpc.server import RpcServer
from tests.hostile.surfaces import http2
from tests.hostile.surfaces.http2 import frame

SOON = 60.0
SURPLUS = 1_000
MOST_BEGUN = 100
"""Begun by gRPC's own threads while the service's loop stands still."""
REFUSED = [code.to_bytes(4, "big") for code in (7, 11)]
"""REFUSED_STREAM and ENHANCE_YOUR_CALM."""


def num_refused(port: int, num_resets: int, wanted: int) -> int:
    """Of so many calls on one connection; returns once as many as are wanted were refused."""
    refused, enough = 0, threading.Event()
    one = http2.header_block(http2.call_headers("/grpc.health.v1.Health/Check"))
    reset = (8).to_bytes(4, "big")
    streams = range(1, 2 * num_resets, 2)

    def count(received: socket.socket) -> None:
        nonlocal refused
        data = b""
        while part := received.recv(1 << 16):
            data += part
            while len(data) >= 9 and len(data) >= (end := 9 + int.from_bytes(data[:3], "big")):
                refused += data[3] == http2.RST_STREAM and data[9:end] in REFUSED
                data = data[end:]
            if refused >= wanted:
                enough.set()

    with socket.create_connection(("127.0.0.1", port)) as connection:
        counting = threading.Thread(target=count, args=(connection,))
        counting.start()
        connection.sendall(http2.opening())
        for n in streams:
            headers = frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, n, one)
            connection.sendall(headers + frame(http2.RST_STREAM, 0, n, reset))
        enough.wait(SOON)
        connection.shutdown(socket.SHUT_RDWR)
        counting.join()
    return refused


async def test_a_connection_has_no_more_calls_than_it_may_although_it_resets_them() -> None:
    server = RpcServer("test", "127.0.0.1:0", [])
    await server.start()
    try:
        wanted = SURPLUS - MOST_BEGUN
        refused = num_refused(server.port, MAX_STREAMS_PER_CONNECTION + SURPLUS, wanted)  # the loop stands still
        assert wanted <= refused <= SURPLUS
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=SOON)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(0)
