"""The state that Megatron-core's optimizers keep of a parameter: only this module reads their private parts.

Float32 without the distributed optimizer: Adam works on the model's parameters. Bfloat16: on float32 master copies.
Distributed: on a run of the flat parameter, in float32 a view of it, in bfloat16 a master copy of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """The state of elements `start` to `end` of a parameter, laid flat."""

    parameter: Tensor
    main: Tensor | None
    """The float32 master copy of those elements, if there is one."""
    state: dict[str, Tensor]
    """The optimizer's own dictionary of tensors by name: what is put in is used."""
    start: int
    end: int
    is_distributed: bool


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Megatron's optimizers below the chain: dense parameters, then experts."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def slots(optimizer: Any) -> Iterator[Slot]:
    """The slots of every parameter that this rank updates."""
    for each in inner_optimizers(optimizer):
        if isinstance(each, DistributedOptimizer):
            yield from _distributed(each)
        elif isinstance(each, Float16OptimizerWithFloat16Params):
            yield from _half(each)
        else:
            yield from (_whole(each, p, None) for group in _groups(each) for p in group["params"])


def _distributed(optimizer: Any) -> Iterator[Slot]:
    if optimizer.is_stub_optimizer:
        return
    pairs = (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups, False),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, True),
    )
    for models, shards, is_master in pairs:
        for parameter, shard in zip(chain(*models), chain(*shards), strict=True):
            place = optimizer._get_model_param_range_map(parameter)["param"]
            state = optimizer.optimizer.state[shard]
            yield Slot(parameter, shard if is_master else None, state, place.start, place.end, True)


def _half(optimizer: Any) -> Iterator[Slot]:
    pairs = zip(chain(*optimizer.float16_groups), chain(*optimizer.fp32_from_float16_groups), strict=True)
    yield from (_whole(optimizer, parameter, main) for parameter, main in pairs)
    yield from (_whole(optimizer, parameter, None) for parameter in chain(*optimizer.fp32_from_fp32_groups))


def _whole(optimizer: Any, parameter: Tensor, main: Tensor | None) -> Slot:
    state = optimizer.optimizer.state[parameter if main is None else main]
    return Slot(parameter, main, state, 0, parameter.numel(), False)


def tensors(optimizer: Any) -> Iterator[Tensor]:
    """The tensors of the optimizer inside: what it updates, with gradients of its own, and its states."""
    for each in inner_optimizers(optimizer):
        for parameter in (p for group in _groups(each) for p in group["params"]):
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        states = each.optimizer.state.values() if each.optimizer is not None else ()
        yield from (value for state in states for value in state.values() if isinstance(value, Tensor))


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [] if optimizer.optimizer is None else list(optimizer.optimizer.param_groups)


def group_step(optimizer: Any) -> int | None:
    """Fused Adams count their steps once for a group; torch's counts them for each parameter, and has none here."""
    steps = [int(group["step"]) for each in inner_optimizers(optimizer) for group in _groups(each) if "step" in group]
    return max(steps, default=None)


def set_group_step(optimizer: Any, step: int) -> None:
    """Puts back what `group_step` gave."""
    for each in inner_optimizers(optimizer):
        for group in _groups(each):
            group["step"] = step


def put(state: dict[str, Tensor], name: str, value: Tensor, like: Tensor) -> None:
    """Puts a state where torch's optimizer expects it: step counts on the CPU, moments beside the parameter."""
    state[name] = value.reshape(()) if name == "step" else value.to(like.device).reshape(like.shape).to(torch.float32)
