"""The reward service's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.process.workers import WorkerPool
from headrace.score import ScoreError, ScoreResult


class RewardMetrics:
    """Counts scored items by scorer and outcome, the time that they took, and how many wait."""

    def __init__(self) -> None:
        self._items = Counter(
            "headrace_reward_items", "Scored items, by scorer and outcome.", ["scorer", "outcome"], registry=None
        )
        self._seconds = Histogram(
            "headrace_reward_seconds",
            "Seconds from the request to its scores, waiting included.",
            ["scorer"],
            registry=None,
        )
        self._waiting = Gauge("headrace_reward_waiting", "Calls that wait for a worker.", registry=None)

    def show(self, registry: CollectorRegistry, pool: WorkerPool) -> None:
        """Adds the metrics to the process's page."""
        self._waiting.set_function(lambda: pool.waiting)
        for metric in (self._items, self._seconds, self._waiting):
            registry.register(metric)

    def count(self, scorer: str, result: ScoreResult) -> None:
        self._items.labels(scorer, result.reason if isinstance(result, ScoreError) else "SCORED").inc()

    def observe(self, scorer: str, seconds: float) -> None:
        """Adds the time of one call."""
        self._seconds.labels(scorer).observe(seconds)
