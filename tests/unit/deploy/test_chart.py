"""The chart, rendered by Helm's own library, is what Kubernetes takes, and its variables are options of a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart
from helm_python.errors import HelmError

from headrace.launch.process import GRACE_SECONDS, LONGEST_GRACE_SECONDS
from tests.support.deployments import DEPLOY, PORTS, PROBE, SERVICES, job_of, targets

CHART = DEPLOY / "helm" / "headrace"
OLDEST, NEWEST = "1.28", kubernetes_validate.latest_version()
PLAIN: dict[str, Any] = {"job": '[run]\nrun_name = "r"\n', "tls": {"secretName": "headrace-tls"}}
FULL: dict[str, Any] = {
    **PLAIN,
    "image": {"registry": "registry.example/team", "pullSecrets": [{"name": "pull"}]},
    "env": [{"name": "HEADRACE_NUM_ROLLOUT", "value": "7"}],
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "volumeMounts": [{"name": "models", "mountPath": "/job/models", "readOnly": True}],
    "wandb": {"secretName": "wandb"},
    "postgres": {"secretName": "postgres"},
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "networkPolicy": {
        "clients": [{"podSelector": {"matchLabels": {"app": "notebook"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
    "rollout": {"replicas": 2, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
    "buffer": {"storage": {"storageClassName": "fast"}, "nodeSelector": {"disk": "nvme"}},
}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    with Chart.load(CHART) as chart:
        files = chart.render(values, name="headrace", namespace="rl")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates by service."""
    found = [each["spec"]["template"] for each in objects if "template" in each.get("spec", {})]
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in found}


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"].removeprefix("headrace-"): each for each in objects if each["kind"] == kind}


def variables(pod: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A field of the pod is read as 1, and a secret as `secret`."""
    for each in pod["spec"]["containers"][0]["env"]:
        yield each["name"], each.get("value") or ("1" if "fieldRef" in each["valueFrom"] else "secret")


@pytest.mark.parametrize("values", [PLAIN, FULL, {**PLAIN, "tls": {"secretName": ""}, "insecure": True}])
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_what_the_chart_makes(values: dict[str, Any], version: str) -> None:
    objects = rendered(values)
    assert set(pods(objects)) == set(SERVICES)
    for each in objects:
        if each["kind"] != "ServiceMonitor":  # the Prometheus operator's: there is no schema here
            kubernetes_validate.validate(each, version, strict=True)
    wrong = of_kind(objects, "StatefulSet")["buffer"]
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRoot"] = True
    with pytest.raises(kubernetes_validate.utils.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("values", [PLAIN, FULL])
@pytest.mark.parametrize("service", SERVICES)
def test_a_pod_gets_a_job_that_can_be_loaded(service: str, values: dict[str, Any], job_file: Path) -> None:
    pod = pods(rendered(values))[service]
    (container,) = pod["spec"]["containers"]
    job = job_of(container["args"], dict(variables(pod)), job_file)
    assert job.services.listen_host == "0.0.0.0"  # noqa: S104
    assert str(job.services.tls_dir) == "/tls"
    assert job.services.buffer_address == "headrace-buffer:7001"
    assert job.services.num_rollout_services == values.get("rollout", {}).get("replicas", 1)
    assert container["image"].rpartition("/")[2].partition(":")[0].removeprefix("headrace-") in targets()
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["exec"]["command"] == [*PROBE, f"127.0.0.1:{PORTS[service]}"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    claimed = {"run"} if service in ("buffer", "rollout") else set()
    assert mounted == {each["name"] for each in pod["spec"]["volumes"]} | claimed


def test_pods_have_no_rights_and_no_variables_of_kubernetes() -> None:
    for pod in pods(rendered(PLAIN)).values():
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["enableServiceLinks"] is False
        assert pod["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**PLAIN, "tls": {"secretName": ""}}, "headrace certs"),
        ({**PLAIN, "job": ""}, "set-file job"),
        ({**PLAIN, "rollout": {"replica": 2}}, "replica"),
        ({**PLAIN, "env": [{"name": "HEADRACE_X", "value": 1}]}, "string"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        rendered(values)


def test_a_new_reward_pod_serves_before_an_old_one_ends_and_every_pod_may_end_in_order() -> None:
    objects = rendered(PLAIN)
    strategy = of_kind(objects, "Deployment")["reward"]["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    reward = pods(objects)["reward"]["spec"]
    seconds = float(reward["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert seconds + GRACE_SECONDS < reward["terminationGracePeriodSeconds"]
    assert all(
        pod["spec"]["terminationGracePeriodSeconds"] > (LONGEST_GRACE_SECONDS if name == "trainer" else GRACE_SECONDS)
        for name, pod in pods(objects).items()
    )
