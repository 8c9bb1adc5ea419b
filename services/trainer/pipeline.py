"""Forward and backward over micro-batches, through Megatron's schedules, for any number of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from headrace.trajectory import Sample
from services.trainer.batching import collate
from services.trainer.head import TokenHead
from services.trainer.inputs import MicroInputs, StepInputs, inference_inputs
from services.trainer.lag import LogProbDistance
from services.trainer.models.gpt import uses_segment_attention
from services.trainer.models.segment_attention import SegmentedRow, transformer_engine_row
from services.trainer.objective import SUMS, Objective, Outcome, Terms
from services.trainer.parallel import Layout
from services.trainer.rows import Packing, Rows
from services.trainer.stopwatch import Stopwatch

LossFunction = Callable[[Tensor], tuple[Tensor, Any]]


class Pipeline:
    """Runs the model over the micro-batches of a step."""

    def __init__(
        self,
        config: TransformerConfig,
        model: DistributedDataParallel,
        objective: Objective,
        layout: Layout,
        temperature: float,
        packing: Packing,
        stopwatch: Stopwatch,
    ) -> None:
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = model.no_sync
        self._model = model
        self._objective = objective
        self._layout = layout
        self._packing = packing
        self._stopwatch = stopwatch
        self.distance = LogProbDistance(layout.device)
        # Greedy rollouts have no temperature to divide by.
        self._temperature = temperature or 1.0
        own = uses_segment_attention(layout, packing)
        self._packed_row = SegmentedRow.of if own else transformer_engine_row
        self._multiple = layout.tp_size if config.sequence_parallel else 1
        self._head = TokenHead(model.module, layout)
        self._schedule = get_forward_backward_func()

    def forward_backward(
        self, inputs: StepInputs, old: Sequence[Tensor] | None, reference: Sequence[Tensor] | None
    ) -> dict[str, float]:
        """Accumulates the gradients of one optimizer step; returns its metrics, equal on all ranks."""
        absent: list[Tensor | None] = [None] * len(inputs)
        frozen = zip(old or absent, reference or absent, strict=True)
        feed = iter([(micro, *pair) for micro, pair in zip(inputs, frozen, strict=True)])
        outcomes = self._run(feed, inputs, self._loss_step, forward_only=False)
        return self._metrics(outcomes)

    def log_probs(self, inputs: StepInputs, temperature: float | None = None) -> list[Tensor] | None:
        """Under the weights in place, [B, S] for each micro-batch; None except on last-stage ranks."""
        feed = iter(inputs)
        step = partial(self._log_prob_step, temperature=temperature or self._temperature)
        with torch.no_grad():
            found = self._run(feed, inputs, step, forward_only=True)
        return found if self._layout.is_last_stage else None

    def response_log_probs(self, samples: Sequence[Sample], temperature: float | None = None) -> list[Tensor]:
        """Of each sample's response tokens, [R]."""
        micro = inference_inputs(collate(samples, self._packing), self._layout.device)
        found = self.log_probs([micro], temperature)
        if found is None:
            return []
        return [row[: sample.response_length] for row, sample in zip(found[0], samples, strict=True)]

    def _run(
        self, feed: Iterator[Any], inputs: StepInputs, step: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        self._model.train(not forward_only)
        results: list[Any] = self._schedule(
            forward_step_func=partial(step, num_micro_batches=len(inputs)),
            data_iterator=feed,
            model=[self._model],
            num_microbatches=len(inputs),
            seq_length=max(micro.rows.tokens.shape[1] for micro in inputs),
            micro_batch_size=inputs[0].rows.tokens.shape[0],
            forward_only=forward_only,
        )
        return results

    def _loss_step(self, feed: Iterator[Any], model: Any, num_micro_batches: int) -> tuple[Tensor, LossFunction]:
        micro, old, reference = next(feed)

        def loss(hidden: Tensor) -> tuple[Tensor, Outcome]:
            with self._stopwatch.part("forward"):
                return measured_loss(hidden)

        def measured_loss(hidden: Tensor) -> tuple[Tensor, Outcome]:
            log_probs, entropy = self._head(hidden, micro, self._temperature)
            outcome = self._objective(
                Terms(
                    log_probs=log_probs,
                    entropy=entropy,
                    mask=micro.mask,
                    weights=micro.weights,
                    advantages=micro.advantages,
                    rollout_log_probs=micro.rollout_log_probs,
                    old_log_probs=old,
                    reference_log_probs=reference,
                )
            )
            if self._layout.tp_rank == 0:
                before = log_probs.detach() if old is None else old
                self.distance.add(before, micro.rollout_log_probs, micro.mask, micro.lags)
            # Megatron divides by the number of micro-batches and averages over data ranks; our weights did both.
            return outcome.loss * (num_micro_batches * self._layout.dp_size), outcome

        with self._stopwatch.part("forward"):
            return self._hidden(model, micro.rows), loss

    def _log_prob_step(
        self, feed: Iterator[Any], model: Any, num_micro_batches: int, temperature: float
    ) -> tuple[Tensor, LossFunction]:
        micro: MicroInputs = next(feed)

        def keep(hidden: Tensor) -> tuple[Tensor, Tensor]:
            log_probs, _ = self._head(hidden, micro, temperature)
            return log_probs.sum(), log_probs

        return self._hidden(model, micro.rows), keep

    def _hidden(self, model: Any, rows: Rows) -> Any:
        rows = rows.aligned(self._multiple)
        packed = None if rows.segments is None else self._packed_row(rows)
        return model(rows.tokens, rows.positions, None, packed_seq_params=packed)

    def _metrics(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        device = self._layout.device
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        largest = torch.zeros((), dtype=torch.float64, device=device)
        # One tensor rank of the last stage speaks for its data rank; all others add nothing.
        if self._layout.is_last_stage and self._layout.tp_rank == 0:
            for outcome in outcomes:
                sums += outcome.sums
                largest = torch.maximum(largest, outcome.max_log_prob_diff.double())
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found = dict(zip(SUMS, sums.tolist(), strict=True))
        tokens = max(found["tokens"], 1.0)
        metrics = {part: found[part] for part in self._objective.losses}
        metrics |= {name: found[source] / tokens for source, name in self._objective.means.items()}
        return metrics | {"log_prob_diff/max": largest.item(), "tokens": found["tokens"]}
