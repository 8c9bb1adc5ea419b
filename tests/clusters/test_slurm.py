"""deploy/slurm/train.sbatch in a real Slurm of two nodes: a run that is one job, and what ends and resumes it.

Engines have no model and no process of SGLang; all else is real. `make clusters` and `make chaos` set
HEADRACE_CLUSTERS.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
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
    pytest.mark.skipif("HEADRACE_CLUSTERS" not in os.environ, reason="long: make clusters sets HEADRACE_CLUSTERS"),
    pytest.mark.skipif(bool(MISSING), reason=f"this machine has no {', '.join(MISSING)}"),
]
SBATCH = ROOT / "deploy" / "slurm" / "train.sbatch"
GRACE_SECONDS = 60
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

    async def submitted(self, *flags: str) -> str:
        """Returns the job's id."""
        return await self.cluster.submit(*self._words, *flags, environment=self._environment)

    async def goes_within_its_grace(self, job: str, *, asked: Sequence[str] = (), urgent: bool = False) -> float:
        """Has the job leave its nodes, by scancel or for an urgent one; returns the seconds that it took."""
        starts, since = len(self.resumed()) + 1, time.monotonic()
        if urgent:
            options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=hostname")
            await self.cluster.until_state(await self.cluster.submit(*options), "COMPLETED")
        else:
            await self.cluster.said("scancel", *asked)
            while self.said().count("interrupted; the same command continues") < starts:
                await asyncio.sleep(0.1)
        took = time.monotonic() - since
        await self.until_starts(starts + 1)
        assert self.resumed()[-1] == self.last_step(), f"job {job} saved the step at which it ended"
        return took

    async def until_step(self, step: int) -> None:
        """Waits until a step is reported."""
        while self.last_step() < step:
            await asyncio.sleep(0.1)

    async def until_starts(self, number: int) -> None:
        """Waits until the job was started so often."""
        while len(self.resumed()) < number - 1:
            await asyncio.sleep(0.1)

    def resumed(self) -> list[int]:
        """The steps after which starts went on, 0 where nothing was saved."""
        return [int(step or 0) for step in re.findall(r"resuming after step (\d+)|starting again", self.said())]

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
async def running(folder: Path, *flags: str) -> AsyncIterator[SlurmRun]:
    """A cluster, an engine on its first node, and a run to submit."""
    async with slurm(folder / "slurm") as cluster:
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


async def test_a_job_that_has_to_go_is_started_again_and_goes_on_where_it_was(tmp_path: Path) -> None:
    async with running(tmp_path, "--num-rollout", "100000") as run:
        job = await run.submitted()
        await run.until_step(2)
        print(f"asked to end: {await run.goes_within_its_grace(job, asked=('--signal=TERM', '--batch', job)):.1f} s")

        await run.until_step(run.last_step() + 2)
        took = await run.goes_within_its_grace(job, urgent=True)
        print(f"pushed out by an urgent job: {took:.1f} s")
        await run.until_step(run.last_step() + 2)
        rows = [row["step"] for row in run.metrics()]
        assert rows == list(range(1, len(rows) + 1)), "each start goes on after the step at which the last one ended"

        await run.cluster.said("scontrol", "requeue", job)  # without a word to the run, as when a node is lost
        await run.until_starts(4)
        assert run.resumed()[2] == run.resumed()[1], "from the checkpoint of the last orderly end"
        await run.until_step(run.resumed()[2] + 2)

        await run.cluster.said("scancel", job)
        assert await run.cluster.until_state(job, "CANCELLED", "PENDING", "COMPLETED", "FAILED") == "CANCELLED"
        await run.cluster.until_idle()
        last = run.last_step() + 2
        again = await run.submitted("--num-rollout", str(last))
        assert await run.cluster.until_state(again, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
        assert run.last_step() == last
        assert "lost, doubled, unaccounted: 0 0 0" in await run.audited()
