"""prime-rl's configuration: the TOML file of `rl`, with its tables of orchestrator, trainer and inference."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.job.schema.section import literal
from headrace.migrate.moved import Migration, carry_by_table, reason

_SAME: Mapping[str, str] = {
    "max_steps": "--num-rollout",
    "seq_len": "--rollout-max-context-len",
    "max_async_level": "--max-staleness",
    "model.name": "--hf-checkpoint",
    "model.trust_remote_code": "--trust-remote-code",
    "max_off_policy_steps": "--max-staleness",
    "rollouts_per_example": "--n-samples-per-prompt",
    "group_size": "--n-samples-per-prompt",
    "sampling.max_tokens": "--rollout-max-response-len",
    "sampling.max_completion_tokens": "--rollout-max-response-len",
    "train.sampling.max_completion_tokens": "--rollout-max-response-len",
    "train.sampling.temperature": "--rollout-temperature",
    "eval.sampling.max_completion_tokens": "--eval-max-response-len",
    "eval.sampling.temperature": "--eval-temperature",
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
    "eval.group_size": "--n-samples-per-eval-prompt",
    "eval.rollouts_per_example": "--n-samples-per-eval-prompt",
    "wandb.project": "--wandb-project",
    "wandb.name": "--run-name",
    "parallel.tp": "--rollout-num-gpus-per-engine",
    "vllm.tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "vllm.gpu_memory_utilization": "--sglang-mem-fraction-static",
    "vllm.max_model_len": "--sglang-context-length",
    "model.max_model_len": "--sglang-context-length",
    "model.tool_call_parser": "--sglang-tool-call-parser",
    "model.reasoning_parser": "--sglang-reasoning-parser",
    "model.cp": "--context-parallel-size",
    "model.ep": "--expert-model-parallel-size",
    "deployment.num_train_nodes": "--actor-num-nodes",
    "deployment.gpus_per_node": "--actor-num-gpus-per-node",
    "model.lora.target_modules": "--lora-target-modules",
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
    "train.env": _ENVIRONMENT,
    "train": "docs/agents.md: an agent host has its own settings",
    "eval.source": _ENVIRONMENT,
    "eval.select": _ENVIRONMENT,
    "renderer": "prompts are rendered by the model's chat template",
    "concurrency": "--max-groups-in-flight bounds what is generated at once",
    "deployment.type": "--actor-num-nodes and --placement say where a run is",
    "deployment.num_infer_nodes": "--rollout-num-gpus and --rollout-placement",
    "slurm": "--placement slurm: docs/placement.md",
    "model.ac_offloading": "give --recompute-granularity",
    "optim.type": "--optimizer adam is the default",
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


def migrate(path: Path, environment: Mapping[str, str], flags: Sequence[str] = ()) -> Migration:
    """`flags` are those behind the file on prime-rl's command line: `--trainer.optim.lr 1e-6`.

    Raises InvalidArgument for a file that is none of prime-rl's.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no TOML: {error}") from error
    if not any(name in tree for name in (*_PROCESSES, "model", "max_steps")):
        raise InvalidArgument(f"{path} has neither [model] nor [orchestrator]: name the file that `uv run rl @` reads")
    migration = Migration(str(path))
    settings = {**dict(_leaves("", tree)), **dict(_of_flags(flags))}
    own = {_own(name): value for name, value in settings.items()}
    if _is_supervised(tree):
        migration.change(
            "sft", "--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--loss-mask-type", "qwen", "--input-key",
            "messages", note="rows are conversations; --loss-mask-type names the template's marks",
        )  # fmt: skip
    for name, value in settings.items():
        _move(migration, name, value, own, supervised=_is_supervised(tree))
    if "--n-samples-per-prompt" not in migration.words:
        migration.change("orchestrator.group_size", "--n-samples-per-prompt", "1", note="set the samples of a prompt")
    if "--rollout-batch-size" not in migration.words:
        migration.change("orchestrator.batch_size", "--rollout-batch-size", "128", note="prime-rl's default")
    if not _is_supervised(tree) and "--max-staleness" not in migration.words:
        migration.change("max_async_level", "--max-staleness", "1", note="generation runs one step ahead, as there")
    return migration


def _is_supervised(tree: Mapping[str, Any]) -> bool:
    return "data" in tree and "orchestrator" not in tree


def _of_flags(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    words = [word.partition("=") for word in flags]
    for number, (name, equals, value) in enumerate(words):
        if name.startswith("--"):
            after = words[number + 1][0] if number + 1 < len(words) else "true"
            text = value if equals else "true" if after.startswith("--") else after
            yield name.removeprefix("--").replace("-", "_"), {"true": True, "false": False}.get(text, literal(text))


def _own(name: str) -> str:
    """The name without its process: one job has the settings of all."""
    process, _, rest = name.partition(".")
    return rest if process in _PROCESSES and rest else name


def _leaves(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _move(migration: Migration, name: str, value: Any, settings: Mapping[str, Any], *, supervised: bool) -> None:
    source, own = f"{name} = {value!r:.120}", _own(name)
    if own == "batch_size":
        _batch(migration, source, value, settings)
    elif supervised and own == "data.batch_size":
        migration.carry(source, "--rollout-batch-size", str(value))
    elif supervised and own == "data.seq_len":
        migration.carry(source, "--rollout-max-context-len", str(value))
    elif supervised and own in ("data.name", "data.source") and (names := _data_sets(value)):
        migration.change(source, "--prompt-data", *names, note="write the rows to JSONL if there is no network")
    elif own in _SAME:
        carry_by_table(migration, source, _SAME[own], value)
    else:
        migration.drop(source, reason(own, _DROPPED))


def _data_sets(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    tables = value if isinstance(value, list) else []
    return [str(table["dataset"]) for table in tables if isinstance(table, dict) and "dataset" in table]


def _batch(migration: Migration, source: str, value: Any, settings: Mapping[str, Any]) -> None:
    """prime-rl counts samples, headrace prompts."""
    samples = settings.get("group_size", settings.get("rollouts_per_example", 1))
    if isinstance(value, int) and isinstance(samples, int) and samples > 0 and not value % samples:
        migration.change(
            source, "--rollout-batch-size", str(value // samples), note=f"prompts a step, {samples} samples each"
        )
    else:
        migration.drop(source, "set --rollout-batch-size: prompts a step")
