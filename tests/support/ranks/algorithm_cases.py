"""What a spawned rank does in the tests of algorithms: trains two rollout steps of a job, and leaves its metrics.

metrics.json   of both steps, or error.txt when the job ended with an error that is the user's
trained        the exported policy after both
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FailedPrecondition
from headrace.job.schema.job import Job
from headrace.trajectory import ROUTED_EXPERTS, Sample
from tests.support.ranks.rank_cases import samples
from tests.support.ranks.ranks import entries

Sections = Mapping[str, Mapping[str, Any]]
_PLAIN: Sections = {
    "train": {"micro_batch_size": 3, "num_steps_per_rollout": 1, "use_rollout_logprobs": True},
    "megatron": {"lr": 1e-2, "adam_eps": 1e-3},
    "rollout": {"num_rollout": 4, "rollout_temperature": 0.8},
    "critic": {"critic_lr": 1e-2},
}


@dataclass(frozen=True)
class AlgorithmCase:
    """Sections are laid over those of a plain job: one optimizer step, the engine's log-probs as the old policy's."""

    name: str
    folder: str
    hf_checkpoint: str
    sections: Sections

    @property
    def out(self) -> Path:
        """Where its results are."""
        return Path(self.folder) / self.name

    def job(self) -> Job:
        """The job it stands for."""
        return laid_over(_PLAIN | {"model": {"hf_checkpoint": self.hf_checkpoint}}, self.sections)


def laid_over(plain: Sections, sections: Sections) -> Job:
    """Leaves of the plain job where the sections say nothing."""
    return Job.model_validate({name: {**plain.get(name, {}), **sections.get(name, {})} for name in plain | sections})


def told(seed: int) -> list[Sample]:
    """The samples of the rank tests, with metadata, and a teacher's log-probs that travelled with them."""
    rng = np.random.default_rng(seed + 100)
    return [
        replace(
            sample,
            metadata={"difficulty": number},
            train_metadata={"weight": 0.5 + number},
            columns={
                "teacher_log_probs": rng.uniform(-6, -5, sample.response_length).astype(np.float32),
                ROUTED_EXPERTS: _routed(sample, number),
            },
        )
        for number, sample in enumerate(samples(seed))
    ]


def _routed(sample: Sample, number: int) -> NDArray[np.int16]:
    """Two of four experts in each of two layers, equal for a group's prompt; a token of each response is free."""
    prompt, response = sample.prompt_length, sample.response_length - 1
    seeds = (int(sample.group_id[1:]), 1000 + number)
    parts = [
        np.random.default_rng(seed).random((size, 2, 4)).argsort(-1)[..., :2]
        for seed, size in zip(seeds, (prompt, response), strict=True)
    ]
    chosen = np.concatenate(parts).astype(np.int16)
    chosen[prompt : prompt + 1] = -1
    return chosen


def run_case(case: AlgorithmCase) -> None:
    """In every rank at once."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from services.trainer.model.build import join_ranks, policy_of

    case.out.mkdir(parents=True, exist_ok=True)
    try:
        layout = join_ranks(case.job())
        policy = policy_of(case.job(), layout)
        metrics = [_train(policy, step) for step in (0, 1)]
        if layout.rank == 0:
            (case.out / "metrics.json").write_text(json.dumps(metrics))
        policy.export(case.out / "trained")
        dist.barrier()
    except FailedPrecondition as error:
        (case.out / "error.txt").write_text(error.message)
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(policy: Any, step: int) -> dict[str, float]:
    from services.trainer.plan.batch import SampleFacts

    by_id = {sample.sample_id: sample for sample in told(step)}
    facts = [SampleFacts.of(sample.pack().envelope) for sample in by_id.values()]
    found: dict[str, float] = policy.train(step, facts, lambda ids: [by_id[i] for i in ids])
    return found


def main(script: Path) -> None:
    """The cases of a script, one after the other."""
    for entry in entries(script):
        run_case(AlgorithmCase(**entry))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
