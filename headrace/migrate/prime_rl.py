"""prime-rl's configuration: the TOML file of `rl`, with its tables of orchestrator, trainer and inference."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.migrate.moved import Migration, carry_by_table

_SAME: Mapping[str, str] = {
    "max_steps": "--num-rollout",
    "seq_len": "--rollout-max-context-len",
    "max_async_level": "--max-staleness",
    "model.name": "--hf-checkpoint",
    "model.trust_remote_code": "--trust-remote-code",
    "rollouts_per_example": "--n-samples-per-prompt",
    "sampling.max_tokens": "--rollout-max-response-len",
    "sampling.temperature": "--rollout-temperature",
    "sampling.top_p": "--rollout-top-p",
    "optim.lr": "--lr",
    "optim.weight_decay": "--weight-decay",
    "optim.betas1": "--adam-beta1",
    "optim.betas2": "--adam-beta2",
    "optim.max_norm": "--clip-grad",
    "ckpt.interval": "--save-interval",
    "ckpt.keep_last": "--keep-last",
    "eval.interval": "--eval-interval",
    "eval.rollouts_per_example": "--n-samples-per-eval-prompt",
    "wandb.project": "--wandb-project",
    "wandb.name": "--run-name",
    "parallel.tp": "--rollout-num-gpus-per-engine",
    "gpu_memory_utilization": "--sglang-mem-fraction-static",
    "deployment.num_train_gpus": "--actor-num-gpus-per-node",
    "deployment.num_infer_gpus": "--rollout-num-gpus",
    "model.lora.rank": "--lora-rank",
    "model.lora.alpha": "--lora-alpha",
    "model.lora.dropout": "--lora-dropout",
}
"""Without the table of the process (orchestrator, trainer, inference): one job has them all here."""

_ENVIRONMENT = "an environment of verifiers plays as an agent host: examples/agents/verifiers_env.py, docs/agents.md"
_DROPPED: Mapping[str, str] = {
    "env": _ENVIRONMENT,
    "eval.env": _ENVIRONMENT,
    "environment": _ENVIRONMENT,
    "buffer": "the ledger keeps every sample; --dynamic-sampling-filter-path chooses groups",
    "filters": "--dynamic-sampling-filter-path chooses groups",
    "weight_broadcast": "--update-weight-transport: collective, ipc or disk",
    "log": "logs are JSON lines in the run's folder",
    "model.ac": "give --recompute-granularity",
    "model.attn": "give --attention-backend",
    "model.compile": "the model is Megatron's",
    "model.impl": "the model is Megatron's",
    "output_dir": "the run's folder is --run-dir / --run-name",
    "clean_output_dir": "a run's folder is kept; another --run-name starts anew",
    "loss": "docs/algorithms.md lists the losses",
    "scheduler": "--lr-decay-style, --lr-warmup-iters and --lr-decay-iters",
    "client": "headrace finds its services",
    "server": "headrace finds its services",
}
_PROCESSES = ("orchestrator", "trainer", "inference")


def migrate(path: Path, environment: Mapping[str, str], _: Sequence[str] = ()) -> Migration:
    """Raises InvalidArgument for a file that is none of prime-rl's."""
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{path} is no TOML: {error}") from error
    if not any(name in tree for name in (*_PROCESSES, "model", "max_steps")):
        raise InvalidArgument(f"{path} has neither [model] nor [orchestrator]: name the file that `uv run rl @` reads")
    migration = Migration(str(path))
    settings = dict(_leaves("", tree))
    for name, value in settings.items():
        _move(migration, name, value, settings)
    return migration


def _leaves(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _move(migration: Migration, name: str, value: Any, settings: Mapping[str, Any]) -> None:
    source = f"{name} = {value!r:.120}"
    process, _, rest = name.partition(".")
    own = rest if process in _PROCESSES else name
    if own == "batch_size":
        _batch(migration, source, value, settings)
    elif own in _SAME:
        carry_by_table(migration, source, _SAME[own], value)
    else:
        migration.drop(source, _why(own))


def _why(name: str) -> str:
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_DROPPED[each] for each in prefixes if each in _DROPPED), "no option of headrace means this")


def _batch(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    """prime-rl counts samples, headrace prompts."""
    names = ("rollouts_per_example", "orchestrator.rollouts_per_example")
    samples = next((settings[name] for name in names if name in settings), 1)
    if isinstance(value, int) and isinstance(samples, int) and samples and not value % samples:
        migration.change(
            source, "--rollout-batch-size", str(value // samples), note=f"prompts a step, {samples} samples each"
        )
    else:
        migration.drop(source, "set --rollout-batch-size: prompts a step")
