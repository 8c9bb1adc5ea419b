"""The rollout service's metrics."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.rollout.admission import Kind, Shares
from services.rollout.engine.fleet import FleetObserver

_SECONDS_BUCKETS = (0.05, 0.2, 1.0, 5.0, 20.0, 60.0, 300.0)


class RolloutMetrics(FleetObserver):
    """Counts of one run since the start; GetFleet answers them, too."""

    def __init__(self, registry: CollectorRegistry, run: str = "") -> None:
        self._run = run
        self.groups_produced = 0
        self.tokens_produced = 0
        self._groups = Counter("headrace_rollout_groups", "Groups put.", ["run", "outcome"], registry=registry)
        self._tokens = Counter("headrace_rollout_tokens", "Response tokens put.", ["run"], registry=registry)
        self._publications = Histogram(
            "headrace_rollout_publication_paused_seconds",
            "Seconds for which requests were paused for new weights.",
            ["run"],
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )

        self._bad_answers = Counter(
            "headrace_rollout_bad_answers", "Impossible responses of engines, by kind.", ["kind"], registry=registry
        )
        self._background = Counter(
            "headrace_rollout_background_work_ended",
            "Background tasks that raised and were started again.",
            ["work"],
            registry=registry,
        )
        self._groups_raised = Counter(
            "headrace_rollout_groups_raised",
            "Groups whose work ended in an unexpected error.",
            ["run"],
            registry=registry,
        )

        self._in_flight = Gauge(
            "headrace_rollout_requests_in_flight",
            "Requests at the engines, by kind.",
            ["run", "kind"],
            registry=registry,
        )
        self._waiting = Gauge(
            "headrace_rollout_requests_waiting",
            "Requests that wait for a slot, by kind.",
            ["run", "kind"],
            registry=registry,
        )
        self._groups_limit = Gauge(
            "headrace_rollout_max_groups_in_flight", "Groups that may be generated at once.", ["run"], registry=registry
        )

        self._of_run = (
            self._groups,
            self._tokens,
            self._publications,
            self._groups_raised,
            self._in_flight,
            self._waiting,
            self._groups_limit,
        )

    def of_joined(self, run: str) -> RolloutMetrics:
        """Those of another run on the same engines."""
        joined = copy.copy(self)
        joined._run, joined.groups_produced, joined.tokens_produced = run, 0, 0
        return joined

    def forget(self) -> None:
        """The run has left: its lines go."""
        for metric in self._of_run:
            metric.remove_by_labels({"run": self._run})

    def watch_requests(self, shares: Shares, groups_limit: Callable[[], int]) -> None:
        """Shows requests in flight and waiting, and the limit of groups, as they are when somebody looks."""
        for kind in Kind:
            self._in_flight.labels(self._run, kind.value).set_function(functools.partial(shares.in_use, kind))
            self._waiting.labels(self._run, kind.value).set_function(functools.partial(shares.waiting, kind))
        self._groups_limit.labels(self._run).set_function(groups_limit)

    def bad_answer(self, kind: str) -> None:
        self._bad_answers.labels(kind).inc()

    def background_work_ended(self, name: str) -> None:
        self._background.labels(name).inc()

    def group_raised(self) -> None:
        """Counts a group whose work ended in an unexpected error."""
        self._groups_raised.labels(self._run).inc()

    def group_done(self, outcome: str, tokens: int) -> None:
        """Counts a group that the ledger has."""
        self._groups.labels(self._run, outcome).inc()
        self._tokens.labels(self._run).inc(tokens)
        self.groups_produced += outcome == "complete"
        self.tokens_produced += tokens

    def published(self, paused_seconds: float) -> None:
        """Counts a committed publication."""
        self._publications.labels(self._run).observe(paused_seconds)
