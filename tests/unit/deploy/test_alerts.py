"""Alerts are on metrics that services have."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headrace.rpc.interceptor import RpcMetrics
from services.buffer.__main__ import LedgerCollector
from services.reward.scoring import RewardMetrics
from services.rollout.metrics import RolloutMetrics
from tests.support.deployments import DEPLOY

RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
_SERIES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of every series that a service shows."""
    registry = RpcMetrics(lambda: 0).registry
    RolloutMetrics(registry)
    nobody: Any = SimpleNamespace(waiting=0, streams={})
    RewardMetrics().show(registry, nobody)
    found: dict[str, set[str]] = {}
    for collector in list(registry._collector_to_names):
        for metric in collector.collect():
            for ending in _SERIES[metric.type]:
                found[metric.name + ending] = set(getattr(collector, "_labelnames", ()))
    for gauge in LedgerCollector(nobody).collect():
        found[gauge.name] = set(getattr(gauge, "_labelnames", ()))
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_on_series_and_labels_that_exist(rule: dict[str, Any], labels: dict[str, set[str]]) -> None:
    series = re.findall(r"\b(headrace_\w+)(?:\{([^}]*)\})?", rule["expr"])
    assert series
    for name, matchers in series:
        assert name in labels, name
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", matchers)) <= labels[name], name
    for grouped in re.findall(r"by \(([^)]*)\)", rule["expr"]):
        assert set(grouped.split(", ")) <= set.union(*(labels[name] for name, _ in series))
    assert rule["labels"]["severity"] in ("page", "ticket")
