"""The estimators' rewards of a rollout batch: each sample's own reward, or its reward against its group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs, to_hook
from headrace.hooks.trainer import trainer_hook
from headrace.job.schema.training import TrainSection
from headrace.trajectory import Sample, Status
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.groups import raw_rewards
from services.trainer.rl.algorithms.grpo import grpo_rewards
from services.trainer.rl.algorithms.rloo import rloo_rewards


def shaped_rewards(samples: Sequence[SampleFacts], config: TrainSection) -> dict[str, float]:
    """The samples of the whole rollout batch by sample_id; 0 for those that failed or have no reward."""
    match config.advantage_estimator:
        case "grpo" | "gspo" | "cispo":
            if config.disable_rewards_normalization:
                return raw_rewards(samples)
            return grpo_rewards(samples, divide_by_std=not config.disable_grpo_std_normalization)
        case "reinforce_plus_plus_baseline":
            return grpo_rewards(samples, divide_by_std=False)
        case "rloo":
            return rloo_rewards(samples)
        case "reinforce_plus_plus" | "ppo":
            return raw_rewards(samples)


class RewardPostProcess:
    """A user's `f(args, samples) -> (raw rewards, rewards)` in the place of `shaped_rewards`.

    It sees all samples of the rollout batch that did not fail, in order. Rank 0 runs it and tells the others.
    """

    def __init__(self, path: str, args: HookArgs, layout: Layout) -> None:
        self._path = path
        self._hook = trainer_hook(path, "reward_post_process").target
        self._args = args
        self._layout = layout

    def __call__(
        self, samples: Sequence[SampleFacts], fetch: Callable[[Sequence[str]], list[Sample]]
    ) -> dict[str, float]:
        """Collective: the reward of every sample by sample_id; 0 for those that failed or have none."""
        scored = [s for s in samples if s.status != Status.FAILED.value and s.reward is not None]
        values = torch.full((len(scored),), math.nan, dtype=torch.float64, device=self._layout.device)
        if self._layout.rank == 0:
            values.copy_(torch.tensor(self._ask(scored, fetch), dtype=torch.float64))
        dist.broadcast(values, src=0)
        found = {sample.sample_id: 0.0 for sample in samples}
        return found | dict(zip((s.sample_id for s in scored), values.tolist(), strict=True))

    def _ask(self, scored: Sequence[SampleFacts], fetch: Callable[[Sequence[str]], list[Sample]]) -> list[float]:
        numbers = {group_id: n for n, group_id in enumerate(dict.fromkeys(s.group_id for s in scored))}
        whole = fetch([sample.sample_id for sample in scored])
        answer = self._hook(self._args, [to_hook(sample, numbers[sample.group_id]) for sample in whole])
        rewards = answer[1] if isinstance(answer, tuple) and len(answer) == 2 else None
        if rewards is None or len(rewards) != len(scored):
            raise InvalidArgument(f"hook {self._path} must return (raw rewards, rewards), {len(scored)} numbers each")
        found = [float(reward) for reward in rewards]
        if not all(math.isfinite(reward) for reward in found):
            raise InvalidArgument(f"hook {self._path} returned a reward that is not finite")
        return found
