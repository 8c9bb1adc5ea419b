"""Learning, not only running: five algorithms, three seeds, one task, on the trainer that jobs use.

The task: a digit is given, and the three digits that follow it are wanted ("7" wants "8 9 0"); the reward is the share
of the three that are right. The policy is a tiny Qwen3, first taught to answer with digits, seldom the right ones.
The trainer is the whole Megatron-core policy with critic, optimizer and schedule; answers are sampled by transformers
from the weights that the trainer exports after every step, so that a run takes seconds.

`python -m tests.bench.learning` prints a table and draws docs/learning.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.job.schema.job import Job
from headrace.trajectory import PolicyRange, Sample, Status
from tests.support.models.tiny_families import make_tiny

STEPS, PROMPTS, SAMPLES, ANSWER = 40, 10, 8, 3
FIRST_DIGIT, MARK = 40, 7
"""Tokens: the digit d is FIRST_DIGIT + d; a prompt is MARK, the digit, MARK."""
KNOWN = 0.15
"""How often the first teaching shows the right digit, and not a random one."""
SEEDS = (1, 2, 3)
PICTURE = Path(__file__).parents[2] / "docs" / "learning.svg"
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "GRPO": {"advantage_estimator": "grpo"},
    "GSPO": {"advantage_estimator": "gspo"},
    "CISPO": {"advantage_estimator": "cispo"},
    "REINFORCE++": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
    "PPO": {"advantage_estimator": "ppo", "normalize_advantages": True},
}


@dataclass(frozen=True)
class Run:
    """The mean reward of every step."""

    algorithm: str
    seed: int
    rewards: Sequence[float]

    @property
    def first(self) -> float:
        """Of the first five steps."""
        return float(np.mean(self.rewards[:5]))

    @property
    def last(self) -> float:
        """Of the last five steps."""
        return float(np.mean(self.rewards[-5:]))


def job(checkpoint: Path, train: Mapping[str, Any], steps: int) -> Job:
    """Two optimizer steps a rollout step, so that old and new policy differ."""
    return Job.model_validate(
        {
            "model": {"hf_checkpoint": str(checkpoint)},
            "rollout": {"num_rollout": steps, "rollout_temperature": 1.0},
            "train": {"micro_batch_size": PROMPTS * SAMPLES, "num_steps_per_rollout": 2, **train},
            "critic": {"critic_lr": 3e-3},
            "megatron": {"lr": 2e-3, "weight_decay": 0.0},
        }
    )


def learn(algorithm: str, seed: int, checkpoint: Path, steps: int = STEPS) -> Run:
    """One run, in this process."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from services.trainer.model.build import join_ranks, policy_of
    from services.trainer.plan.batch import SampleFacts

    chosen = job(checkpoint, ALGORITHMS[algorithm], steps)
    policy = policy_of(chosen, join_ranks(chosen))
    sampler = AutoModelForCausalLM.from_pretrained(checkpoint)
    generator = torch.Generator().manual_seed(seed)
    rewards = []
    for step in range(steps):
        by_id = {sample.sample_id: sample for sample in sampled(sampler, step, generator)}
        facts = [SampleFacts.of(sample.pack().envelope) for sample in by_id.values()]
        policy.train(step, facts, lambda ids, by_id=by_id: [by_id[i] for i in ids])
        sampler.load_state_dict(dict(policy.hf_tensors()), strict=False)
        rewards.append(float(np.mean([sample.reward for sample in by_id.values()])))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return Run(algorithm, seed, rewards)


def sampled(network: Any, step: int, generator: torch.Generator) -> list[Sample]:
    """Every digit is asked, SAMPLES times each."""
    digits = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    tokens = prompts(digits)
    log_probs = []
    with torch.no_grad():
        for _ in range(ANSWER):
            table = network(tokens).logits[:, -1].float().log_softmax(-1)
            chosen = torch.multinomial(table.exp(), 1, generator=generator)
            log_probs.append(table.gather(1, chosen))
            tokens = torch.cat((tokens, chosen), dim=1)
    right = (tokens[:, -ANSWER:] == wanted(digits)).float().mean(1)
    rows = zip(digits.tolist(), tokens.numpy(), torch.cat(log_probs, dim=1).numpy(), right.tolist(), strict=True)
    return [_sample(step, number, *row) for number, row in enumerate(rows)]


