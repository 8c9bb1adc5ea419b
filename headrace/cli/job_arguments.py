"""Reads `[JOB.toml] [flags]`, which the commands that start services take, and prints help for the flags."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console

from headrace.job.load.load import load
from headrace.job.megatron import DESCRIBED
from headrace.job.option import Arity, Option, options
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job

FIRST = (
    *("hf_checkpoint", "max_staleness", "run_name", "prompt_data", "input_key", "label_key", "apply_chat_template"),
    *("num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len", "rollout_temperature"),
    *("custom_generate_function_path", "rm_type", "custom_rm_path"),
    *("advantage_estimator", "use_kl_loss", "kl_loss_coef", "global_batch_size", "max_tokens_per_gpu", "lr", "bf16"),
    *("tensor_model_parallel_size", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine"),
    *("eval_prompt_data", "eval_interval", "save_interval", "save_hf", "use_wandb"),
)
"""What a first run sets, in the order in which people choose it."""

_HERE = Path("job.toml")
"""What `headrace init` writes."""

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

    A file's values come first, HEADRACE_* variables replace them, and flags replace both. Without a file it is job.toml
    of this folder, if there is one.
    """
    has_file = bool(argv) and not argv[0].startswith("-")
    path = Path(argv[0]) if has_file else _HERE if _HERE.is_file() else None
    if path is not None and not has_file:
        note(f"the job is {path.absolute()}")
    return load(path, argv[1:] if has_file else argv, os.environ, scope_of, note)


def note(line: str) -> None:
    Console(stderr=True).print(f"headrace: {line}", highlight=False, markup=False, soft_wrap=True)


class JobCommand(click.Command):
    """Gives its function `words`: [JOB.toml] and the flags of a job, which are none of its own."""

    def __init__(self, name: str | None, **attrs: Any) -> None:
        super().__init__(name, context_settings={"ignore_unknown_options": True}, **attrs)
        self.params += [
            click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="[JOB.toml] [flags]"),
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_help_all,
                hidden=True,
            ),
        ]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The flags that people set first, with their defaults."""
        lines = _by_section([options()[name] for name in FIRST])
        formatter.write("\n".join(["", *(line for line in lines if line), *_MORE]))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        flags = (option for option in options().values() if option.flag.startswith(incomplete or "-"))
        own = super().shell_complete(ctx, incomplete)
        return [*own, *(CompletionItem(option.flag, help=option.description) for option in flags)]


def _help_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        own = [option for option in options().values() if option.section != "megatron" or option.name in DESCRIBED]
        click.echo("\n".join([ctx.get_usage(), *_by_section(own), *_OTHERS]))
        ctx.exit()


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
