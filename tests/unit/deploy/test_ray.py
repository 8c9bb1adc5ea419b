"""deploy/ray: pods that Kubernetes takes, and flags that headrace has."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from headrace.job.load.load import load
from headrace.job.option import options
from headrace.job.rules.scope import Scope
from tests.support.deployments import DEPLOY, targets

SUBMIT = DEPLOY / "ray" / "submit.sh"


def ray_job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "ray" / "rayjob.yaml").read_text())
    return found


def groups() -> list[dict[str, Any]]:
    cluster = ray_job()["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("number", [0, 1])
def test_its_pods_are_what_kubernetes_takes_and_run_an_image_of_the_containerfile(number: int) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **groups()[number]["template"]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    (container,) = pod["spec"]["containers"]
    assert container["image"].removeprefix("headrace-") in targets()
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
    known = {option.variable for option in options().values()}
    assert {each["name"] for each in container["env"]} <= known


def test_its_job_is_one_that_can_be_loaded_and_has_room(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")  # as in every job of Ray
    headrace, train, path, *flags = shlex.split(ray_job()["spec"]["entrypoint"])
    assert (headrace, train, path) == ("headrace", "train", "/job/job.toml")
    (container,) = groups()[0]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "10.0.0.7") for each in container["env"]}
    job = load(job_file, flags, variables, lambda job: Scope(["buffer", "reward", "rollout", "trainer"], "elsewhere"))
    assert str(job.run.run_dir) == "/runs"
    auth = ray_job()["spec"]["rayClusterSpec"]["authOptions"]
    assert auth == {"mode": "token"}, "whoever reaches a Ray cluster runs programs on it"
    room = sum(int(group["rayStartParams"]["num-cpus"]) * group.get("replicas", 1) for group in groups())
    assert job.placement.num_ranks + job.placement.num_engines <= room
    assert job.placement.actor_num_nodes == len(groups())


def test_a_submitted_job_says_where_the_services_are(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    ray.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RAY_API_SERVER_ADDRESS": "http://gpu1:8265",
    }
    words = [str(SUBMIT), "mine", "job.toml", "--rollout-placement", "local"]
    done = subprocess.run(["bash", *words], env=environment, capture_output=True, text=True, check=True)
    submitted = json.loads(done.stdout)
    assert submitted == [
        *("job", "submit", "--working-dir", "mine", "--"),
        *("headrace", "train", "job.toml", "--placement", "ray", "--rollout-placement", "ray"),
        *("--service-host", "gpu1", "--rollout-placement", "local"),
    ]
