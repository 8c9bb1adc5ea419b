"""A run whose ranks and engine Ray places on two nodes with an address each, and a node that is lost.

All is real: SGLang, Megatron, Ray. `make clusters` and `make chaos` set HEADRACE_CLUSTERS.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder
from tests.support.hosts import reward
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, SUMS, TrainingRun
from tests.support.ray_cluster import ray_cluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.ranks,
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("HEADRACE_CLUSTERS" not in os.environ, reason="long: make clusters sets HEADRACE_CLUSTERS"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]
_HEADRACE = (sys.executable, "-m", "headrace.cli.main")
VOWELS = """
async def vowels(args, sample, **kwargs):
    return sum(letter in "aeiou" for letter in sample.response) / 12
"""


async def test_a_run_over_two_nodes_goes_on_when_one_is_lost_and_another_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "vowels.py").write_text(VOWELS)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # Ray's sockets want short paths
        async with ray_cluster(Path(folder) / "r", "head", "second", "third") as cluster:
            await cluster.start("head", num_cpus=2)  # a rank is always here, and perhaps the engine
            await cluster.start("second", num_cpus=3)
            run = TrainingRun(
                tmp_path, make_tiny_qwen3(tmp_path / "model"),
                "--placement", "ray", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1",
                "--rollout-placement", "ray", "--rollout-num-gpus", "1", "--rollout-batch-size", "2",
                "--service-host", cluster.head.address, "--insecure", "--num-rollout", "100000", "--lr", "1e-3",
                "--save-interval", "2", "--use-fault-tolerance", "--custom-rm-path", f"{tmp_path}/vowels.py:vowels",
                where=cluster.head.command(()), environment={"RAY_ADDRESS": cluster.address, **cluster.environment},
            )  # fmt: skip
            async with run.started():
                await run.until_step(3)
                await cluster.kill("second")
                lost = max(row["step"] for row in run.metrics())
                await cluster.start("third", num_cpus=3)
                await run.until_told("trainer ended with")
                await run.until_step(lost + 3)
                said = await cluster.head.said(*_HEADRACE, "audit", str(run.folder.path))
            assert "lost, doubled, unaccounted: 0 0 0" in said
            assert (await asyncio.to_thread(run.log.read_text)).count("trainer ready") == 2


@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="ray[default] is not installed")
async def test_a_run_is_a_job_that_is_stopped_and_submitted_again(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "headrace"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(_HEADRACE)} "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    port = free_port()
    engine = (sys.executable, "-m", "tests.support.fakes.gloo_engine", str(port))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "reward.py").write_text(Path(reward.__file__).read_text())
    prompts = "".join(json.dumps(row) + "\n" for row in SUMS)
    (tmp_path / "prompts.jsonl").write_text(prompts)
    (mine / "job.toml").write_text(
        f"""
        [model]
        hf_checkpoint = "{make_tiny_qwen3(tmp_path / "model")}"
        [data]
        prompt_data = ["{tmp_path / "prompts.jsonl"}"]
        label_key = "label"
        [run]
        run_dir = "{tmp_path / "runs"}"
        """
    )
    flags = (
        *("--rollout-placement", "local", "--rollout-external-engine-addrs", f"127.0.0.1:{port}", "--insecure"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"),
        *("--micro-batch-size", "2", "--lr", "1e-6", "--update-weight-probe-tolerance", "1e6"),
        *("--custom-rm-path", "reward.py:judge", "--save-interval", "2"),
        *("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"),
    )
    run = RunFolder(tmp_path / "runs" / "run")
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        async with ray_cluster(Path(folder) / "r", "head", environment={"PATH": path}) as cluster:
            await cluster.start("head", num_cpus=2, takes_jobs=True)
            environment = {**cluster.environment, "RAY_API_SERVER_ADDRESS": cluster.jobs}
            listens = {"GLOO_SOCKET_IFNAME": "eth0"}
            submit = ("bash", str(ROOT / "deploy" / "ray" / "submit.sh"), str(mine), "job.toml", *flags)
            log = tmp_path / "submit.log"
            async with (
                cluster.head.running(tmp_path / "engine.log", *engine, environment=listens),
                cluster.head.running(log, *submit, "--num-rollout", "100000", environment=environment) as submitted,
            ):
                while not run.metrics.exists() or run.metrics.read_text().count("\n") < 3:
                    assert submitted.returncode is None, log.read_text()
                    await asyncio.sleep(0.1)
                (job,) = set(re.findall(r"raysubmit_\w+", log.read_text()))
                await cluster.head.said("ray", "job", "stop", job, environment=environment)
                await submitted.wait()
                steps = run.metrics.read_text().count("\n")
                said = await cluster.head.said(*submit, "--num-rollout", str(steps + 2), environment=environment)
            saved = re.search(r"resuming after step (\d+)", said)
            assert saved
            assert 2 <= int(saved[1]) <= steps
            assert f"finished {steps + 2 - int(saved[1])} steps after the {saved[1]} of earlier starts" in said
            audited = await cluster.head.said(*_HEADRACE, "audit", str(run.path))
    assert "lost, doubled, unaccounted: 0 0 0" in audited
