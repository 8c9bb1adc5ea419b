"""Megatron's Adam with clipping and schedule, and its states as plain tensors (nothing is pickled).

Only this module reads the private parts of Megatron-core's optimizers. Float32 without the distributed optimizer: Adam
works on the model's parameters. Bfloat16: on float32 master copies. Distributed: on a run of the flat parameter, in
float32 a view of it, in bfloat16 a master copy of the run. Offloaded (`--optimizer-cpu-offload`): Adam works on copies
of all these in the host's memory, with the same states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from headrace.errors import DataLoss
from headrace.job.megatron import MegatronArgs
from services.trainer.megatron.configs import made


@dataclass(frozen=True, slots=True)
class Slot:
    """The state of elements `start` to `end` of a parameter, laid flat."""

    parameter: Tensor
    main: Tensor | None
    """The float32 master copy of those elements, if there is one."""
    updated: Tensor
    """What the optimizer works on: the parameter, the master copy, or a copy of either in the host's memory."""
    state: dict[str, Tensor]
    """The optimizer's own dictionary of tensors by name: what is put in is used."""
    start: int
    end: int
    is_distributed: bool


def _distributed(optimizer: Any) -> Iterator[Slot]:
    if optimizer.is_stub_optimizer:
        return
    masters = optimizer.shard_fp32_from_float16_groups
    if any(master is None for master in chain(*masters)):  # a precision-aware optimizer has them
        masters = optimizer.shard_float16_groups
    pairs = ((optimizer.model_fp32_groups, optimizer.shard_fp32_groups), (optimizer.model_float16_groups, masters))
    for models, shards in pairs:
        for parameter, shard in zip(chain(*models), chain(*shards), strict=True):
            place = optimizer._get_model_param_range_map(parameter)["param"]
            yield _slot(optimizer, parameter, shard, place.start, place.end, True)


def _half(optimizer: Any) -> Iterator[Slot]:
    pairs = zip(chain(*optimizer.float16_groups), chain(*optimizer.fp32_from_float16_groups), strict=True)
    yield from (_whole(optimizer, parameter, main) for parameter, main in pairs)
    yield from (_whole(optimizer, parameter, parameter) for parameter in chain(*optimizer.fp32_from_fp32_groups))


def _whole(optimizer: Any, parameter: Tensor, known: Tensor) -> Slot:
    return _slot(optimizer, parameter, known, 0, parameter.numel(), False)


def _slot(optimizer: Any, parameter: Tensor, known: Tensor, start: int, end: int, is_distributed: bool) -> Slot:
    """`known` is what Megatron's wrapper gave the optimizer inside: the parameter, a run of it, or a master copy."""
    updated, state = _updated(optimizer.optimizer, known)
    main = None
    if parameter.dtype is not torch.float32:
        main = known if known.dtype is torch.float32 else updated
    return Slot(parameter, main, updated, state, start, end, is_distributed)


