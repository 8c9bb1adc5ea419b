"""Operations of torch in the place of a GPU's kernels."""

from __future__ import annotations

import torch

from services.rollout.engine.cpu.served import add_gated


def test_the_shared_experts_output_is_added_behind_its_gate() -> None:
    torch.manual_seed(1)
    hidden, gate, shared, final = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8), torch.randn(3, 8)
    expected = torch.stack(
        [final[row] + shared[row] / (1 + torch.exp(-(hidden[row] * gate).sum())) for row in range(3)]
    )
    add_gated(hidden, gate, shared, final)
    torch.testing.assert_close(final, expected)
