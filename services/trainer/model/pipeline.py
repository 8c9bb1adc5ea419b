"""A model's forward and backward passes over the micro-batches of a step, through Megatron's schedules.

Policy and critic have a runner each, for any number of stages. The policy's passes give log-probs and entropy of the
responses' tokens, and the loss with its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from headrace.errors import FailedPrecondition
from headrace.models.architecture import Vision
from headrace.trajectory import Sample
from services.trainer.megatron.gpt import ImagePlaces, output_weight, uses_segment_attention
from services.trainer.megatron.layers import SegmentedRow, transformer_engine_row
from services.trainer.megatron.parallel import Context, Layout, summed_by_name
from services.trainer.megatron.routing_replay import Routing, RoutingReplay
from services.trainer.metrics import MAXIMA, SUMS, LogProbDistance, Stopwatch, statistics
from services.trainer.plan.planning import collate, empty_micro_batch
from services.trainer.plan.rows import Packing
from services.trainer.rl.algorithms.vocab_parallel import KeptTokens, log_probs_and_entropy
from services.trainer.rl.inputs import MicroInputs, StepInputs, inference_inputs
from services.trainer.rl.objective import LossInputs, LossOutputs, Objective
from services.trainer.rl.sampling_mask import lacks_mask, policy_mask
from services.trainer.rl.seen_tokens import LossRecord


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
        kept = micro.kept and micro.kept.at(micro.target_slots, micro.targets.numel())
        values = log_probs_and_entropy(predicting, weight, targets, temperature, self._layout.tp_group, kept)
        log_probs, entropy = (placed(each, micro, self._layout.context) for each in values)
        return log_probs, entropy

    def masked(
        self, hidden: Tensor, micro: MicroInputs, temperature: float, top_p: float, top_k: int | None
    ) -> MicroInputs:
        """The micro-batch with masks of the policy where engines gave none, and their log-probs renormalised so."""
        assert micro.kept is not None  # the job keeps sampling masks
        weight, context = output_weight(self._model), self._layout.context
        lacking = torch.zeros_like(micro.mask, dtype=torch.bool)
        for row, sample in enumerate(micro.samples):
            lacking[row] = lacks_mask(sample)
        is_chosen = (lacking & (micro.mask > 0)).flatten()[micro.target_slots]
        slots = micro.target_slots[is_chosen]
        chosen = self._wanted(hidden, micro)[is_chosen].to(weight.dtype)
        targets, group = micro.targets.flatten()[slots], self._layout.tp_group
        found = policy_mask(chosen, weight, targets, temperature, group, top_p=top_p, top_k=top_k)
        log_mass, outside = (
            context.total(found.log_mass.new_zeros(lacking.numel()).index_copy(0, slots, values).view(lacking.shape))
            for values in (found.log_mass, found.is_outside.to(found.log_mass))
        )
        return replace(
            micro,
            kept=micro.kept + KeptTokens(slots[found.kept.positions], found.kept.ids),
            outside=outside,
            rollout_log_probs=(micro.rollout_log_probs - log_mass).clamp(max=0.0),
        )

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


LossFunction = Callable[[Tensor], tuple[Tensor, Any]]


class Runner:
    """Feeds a model and hands its output (hidden states on the last stage) to a function.

    Chunks that nothing wraps keep their gradients to themselves: they are sums over this rank's samples.
    """

    def __init__(
        self,
        config: TransformerConfig,
        chunks: Sequence[DistributedDataParallel] | Sequence[GPTModel],
        layout: Layout,
        packing: Packing,
        stopwatch: Stopwatch,
        part: str = "forward",
        replay: RoutingReplay | None = None,
        images: ImagePlaces | None = None,
    ) -> None:
        self._wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
        config.finalize_model_grads_func = finalize_model_grads if self._wrapped else None
        config.no_sync_func = self._no_sync
        self._chunks = list(chunks)
        self._layout = layout
        self._stopwatch = stopwatch
        self._part = part
        self._replay = replay
        self._images = images
        self._multiple = layout.tp_size if config.sequence_parallel else 1
        own = uses_segment_attention(layout, packing)
        self._packed_row = SegmentedRow.of if own else transformer_engine_row
        self._schedule = get_forward_backward_func()

    def train(self, inputs: StepInputs, loss: Callable[[int, Tensor], tuple[Tensor, Any]]) -> list[Any]:
        """Accumulates gradients. `loss(number of the micro-batch, output)` returns its loss and any other value.

        The other values are returned for every micro-batch; [] except on last-stage ranks.
        """
        # Megatron divides by the number of micro-batches and averages over data ranks; our weights did both.
        scale = len(inputs) * (self._layout.dp_size if self._wrapped else 1)

        def scaled(number: int, output: Tensor) -> tuple[Tensor, Any]:
            value, extra = loss(number, output)
            return value * scale, extra

        return self._run(inputs, scaled, forward_only=False, routing="replay")

    def infer(
        self, inputs: StepInputs, read: Callable[[MicroInputs, Tensor], Tensor], routing: Routing = "free"
    ) -> list[Tensor] | None:
        """`read(micro, output)` of every micro-batch, without gradients; None except on last-stage ranks."""

        def keep(number: int, output: Tensor) -> tuple[Tensor, Tensor]:
            found = read(inputs[number], output)
            return found.sum(), found

        with torch.no_grad():
            found = self._run(inputs, keep, forward_only=True, routing=routing)
        return found if self._layout.is_last_stage else None

    def _run(
        self,
        inputs: StepInputs,
        finish: Callable[[int, Tensor], tuple[Tensor, Any]],
        *,
        forward_only: bool,
        routing: Routing,
    ) -> list[Any]:
        def step(feed: Iterator[tuple[int, MicroInputs]], model: Any) -> tuple[Tensor, LossFunction]:
            number, micro = next(feed)
            if self._replay is not None:
                self._replay.choices = micro.experts
            with self._stopwatch.part("inference" if forward_only else self._part):
                return self._output(model, micro), partial(finish, number)

        for chunk in self._chunks:
            chunk.train(not forward_only)
        following = nullcontext() if self._replay is None else self._replay.following(routing, trains=not forward_only)
        with following:
            results: list[Any] = self._schedule(
                forward_step_func=step,
                data_iterator=[iter(list(enumerate(inputs))) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(inputs),
                seq_length=max(micro.rows.tokens.shape[1] for micro in inputs),
                micro_batch_size=inputs[0].rows.tokens.shape[0],
                forward_only=forward_only,
            )
        return results

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Gradients are not reduced inside: not before the last micro-batch."""
        with ExitStack() as stack:
            for chunk in self._wrapped:
                stack.enter_context(chunk.no_sync())
            yield

    def _output(self, model: Any, micro: MicroInputs) -> Tensor:
        rows = micro.rows.aligned(self._multiple)
        if self._images is not None:
            self._images.enter(micro.images and micro.images.aligned(rows.tokens.shape[1]))
        packed = None if rows.segments is None else self._packed_row(rows, rows.segments)
        output: Tensor = model(rows.tokens, rows.positions, None, packed_seq_params=packed)
        return output


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Runs the policy over the micro-batches of a step.

    `agreement_bound`: how far apart the log-probs of trainer and engine may be; None: as far as they like.
    `record` remembers what the losses of a step have seen.
    """

    runner: Runner
    head: TokenHead
    objective: Objective
    layout: Layout
    temperature: float
    packing: Packing
    stopwatch: Stopwatch
    distance: LogProbDistance
    agreement_bound: float | None = None
    vision: Vision | None = None
    record: LossRecord | None = None

    def forward_backward(self, inputs: StepInputs) -> dict[str, float]:
        """Accumulates the gradients of one optimizer step; returns its metrics, equal on all ranks.

        Raises FailedPrecondition on all of them when trainer and engine disagree beyond the bound.
        """

        def loss(number: int, hidden: Tensor) -> tuple[Tensor, LossOutputs]:
            with self.stopwatch.part("forward"):
                return self._loss(hidden, inputs[number])

        return self._metrics(self.runner.train(inputs, loss))

    def log_probs(
        self, inputs: StepInputs, temperature: float | None = None, routing: Routing = "free"
    ) -> list[Tensor] | None:
        """Log-probs under the weights in place, [B, S] for each micro-batch; None except on last-stage ranks."""
        divisor = temperature or self.temperature

        def read(micro: MicroInputs, hidden: Tensor) -> Tensor:
            return self.head(hidden, micro, divisor)[0]

        return self.runner.infer(inputs, read, routing)

    def masked(self, inputs: StepInputs, top_p: float, top_k: int | None, routing: Routing = "free") -> StepInputs:
        """The inputs with the policy's own sampling masks where engines gave none; as they are on other stages."""
        found: list[MicroInputs] = []

        def read(micro: MicroInputs, hidden: Tensor) -> Tensor:
            found.append(self.head.masked(hidden, micro, self.temperature, top_p, top_k))
            return hidden.new_zeros(())

        return inputs if self.runner.infer(inputs, read, routing) is None else found

    def response_log_probs(self, samples: Sequence[Sample], temperature: float | None = None) -> list[Tensor]:
        """Log-probs of each sample's response tokens, [R]; [] except on last-stage ranks."""
        micro = inference_inputs(collate(samples, self.packing), self.layout, self.vision)
        filler = inference_inputs(empty_micro_batch(), self.layout)
        found = self.log_probs([micro, *[filler] * (self.layout.micro_batch_multiple - 1)], temperature)
        return [] if found is None else micro.cut(found[0])

    def _loss(self, hidden: Tensor, micro: MicroInputs) -> tuple[Tensor, LossOutputs]:
        log_probs, entropy = self.head(hidden, micro, self.temperature)
        logits = self.head.logits(hidden, micro) if self.objective.needs_logits else None
        loss_inputs = LossInputs(micro, log_probs, entropy, logits)
        if self.layout.is_reporting_rank:
            self.distance.add(loss_inputs.trainer_log_probs, micro.rollout_log_probs, micro.mask, micro.staleness)
        if self.record is not None:
            self.record.add(loss_inputs)
        output = self.objective(loss_inputs)
        return output.loss, output

    def _metrics(self, outputs: Sequence[LossOutputs]) -> dict[str, float]:
        device = self.layout.device
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
        worst = torch.zeros(3, dtype=torch.float64, device=device)
        hooks: dict[str, float] = {}
        # One rank of the last stage speaks for its data rank; all others add nothing.
        if self.layout.is_last_stage and self.layout.is_reporting_rank:
            for output in outputs:
                sums += output.sums
                maxima = torch.maximum(maxima, output.largest)
                for name, share in output.hooks.items():
                    hooks[name] = hooks.get(name, 0.0) + float(share)
                found = torch.stack((output.worst.gap, output.worst.trainer, output.worst.engine)).double()
                worst = torch.where(found[0] > worst[0], found, worst)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        by_name = dict(zip(SUMS, sums.tolist(), strict=True))
        largest = dict(zip(MAXIMA, maxima.tolist(), strict=True))
        metrics = {part: by_name[part] for part in self.objective.losses}
        metrics |= statistics(self.objective.reported, by_name, largest)
        metrics |= {"log_prob_diff/max": self._agreement(worst), "tokens": by_name["tokens"]}
        return metrics | (summed_by_name(hooks, self.layout) if self.objective.has_hooks else {})

    def _agreement(self, worst: Tensor) -> float:
        """The largest gap of all ranks."""
        every = [torch.zeros_like(worst) for _ in range(self.layout.world_size)]
        dist.all_gather(every, worst)
        gap, trainer, engine = max((found.tolist() for found in every), key=lambda found: float(found[0]))
        if self.agreement_bound is not None and gap > self.agreement_bound:
            raise FailedPrecondition(
                f"true_on_policy_mode: the trainer gives a token log-prob {trainer:.6f}, the engine gave it "
                f"{engine:.6f}: {gap:.2g} apart, at most {self.agreement_bound:g} is on-policy. Use the same dtype "
                "and kernels on both sides, or leave --true-on-policy-mode out",
                reason="NOT_ON_POLICY",
            )
        return float(gap)
