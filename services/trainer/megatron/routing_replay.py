"""Routing replay: a micro-batch's tokens go to the experts that they went to before, whatever the router says now.

GSPO (https://arxiv.org/abs/2507.18071) replays the old policy's choice; with the choice of
the rollouts' engines (https://arxiv.org/abs/2510.11370) trainer and engines run the same experts. The weights of the
chosen experts are still the router's own, and so its gradient.

Stands where Megatron-core's RouterReplay would, one for each router. A layer that is recomputed is first run without
gradients and, in the backward pass, again with them: what it chose for is kept in order until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Literal, TypeVar

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import pad

from services.trainer.plan.rows import FREE, ExpertChoices

Routing = Literal["free", "record", "replay"]
TopK = Callable[..., tuple[Tensor, Tensor]]
T = TypeVar("T")


class RoutingReplay:
    """Records and replays the choices of all routers of a rank. `choices` are those of the next micro-batch."""

    def __init__(self, stages: Sequence[GPTModel], tp_rank: int) -> None:
        self.tp_rank = tp_rank
        self.mode: Routing = "free"
        self.choices = ExpertChoices()
        self.trains = False
        for stage in stages:
            for layer in stage.decoder.layers:
                for module in layer.modules():
                    if isinstance(module, TopKRouter):
                        module.router_replay = RouterOfLayer(layer.layer_number - 1, self)

    @contextmanager
    def following(self, mode: Routing, *, trains: bool) -> Iterator[None]:
        """Inside, forward passes write their choices down, or follow those of their micro-batch."""
        self.mode, self.trains = mode, trains
        try:
            yield
        finally:
            self.mode = "free"


class SecondPasses(Generic[T]):
    """Remembers what belongs to the micro-batches that a layer has seen without gradients, until it is recomputed."""

    def __init__(self) -> None:
        self._to_recompute: deque[T] = deque()

    def first(self, current: T, *, trains: bool) -> T:
        """Returns `current`, and in a second pass what it was in the first."""
        if trains and not torch.is_grad_enabled():
            self._to_recompute.append(current)
        elif self._to_recompute:
            return self._to_recompute.popleft()
        return current


class RouterOfLayer:
    """Gives a layer's router the recorded choices in place of its best scores."""

    def __init__(self, layer: int, replay: RoutingReplay) -> None:
        self._layer = layer
        self._replay = replay
        self._passes = SecondPasses[ExpertChoices]()
        self.layer_number = layer  # Megatron-core 0.19 sets it

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the experts, [tokens, topk] each, as Megatron-core's router wants them."""
        best: tuple[Tensor, Tensor] = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        match self._replay.mode:
            case "free":
                return best
            case "record":
                self._replay.choices.by_layer[self._layer] = best[1].detach()
                return best
            case "replay":
                return self._replayed(scores, best)

    def _replayed(self, scores: Tensor, best: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        choices = self._passes.first(self._replay.choices, trains=self._replay.trains)
        known = choices.by_layer.get(self._layer)
        if known is None:
            return best
        known = _share(known, len(scores), self._replay.tp_rank)
        chosen = torch.where(known[:, :1] == FREE, best[1], known)
        return scores.gather(1, chosen), chosen


def _share(known: Tensor, tokens: int, tp_rank: int) -> Tensor:
    """This rank's part of the positions: with sequence parallelism its router sees no others."""
    if len(known) == tokens:
        return known
    start = tp_rank * tokens
    mine = known[start : start + tokens]
    return pad(mine, (0, 0, 0, tokens - len(mine)), value=FREE)