def prompts(digits: Tensor) -> Tensor:
    """[N, 3]."""
    mark = torch.full_like(digits, MARK)
    return torch.stack((mark, digits + FIRST_DIGIT, mark), dim=1)


def wanted(digits: Tensor) -> Tensor:
    """[N, 3]."""
    return (digits[:, None] + torch.arange(1, ANSWER + 1)) % 10 + FIRST_DIGIT


def _sample(step: int, number: int, digit: int, tokens: Any, log_probs: Any, reward: float) -> Sample:
    return Sample(
        sample_id=f"{step}/{number}",
        group_id=f"{step}/{digit}",
        index=number % SAMPLES,
        prompt="",
        response="",
        tokens=tokens.astype(np.int32),
        loss_mask=np.ones(ANSWER, dtype=np.uint8),
        rollout_log_probs=log_probs.astype(np.float32),
        status=Status.COMPLETED,
        reward=reward,
        policy_ranges=(PolicyRange(step, 0, ANSWER),),
    )


def taught(folder: Path) -> Path:
    """A checkpoint that answers with digits, each the right one a little more often than any other."""
    network = AutoModelForCausalLM.from_pretrained(make_tiny(folder / "random", "qwen3", tied=True))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        digits = torch.randint(0, 10, (64,), generator=generator)
        answers = torch.randint(FIRST_DIGIT, FIRST_DIGIT + 10, (64, ANSWER), generator=generator)
        knows = torch.rand((64, ANSWER), generator=generator) < KNOWN
        answers = torch.where(knows, wanted(digits), answers)
        tokens = torch.cat((prompts(digits), answers), dim=1)
        table = network(tokens[:, :-1]).logits[:, -ANSWER:].log_softmax(-1)
        optimizer.zero_grad()
        (-table.gather(2, answers[..., None]).mean()).backward()
        optimizer.step()
    network.save_pretrained(folder / "taught")
    return folder / "taught"


def draw(runs: Sequence[Run], path: Path) -> None:
    """A panel for each algorithm: thin lines are seeds, the thick one their mean."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"  # the same bytes for the same runs
    from matplotlib import pyplot

    names = list(dict.fromkeys(run.algorithm for run in runs))
    figure, panels = pyplot.subplots(1, len(names), figsize=(2.6 * len(names), 2.6), sharey=True, layout="constrained")
    for name, panel in zip(names, panels, strict=True):
        curves = np.asarray([run.rewards for run in runs if run.algorithm == name])
        panel.plot(curves.T, color="#9db8d2", linewidth=0.8)
        panel.plot(curves.mean(0), color="#1f4e79", linewidth=2)
        panel.set(title=name, xlabel="rollout step", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean reward")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when an algorithm did not learn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the curves are drawn")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = taught(Path(folder))
        runs = [learn(algorithm, seed, checkpoint) for algorithm in ALGORITHMS for seed in SEEDS]
    print(f"{'algorithm':<14}{'seed':>5}{'first 5 steps':>16}{'last 5 steps':>15}")
    for run in runs:
        print(f"{run.algorithm:<14}{run.seed:>5}{run.first:>16.3f}{run.last:>15.3f}")
    draw(runs, args.picture)
    print(json.dumps({"picture": str(args.picture), "learned": all(learned(run) for run in runs)}))
    return 0 if all(learned(run) for run in runs) else 1


def learned(run: Run) -> bool:
    """From a quarter or so to more than twice that."""
    return run.last > 2 * run.first


if __name__ == "__main__":
    sys.exit(main())
