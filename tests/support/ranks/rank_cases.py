"""What a spawned rank does in the tests: builds a policy under a layout, and leaves what it did in the case's folder.

log_probs.json   of every sample, before training (last stage)
metrics.json     of both rollout steps
initial, trained, twice_trained, resumed: exported models; `resumed` was restored after the first step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.trajectory import Failure, PolicyRange, Sample, Status
from tests.support.ranks.ranks import RankCase, Sections, laid_over

VOCAB_SIZE = 320
Tokens = NDArray[np.int64]
WAYS: Mapping[str, Mapping[str, Any]] = {
    f"{sizes}-{packing}": chosen | {"packing": packing}
    for sizes, chosen in {
        "static": {"micro_batch_size": 3},
        "dynamic": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48, "micro_batch_size": 1},
    }.items()
    for packing in ("padded", "packed", "shared_prompts")
}
"""To cut a batch and to lay it into rows."""


def ways_of(megatron: Mapping[str, Any]) -> list[str]:
    """Those that a layout can train in: context parallelism divides packed rows only."""
    is_whole = megatron.get("context_parallel_size", 1) == 1
    return [way for way, chosen in WAYS.items() if is_whole or chosen["packing"] != "padded"]


@dataclass(frozen=True)
class Case(RankCase):
    """One layout of one model."""

    work: str = "resume"
    """resume: train, save, train on and restore; save: train a step, or restore `load`, and save; ways: train a step in
    every way, each in a folder below; refuse: end with an error before training, whose message error.txt has."""
    staleness: int = 0
    """So many steps behind the policy is that a step's samples come from."""
    # Adam divides by |g|: with a tiny epsilon the rounding noise of a zero gradient would be a full step.
    plain: ClassVar[Sections] = {
        "rollout": {"num_rollout": 4, "rollout_temperature": 0.8},
        "train": {
            "micro_batch_size": 2,
            "num_steps_per_rollout": 2,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "entropy_coef": 0.01,
            "use_tis": True,
            "eps_clip_high": 0.28,
        },
        "megatron": {"lr": 1e-2, "adam_eps": 1e-3},
    }

    def job(self) -> Job:
        """It saves to its folder."""
        saved = {"checkpoint": {"save": str(self.out / "checkpoints")}}
        return laid_over(self.plain, {"model": {"hf_checkpoint": self.hf_checkpoint}}, saved, self.sections)

    def run(self) -> None:
        """On a CPU, what the job offloads counts as a GPU's."""
        from tests.support.ranks.offloading import offloading

        with offloading() if self.job().megatron.get("optimizer_cpu_offload") else nullcontext():
            self._run()

    def _run(self) -> None:
        {"resume": self._resume, "save": self._save, "ways": self._ways, "refuse": self._refuse}[self.work]()

    def _resume(self) -> None:
        import torch.distributed as dist

        from services.trainer.checkpoint.checkpoint import Checkpoints
        from services.trainer.model.build import policy_of

        policy, layout = self.policy()
        policy.export(self.out / "initial")
        log_probs = policy.log_probs(samples(0))
        if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
            (self.out / "log_probs.json").write_text(json.dumps([row.tolist() for row in log_probs]))
        checkpoints = Checkpoints(self.job().checkpoint, self.out, layout)
        metrics = [self._train(policy, 0)]
        policy.export(self.out / "trained")
        checkpoints.save(policy.saved, step=1, policy_version=1, epoch=1)
        metrics.append(self._train(policy, 1))
        policy.export(self.out / "twice_trained")
        resumed = policy_of(self.job(), layout)
        assert checkpoints.restore_latest(resumed.saved) == 1
        metrics.append(self._train(resumed, 1))
        resumed.export(self.out / "resumed")
        if layout.rank == 0:
            (self.out / "metrics.json").write_text(json.dumps(metrics))
        dist.barrier()

    def _save(self) -> None:
        import torch.distributed as dist

        from services.trainer.checkpoint.checkpoint import Checkpoints

        policy, layout = self.policy()
        checkpoints = Checkpoints(self.job().checkpoint, self.out, layout)
        if self.job().checkpoint.load is None:
            self._train(policy, 0)
        else:
            assert checkpoints.restore_latest(policy.saved) == 1
        checkpoints.save(policy.saved, step=1, policy_version=1, epoch=1)
        dist.barrier()

    def _ways(self) -> None:
        """The process groups are made once."""
        import torch.distributed as dist

        from services.trainer.model.build import join_ranks, policy_of

        layout = join_ranks(self.job())
        for name in ways_of(self.sections["megatron"]):
            way = replace(self, name=f"{self.name}/{name}", sections={**self.sections, "train": WAYS[name]})
            policy = policy_of(way.job(), layout)
            metrics = self._train(policy, 0)
            way.out.mkdir(parents=True, exist_ok=True)
            policy.export(way.out / "weights")
            if layout.rank == 0:
                (way.out / "metrics.json").write_text(json.dumps([metrics]))
        dist.barrier()

    def _refuse(self) -> None:
        try:
            self.policy()
        except ConfigError as error:
            (self.out / "error.txt").write_text(error.message)

    def _train(self, policy: Any, step: int) -> dict[str, float]:
        version = max(0, step - self.staleness)
        return train_once(policy, step, [_of_version(sample, version) for sample in samples(step)])


def train_once(policy: Any, step: int, batch: Sequence[Sample]) -> dict[str, float]:
    """One rollout step on the samples."""
    from services.trainer.plan.batch import SampleFacts

    by_id = {sample.sample_id: sample for sample in batch}
    facts = [SampleFacts.of(sample.pack().envelope) for sample in batch]
    found: dict[str, float] = policy.train(step, facts, lambda ids: [by_id[i] for i in ids])
    return found


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
