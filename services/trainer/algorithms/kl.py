"""Estimators of the KL divergence to the reference policy, per token, with d = logπ − logπ_ref.

k1 = d, k2 = d²/2, k3 = e^{−d} − 1 + d; low_var_kl is k3 clamped to ±10. Schulman 2020, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlType = Literal["k1", "k2", "k3", "low_var_kl"]


def kl_divergence(log_probs: Tensor, reference_log_probs: Tensor, kl_type: KlType) -> Tensor:
    """Same shape as its inputs; has a gradient where `log_probs` has one."""
    d = log_probs - reference_log_probs
    match kl_type:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return _k3(d)
        case "low_var_kl":
            return _k3(d).clamp(-10.0, 10.0)


def _k3(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d
