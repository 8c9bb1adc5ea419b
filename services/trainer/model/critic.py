"""PPO's critic: the policy's architecture with one output, an optimizer and a schedule of its own.

Lives on the same ranks under the same layout. Values are of positions: V at the position that predicts a token is the
worth of the state before that token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from headrace.job.megatron import MegatronArgs
from headrace.models.family import Replicated
from services.trainer.checkpoint.resharding import ModelState
from services.trainer.hugging_face.rank_model import RankModel
from services.trainer.hugging_face.shards import ModelShard, weights_of
from services.trainer.megatron.configs import mark_sequence_parallel
from services.trainer.megatron.gpt import ImagePlaces
from services.trainer.megatron.optimizer import Optimizer, wrap_for_data_parallel
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics import Stopwatch
from services.trainer.model.memory import TrainedModel
from services.trainer.model.pipeline import Runner, placed
from services.trainer.rl.algorithms.algorithm import require
from services.trainer.rl.algorithms.numerics import weighted_sum
from services.trainer.rl.algorithms.ppo import value_loss
from services.trainer.rl.inputs import MicroInputs, StepInputs
from services.trainer.rl.objective import masked_sum


class ValueHead(torch.nn.Module):
    """One number a position, from hidden states. Begins at 0, alike on all tensor ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            mark_sequence_parallel(parameter, config.sequence_parallel)

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Float32 [S, B, 1], in the place of Megatron's output layer, whose arguments speak of a vocabulary."""
        values = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        if self._sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class Critic:
    """One rank's share of the critic. `model` has its first weights, and gets a head for values here."""

    def __init__(
        self,
        model: RankModel,
        args: MegatronArgs,
        layout: Layout,
        stopwatch: Stopwatch,
        images: ImagePlaces | None,
        *,
        value_clip: float,
        num_optimizer_steps: int,
    ) -> None:
        if layout.is_last_stage:
            model.stages[-1].output_layer = ValueHead(model.config).to(layout.device)
        for stage in model.stages:
            stage.share_embeddings_and_output_weights = False
        self._layout = layout
        self._value_clip = value_clip
        self._chunks = wrap_for_data_parallel(model.config, args, model.stages)
        self._optimizer = Optimizer(args, self._chunks, num_optimizer_steps)
        self.state = ModelState("critic", _shards(model, layout), self._optimizer)
        self._runner = Runner(
            model.config, self._chunks, layout, model.packing, stopwatch, part="critic_forward", images=images
        )

    @property
    def trained(self) -> TrainedModel:
        return TrainedModel(self._chunks, self._optimizer)

    def values(self, inputs: StepInputs) -> list[Tensor] | None:
        """[B, S] for each micro-batch; None except on last-stage ranks."""
        return self._runner.infer(inputs, self._at_responses)

    def train(self, inputs: StepInputs, *, updates: bool = True) -> dict[str, float]:
        """One optimizer step towards the returns; metrics are equal on all ranks."""

        def loss(number: int, output: Tensor) -> tuple[Tensor, Tensor]:
            micro = inputs[number]
            values = self._at_responses(micro, output)
            per_token, clipped = value_loss(values, require(micro.values), micro.returns, self._value_clip)
            found = weighted_sum(per_token, micro.weights)
            return found, _sums(micro, values, clipped, found)

        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        total, tokens, clipped, values, returns = self._summed(self._runner.train(inputs, loss))
        found = self._optimizer.step(updates=updates)
        tokens = max(tokens, 1.0)
        return {
            "critic/loss": total,
            "critic/clip_fraction": clipped / tokens,
            "critic/value": values / tokens,
            "critic/return": returns / tokens,
            "critic/grad_norm": found["grad_norm"],
            "critic/lr": found["lr"],
        }

    def _at_responses(self, micro: MicroInputs, output: Tensor) -> Tensor:
        """[B, S, 1] of the rows to the responses' tokens: V where a token is predicted, before it is known."""
        return placed(output.flatten()[micro.logit_positions], micro, self._layout.context)

    def _summed(self, parts: Sequence[Tensor]) -> list[float]:
        sums = torch.zeros(5, dtype=torch.float64, device=self._layout.device)
        if self._layout.is_last_stage and self._layout.is_reporting_rank:
            for part in parts:
                sums += part
        dist.all_reduce(sums)
        return [float(x) for x in sums.tolist()]


def _sums(micro: MicroInputs, values: Tensor, clipped: Tensor, loss: Tensor) -> Tensor:
    parts = (
        loss,
        micro.mask.sum(),
        masked_sum(clipped, micro.mask),
        masked_sum(values, micro.mask),
        masked_sum(micro.returns, micro.mask),
    )
    return torch.stack([part.detach().double() for part in parts])


def _shards(model: RankModel, layout: Layout) -> list[ModelShard]:
    """The policy's, less its output layer, and the head: one copy on every rank of the last stage."""
    living = {id(parameter) for parameter in weights_of(model.stages).values()}
    place = {
        "rank": layout.tp_rank,
        "size": layout.tp_size,
        "data_rank": layout.dp_rank,
        "data_size": layout.dp_size,
    }
    head = [
        ModelShard.of(name, parameter, Replicated(), **place)
        for name, parameter in model.stages[-1].named_parameters()
        if name.startswith("output_layer.")
    ]
    return [shard for shard in model.converter.shards() if id(shard.parameter) in living] + head
