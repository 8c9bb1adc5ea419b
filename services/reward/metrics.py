"""What the reward service counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.judgement import Judgement, ScoreError
from headrace.process.workers import WorkerPool


class RewardMetrics:
    """Judged items by scorer and outcome, the time they took, and how many wait."""

    def __init__(self) -> None:
        self._items = Counter("headrace_reward_items", "Judged items.", ["scorer", "outcome"], registry=None)
        self._seconds = Histogram(
            "headrace_reward_seconds", "From asking to judgement, waiting included.", ["scorer"], registry=None
        )
        self._waiting = Gauge("headrace_reward_waiting", "Calls that wait for a worker.", registry=None)

    def show(self, registry: CollectorRegistry, pool: WorkerPool) -> None:
        """Adds them to the process's page."""
        self._waiting.set_function(lambda: pool.waiting)
        for metric in (self._items, self._seconds, self._waiting):
            registry.register(metric)

    def count(self, scorer: str, result: Judgement) -> None:
        """One item is done."""
        self._items.labels(scorer, result.reason if isinstance(result, ScoreError) else "SCORED").inc()

    def observe(self, scorer: str, seconds: float) -> None:
        """One call is done."""
        self._seconds.labels(scorer).observe(seconds)
