"""Rules of Megatron's arguments that depend on this machine, on the installed version, or on each other."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from headrace.devices import num_gpus
from headrace.errors import ConfigError
from headrace.job.megatron.arguments import OTHER_STATES, MegatronArgs, megatron
from headrace.job.megatron.fields import ONLY_IN
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job


def check_megatron(job: Job) -> None:
    """Raises ConfigError for the first rule that is broken."""
    args = megatron(job.megatron)
    _context_parallel(args, job)
    _installed(args)
    _recomputation(args)
    _optimizer(args)
    _schedules(args)


def require_gpus(job: Job, scope: Scope) -> None:
    """Refuses flags that need a GPU when the trainer's machine has none."""
    flags = megatron(job.megatron).needs_gpu()
    if flags and not num_gpus():
        scope.missing(
            ConfigError(
                f"{', '.join(flags)}: Megatron-core does that only on a GPU, and this machine has none: leave it out"
            )
        )


def require_states_that_are_saved(job: Job, scope: Scope) -> None:
    """Refuses an optimizer on a GPU whose states no checkpoint holds."""
    given = megatron(job.megatron).given(frozenset(OTHER_STATES))
    flags = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if not flags or job.debug.debug_rollout_only or not (num_gpus() or scope.elsewhere):
        return
    scope.missing(
        ConfigError(
            f"{', '.join(flags)}: on a GPU the optimizer's states then have a form that headrace's checkpoints cannot "
            "hold yet, and every run ends with a checkpoint: leave it out",
            field=next(iter(given)),
        )
    )


def _context_parallel(args: MegatronArgs, job: Job) -> None:
    if args.context_parallel_size > 1 and job.train.packing == "padded":
        raise ConfigError(
            f"context_parallel_size {args.context_parallel_size} divides packed rows, and packing is padded: "
            "leave one of them out",
            field="packing",
        )


def _installed(args: MegatronArgs) -> None:
    """Skips the check when Megatron-core is not installed here: the trainer's machine will check."""
    try:
        installed = ".".join(version("megatron-core").split(".")[:2])
    except PackageNotFoundError:
        return
    for name in args.given(frozenset(ONLY_IN)):
        if installed not in ONLY_IN[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')} is a field of megatron-core {' and '.join(ONLY_IN[name])}, and "
                f"{installed} is installed: leave it out, or install the other version",
                field=name,
            )


def _recomputation(args: MegatronArgs) -> None:
    if args.recompute_activations and args.recompute_granularity == "full":
        raise ConfigError(
            "recompute_activations means recompute_granularity selective, which is set to full: leave one out",
            field="recompute_granularity",
        )


def _optimizer(args: MegatronArgs) -> None:
    if args.optimizer != "adam" and args.use_distributed_optimizer:
        raise ConfigError(
            f"optimizer {args.optimizer} with use_distributed_optimizer: Megatron-core distributes only Adam: leave "
            "one of them out",
            field="optimizer",
        )


def _schedules(args: MegatronArgs) -> None:
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        raise ConfigError(
            f"lr_warmup_iters {args.lr_warmup_iters} and lr_warmup_fraction {args.lr_warmup_fraction:g} set the same "
            "thing: leave one out",
            field="lr_warmup_fraction",
        )
    start, end = (args.weight_decay if wd is None else wd for wd in (args.start_wd, args.end_wd))
    if start != end and args.wd_incr_style == "constant":
        raise ConfigError(
            f"weight decay goes from {start} to {end}, and wd_incr_style is constant: make it linear or cosine",
            field="wd_incr_style",
        )
    if args.wd_incr_steps is not None and args.wd_incr_style == "constant":
        raise ConfigError("wd_incr_steps has no effect with wd_incr_style constant", field="wd_incr_steps")
    wsd = {"wsd_decay_steps": args.wsd_decay_steps, "lr_wsd_decay_style": args.lr_wsd_decay_style}
    for name, value in wsd.items():
        if (value is None) == (args.lr_decay_style == "WSD"):
            raise ConfigError(
                f"lr_decay_style is {args.lr_decay_style} and {name} is {value}: set both or neither", field=name
            )
