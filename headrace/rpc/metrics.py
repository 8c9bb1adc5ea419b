"""Prometheus counters of a process and the port that shows them."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from headrace.rpc.net import Address, require_free
from headrace.rpc.tls import TlsFolder, renew_at_handshakes

_SECONDS_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)


class RpcMetrics:
    """Calls by method and status, and how long they took. `registry` takes a service's own metrics too."""

    def __init__(self, in_progress: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._server: WSGIServer | None = None
        self._calls = Counter("headrace_rpc_calls", "Finished calls.", ["method", "code"], registry=self.registry)
        self._seconds = Histogram(
            "headrace_rpc_seconds", "Time in the server.", ["method"], buckets=_SECONDS_BUCKETS, registry=self.registry
        )

        calls = Gauge("headrace_rpc_in_progress", "Calls that have begun and not ended.", registry=self.registry)
        calls.set_function(in_progress)

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Counts one finished call."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)

    def serve(self, address: Address, tls: TlsFolder | None = None) -> int:
        """Shows `/metrics` over HTTP from a thread; returns the bound port. Raises Unavailable when it is taken.

        With `tls` over HTTPS, to clients with a certificate; raises ConfigError for files of no use.
        """
        require_free(address)
        if tls is None:
            self._server, _ = start_http_server(address.port, address.host, self.registry)
            return self._server.server_port
        tls.read()
        self._server, _ = start_http_server(
            address.port,
            address.host,
            self.registry,
            certfile=str(tls.certificate),
            keyfile=str(tls.key),
            client_cafile=str(tls.authority),
            client_auth_required=True,
        )
        listening = self._server.socket
        assert isinstance(listening, ssl.SSLSocket)
        renew_at_handshakes(listening.context, tls)
        # In the thread of its connection, so that all others need not wait for a client that does not finish its own.
        listening.do_handshake_on_connect = False  # type: ignore[attr-defined]  # the stubs forget it
        return self._server.server_port

    def stop(self) -> None:
        """Shows them no more, within half a second. Does nothing where they are not shown."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