def _updated(inside: Any, known: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What an optimizer works on for a tensor that it was given, and the state for it."""
    if not isinstance(inside, HybridDeviceOptimizer):
        return known, inside.state[known]
    copy = inside.param_to_inner_param[known]
    for part in inside.sub_optimizers:
        if any(copy is parameter for group in part.param_groups for parameter in group["params"]):
            return copy, part.state[copy]
    raise RuntimeError(f"no part of {type(inside).__name__} updates a parameter of {tuple(known.shape)}")


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [] if optimizer.optimizer is None else list(optimizer.optimizer.param_groups)


def fuse_on_cpu(optimizers: Sequence[Any]) -> None:
    """Lets torch's Adam pass once over weights, gradients and moments in the host's memory: a fifth of its time."""
    for each in optimizers:
        inside = each.optimizer
        for part in inside.sub_optimizers if isinstance(inside, HybridDeviceOptimizer) else [inside]:
            for group in part.param_groups if isinstance(part, torch.optim.Adam) else ():
                group["fused"] = all(parameter.device.type == "cpu" for parameter in group["params"])


def put(state: dict[str, Tensor], name: str, value: Tensor, like: Tensor) -> None:
    """Puts a state where torch's optimizer expects it: step counts on the CPU, moments beside the parameter."""
    state[name] = value.reshape(()) if name == "step" else value.to(like.device).reshape(like.shape).to(torch.float32)


def wrap_for_data_parallel(
    config: TransformerConfig, args: MegatronArgs, chunks: Sequence[GPTModel]
) -> list[DistributedDataParallel]:
    """The rank's stages with gradient buffers that data ranks reduce, in float32."""
    ddp_config = made(DistributedDataParallelConfig, args, {})
    # As Megatron's own trainer: only the gradients of the first stage are waited for, so only they come in buckets.
    return [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def parameter_schedule(optimizer: Any, args: MegatronArgs, num_steps: int) -> OptimizerParamScheduler:
    """The learning rate and the weight decay over `num_steps` optimizer steps."""
    decay_steps, warmup_steps = args.lr_decay_iters or num_steps, args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup_steps = round(args.lr_warmup_fraction * decay_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=min(args.init_lr, args.lr),
        max_lr=args.lr,
        min_lr=min(args.min_lr, args.lr),
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(decay_steps, warmup_steps + 1),
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay if args.start_wd is None else args.start_wd,
        end_wd=args.weight_decay if args.end_wd is None else args.end_wd,
        wd_incr_steps=0 if args.wd_incr_style == "constant" else args.wd_incr_steps or num_steps,
        wd_incr_style=args.wd_incr_style,
        wsd_decay_steps=args.wsd_decay_steps,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


class Optimizer:
    """One optimizer step at a time, the schedule with it."""

    def __init__(self, args: MegatronArgs, chunks: Sequence[DistributedDataParallel], num_steps: int) -> None:
        config = made(
            OptimizerConfig,
            args,
            {
                "params_dtype": torch.bfloat16 if args.bf16 else torch.float32,
                "optimizer_offload_fraction": 1.0,  # as Megatron's own script; without optimizer_cpu_offload unused
            },
            fixed={"lr": args.lr, "min_lr": min(args.min_lr, args.lr)},
        )
        self._optimizer: Any = get_megatron_optimizer(config, list(chunks))
        is_chain = isinstance(self._optimizer, ChainedOptimizer)
        self._parts = list(self._optimizer.chained_optimizers) if is_chain else [self._optimizer]
        """Megatron's optimizers: dense parameters, then experts."""
        fuse_on_cpu(self._parts)
        self._kind = args.optimizer
        self._schedule = parameter_schedule(self._optimizer, args, num_steps)

    def step(self, *, updates: bool = True) -> dict[str, float]:
        """Clips, updates, moves the schedule on; returns grad_norm (before clipping) and the lr that was used.

        Without `updates` only the schedule moves.
        """
        lr = float(self._optimizer.param_groups[0]["lr"])
        updated, grad_norm, _ = self._optimizer.step() if updates else (False, 0.0, None)
        self._schedule.step(increment=1)
        return {"grad_norm": float(grad_norm or 0.0), "lr": lr, "updated": float(updated)}

    @property
    def megatron(self) -> tuple[Any, Any]:
        """Megatron's optimizer and scheduler, for a user's hook."""
        return self._optimizer, self._schedule

    def zero_grad(self) -> None:
        """Clears the gradients; called before the first backward pass of a step."""
        self._optimizer.zero_grad()

    def tensors(self) -> Iterator[Tensor]:
        """The parameters that it updates, their gradients, and its states."""
        for part in self._parts:
            for parameter in (p for group in _groups(part) for p in group["params"]):
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
            states = part.optimizer.state.values() if part.optimizer is not None else ()
            yield from (value for state in states for value in state.values() if isinstance(value, Tensor))

    def slots(self) -> Iterator[Slot]:
        """The state of every parameter that this rank updates."""
        for part in self._parts:
            if isinstance(part, DistributedOptimizer):
                yield from _distributed(part)
            elif isinstance(part, Float16OptimizerWithFloat16Params):
                yield from _half(part)
            else:
                yield from (_whole(part, p, p) for group in _groups(part) for p in group["params"])

    def scalars(self) -> dict[str, Any]:
        """The schedule's position and the kind of optimizer, as JSON has them."""
        # Fused Adams count their steps once for a group; torch's counts them for each parameter, and has none here.
        steps = [int(group["step"]) for part in self._parts for group in _groups(part) if "step" in group]
        return {
            "optimizer": self._kind,
            "schedule_steps": self._schedule.num_steps,
            "group_step": max(steps, default=None),
        }

    def require_same_kind(self, scalars: Mapping[str, Any]) -> None:
        """Raises DataLoss when the states of a checkpoint are another optimizer's."""
        if scalars["optimizer"] != self._kind:
            raise DataLoss(
                f"the checkpoint has states of {scalars['optimizer']}, and this job's optimizer is {self._kind}: "
                f"pass --optimizer {scalars['optimizer']}, or take its weights with --initial-megatron-checkpoint"
            )

    def restore_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Continues the schedule. Offloaded copies take what a checkpoint has put into weights and masters."""
        for part in self._parts:
            for group in _groups(part) if scalars["group_step"] is not None else ():
                group["step"] = scalars["group_step"]
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                for known, copy in part.optimizer.param_to_inner_param.items():
                    if copy is not known and copy.dtype is known.dtype:
                        copy.data.copy_(known.data)
        self._schedule.num_steps = 0
        self._schedule.step(increment=scalars["schedule_steps"])
