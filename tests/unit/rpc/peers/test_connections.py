"""Connections to a gRPC port beyond an address's number: who has called stays."""

from __future__ import annotations

import asyncio
import socket
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.rpc.client import connect
from headrace.rpc.peers.connections import ConnectionGuard, Pace, Seen, surplus
from headrace.rpc.peers.sockets import Connection
from headrace.rpc.server import RpcServer, Service

NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
SOON = 60.0


def seen(host: str, port: int, *, known: bool = False) -> Seen:
    return Seen(Connection(port, host, f"ipv4:{host}:{port}"), float(port), known)


def closed(connections: list[Seen], most_per_peer: int, most: int = 100) -> set[int]:
    return {each.descriptor for each in surplus(connections, most_per_peer, most)}


def test_the_longest_silent_go_first_then_the_newest_and_no_other_addresss() -> None:
    strangers = [seen("10.0.0.1", port) for port in range(1, 6)]
    known = [seen("10.0.0.1", port, known=True) for port in range(6, 9)]
    other = [seen("10.0.0.2", port) for port in range(20, 23)]
    assert closed([*strangers, *known, *other], 8) == set()
    assert closed([*strangers, *known, *other], 6) == {1, 2}
    assert closed([*strangers, *known, *other], 3) == {1, 2, 3, 4, 5}
    assert closed([*strangers, *known, *other], 2) == {1, 2, 3, 4, 5, 8, 20}, "of those that have called the newest"
    assert closed([*strangers, *known, *other], 100, most=9) == {1, 2}


def test_many_connections_that_stay_are_looked_at_seldom_and_a_crowd_at_once() -> None:
    pace = Pace(most_per_peer=2_048)
    assert not any(pace.is_due(255, float(now)) for now in range(100)), "nobody is near a limit"
    assert [now for now in range(100, 112) if pace.is_due(300, float(now))] == [100, 105, 110]
    assert not pace.is_due(363, 112.0)
    assert pace.is_due(364, 112.1), "64 more than at the last look"
    assert not pace.is_due(330, 112.2)
    assert pace.is_due(394, 112.3), "64 more than the fewest since then: others may have left for them"


async def test_a_crowd_of_silent_connections_is_closed_and_a_caller_goes_on() -> None:
    class Scorers(reward_pb2_grpc.RewardServiceServicer):
        async def ListScorers(self, request, context):
            return reward_pb2.ListScorersResponse()

    guard = ConnectionGuard(most_per_peer=10)
    servicer = Service(Scorers(), reward_pb2_grpc.add_RewardServiceServicer_to_server, NAME)
    server = RpcServer("test", "127.0.0.1:0", [servicer], connections=guard)
    await server.start()
    crowd = []
    try:
        async with connect(server.address) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=30)
            crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
            end = time.monotonic() + SOON
            while guard.num_closed < 51:
                assert time.monotonic() < end, guard.num_closed
                await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=30)
                await asyncio.sleep(0.05)
            async with connect(server.address) as newcomer:
                health = health_pb2_grpc.HealthStub(newcomer)
                await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
    finally:
        for each in crowd:
            each.close()
        await server.stop(0)
