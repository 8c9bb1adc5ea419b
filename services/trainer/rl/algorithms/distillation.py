"""On-policy distillation: the student's reward is its teacher's log-probs of the student's own tokens.

Agarwal et al. 2024, arXiv:2306.13649; as an advantage: Thinking Machines 2025, "On-Policy Distillation".
"""

from __future__ import annotations

from torch import Tensor

from services.trainer.rl.algorithms.numerics import precise


def distilled_advantages(
    advantages: Tensor, log_probs: Tensor, teacher_log_probs: Tensor, opd_kl_coef: float
) -> Tensor:
    """A - opd_kl_coef · (logπ - logπ_teacher), float32 [R] from [R] each; no gradient."""
    reverse_kl = precise(log_probs.detach()) - precise(teacher_log_probs)
    return precise(advantages) - opd_kl_coef * reverse_kl
