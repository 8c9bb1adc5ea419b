"""A model's weights: its parameters, and the router biases, which Megatron keeps as buffers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

_ROUTER_BIAS = ".router.expert_bias"


def weights_of(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """A rank's weights as a checkpoint, an export or another policy holds them.

    The keys are Megatron's names behind the number of the stage: `0.decoder.layers.3.mlp.linear_fc1.weight`.
    """
    return {
        f"{number}.{name}": tensor for number, chunk in enumerate(chunks) for name, tensor in _of_one(chunk).items()
    }


def _of_one(chunk: nn.Module) -> dict[str, Tensor]:
    biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(_ROUTER_BIAS)}
    return dict(chunk.named_parameters()) | biases
