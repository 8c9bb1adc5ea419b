"""One model's forward and backward passes over micro-batches, through Megatron's schedules, for any number of stages.

Policy and critic have one each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.megatron.gpt.gpt import uses_segment_attention
from services.trainer.megatron.gpt.images import ImagePlaces
from services.trainer.megatron.gpt.routing_replay import Routing, RoutingReplay
from services.trainer.megatron.gpt.segment_attention import SegmentedRow, transformer_engine_row
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics.stopwatch import Stopwatch
from services.trainer.plan.rows import Packing
from services.trainer.rl.inputs import MicroInputs, StepInputs

LossFunction = Callable[[Tensor], tuple[Tensor, Any]]


class Runner:
    """Feeds a model and hands its output (hidden states on the last stage) to a function."""

    def __init__(
        self,
        config: TransformerConfig,
        chunks: Sequence[DistributedDataParallel],
        layout: Layout,
        packing: Packing,
        stopwatch: Stopwatch,
        part: str = "forward",
        replay: RoutingReplay | None = None,
        images: ImagePlaces | None = None,
    ) -> None:
        config.finalize_model_grads_func = finalize_model_grads
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
        scale = len(inputs) * self._layout.dp_size

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
                self._replay.enter(micro.experts)
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
            for chunk in self._chunks:
                stack.enter_context(chunk.no_sync())
            yield

    def _output(self, model: Any, micro: MicroInputs) -> Tensor:
        rows = micro.rows.aligned(self._multiple)
        if self._images is not None:
            self._images.enter(micro.images and micro.images.aligned(rows.tokens.shape[1]))
        packed = None if rows.segments is None else self._packed_row(rows, rows.segments)
        output: Tensor = model(rows.tokens, rows.positions, None, packed_seq_params=packed)
        return output
