"""A whole run whose samples all fail ends with exit code 3 and the reasons, whoever starts the trainer's ranks.

Real launcher, buffer and Megatron ranks; the samples need no engine. `make chaos` sets HEADRACE_PLACEMENTS.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.main import main
from headrace.process.exit_status import NOTHING_TO_LEARN
from headrace.trajectory import Status
from tests.support.fakes.certain_rollout import certain_rollout, produce
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.training_run import ROOT, TrainingRun

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.ranks,
    pytest.mark.timeout(900),
    pytest.mark.skipif("HEADRACE_PLACEMENTS" not in os.environ, reason="long: make chaos sets HEADRACE_PLACEMENTS"),
]

PLACEMENTS = ["local", "slurm", "ray"]
REASONS = itertools.cycle([("SCORER_RAISED", "KeyError: 'answer'")] * 3 + [("SCORER_TIMEOUT", "60 s"), ("OTHER", "x")])


def unscored(put: buffer_pb2.GroupPut) -> buffer_pb2.GroupPut:
    """As the rollout service puts it where the reward raises, runs out of time, or is not there."""
    for sample, (reason, message) in zip(put.samples, REASONS, strict=False):
        sample.envelope.ClearField("reward")
        sample.envelope.status = Status.FAILED.number
        sample.envelope.failure.CopyFrom(sample_pb2.Failure(reason=reason, message=message))
    return put


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_run_that_cannot_learn_ends_with_exit_code_3_and_the_reasons(
    tmp_path: Path, placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").symlink_to(ROOT / "tests" / "support" / "fakes" / "srun.py")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    async with certain_rollout() as rollout:
        run = TrainingRun(
            tmp_path, checkpoint, "--placement", placement, "--num-rollout", "8",
            "--rollout-address", rollout.address, "--reward-address", "127.0.0.1:9",
            "--update-weight-probe-tolerance", "1e6",
            environment=environment,
        )  # fmt: skip
        async with run.started():
            producing = asyncio.create_task(produce(await run.address_of("buffer"), None, unscored))
            while run.is_running:
                await asyncio.sleep(0.1)
            producing.cancel()
    console = run.log.read_text()
    assert run.exit_code == NOTHING_TO_LEARN, run.last_words()
    verdict = console[console.index("headrace: trainer: ") :]
    assert "samples failed, more than --max-failed-share 0.5 allows:" in verdict
    assert "SCORER_RAISED: KeyError: 'answer' (e.g. group train/" in verdict
    assert "SCORER_TIMEOUT: 60 s (e.g. group train/" in verdict
    assert "OTHER: x (e.g. group train/" in verdict
    assert await asyncio.to_thread(main, ["status", str(run.folder.path)]) == 1
    assert "SCORER_RAISED: KeyError: 'answer'" in capsys.readouterr().out
