"""Alerts and the dashboard are on metrics that services have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headrace.rpc.interceptor import RpcMetrics
from services.buffer.__main__ import LedgerCollector
from services.reward.scoring import RewardMetrics
from services.rollout.metrics import RolloutMetrics
from services.trainer.serving.report import RunReport
from tests.support.deployments import DEPLOY
from tests.support.metric_docs import undocumented

RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
_SERIES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
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
    report = RunReport(tmp_path_factory.mktemp("run"))
    for gauge in (*LedgerCollector(nobody).collect(), *report.collect()):
        found[gauge.name] = set(getattr(gauge, "_labelnames", ()))
    return found


def require_series(expression: str, labels: dict[str, set[str]]) -> set[str]:
    """The labels that a result of the expression has."""
    series = re.findall(r"\b(headrace_\w+)(?:\{([^}]*)\})?", expression)
    assert series
    for name, matchers in series:
        assert name in labels, name
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", matchers)) <= labels[name], name
    every = set.union(*(labels[name] for name, _ in series))
    grouped = {label for some in re.findall(r"by \(([^)]*)\)", expression) for label in some.split(", ")}
    assert grouped <= every
    return grouped or every


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_on_series_and_labels_that_exist(rule: dict[str, Any], labels: dict[str, set[str]]) -> None:
    require_series(rule["expr"], labels)
    assert rule["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_panel_is_on_series_labels_and_metrics_that_exist(
    title: str, target: dict[str, Any], labels: dict[str, set[str]]
) -> None:
    known = require_series(target["expr"], labels)
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known
    assert not undocumented(set(re.findall(r'name="([^"]+)"', target["expr"])))


def test_panels_have_ids_of_their_own_and_do_not_lie_on_one_another() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_trainers_page_has_the_newest_value_of_each_metric_also_after_a_restart(tmp_path: Path) -> None:
    report = RunReport(tmp_path)
    report.resume(0)
    report.write(1, {"mfu": 0.25, "tokens_per_second_per_rank": 100.0})
    report.write(2, {"mfu": 0.5})
    report.write(1, {"eval/sums": 0.75})
    for one in (report, again := RunReport(tmp_path)):
        if one is again:
            again.resume(2)
        metric, step = one.collect()
        found = {sample.labels["name"]: sample.value for sample in metric.samples}
        assert found == {"mfu": 0.5, "tokens_per_second_per_rank": 100.0, "eval/sums": 0.75}
        assert [sample.value for sample in step.samples] == [2.0]
        one.close()
