"""Recorded steps are trained again bit for bit, generation alone leaves a ledger without a gap, and both need no other.

Real launcher, buffer and Megatron ranks; samples follow from prompt and version, so that no engine is needed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.recorded_steps import RecordedSteps
from services.trainer.checkpoint.manifest import FileFacts, Manifest
from tests.long_forms import whole_run
from tests.support.fakes.certain_rollout import certain_rollout, produce
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, TrainingRun

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.timeout(900)]

STEPS = 4
FLAGS = (
    *("--reward-address", "127.0.0.1:9", "--update-weight-probe-tolerance", "1e6"),
    *("--num-rollout", str(STEPS), "--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
    *("--save-interval", "1", "--keep-last", "9", "--lr", "1e-3"),
)
_OF_THE_MACHINE = ("time", "busy/", "publish/", "reward/all", "tokens_per_second", "tflops", "mfu")


def written(folder: Path, step: int) -> Mapping[str, FileFacts]:
    """The size and digest of every file of a checkpoint: weights, optimizer, random numbers."""
    return Manifest.read(folder / f"checkpoints/step-{step:08d}").files


def headrace(*words: str) -> str:
    """What a command prints; it must end well."""
    command = [sys.executable, "-m", "headrace.cli.main", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def figures(folder: Path) -> Mapping[int, Mapping[str, float]]:
    """Of each step, without what depends on the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        row["step"]: {name: value for name, value in row.items() if not name.startswith(_OF_THE_MACHINE)}
        for row in rows
        if "grad_norm" in row
    }


@whole_run
async def test_a_recorded_run_is_trained_again_bit_for_bit_from_any_step(tmp_path: Path) -> None:
    checkpoint, steps = make_tiny_qwen3(tmp_path / "model"), str(tmp_path / "steps" / "{rollout_id}.samples")
    async with certain_rollout() as rollout:
        run = TrainingRun(
            tmp_path, checkpoint, *FLAGS, "--rollout-address", rollout.address, "--save-debug-rollout-data", steps
        )
        async with run.started():
            producing = asyncio.create_task(produce(await run.address_of("buffer")))
            await run.finished()
            producing.cancel()
    recorded = run.folder.path
    assert RecordedSteps(steps).steps() == list(range(STEPS))
    before = {file: file.stat().st_mtime_ns for file in recorded.rglob("*") if file.is_file()}

    said = await asyncio.to_thread(headrace, "replay", str(recorded), "--from-step", "2")
    assert "steps 3 to 4 are the same in every figure, bit for bit" in said
    again = recorded.with_name(f"{recorded.name}-replay")
    assert figures(again) == {step: row for step, row in figures(recorded).items() if step > 2}
    assert written(again, STEPS) == written(recorded, STEPS)

    said = await asyncio.to_thread(headrace, "replay", str(recorded), "--lr", "1e-2", "--run-name", "faster")
    assert "they differ from step 1 on: lr 0.001 was 0.01 now" in said
    faster = recorded.with_name("faster")
    assert list(figures(faster)) == [1, 2, 3, 4]
    assert figures(faster)[1]["grad_norm"] == figures(recorded)[1]["grad_norm"], "the first step begins alike"
    assert written(faster, STEPS) != written(recorded, STEPS)
    assert {file: file.stat().st_mtime_ns for file in recorded.rglob("*") if file.is_file()} == before


@whole_run
async def test_generation_alone_survives_a_kill_and_what_it_kept_can_be_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, steps = make_tiny_qwen3(tmp_path / "model"), str(tmp_path / "{rollout_id}.samples")
    supply = asyncio.Semaphore(0)
    async with certain_rollout() as rollout:
        flags = (*FLAGS, "--use-fault-tolerance", "--debug-rollout-only", "--save-debug-rollout-data", steps)
        run = TrainingRun(tmp_path, checkpoint, *flags, "--rollout-address", rollout.address)
        async with run.started():
            producing = asyncio.create_task(produce(await run.address_of("buffer"), supply))
            for _ in range(5):
                supply.release()
            await run.until_step(2)
            await run.until_told("trainer ready after")  # two steps may take less time than the launcher's next look
            run.kill("trainer")
            for _ in range(2 * STEPS):
                supply.release()
            await run.finished()
            producing.cancel()
    assert "generation alone: nothing is trained" in run.log.read_text()
    assert not (run.folder.path / "checkpoints").exists()
    assert await asyncio.to_thread(main, ["audit", str(run.folder.path)]) == 0
    assert "lost, doubled, unaccounted: 0 0 0" in capsys.readouterr().out
    assert {step: RecordedSteps(steps).read_ids(step) for step in range(STEPS)} == run.trained()

    alone = TrainingRun(tmp_path, checkpoint, *FLAGS, "--load-debug-rollout-data", steps, name="alone")
    async with alone.started():
        await alone.finished()
    assert alone.trained() == run.trained()
    assert "starting trainer;" in alone.log.read_text()
    assert sorted(figures(alone.folder.path)) == [1, 2, 3, 4]
