"""A gRPC server as every service has it.

States: built → started (serving) → draining (health says NOT_SERVING, no new calls, those in flight finish, and those
that only wait are told at once to ask again) → stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
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
from headrace.rpc.access import Access, Tokens
from headrace.rpc.interceptor import CallInterceptor, CallsInProgress, RpcMetrics
from headrace.rpc.log import log
from headrace.rpc.net import Address, keepalive_options, require_free, require_reachable
from headrace.rpc.tls import VARIABLE, TlsFolder, server_credentials, use_tls

DRAIN_SECONDS = 3.0
_LAST_WORDS_SECONDS = 1.0
"""The time within which a call that cannot be finished is answered."""
_MOST_DESCRIPTORS = 1 << 16

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
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
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
        request_bytes: Mapping[str, int] = MappingProxyType({}),
        gate: Callable[[], None] = lambda: None,
        waiting: Collection[str] = (),
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        """`request_bytes`: what a request may have, by its method; MAX_REQUEST_BYTES without an entry.

        With `tls` or `tokens` callers have roles.
        `gate` raises what every call of the services is to be answered now; health and reflection go on.
        `waiting` are methods that a signal ends at once; calls of the others have `drain_seconds` to finish.
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
        self._calls = CallsInProgress()
        self.metrics = RpcMetrics(lambda: self.calls_in_progress)
        access = Access(has_certificates=tls is not None, tokens=tokens)
        interceptor = CallInterceptor(names, self.metrics, request_bytes, gate, access, self._calls)
        self._server = grpc.aio.server(interceptors=[interceptor], options=[*OPTIONS, *keepalive_options()])

    @property
    def address(self) -> str:
        """host:port, the port being the bound one."""
        return str(Address(self._address.host, self.port))

    @property
    def calls_in_progress(self) -> int:
        return self._calls.count

    async def start(self, *, ready: bool = True) -> None:
        """Binds and serves. Raises Unavailable when the port is taken. Not `ready`: healthy only after set_ready()."""
        require_reachable(self._address)
        require_free(self._address)
        for service in self._services:
            service.add_to_server(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [s.full_name for s in self._services]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME, "grpc.health.v1.Health"], self._server)
        _raise_descriptor_limit()
        try:
            self.port = self._add_port()
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {self._address}: choose another --address") from error
        await self._server.start()
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
        await asyncio.to_thread(self.metrics.stop)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *(s.full_name for s in self._services)):
            await self._health.set(name, status)


def _raise_descriptor_limit() -> None:
    """Each connection is an open file, and many machines let a process have 1,024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
