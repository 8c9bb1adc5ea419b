"""TRL's scripts: the arguments of GRPOConfig, RLOOConfig or SFTConfig, and of the trainer. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.limits import syntax_tree
from headrace.migrate.moved import Migration, carry_by_table

_UNKNOWN = object()
_TRAINERS = ("GRPOTrainer", "RLOOTrainer", "SFTTrainer", "AsyncGRPOTrainer")
_CONFIGS = ("GRPOConfig", "RLOOConfig", "SFTConfig", "AsyncGRPOConfig")
_PEFT = "LoraConfig"

_SAME: Mapping[str, str] = {
    "learning_rate": "--lr",
    "adam_beta1": "--adam-beta1",
    "adam_beta2": "--adam-beta2",
    "adam_epsilon": "--adam-eps",
    "weight_decay": "--weight-decay",
    "max_grad_norm": "--clip-grad",
    "warmup_steps": "--lr-warmup-iters",
    "num_generations": "--n-samples-per-prompt",
    "max_completion_length": "--rollout-max-response-len",
    "max_prompt_length": "--rollout-max-prompt-len",
    "temperature": "--rollout-temperature",
    "top_p": "--rollout-top-p",
    "epsilon": "--eps-clip",
    "epsilon_high": "--eps-clip-high",
    "delta": "--eps-clip-c",
    "max_steps": "--num-rollout",
    "num_train_epochs": "--num-epoch",
    "seed": "--seed",
    "run_name": "--run-name",
    "max_staleness": "--max-staleness",
    "bf16": "--bf16",
    "num_generations_eval": "--n-samples-per-eval-prompt",
    "chat_template_kwargs": "--apply-chat-template-kwargs",
}
_OF_LORA: Mapping[str, str] = {
    "r": "--lora-rank", "lora_alpha": "--lora-alpha", "lora_dropout": "--lora-dropout",
    "target_modules": "--lora-target-modules",
}  # fmt: skip
_ALWAYS = "headrace does this always"
_DROPPED: Mapping[str, str] = {
    "output_dir": "the run's folder is --run-dir / --run-name",
    "use_vllm": "engines are SGLang's, and always there",
    "vllm_mode": "engines are processes of their own; --colocate shares the GPUs",
    "vllm_server_host": "engines are started by the run, or named with --rollout-external-engine-addrs",
    "vllm_server_port": "engines are started by the run, or named with --rollout-external-engine-addrs",
    "logging_steps": "every step is logged",
    "remove_unused_columns": "rows keep all fields; --metadata-key names those that a reward sees",
    "log_completions": "`headrace samples` shows them",
    "report_to": "give --use-wandb or --use-tensorboard",
    "push_to_hub": "--save-hf writes a folder that `huggingface-cli upload` takes",
    "use_liger_kernel": "the model is Megatron's",
    "disable_dropout": _ALWAYS,
    "shuffle_dataset": "give --rollout-shuffle",
    "packing": "batches are packed with --use-dynamic-batch-size",
}


def migrate(path: Path, environment: Mapping[str, str], _: Sequence[str] = ()) -> Migration:
    """Raises InvalidArgument for a file that makes no trainer of TRL."""
    try:
        tree = syntax_tree(path.read_text())
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise InvalidArgument(f"{path} is no Python script: {error}") from error
    values = _assigned(tree)
    calls = dict(_calls(tree))
    trainer = next((calls[name] for name in _TRAINERS if name in calls), None)
    if trainer is None:
        raise InvalidArgument(f"{path} makes none of TRL's trainers: {', '.join(_TRAINERS)}")
    migration = Migration(str(path))
    _trainer(migration, trainer, values, path)
    for name in _CONFIGS:
        if name in calls:
            for keyword, value in _keywords(calls[name], values):
                _setting(migration, name, keyword, value, {k: v for k, v in _keywords(calls[name], values) if k})
    if _PEFT in calls:
        for keyword, value in _keywords(calls[_PEFT], values):
            _by_table(migration, f"{_PEFT}({keyword}=…)", keyword, value, _OF_LORA)
    return migration


def _trainer(migration: Migration, call: ast.Call, values: Mapping[str, Any], path: Path) -> None:
    if _name(call.func) == "SFTTrainer":
        migration.change(
            "SFTTrainer", "--loss-type", "sft_loss", "--n-samples-per-prompt", "1",
            note="rows are conversations; name the template's marks with --loss-mask-type",
        )  # fmt: skip
    elif _name(call.func) == "RLOOTrainer":
        migration.carry("RLOOTrainer", "--advantage-estimator", "rloo")
    else:
        migration.carry("GRPOTrainer", "--advantage-estimator", "grpo")
    for keyword, value in _keywords(call, values):
        source = f"{keyword}={_shown(value)}"
        if keyword == "model" and isinstance(value, str):
            migration.carry(source, "--hf-checkpoint", value)
        elif keyword == "reward_funcs":
            _rewards(migration, call, path)
        elif keyword == "train_dataset":
            _dataset(migration, call, values)
        elif keyword not in ("args", "peft_config", "processing_class", "eval_dataset", "model"):
            migration.drop(source, "set what it does with a hook: docs/hooks.md")


def _rewards(migration: Migration, call: ast.Call, path: Path) -> None:
    node = next(each.value for each in call.keywords if each.arg == "reward_funcs")
    names = [_name(each) for each in (node.elts if isinstance(node, ast.List) else [node])]
    if len(names) == 1 and names[0]:
        migration.change(
            f"reward_funcs={names[0]}", "--custom-rm-path", f"{path.name}:{names[0]}",
            note="TRL's form f(prompts, completions, **kwargs) is taken; move it into a file without the trainer",
        )  # fmt: skip
    else:
        migration.drop(
            f"reward_funcs=[{', '.join(filter(None, names))}]",
            "one function here: write one that adds them, and name it with --custom-rm-path",
        )


def _dataset(migration: Migration, call: ast.Call, values: Mapping[str, Any]) -> None:
    node = next(each.value for each in call.keywords if each.arg == "train_dataset")
    loaded = values.get(node.id) if isinstance(node, ast.Name) else node
    if isinstance(loaded, ast.Call) and _name(loaded.func) == "load_dataset" and loaded.args:
        name = _value(loaded.args[0], values)
        if isinstance(name, str):
            migration.change(
                f'load_dataset("{name}")', "--prompt-data", name, "--input-key", "prompt",
                note="write it to a JSONL file if there is no network: dataset.to_json(…)",
            )  # fmt: skip
            return
    migration.drop("train_dataset", "the script computes it: write it to a JSONL file, and name it with --prompt-data")


def _setting(migration: Migration, config: str, keyword: str, value: Any, others: Mapping[str, Any]) -> None:
    source = f"{config}({keyword}={_shown(value)})"
    if value is _UNKNOWN:
        migration.drop(source, "the script computes this value: set it yourself")
    elif keyword in _SPECIAL:
        _SPECIAL[keyword](migration, source, value, others)
    elif keyword in _SAME:
        carry_by_table(migration, source, _SAME[keyword], value)
    else:
        migration.drop(source, _DROPPED.get(keyword, "no option of headrace means this"))


def _beta(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    if value:
        migration.carry(source, "--use-kl-loss", "--kl-loss-coef", str(value), "--kl-loss-type", "low_var_kl")
    else:
        migration.carry(source, note="no KL term is the default here")


def _batch(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    steps, generations = others.get("gradient_accumulation_steps", 1), others.get("num_generations", 8)
    if not all(isinstance(each, int) for each in (value, steps, generations)):
        migration.drop(source, "set --rollout-batch-size (prompts a step) and --micro-batch-size")
        return
    prompts = max(1, value * steps // generations)
    migration.change(
        source, "--micro-batch-size", str(value), "--rollout-batch-size", str(prompts),
        note=f"a step has {prompts} prompts x {generations} samples on one device; there it grows with the devices",
    )  # fmt: skip


def _accumulation(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    migration.change(source, note="in --rollout-batch-size: a step's samples are divided into micro-batches")


def _loss(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    if value in ("bnpo", "dapo"):
        migration.carry(source, "--calculate-per-token-loss")
    elif value == "grpo":
        migration.carry(source, note="means of each response, the default here")
    elif value == "dr_grpo":
        migration.change(
            source, "--disable-grpo-std-normalization", "--loss-constant-length",
            str(others.get("max_completion_length", 256)), note="Dr.GRPO: sums over a constant length",
        )  # fmt: skip
    else:
        migration.drop(source, "docs/algorithms.md lists the losses")


def _scale(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    if value in (False, "none"):
        migration.carry(source, "--disable-grpo-std-normalization")
    elif value in (True, "group"):
        migration.carry(source, note="the default here")
    else:
        migration.drop(source, "rewards are divided by their group's standard deviation, or not at all")


def _importance(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    if value == "sequence":
        migration.change(source, "--advantage-estimator", "gspo", note="ratios of whole responses")
    else:
        migration.carry(source, note="ratios of tokens, the default here")


def _iterations(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    if value == 1:
        migration.carry(source, note="each batch is trained once")
    else:
        migration.drop(source, "a sample is trained once; --num-steps-per-rollout makes several steps of a batch")


def _checkpointing(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    words = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    migration.carry(source, *(words if value else ()))


def _saves(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    migration.carry(source, "--save-interval", str(value))


def _schedule(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    kinds = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if value in kinds:
        migration.carry(source, "--lr-decay-style", kinds[value])
    else:
        migration.drop(source, f"--lr-decay-style has {', '.join(sorted(set(kinds.values())))}")


_SPECIAL: Mapping[str, Callable[[Migration, str, Any, Mapping[str, Any]], None]] = {
    "beta": _beta,
    "per_device_train_batch_size": _batch,
    "gradient_accumulation_steps": _accumulation,
    "loss_type": _loss,
    "scale_rewards": _scale,
    "importance_sampling_level": _importance,
    "num_iterations": _iterations,
    "gradient_checkpointing": _checkpointing,
    "save_steps": _saves,
    "lr_scheduler_type": _schedule,
}


def _by_table(migration: Migration, source: str, keyword: str, value: Any, table: Mapping[str, str]) -> None:
    if value is _UNKNOWN:
        migration.drop(source, "the script computes this value: set it yourself")
    elif keyword in table:
        carry_by_table(migration, source, table[keyword], value)
    else:
        migration.drop(source, "no option of headrace means this")


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    wanted = {*_TRAINERS, *_CONFIGS, _PEFT}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(_name(node.func), node) for node in nodes if _name(node.func) in wanted]


def _assigned(tree: ast.AST) -> dict[str, Any]:
    """Names that are assigned once: their literal, or the expression."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            found[name] = _UNKNOWN if name in found else _literal(node.value)
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    value = values.get(node.id, _UNKNOWN) if isinstance(node, ast.Name) else _literal(node)
    return _UNKNOWN if isinstance(value, ast.AST) else value


def _keywords(call: ast.Call, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(each.arg, _value(each.value, values)) for each in call.keywords if each.arg]


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _shown(value: Any) -> str:
    return "…" if value is _UNKNOWN else repr(value)
