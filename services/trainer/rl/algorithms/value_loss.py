"""The critic's clipped squared error (PPO's public implementation; Huang et al. 2022, detail 9)."""

from __future__ import annotations

from torch import Tensor, maximum

from services.trainer.rl.algorithms.precision import precise


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Loss and 0/1 indicator of clipping, float32 in the shape given.

    max((V - G)², (clip(V, V_old ± value_clip) - G)²) with the values before this rollout step's updates as
    V_old. Gradients flow to `values` alone.
    """
    values, old_values, returns = precise(values), precise(old_values.detach()), precise(returns.detach())
    free = (values - returns) ** 2
    bounded = (values.clamp(old_values - value_clip, old_values + value_clip) - returns) ** 2
    return maximum(free, bounded), (bounded > free).float()
