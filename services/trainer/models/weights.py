"""What of a model is weights: its parameters, and the router biases, which Megatron keeps as buffers."""

from __future__ import annotations

from torch import Tensor, nn

_ROUTER_BIAS = ".router.expert_bias"


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything that a checkpoint, an export or another policy holds of the model, by Megatron's names."""
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(_ROUTER_BIAS)}
    return dict(model.named_parameters()) | biases
