"""The estimators' rewards of a rollout batch: each sample's own reward, or its reward against its group."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.job.schema.training import TrainSection
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
