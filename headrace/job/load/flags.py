"""Parses flags into settings: `--flag value`, `--flag=value`, `--switch`, `--no-switch`, `--many a b --many c`."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.job.option import ALIASES, OPPOSITES, Arity, Option, Setting
from headrace.job.schema.job import CONSTANTS, MERGED
from headrace.job.schema.section import literal
from headrace.limits import did_you_mean, shown, syntax_tree


@cache
def server_args() -> frozenset[str]:
    """Fields of ServerArgs; empty where SGLang is not installed (the engines may be on another machine)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "srt"
    files = [source / "server_args.py", *sorted((source / "arg_groups" / "fields").glob("*.py"))]
    return frozenset(name for file in files if file.is_file() for name in _fields(file))


def require_known(name: str, origin: str) -> None:
    """Raises ConfigError when SGLang is installed and has no such argument."""
    known = server_args()
    if known and name not in known:
        parts = sorted(each for each in known if each.startswith(f"{name}_"))
        near = f": it has {', '.join(parts)}" if parts else did_you_mean(name, known)
        raise ConfigError(f"{origin}: SGLang has no argument {name}{near}", field=f"sglang.{name}")


def _fields(file: Path) -> list[str]:
    return [
        statement.target.id
        for node in syntax_tree(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_")
    ]


_LEDGER = "every sample is in the ledger: `headrace samples` shows it, `headrace buffer export` writes Parquet"
_RESUME = "a resumed run continues its whole state; to begin with weights alone, name them with "
_RESUME += "--initial-megatron-checkpoint"
_OFFLOAD = "--colocate turns both on; --no-offload-train or --no-offload-rollout turns one off"
_ROUTER = "sglang-router spreads the requests: choose how with --router-policy"
_FSDP = "the trainer is Megatron-core: recompute activations with --recompute-granularity, and choose attention with "
_FSDP += "--attention-backend"
_RUN = "a W&B run is named after --run-name, and its id follows the run's folder"
_KEY = "a key on a command line is seen by everyone on the machine: set WANDB_API_KEY, or run `wandb login`"
_ENGINES = "an engine is checked once it has started, for which it has --start-timeout-seconds"
_STEPS = "the length of a run is --num-rollout, or --num-epoch over --prompt-data"
_ALWAYS = "it is always on"
_REPORTED = "the run's folder has every metric, and --use-tensorboard and --use-wandb show them"
_CHUNKS = "log-probs are always computed in chunks, within a fixed memory"
_CONSTANT = "it is a constant, which fits every job: leave it out"
_MTP = "layers that predict further tokens are kept as they are and not trained"

_REASONS: Mapping[str, Sequence[str]] = {
    "--loss-type sft_loss computes none": ("disable_compute_advantages_and_returns",),
    _LEDGER: ("save_debug_train_data", "dump_details"),
    _RESUME: (
        "no_load_rng",
        "no_load_optim",
        "no_save_rng",
        "no_save_optim",
        "finetune",
        "ckpt_step",
        "start_rollout_id",
    ),
    _OFFLOAD: ("offload",),
    "with --colocate it is called --offload-train": ("release_train",),
    _ROUTER: ("use_slime_router", "slime_router_middleware_paths", "sglang_router_ip", "sglang_router_port"),
    "--max-groups-in-flight bounds what is generated at once": ("sglang_server_concurrency",),
    _FSDP: ("gradient_checkpointing", "attn_implementation", "fsdp_cpu_offload"),
    "weights are converted by headrace's own tables": ("megatron_to_hf_mode", "model_name"),
    _MTP: ("enable_mtp_training",),
    "give the values as flags of their own": ("custom_config_path",),
    _KEY: ("wandb_key",),
    _RUN: (
        "wandb_run_id",
        "wandb_random_suffix",
        "disable_wandb_random_suffix",
        "wandb_exp_name",
        "wandb_save_dir",
        "wandb_dir",
        "wandb_host",
        "tb_project_name",
        "tb_experiment_name",
        "tensorboard_dir",
    ),
    _ENGINES: ("rollout_health_check_first_wait",),
    _STEPS: ("train_iters", "train_samples", "exit_interval"),
    _ALWAYS: ("use_mcore_models", "use_flash_attn"),
    _REPORTED: ("log_interval", "log_passrate", "log_multi_turn", "log_throughput"),
    _CHUNKS: ("log_probs_chunk_size", "recompute_loss_function"),
    "rows are padded as the layout needs": ("data_pad_size_multiplier",),
    "the vocabulary is the checkpoint's": ("make_vocab_size_divisible_by",),
    "the collective library follows the machine: NCCL on GPUs, gloo on CPUs": ("distributed_backend",),
    "--start-timeout-seconds and --update-weight-timeout-seconds bound what may hang": ("distributed_timeout_minutes",),
    "it is called --lr": ("learning_rate",),
    _CONSTANT: CONSTANTS,
}

UNSUPPORTED: Mapping[str, str] = {
    **{name: reason for reason, names in _REASONS.items() for name in names},
    **MERGED,
    "eval_pass_reward": "a set of --eval-config has its own pass_reward; without one it is 1",
}
"""Why a name is refused, and what to do instead."""


SGLANG_PREFIX = "--sglang-"
_SHOWN = 80


def parse_flags(
    argv: Sequence[str], known: Mapping[str, Option], note: Callable[[str], None] = lambda _: None
) -> list[Setting]:
    """One setting for each option.

    `note` is called for an option that is given twice: its last value counts, as in argparse. Raises ConfigError that
    names every flag that is unknown or has the wrong number of values.
    """
    settings: dict[tuple[str, str], Setting] = {}
    mistakes: list[ConfigError] = []
    for flag, words in _split(argv):
        try:
            setting = _setting(flag, words, known)
        except ConfigError as mistake:
            mistakes.append(mistake)
            continue
        key = (setting.section, setting.name)
        settings[key] = _joined(settings[key], setting, known, note) if key in settings else setting
    if mistakes:
        raise _all_of(mistakes)
    return list(settings.values())


def option_value(option: Option, words: Sequence[str], origin: str) -> Any:
    """Converts `words` to the value of `option`. It checks only their number; the job's types check the rest."""
    if option.arity is Arity.PAIRS:
        if not words or len(words) % 2:
            raise ConfigError(f"{origin} takes NAME PATH pairs, got {_shown(words)}", field=option.name)
        return list(zip(words[::2], words[1::2], strict=True))
    if option.arity is Arity.MANY:
        if not words:
            raise ConfigError(f"{origin} takes one or more values, got none", field=option.name)
        return list(words)
    if option.arity is Arity.SWITCH and not words:
        return True
    if len(words) != 1:
        raise ConfigError(f"{origin} takes one value, got {_shown(words)}", field=option.name)
    return words[0]


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"unexpected argument {shown(word)}: flags begin with --")
    return found


