"""Reads `[JOB.toml] [flags]`, which train, check and up take, and prints help for the flags."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console

from headrace.job.load.load import load
from headrace.job.megatron.arguments import DESCRIBED
from headrace.job.option import Arity, Option, options
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job

_ALL = "--help-all"
FIRST = (
    *("hf_checkpoint", "max_staleness", "run_name", "prompt_data", "input_key", "label_key", "apply_chat_template"),
    *("num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len", "rollout_temperature"),
    *("custom_generate_function_path", "rm_type", "custom_rm_path"),
    *("advantage_estimator", "use_kl_loss", "kl_loss_coef", "global_batch_size", "max_tokens_per_gpu", "lr", "bf16"),
    *("tensor_model_parallel_size", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine"),
    *("eval_prompt_data", "eval_interval", "save_interval", "save_hf", "use_wandb"),
)
"""What a first run sets, in the order in which people choose it."""

_MORE = (
    "",
    "  --sglang-NAME VALUE                        any argument of SGLang's server",
    "",
    "headrace train --help-all lists every flag; docs/flags.md has them with their tests.",
)
_OTHERS = (
    "",
    "  and any other field of Megatron-core's TransformerConfig, MLATransformerConfig, OptimizerConfig,",
    "  DistributedDataParallelConfig and OptimizerParamScheduler, by its name",
    "",
    "[sglang]",
    "  --sglang-NAME VALUE: any argument of SGLang's server",
)


def load_job(argv: Sequence[str], scope_of: Callable[[Job], Scope] = Scope.of_train) -> Job:
    """The job, checked for what the command starts. Raises ConfigError.

    A file's values come first, HEADRACE_* variables replace them, and flags replace both.
    """
    has_file = bool(argv) and not argv[0].startswith("-")
    path = Path(argv[0]) if has_file else None
    return load(path, argv[1:] if has_file else argv, os.environ, scope_of, note)


def note(line: str) -> None:
    Console(stderr=True).print(f"headrace: {line}", highlight=False, markup=False, soft_wrap=True)


def wants_help(argv: Sequence[str]) -> bool:
    return any(word in argv for word in ("-h", "--help", _ALL))


def flags_help(argv: Sequence[str]) -> str:
    """Describes the flags that people set first, with their defaults; with --help-all every flag by section."""
    if _ALL in argv:
        described = [
            option for option in options().values() if option.section != "megatron" or option.name in DESCRIBED
        ]
        return "\n".join([*_by_section(described), *_OTHERS])
    return "\n".join([*_by_section([options()[name] for name in FIRST]), *_MORE])


def _by_section(chosen: Sequence[Option]) -> list[str]:
    parts: list[str] = []
    for section, group in groupby(chosen, key=lambda option: option.section):
        parts += ["", f"[{section}]", *(_line(option) for option in group)]
    return parts


def _line(option: Option) -> str:
    words = {Arity.SWITCH: "", Arity.ONE: " X", Arity.MANY: " X …", Arity.PAIRS: " NAME PATH …"}[option.arity]
    default = (
        ""
        if option.required or option.default in (None, ()) or option.arity is Arity.SWITCH
        else f" ({option.default})"
    )
    return f"  {option.flag + words:<42} {option.description}{default}"
