"""Megatron's Adam with clipping and schedule, and its states as plain tensors (nothing is pickled)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from headrace.config.megatron import MegatronArgs
from headrace.errors import DataLoss
from services.trainer.megatron import made


def wrap_for_data_parallel(config: TransformerConfig, args: MegatronArgs, model: GPTModel) -> DistributedDataParallel:
    """The model with gradient buffers that data ranks reduce, in float32."""
    return DistributedDataParallel(
        config=config,
        ddp_config=made(
            DistributedDataParallelConfig,
            args,
            {
                "grad_reduce_in_fp32": args.grad_reduce_in_fp32,
                "use_distributed_optimizer": args.use_distributed_optimizer,
                "check_for_nan_in_grad": args.check_for_nan_in_grad,
            },
        ),
        module=model,
    )


def _schedule(optimizer: Any, args: MegatronArgs, num_steps: int) -> OptimizerParamScheduler:
    """Of the learning rate and the weight decay over `num_steps` optimizer steps."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=min(args.init_lr, args.lr),
        max_lr=args.lr,
        min_lr=min(args.min_lr, args.lr),
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=max(args.lr_decay_iters or num_steps, args.lr_warmup_iters + 1),
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

    def __init__(self, args: MegatronArgs, model: DistributedDataParallel, num_steps: int) -> None:
        config = made(
            OptimizerConfig,
            args,
            {
                "optimizer": args.optimizer,
                "weight_decay": args.weight_decay,
                "adam_beta1": args.adam_beta1,
                "adam_beta2": args.adam_beta2,
                "adam_eps": args.adam_eps,
                "clip_grad": args.clip_grad,
                "bf16": args.bf16,
                "params_dtype": torch.bfloat16 if args.bf16 else torch.float32,
                "use_distributed_optimizer": args.use_distributed_optimizer,
            },
            fixed={"lr": args.lr, "min_lr": min(args.min_lr, args.lr)},
        )
        self._optimizer: Any = get_megatron_optimizer(config, [model])
        # In float32 Adam works on the model's own parameters.
        self._has_master_weights = args.bf16
        self._schedule = _schedule(self._optimizer, args, num_steps)

    def step(self) -> dict[str, float]:
        """Clips, updates, moves the schedule on; returns grad_norm (before clipping) and the lr that was used."""
        lr = float(self._optimizer.param_groups[0]["lr"])
        updated, grad_norm, _ = self._optimizer.step()
        self._schedule.step(increment=1)
        return {"grad_norm": float(grad_norm or 0.0), "lr": lr, "updated": float(updated)}

    def zero_grad(self) -> None:
        """Before the first backward of a step."""
        self._optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Every state tensor of this rank by name: moments, step counts, fp32 master weights."""
        return dict(self._named_tensors())

    def scalars(self) -> dict[str, Any]:
        """The schedule's place, as JSON."""
        return {"schedule_steps": self._schedule.num_steps}

    def restore(self, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
        """The other way; raises DataLoss when the tensors are of another model or layout."""
        self._materialize()
        expected = dict(self._named_tensors())
        if expected.keys() != tensors.keys():
            raise DataLoss(f"optimizer states do not fit: {sorted(expected.keys() ^ tensors.keys())[:5]}")
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])
        self._schedule.num_steps = 0
        self._schedule.step(increment=scalars["schedule_steps"])

    def reload_master_weights(self) -> None:
        """After the model's weights were replaced from outside."""
        self._optimizer.reload_model_params()

    def _inner(self) -> Iterator[tuple[str, Any]]:
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for number, optimizer in enumerate(chained):
            yield f"optimizer.{number}", optimizer.optimizer

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, inner in self._inner():
            for g, group in enumerate(inner.param_groups):
                for p, parameter in enumerate(group["params"]):
                    if self._has_master_weights:
                        yield f"{prefix}.{g}.{p}.main", parameter.data
                    for name, value in sorted(inner.state[parameter].items()):
                        yield f"{prefix}.{g}.{p}.{name}", value

    def _materialize(self) -> None:
        """Adam makes its states at the first step; a restored run needs them before it."""
        for _, inner in self._inner():
            for group in inner.param_groups:
                for parameter in group["params"]:
                    if not inner.state[parameter]:
                        inner.state[parameter] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(parameter.data),
                            "exp_avg_sq": torch.zeros_like(parameter.data),
                        }