def _setting(flag: str, words: list[str], known: Mapping[str, Option]) -> Setting:
    unsupported = UNSUPPORTED.get(flag.removeprefix("--").replace("-", "_"))
    if unsupported is not None:
        raise ConfigError(f"{flag} is not a flag of headrace: {unsupported}", field=flag)
    name = _name(flag.removeprefix("--"))
    if flag.startswith(SGLANG_PREFIX) and name not in known:
        return _sglang(flag, words)
    if name in known:
        option = known[name]
        return Setting(option.section, option.name, option_value(option, words, flag), flag)
    negated = OPPOSITES.get(name) or _name(flag.removeprefix("--no-"))
    if negated in known and known[negated].arity is Arity.SWITCH:
        if words:
            raise ConfigError(f"{flag} takes no value, got {_shown(words)}", field=negated)
        return Setting(known[negated].section, negated, False, flag)
    names = [option.flag for option in known.values()] + [f"--{alias.replace('_', '-')}" for alias in ALIASES]
    raise ConfigError(f"unknown flag {flag[:_SHOWN]}{did_you_mean(flag, names)}", field=flag)


def _sglang(flag: str, words: list[str]) -> Setting:
    name = flag.removeprefix(SGLANG_PREFIX).replace("-", "_")
    require_known(name, flag)
    values = [literal(word) for word in words]
    return Setting("sglang", name, True if not values else values[0] if len(values) == 1 else values, flag)


def _joined(first: Setting, second: Setting, known: Mapping[str, Option], note: Callable[[str], None]) -> Setting:
    if first.section != "sglang" and known[first.name].arity in (Arity.MANY, Arity.PAIRS):
        return Setting(first.section, first.name, [*first.value, *second.value], first.origin)
    if first.value != second.value:
        note(
            f"{first.name} is given twice, {first.origin} {str(first.value)[:_SHOWN]} and {second.origin} "
            f"{str(second.value)[:_SHOWN]}: the last one counts"
        )
    return second


def _all_of(mistakes: Sequence[ConfigError]) -> ConfigError:
    if len(mistakes) == 1:
        return mistakes[0]
    lines = "".join(f"\n  {mistake.message}" for mistake in mistakes)
    return ConfigError(f"{len(mistakes)} flags are wrong:{lines}", field=mistakes[0].field)


def _name(flag: str) -> str:
    name = flag.replace("-", "_")
    return ALIASES.get(name, name)


def _shown(words: Sequence[str]) -> str:
    return f"{len(words)}: {' '.join(words)[:_SHOWN]}" if words else "none"
