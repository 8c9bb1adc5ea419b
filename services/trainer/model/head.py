"""The step from the last stage's hidden states to log-probs and entropy of the responses' tokens."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from services.trainer.megatron.gpt.hidden_states import output_weight
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.context import Context
from services.trainer.rl.algorithms.vocab_parallel import log_probs_and_entropy
from services.trainer.rl.inputs import MicroInputs


class TokenHead:
    """Projects only the positions that predict a response's token."""

    def __init__(self, model: GPTModel, layout: Layout) -> None:
        self._model = model
        self._layout = layout

    def __call__(self, hidden: Tensor, micro: MicroInputs, temperature: float) -> tuple[Tensor, Tensor]:
        """[B, S, H] to log-probs and entropy [samples, R], 0 where nothing predicts a token."""
        weight = output_weight(self._model)
        predicting = self._wanted(hidden, micro).to(weight.dtype)
        targets = micro.targets.flatten()[micro.target_slots]
        values = log_probs_and_entropy(predicting, weight, targets, temperature, self._layout.tp_group)
        log_probs, entropy = (placed(each, micro, self._layout.context) for each in values)
        return log_probs, entropy

    def logits(self, hidden: Tensor, micro: MicroInputs) -> Tensor:
        """[samples, R, V / tp], 0 where nothing predicts a token: for losses that want them whole."""
        weight = output_weight(self._model)
        wanted = self._wanted(hidden, micro).to(weight.dtype) @ weight.T
        shape = (*micro.targets.shape, wanted.shape[-1])
        flat = wanted.new_zeros(micro.targets.numel(), wanted.shape[-1])
        return self._layout.context.total(flat.index_copy(0, micro.target_slots, wanted).view(shape))

    def _wanted(self, hidden: Tensor, micro: MicroInputs) -> Tensor:
        """[N, H], with a gradient that is summed over tensor ranks, for each of them has a share of the vocabulary."""
        if self._model.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(hidden.transpose(0, 1), tensor_parallel_output_grad=True)
            rows = whole.transpose(0, 1)[:, : micro.rows.tokens.shape[1]]
            wanted: Tensor = rows.flatten(0, 1)[micro.logit_positions]
        else:
            wanted = copy_to_tensor_model_parallel_region(hidden.flatten(0, 1)[micro.logit_positions])
        return wanted


def placed(values: Tensor, micro: MicroInputs, context: Context) -> Tensor:
    """[N], one a predicting position of this rank, to [samples, R] of its context group."""
    shape = micro.targets.shape
    return context.total(values.new_zeros(shape.numel()).index_copy(0, micro.target_slots, values).view(shape))
