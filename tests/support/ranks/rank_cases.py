"""What a spawned rank does in the tests: builds a policy under a layout, and leaves what it did in the case's folder.

log_probs.json   of every sample, before training (last stage)
metrics.json     of both rollout steps
initial, trained, twice_trained, resumed: exported models; `resumed` was restored after the first step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.trajectory import Failure, PolicyRange, Sample, Status
from tests.support.ranks.ranks import entries

VOCAB_SIZE = 320
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    name: str
    folder: str
    hf_checkpoint: str
    megatron: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)
    ref_load: str | None = None
    ranks: int | None = None
    """Only the first ranks take part, and they only train a step, or restore `load`, and save."""
    load: str | None = None
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further sections of the job."""
    lag: int = 0
    """So many steps behind the policy is that a step's samples come from."""
    refused: bool = False
    """It is expected to end with an error before it trains; error.txt has the message."""

    @property
    def out(self) -> Path:
        """Where its results are."""
        return Path(self.folder) / self.name

    def job(self) -> Job:
        """The job it stands for."""
        megatron = {
            "lr": 1e-2,
            # Adam divides by |g|: with a tiny epsilon the rounding noise of a zero gradient would be a full step.
            "adam_eps": 1e-3,
        }
        train = {"micro_batch_size": 2, "num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}
        return Job.model_validate(
            {
                "model": {"hf_checkpoint": self.hf_checkpoint, "ref_load": self.ref_load},
                "rollout": {"num_rollout": 4, "rollout_temperature": 0.8},
                "train": train | {"entropy_coef": 0.01, "use_tis": True, "eps_clip_high": 0.28} | dict(self.train),
                "megatron": megatron | dict(self.megatron),
                "checkpoint": {"save": str(self.out / "checkpoints"), "load": self.load},
                **self.sections,
            }
        )


def samples(seed: int) -> list[Sample]:
    """Two steps' worth: uneven groups, one of a single sample, one failed sample, one that is masked in whole."""
    random = np.random.default_rng(seed)
    found = []
    for group, size in enumerate((4, 3, 1, 2)):
        prompt = random.integers(3, VOCAB_SIZE, int(random.integers(2, 12)))
        for index in range(size):
            failed, masked = (group, index) == (1, 2), (group, index) == (0, 3)
            found.append(_sample(random, prompt, f"g{group}", index, failed=failed, masked=masked))
    return found


def _sample(
    random: np.random.Generator, prompt: Tokens, group: str, index: int, *, failed: bool, masked: bool
) -> Sample:
    response = int(random.integers(1, 20))
    mask = (random.random(response) < 0.8).astype(np.uint8)
    mask[-1] = 1
    return Sample(
        sample_id=f"{group}-{index}",
        group_id=group,
        index=index,
        prompt="",
        response="",
        tokens=np.concatenate([prompt, random.integers(3, VOCAB_SIZE, response)]).astype(np.int32),
        loss_mask=mask * (0 if masked else 1),
        rollout_log_probs=random.uniform(-6.5, -5.0, response).astype(np.float32),
        status=Status.FAILED if failed else Status.COMPLETED,
        reward=None if failed else float(random.normal()),
        failure=Failure("ENGINE_GONE", "the engine went away") if failed else None,
    )


def _of_version(sample: Sample, version: int) -> Sample:
    return replace(sample, policy_ranges=(PolicyRange(version, 0, sample.response_length),))


def run_case(case: Case) -> None:
    """In every rank at once."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if case.ranks is not None:
        os.environ["WORLD_SIZE"] = str(case.ranks)
        if int(os.environ["RANK"]) >= case.ranks:
            return
    case.out.mkdir(parents=True, exist_ok=True)
    try:
        if case.refused:
            _expect_refusal(case)
        elif case.ranks is not None:
            _save(case)
        else:
            _train_and_resume(case)
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _expect_refusal(case: Case) -> None:
    from services.trainer.model.build import join_ranks, policy_of

    try:
        policy_of(case.job(), join_ranks(case.job()))
    except ConfigError as error:
        (case.out / "error.txt").write_text(error.message)


def _save(case: Case) -> None:
    import torch.distributed as dist

    from services.trainer.checkpoint.checkpoint import Checkpoints
    from services.trainer.model.build import join_ranks, policy_of

    job = case.job()
    layout = join_ranks(job)
    policy = policy_of(job, layout)
    checkpoints = Checkpoints(job.checkpoint, case.out, layout)
    if case.load is None:
        train_once(policy, 0, case.lag)
    else:
        assert checkpoints.restore_latest(policy.saved) == 1
    checkpoints.save(policy.saved, step=1, policy_version=1, epoch=1)
    dist.barrier()


def _train_and_resume(case: Case) -> None:
    import torch.distributed as dist

    from services.trainer.checkpoint.checkpoint import Checkpoints
    from services.trainer.model.build import join_ranks, policy_of

    job = case.job()
    layout = join_ranks(job)
    policy = policy_of(job, layout)
    policy.export(case.out / "initial")
    log_probs = policy.log_probs(samples(0))
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        (case.out / "log_probs.json").write_text(json.dumps([row.tolist() for row in log_probs]))
    checkpoints = Checkpoints(job.checkpoint, case.out, layout)
    metrics = [train_once(policy, 0, case.lag)]
    policy.export(case.out / "trained")
    checkpoints.save(policy.saved, step=1, policy_version=1, epoch=1)
    metrics.append(train_once(policy, 1, case.lag))
    policy.export(case.out / "twice_trained")
    resumed = policy_of(job, layout)
    assert checkpoints.restore_latest(resumed.saved) == 1
    metrics.append(train_once(resumed, 1, case.lag))
    resumed.export(case.out / "resumed")
    if layout.rank == 0:
        (case.out / "metrics.json").write_text(json.dumps(metrics))
    dist.barrier()


def train_once(policy: Any, step: int, lag: int = 0) -> dict[str, float]:
    """One rollout step on the samples of that seed, which come from the policy of `lag` steps before."""
    from services.trainer.plan.batch import SampleFacts

    version = max(0, step - lag)
    by_id = {sample.sample_id: _of_version(sample, version) for sample in samples(step)}
    facts = [SampleFacts.of(sample.pack().envelope) for sample in by_id.values()]
    found: dict[str, float] = policy.train(step, facts, lambda ids: [by_id[i] for i in ids])
    return found


def main(script: Path) -> None:
    """The cases of a script, one after the other."""
    for entry in entries(script):
        run_case(Case(**entry))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
