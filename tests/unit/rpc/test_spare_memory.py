"""Memory that was freed goes back to the machine once it was not needed for a while, and not before."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import time

import pytest
from structlog.testing import capture_logs

from headrace.process.memory import resident_bytes
from headrace.rpc.server import Heap, SpareMemory, glibc_heap
from tests.hostile.surfaces import http2

SOON = 60.0
MIB = 1 << 20
SERVED = """
import asyncio
from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.rpc import server as server_module
from headrace.rpc.server import RpcServer, Service

class Scorers(reward_pb2_grpc.RewardServiceServicer):
    async def ListScorers(self, request, context):
        return reward_pb2.ListScorersResponse()

async def serve():
    server_module._LOOK_SECONDS = 0.2
    name = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
    server = RpcServer(
        "x", "127.0.0.1:0", [Service(Scorers(), reward_pb2_grpc.add_RewardServiceServicer_to_server, name)]
    )
    await server.start()
    print("port", server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""
PATH = "/headrace.api.reward.v1.RewardService/ListScorers"


class Looked:
    def __init__(self) -> None:
        self.free_bytes = 0
        self.num_trims = 0

    def looks(self, memory: SpareMemory, *sizes_mib: int, resident_mib: int = 0) -> int:
        """How often it was trimmed after these looks."""
        before = self.num_trims
        for size in sizes_mib:
            self.free_bytes = size * MIB
            memory.look(Heap(lambda: self.free_bytes, lambda: resident_mib * MIB, self._trim))
        return self.num_trims - before

    def _trim(self) -> None:
        self.num_trims += 1


def test_what_is_free_for_several_looks_is_trimmed_once_and_again_after_the_next_flood() -> None:
    looked, memory = Looked(), SpareMemory()
    assert looked.looks(memory, 900, 900, 900, 900) == 0
    assert looked.looks(memory, 900) == 1
    assert looked.looks(memory, *[900] * 20) == 0, "what was trimmed counts as free, and is gone"
    assert looked.looks(memory, 10, *[900] * 10) == 1


def test_pages_that_were_taken_again_between_two_looks_are_trimmed_too() -> None:
    looked, memory = Looked(), SpareMemory()
    assert looked.looks(memory, *[900] * 5, resident_mib=100) == 1
    assert looked.looks(memory, *[900] * 20, resident_mib=110) == 0, "little is not worth it"
    assert looked.looks(memory, *[900] * 5, resident_mib=160) == 1
    assert looked.looks(memory, *[900] * 20, resident_mib=160) == 0, "that is in use"
    assert looked.looks(memory, *[900, 900, 3] * 5, resident_mib=300) == 0, "the heap needs it"


def test_a_trim_is_logged_below_what_a_person_reads_of_a_start() -> None:
    looked = Looked()
    with capture_logs() as logs:
        looked.looks(SpareMemory(), *[900] * 5)
    assert [(said["event"], said["log_level"]) for said in logs] == [("memory_trimmed", "debug")]


def test_what_is_taken_and_freed_all_the_while_is_left_alone() -> None:
    looked, memory = Looked(), SpareMemory()
    assert looked.looks(memory, *[900, 900, 900, 3] * 10) == 0
    assert looked.looks(memory, *[3, 10] * 10) == 0, "little is not worth it"


@pytest.mark.skipif(glibc_heap() is None, reason="the C library is not glibc")
def test_glibc_says_what_is_free() -> None:
    heap, library = glibc_heap(), ctypes.CDLL(None)
    assert heap is not None
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [library.malloc(ctypes.c_size_t(12_600)) for _ in range(4_000)]
    before = heap.free_bytes()
    for each in blocks[:-1]:
        library.free(each)
    assert heap.free_bytes() - before > 30 * MIB
    heap.trim()
    library.free(blocks[-1])


@pytest.mark.skipif(glibc_heap() is None, reason="the C library is not glibc")
async def test_calls_that_are_reset_at_once_leave_no_memory_behind() -> None:
    """GRPC loses a block for each call that is cancelled while it is read; each kept a page of those around it."""
    process = subprocess.Popen([sys.executable, "-c", SERVED], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        port = next(int(line.split()[1]) for line in process.stdout if line.startswith("port"))
        before, most = resident_bytes(process.pid), 0
        await asyncio.gather(*(_flood(port) for _ in range(8)))
        end = time.monotonic() + SOON
        while (now := resident_bytes(process.pid)) > before * 1.3 or most <= before * 1.5:
            most = max(most, now)
            assert time.monotonic() < end, (before >> 20, most >> 20, now >> 20)
            await asyncio.sleep(0.1)
    finally:
        process.kill()
        process.wait()


async def _flood(port: int) -> None:
    code = (8).to_bytes(4, "big")
    calls = (http2.call(PATH, n) + http2.frame(http2.RST_STREAM, 0, n, code) for n in range(1, 2_001, 2))
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http2.opening() + b"".join(calls))
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.transport.abort()
