"""deploy/slurm/train.sbatch in a real Slurm of two nodes: a run that is one job, and what ends, requeues and resumes it.

Engines have no model and no process of SGLang; all else is real. `make slurm` and `make chaos` set HEADRACE_SLURM.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.rpc.net import free_port
from headrace.run_folder import RunFolder
from tests.support.hosts import reward
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, SUMS
from tests.support.slurm import MISSING, Slurm, slurm

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.ranks,
    pytest.mark.timeout(1200),
    pytest.mark.skipif("HEADRACE_SLURM" not in os.environ, reason="long: make slurm sets HEADRACE_SLURM"),
    pytest.mark.skipif(bool(MISSING), reason=f"this machine has no {', '.join(MISSING)}"),
]
SBATCH = ROOT / "deploy" / "slurm" / "train.sbatch"
_HEADRACE = (sys.executable, "-m", "headrace.cli.main")


class SlurmRun:
    """A run that is submitted to Slurm as a person submits it."""

    def __init__(self, cluster: Slurm, folder: Path, engine: str, *flags: str) -> None:
        self.cluster = cluster
        self.folder = RunFolder(folder / "runs" / "run")
        self.output = folder / "job.out"
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
        (folder / "bin").mkdir()
        command = folder / "bin" / "headrace"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(_HEADRACE)} "$@"\n')
        command.chmod(0o755)
        self._environment = {"PATH": f"{command.parent}:{os.environ['PATH']}"}
        self._words = (
            *("--nodes=2", "--ntasks-per-node=1", f"--output={self.output}", str(SBATCH), "--insecure"),
            *("--run-dir", str(folder / "runs"), "--run-name", "run", "--prompt-data", str(prompts)),
            *("--hf-checkpoint", str(make_tiny_qwen3(folder / "model")), "--label-key", "label"),
            *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"),
            *("--micro-batch-size", "2", "--rollout-num-gpus", "1", "--lr", "1e-6", "--rollout-external-engine-addrs"),
            *(engine, "--update-weight-probe-tolerance", "1e6", "--custom-rm-path", f"{reward.__file__}:judge"),
            # The engine gives a group's samples the same tokens: advantages that sum to 0 in it would teach nothing.
            *("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages", "--save-interval", "1000"),
            *flags,
        )

    async def submitted(self, *options: str) -> str:
        """Returns the job's id."""
        return await self.cluster.submit(*options, *self._words, environment=self._environment)

    async def until_step(self, step: int) -> None:
        """Waits until a step is reported."""
        while self.last_step() < step:
            await asyncio.sleep(0.1)

    def last_step(self) -> int:
        """0 before the first."""
        return max((row["step"] for row in self.metrics()), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far."""
        path = self.folder.metrics
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    async def audited(self) -> str:
        """What `headrace audit` says."""
        return await self.cluster.said(*_HEADRACE, "audit", str(self.folder.path))

    def said(self) -> str:
        """What the job has printed so far."""
        return self.output.read_text() if self.output.exists() else ""

    def last_words(self) -> str:
        """The end of every log, for a failed assertion."""
        logs = [self.output, *sorted(self.folder.logs.glob("*.log")), *sorted(self.cluster.folder.glob("*.log"))]
        return "\n".join(f"── {log}\n{log.read_text(errors='replace')[-2500:]}" for log in logs if log.exists())


@asynccontextmanager
async def running(folder: Path, *flags: str, **cluster_options: int) -> AsyncIterator[SlurmRun]:
    """A cluster, an engine on its first node, and a run to submit."""
    async with slurm(folder / "slurm", **cluster_options) as cluster:
        port = free_port()
        engine = (sys.executable, "-m", "tests.support.fakes.gloo_engine", str(port))
        async with cluster.first.running(folder / "engine.log", *engine, environment={"GLOO_SOCKET_IFNAME": "eth0"}):
            run = SlurmRun(cluster, folder, f"127.0.0.1:{port}", *flags)
            try:
                yield run
            except BaseException:
                print(run.last_words())
                raise


async def test_a_run_is_a_job_of_two_nodes_with_a_rank_on_each(tmp_path: Path) -> None:
    async with running(tmp_path, "--num-rollout", "4") as run:
        job = await run.submitted()
        assert await run.cluster.until_state(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
        assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
        assert all(row["grad_norm"] > 0 for row in run.metrics())
        assert "lost, doubled, unaccounted: 0 0 0" in await run.audited()
