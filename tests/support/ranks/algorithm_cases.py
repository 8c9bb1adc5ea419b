"""What a spawned rank does in the tests of algorithms: trains two rollout steps of a job, and leaves its metrics.

metrics.json   of both steps, or error.txt when the job ended with an error that is the user's
trained        the exported policy after both
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.errors import FailedPrecondition
from headrace.trajectory import ROUTED_EXPERTS, Sample
from tests.support.ranks.rank_cases import samples, train_once
from tests.support.ranks.ranks import RankCase, Sections


@dataclass(frozen=True)
class AlgorithmCase(RankCase):
    """One optimizer step a rollout step, with the engine's log-probs as the old policy's."""

    plain: ClassVar[Sections] = {
        "train": {"micro_batch_size": 3, "num_steps_per_rollout": 1, "use_rollout_logprobs": True},
        "megatron": {"lr": 1e-2, "adam_eps": 1e-3},
        "rollout": {"num_rollout": 4, "rollout_temperature": 0.8},
        "critic": {"critic_lr": 1e-2},
    }

    def run(self) -> None:
        import torch.distributed as dist

        try:
            policy, layout = self.policy()
            metrics = [train_once(policy, step, told(step)) for step in (0, 1)]
            if layout.rank == 0:
                (self.out / "metrics.json").write_text(json.dumps(metrics))
            policy.export(self.out / "trained")
            dist.barrier()
        except FailedPrecondition as error:
            (self.out / "error.txt").write_text(error.message)


@dataclass(frozen=True)
class SentCase(AlgorithmCase):
    """One rollout step on the samples that the file `samples` has, one a line in hexadecimal."""

    samples: str = ""

    def run(self) -> None:
        import torch.distributed as dist

        policy, layout = self.policy()
        lines = Path(self.samples).read_text().splitlines()
        batch = [Sample.unpack(pb.Sample.FromString(bytes.fromhex(line))) for line in lines]
        found = train_once(policy, 0, batch)
        if layout.rank == 0:
            (self.out / "metrics.json").write_text(json.dumps([found]))
        dist.barrier()


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
