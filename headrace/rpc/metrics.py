"""Prometheus counters of a process and the port that shows them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.rpc.http.page import MetricsPage
from headrace.rpc.net import Address, require_free
from headrace.rpc.tls import TlsFolder

_SECONDS_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)


class RpcMetrics:
    """Calls by method and status, and how long they took. `registry` takes a service's own metrics too."""

    def __init__(self, in_progress: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._page: MetricsPage | None = None
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

        With `tls` over HTTPS, to clients with a certificate.
        """
        require_free(address)
        self._page = MetricsPage(self.registry, tls)
        return self._page.start(address)

    def stop(self) -> None:
        """Shows them no more. Does nothing where they are not shown."""
        if self._page is not None:
            self._page.stop()
