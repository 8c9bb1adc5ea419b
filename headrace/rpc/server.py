"""A gRPC server as every service has it.

States: built → started (serving) → draining (health says NOT_SERVING, no new calls, those in flight finish, and those
that only wait are told at once to ask again) → stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import mmap
import os
import signal
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from headrace.errors import ConfigError, Unavailable
from headrace.limits import (
    MAX_CONNECTIONS,
    MAX_HANDSHAKE_SECONDS,
    MAX_IDLE_SECONDS,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    MAX_STREAMS_PER_CONNECTION,
)
from headrace.rpc.access.access import Access, Tokens
from headrace.rpc.interceptor import CallInterceptor, CallsInProgress, RequestLimits
from headrace.rpc.log import log
from headrace.rpc.metrics import RpcMetrics
from headrace.rpc.net import Address, keepalive_options, require_free, require_reachable
from headrace.rpc.peers.calls import DEFAULT_MAX_CALLS, PeerCalls
from headrace.rpc.peers.connections import ConnectionGuard
from headrace.rpc.tls import VARIABLE, TlsFolder, server_credentials, use_tls

# Gives memory that a flood of calls took back to the machine, once it is over.
#
# glibc keeps what is freed for the next time, and one small block in use holds all that lies below it. `malloc_trim`
# gives back the whole pages in between. Memory that is taken and freed again all the while is left alone.

_LOOK_SECONDS = 2.0
_NUM_LOOKS = 5
_WORTH_BYTES = 16 << 20


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2, of all arenas together; `fordblks` is what is free, trimmed pages included."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


@dataclass(frozen=True, slots=True)
class Heap:
    """The C heap of this process, and what of the whole process is in memory."""

    free_bytes: Callable[[], int]
    resident_bytes: Callable[[], int]
    trim: Callable[[], None]


def glibc_heap() -> Heap | None:
    """None where the C library is another one, or older than 2.33."""
    library = ctypes.CDLL(None)
    try:
        mallinfo2, malloc_trim = library.mallinfo2, library.malloc_trim
    except AttributeError:
        return None
    mallinfo2.restype = _MallInfo2
    malloc_trim.argtypes = [ctypes.c_size_t]

    def trim() -> None:
        malloc_trim(0)

    return Heap(lambda: int(mallinfo2().fordblks), _resident_bytes, trim)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class SpareMemory:
    """Looks at the heap from a thread of its own. States: built → started → stopped."""

    def __init__(self, heap: Heap | None = None) -> None:
        self._heap = heap or glibc_heap()
        self._kept = 0
        """What was free after the last trim, or less: those pages are the machine's."""
        self._resident = 0
        """After the last trim. What has come since may be pages that were taken again and freed between two looks."""
        self._looks = deque[tuple[int, int]](maxlen=_NUM_LOOKS)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Does nothing where there is no such heap."""
        if self._heap is not None:
            threading.Thread(target=self._run, args=(self._heap,), name="spare-memory", daemon=True).start()

    def stop(self) -> None:
        """Looks no more."""
        self._stopped.set()

    def _run(self, heap: Heap) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            self.look(heap)

    def look(self, heap: Heap) -> None:
        """Trims where much has been free for several looks, and was not when it was trimmed last."""
        self._looks.append((heap.free_bytes(), heap.resident_bytes()))
        free, resident = map(min, zip(*self._looks, strict=True))
        self._kept = min(self._kept, free)
        unused = max(free - self._kept, min(free, resident - self._resident))
        if len(self._looks) < _NUM_LOOKS or unused < _WORTH_BYTES:
            return
        heap.trim()
        log.debug("memory_trimmed", free_bytes=unused)  # a start shows its last event of a higher level
        self._kept, self._resident = heap.free_bytes(), heap.resident_bytes()
        self._looks.clear()


DRAIN_SECONDS = 3.0
_LAST_WORDS_SECONDS = 1.0
"""The time within which a call that cannot be finished is answered."""
DEFAULT_LIMITS = RequestLimits()

# Each method has a queue of calls that have come and not begun, 13 KB a call, those that were reset included. Below
# gRPC's own limits (1,000 and 3,000) no crowd of honest callers fits. With so_reuseport two servers would share a port.
OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.server.max_pending_requests", 16_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    ("grpc.so_reuseport", 0),
    # Large messages in few frames, and room for one before its window must be widened.
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Strangers: who does not finish a handshake, asks nothing, sends too much, or packs it.
    ("grpc.server_handshake_timeout_ms", int(MAX_HANDSHAKE_SECONDS * 1000)),
    ("grpc.max_connection_idle_ms", int(MAX_IDLE_SECONDS * 1000)),
    ("grpc.max_allowed_incoming_connections", 2 * MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer, the generated function that adds it, and its full proto name."""

    servicer: Any
    add_to_server: Callable[[Any, Any], None]
    full_name: str


