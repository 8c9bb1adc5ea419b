"""A run whose ranks and engine Ray places on two nodes with an address each, and a node that is lost.

All is real: SGLang, Megatron, Ray. `make ray` and `make chaos` set HEADRACE_RAY.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import TrainingRun
from tests.support.ray_cluster import ray_cluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.ranks,
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("HEADRACE_RAY" not in os.environ, reason="long: make ray sets HEADRACE_RAY"),
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
            await cluster.start("head", num_cpus=1)  # room for a rank
            await cluster.start("second", num_cpus=2)  # for a rank and an engine
            run = TrainingRun(
                tmp_path, make_tiny_qwen3(tmp_path / "model"),
                "--placement", "ray", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1",
                "--rollout-placement", "ray", "--rollout-num-gpus", "1", "--rollout-batch-size", "2",
                "--service-host", cluster.head.address, "--insecure", "--num-rollout", "100000", "--lr", "1e-3",
                "--save-interval", "2", "--use-fault-tolerance", "--custom-rm-path", f"{tmp_path}/vowels.py:vowels",
                where=cluster.head.command(()), environment={"RAY_ADDRESS": cluster.address},
            )  # fmt: skip
            async with run.started():
                await run.until_step(3)
                await cluster.kill("second")
                lost = max(row["step"] for row in run.metrics())
                await cluster.start("third", num_cpus=2)
                await run.until_told("trainer ended with")
                await run.until_step(lost + 3)
                said = await cluster.head.said(*_HEADRACE, "audit", str(run.folder.path))
            assert "lost, doubled, unaccounted: 0 0 0" in said
            assert (await asyncio.to_thread(run.log.read_text)).count("trainer ready") == 2
