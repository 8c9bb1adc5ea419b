"""The ledger's gauges, read from its counters when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.buffer.ledger.group import GroupState
from services.buffer.ledger.ledger import Ledger


class LedgerCollector(Collector):
    """Register it once with the server's registry."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterable[Metric]:
        groups = GaugeMetricFamily("headrace_buffer_groups", "Groups in a state.", labels=["stream", "state"])
        numbers = {
            "payload_bytes": _gauge("payload_bytes", "Payload bytes stored."),
            "step": _gauge("step", "The step to be consumed next."),
            "committed_step": _gauge("committed_step", "Every step below it is committed."),
            "policy_version": _gauge("policy_version", "The policy version that engines serve."),
            "prompts_read": _gauge("prompts_read", "Prompts read from the prompt files."),
            "bad_lines": _gauge("bad_lines", "Bad lines of the prompt files that were skipped."),
        }
        for name, stream in list(self._ledger.streams.items()):
            state = stream.state
            for group_state in GroupState:
                groups.add_metric([name, group_state.name], stream.count(group_state))
            numbers["payload_bytes"].add_metric([name], stream.payload_bytes)
            numbers["step"].add_metric([name], state.step)
            numbers["committed_step"].add_metric([name], state.committed_step)
            numbers["policy_version"].add_metric([name], state.policy_version)
            numbers["prompts_read"].add_metric([name], state.prompts_read)
            numbers["bad_lines"].add_metric([name], state.num_bad_lines)
        return [groups, *numbers.values()]


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headrace_buffer_{name}", text, labels=["stream"])