class RpcServer:
    """Serves the given services with health, reflection, metrics and graceful drain."""

    def __init__(
        self,
        name: str,
        address: str,
        services: Sequence[Service],
        *,
        metrics_address: str | None = None,
        insecure: bool = False,
        tls: TlsFolder | None = None,
        tokens: Tokens | None = None,
        max_calls_per_peer: int = DEFAULT_MAX_CALLS,
        request_limits: RequestLimits = DEFAULT_LIMITS,
        gate: Callable[[], None] = lambda: None,
        connections: ConnectionGuard | None = None,
        waiting: Collection[str] = (),
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        """`request_limits`: what a request may have, by its method. With `tls` or `tokens` callers have roles.

        `gate` raises what every call of the services is to be answered now; health and reflection go on. `waiting` are
        methods that a signal ends at once; calls of the others have `drain_seconds` to finish.
        """
        self.name = name
        self.port = 0
        self.metrics_port: int | None = None
        self._address = Address.parse(address)
        self._metrics_address = Address.parse(metrics_address) if metrics_address else None
        self._services = services
        self._waiting = waiting
        self._drain_seconds = drain_seconds
        for each in (self._address, self._metrics_address):
            if not (insecure or tls) and each is not None and not each.is_loopback:
                raise ConfigError(
                    f"{each} can be reached from other machines and the wire is not encrypted: make certificates with "
                    "`headrace certs FOLDER` and pass --tls-dir FOLDER, listen on 127.0.0.1, or pass --insecure on a "
                    "network that nobody else is in"
                )
        if tokens and not tls and not self._address.is_loopback:
            raise ConfigError(
                f"tokens would travel unencrypted to {self._address}: pass --tls-dir FOLDER too (`headrace certs "
                "FOLDER` makes it), listen on 127.0.0.1, or leave --tokens-file out"
            )
        self._tls = tls
        self._health = HealthServicer()
        names = frozenset(s.full_name for s in services)
        self.peers = PeerCalls(max_calls_per_peer)
        self.metrics = RpcMetrics(lambda: self.peers.in_progress)
        access = Access.of(tls.path if tls else None, tokens)
        self.connections = connections or ConnectionGuard()
        self._calls = CallsInProgress()
        self._memory = SpareMemory()
        interceptor = CallInterceptor(
            names, self.metrics, self.peers, request_limits, gate, access, self.connections, self._calls
        )
        self._server = grpc.aio.server(interceptors=[interceptor], options=[*OPTIONS, *keepalive_options()])

    @property
    def address(self) -> str:
        """host:port, the port being the bound one."""
        return str(Address(self._address.host, self.port))

    async def start(self, *, ready: bool = True) -> None:
        """Binds and serves. Raises Unavailable when the port is taken. Not `ready`: healthy only after set_ready()."""
        require_reachable(self._address)
        require_free(self._address)
        for service in self._services:
            service.add_to_server(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [s.full_name for s in self._services]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME, "grpc.health.v1.Health"], self._server)
        try:
            self.port = self._add_port()
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {self._address}: choose another --address") from error
        await self._server.start()
        self.connections.start(self.port)
        self._memory.start()
        if self._metrics_address:
            self.metrics_port = self.metrics.serve(self._metrics_address, self._tls)
        status = health_pb2.HealthCheckResponse
        await self._set_health(status.SERVING if ready else status.NOT_SERVING)
        log.info("serving", address=self.address, metrics_port=self.metrics_port, ready=ready)

    def _add_port(self) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(str(self._address))
        return self._server.add_secure_port(str(self._address), server_credentials(self._tls))

    async def set_ready(self) -> None:
        """Health says SERVING from now on."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def set_serving(self, serving: bool) -> None:
        """Sets the status that health reports."""
        status = health_pb2.HealthCheckResponse
        await self._set_health(status.SERVING if serving else status.NOT_SERVING)

    async def run_until_signal(self, drained: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then drains; `drained` is what drains beside it."""
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked.set)
        await asked.wait()
        await asyncio.gather(self.stop(self._drain_seconds), *([drained()] if drained else []))

    async def stop(self, grace_seconds: float = DRAIN_SECONDS) -> None:
        """Takes no new calls, lets those in flight finish for `grace_seconds`, then tells them to ask again."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        log.info("draining", grace_seconds=grace_seconds)
        stopping = asyncio.ensure_future(self._server.stop(grace_seconds + _LAST_WORDS_SECONDS))
        self._calls.end(self._waiting)
        await asyncio.wait({stopping}, timeout=grace_seconds)
        self._calls.end()
        await stopping
        self.connections.stop()
        self._memory.stop()
        self.metrics.stop()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *(s.full_name for s in self._services)):
            await self._health.set(name, status)


@dataclass(frozen=True, slots=True)
class Listen:
    """Addresses are `host:port`. `insecure`: without `tls`, too, they may be ones that other machines reach.

    With `tls` or `tokens` callers have roles.
    """

    address: str
    metrics_address: str | None = None
    insecure: bool = False
    tls: TlsFolder | None = None
    tokens: Tokens | None = None


def add_listen_arguments(parser: argparse.ArgumentParser, *, address: str | None = None) -> None:
    """`address` is where the service listens when the argument is absent."""
    parser.add_argument("--address", default=address, required=address is None, help="host:port to listen on")
    parser.add_argument("--metrics-address", help="host:port of Prometheus' /metrics")
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=os.environ.get(VARIABLE),
        help=f"folder of ca.pem, cert.pem and key.pem (default: ${VARIABLE})",
    )
    parser.add_argument("--tokens-file", type=Path, help="tokens of callers, and their roles (`headrace tokens`)")
    parser.add_argument("--insecure", action="store_true", help="listen where other machines can reach, unencrypted")


def listen_of(given: Mapping[str, Any]) -> Listen:
    """The parsed arguments. This process's own calls use the same certificate from now on.

    Raises ConfigError for a tokens file that cannot be used.
    """
    folder = use_tls(given["tls_dir"])
    tokens = Tokens(given["tokens_file"]) if given["tokens_file"] else None
    return Listen(given["address"], given["metrics_address"], given["insecure"], folder, tokens)
