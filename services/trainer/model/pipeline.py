"""The policy's passes over the micro-batches of a step: log-probs, and the loss with its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import FailedPrecondition
from headrace.models.architecture import Vision
from headrace.trajectory import Sample
from services.trainer.megatron.gpt.routing_replay import Routing
from services.trainer.megatron.parallel import Layout
from services.trainer.metrics.log_prob_distance import LogProbDistance
from services.trainer.metrics.named_sums import summed_by_name
from services.trainer.metrics.stopwatch import Stopwatch
from services.trainer.metrics.token_statistics import MAXIMA, SUMS, statistics
from services.trainer.model.head import TokenHead
from services.trainer.model.runner import Runner
from services.trainer.plan.batching import collate, empty_micro_batch
from services.trainer.plan.rows import Packing
from services.trainer.rl.inputs import MicroInputs, StepInputs, inference_inputs
from services.trainer.rl.loss import LossInputs, LossOutputs
from services.trainer.rl.micro_values import MicroValues, at
from services.trainer.rl.objective import Objective


class Pipeline:
    """Runs the policy over the micro-batches of a step.

    `agreement_bound`: how far apart the log-probs of trainer and engine may be; None: as far as they like.
    """

    def __init__(
        self,
        runner: Runner,
        head: TokenHead,
        objective: Objective,
        layout: Layout,
        temperature: float,
        packing: Packing,
        stopwatch: Stopwatch,
        agreement_bound: float | None = None,
        vision: Vision | None = None,
    ) -> None:
        self._runner = runner
        self._head = head
        self._objective = objective
        self._layout = layout
        self._packing = packing
        self._vision = vision
        self._stopwatch = stopwatch
        self.distance = LogProbDistance(layout.device)
        # Greedy rollouts have no temperature to divide by.
        self._temperature = temperature or 1.0
        self._agreement_bound = agreement_bound

    def forward_backward(self, inputs: StepInputs, old: MicroValues, reference: MicroValues) -> dict[str, float]:
        """Accumulates the gradients of one optimizer step; returns its metrics, equal on all ranks.

        Raises FailedPrecondition on all of them when trainer and engine disagree beyond the bound.
        """

        def loss(number: int, hidden: Tensor) -> tuple[Tensor, LossOutputs]:
            with self._stopwatch.part("forward"):
                return self._loss(hidden, inputs[number], at(old, number), at(reference, number))

        return self._metrics(self._runner.train(inputs, loss))

    def log_probs(
        self, inputs: StepInputs, temperature: float | None = None, routing: Routing = "free"
    ) -> list[Tensor] | None:
        """Log-probs under the weights in place, [B, S] for each micro-batch; None except on last-stage ranks."""
        divisor = temperature or self._temperature

        def read(micro: MicroInputs, hidden: Tensor) -> Tensor:
            return self._head(hidden, micro, divisor)[0]

        return self._runner.infer(inputs, read, routing)

    def response_log_probs(self, samples: Sequence[Sample], temperature: float | None = None) -> list[Tensor]:
        """Log-probs of each sample's response tokens, [R]; [] except on last-stage ranks."""
        micro = inference_inputs(collate(samples, self._packing), self._layout, self._vision)
        filler = inference_inputs(empty_micro_batch(), self._layout)
        found = self.log_probs([micro, *[filler] * (self._layout.micro_batch_multiple - 1)], temperature)
        return [] if found is None else micro.cut(found[0])

    def _loss(
        self, hidden: Tensor, micro: MicroInputs, old: Tensor | None, reference: Tensor | None
    ) -> tuple[Tensor, LossOutputs]:
        log_probs, entropy = self._head(hidden, micro, self._temperature)
        logits = self._head.logits(hidden, micro) if self._objective.needs_logits else None
        loss_inputs = LossInputs(micro, log_probs, entropy, old, reference, logits)
        if self._layout.speaks:
            self.distance.add(loss_inputs.trainer_log_probs, micro.rollout_log_probs, micro.mask, micro.staleness)
        output = self._objective(loss_inputs)
        return output.loss, output

    def _metrics(self, outputs: Sequence[LossOutputs]) -> dict[str, float]:
        device = self._layout.device
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
        worst = torch.zeros(3, dtype=torch.float64, device=device)
        hooks: dict[str, float] = {}
        # One rank of the last stage speaks for its data rank; all others add nothing.
        if self._layout.is_last_stage and self._layout.speaks:
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
        metrics = {part: by_name[part] for part in self._objective.losses}
        metrics |= statistics(self._objective.reported, by_name, largest)
        metrics |= {"log_prob_diff/max": self._agreement(worst), "tokens": by_name["tokens"]}
        return metrics | (summed_by_name(hooks, self._layout) if self._objective.has_hooks else {})

    def _agreement(self, worst: Tensor) -> float:
        """The largest gap of all ranks."""
        every = [torch.zeros_like(worst) for _ in range(self._layout.world_size)]
        dist.all_gather(every, worst)
        gap, trainer, engine = max((found.tolist() for found in every), key=lambda found: float(found[0]))
        if self._agreement_bound is not None and gap > self._agreement_bound:
            raise FailedPrecondition(
                f"true_on_policy_mode: the trainer gives a token log-prob {trainer:.6f}, the engine gave it "
                f"{engine:.6f}: {gap:.2g} apart, true_on_policy_bound is {self._agreement_bound:g}. Use the same dtype "
                "and kernels on both sides, or raise the bound",
                reason="NOT_ON_POLICY",
            )
        return float(gap)
