"""The algorithms that `advantage_estimator` names."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.job.schema.training import TrainSection
from services.trainer.rl.algorithms.algorithm import Algorithm
from services.trainer.rl.algorithms.cispo import Cispo
from services.trainer.rl.algorithms.grpo import Grpo
from services.trainer.rl.algorithms.gspo import Gspo
from services.trainer.rl.algorithms.ppo import Ppo
from services.trainer.rl.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from services.trainer.rl.algorithms.rloo import Rloo

ALGORITHMS: Mapping[str, type[Algorithm]] = {
    "grpo": Grpo,
    "gspo": Gspo,
    "cispo": Cispo,
    "rloo": Rloo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "ppo": Ppo,
}


def algorithm(config: TrainSection) -> Algorithm:
    return ALGORITHMS[config.advantage_estimator](config)
