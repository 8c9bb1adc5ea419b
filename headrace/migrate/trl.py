"""TRL's scripts: the arguments of its configurations and trainers, in Python or as flags. Nothing is run."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.job.schema.section import literal
from headrace.limits import syntax_tree
from headrace.migrate.moved import Migration, Mover, carry_by_table, classifier, parsed_yaml, unknown_value
from headrace.migrate.bash import read_script, script_text

_UNKNOWN = object()
_TRAINERS = ("GRPOTrainer", "RLOOTrainer", "SFTTrainer", "AsyncGRPOTrainer")
_CONFIGS = ("GRPOConfig", "RLOOConfig", "SFTConfig", "AsyncGRPOConfig")
_PEFT = "LoraConfig"
_COMMANDS = {"grpo": "GRPOTrainer", "rloo": "RLOOTrainer", "sft": "SFTTrainer"}
_ESTIMATORS = {"GRPOTrainer": "grpo", "AsyncGRPOTrainer": "grpo", "RLOOTrainer": "rloo"}
_ACCURACY = ("accuracy_reward", "reasoning_accuracy_reward")
"""TRL's own rewards that compare with a row's solution by math_verify."""

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
    "num_train_epochs": "--num-epoch",
    "seed": "--seed",
    "run_name": "--run-name",
    "max_staleness": "--max-staleness",
    "num_generations_eval": "--n-samples-per-eval-prompt",
    "model_name_or_path": "--hf-checkpoint",
    "dataset_name": "--prompt-data",
    "trust_remote_code": "--trust-remote-code",
    "warmup_ratio": "--lr-warmup-fraction",
    "max_length": "--rollout-max-context-len",
    "top_k": "--rollout-top-k",
    "lora_r": "--lora-rank",
    "lora_alpha": "--lora-alpha",
    "lora_dropout": "--lora-dropout",
    "lora_target_modules": "--lora-target-modules",
    "save_total_limit": "--keep-last",
    "eval_steps": "--eval-interval",
    "resume_from_checkpoint": "--load",
    "entropy_coef": "--entropy-coef",
    "ref_model_sync_steps": "--ref-update-interval",
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "GRPOTrainer": {
        "num_generations": 8, "per_device_train_batch_size": 8, "max_completion_length": 256, "learning_rate": 1e-6,
        "loss_type": "dapo", "lr_scheduler_type": "linear", "num_train_epochs": 3,
    },
    "RLOOTrainer": {
        "num_generations": 2, "per_device_train_batch_size": 8, "max_completion_length": 256, "learning_rate": 1e-6,
        "beta": 0.05, "lr_scheduler_type": "linear", "num_train_epochs": 3,
    },
    "SFTTrainer": {
        "per_device_train_batch_size": 8, "learning_rate": 2e-5, "lr_scheduler_type": "linear", "num_train_epochs": 3,
    },
}  # fmt: skip
"""What TRL does without a setting, where headrace does something else."""
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
    "push_to_hub": "--save-hf writes a folder that `huggingface-cli upload` takes",
    "use_liger_kernel": "the model is Megatron's",
    "disable_dropout": _ALWAYS,
    "shuffle_dataset": "give --rollout-shuffle",
    "model_init_kwargs": "the model is Megatron's: --bf16, --attention-backend",
    "attn_implementation": "give --attention-backend",
    "steps_per_generation": "a step generates its own batch: --num-steps-per-rollout divides it",
    "generation_batch_size": "set --rollout-batch-size: prompts a step",
    "num_completions_to_print": "`headrace samples` shows them",
    "vllm_gpu_memory_utilization": "give --sglang-mem-fraction-static",
    "vllm_tensor_parallel_size": "give --rollout-num-gpus-per-engine",
    "vllm_importance_sampling_correction": "give --use-tis",
    "gradient_checkpointing_kwargs": "--recompute-granularity and its companions",
    "eval_strategy": "give --eval-interval and --eval-prompt-data",
    "per_device_eval_batch_size": "evaluations run as fast as the engines can",
    "save_strategy": "give --save-interval",
    "trackio_space_id": "give --use-wandb or --use-tensorboard",
    "project": "give --use-wandb and --wandb-project",
    "logging_strategy": "every step is logged",
    "logging_first_step": "every step is logged",
    "dataset_num_proc": "prompts are read by the buffer",
    "dataset_config": "write the rows to a JSONL file",
    "dataset_train_split": "write the rows to a JSONL file",
    "dataset_test_split": "give --eval-prompt-data",
    "reward_weights": "write one function that adds the rewards",
    "mask_truncated_completions": "a --rollout-sample-filter-path leaves truncated responses out",
    "sync_ref_model": "give --ref-update-interval",
    "use_transformers_paged": "engines are SGLang's, and always there",
    "fp16": "half precision with loss scaling is not supported: use --bf16",
    "tools": "turns and tools are a generate function or an agent: docs/hooks.md, docs/agents.md",
    "environment_factory": "an environment is a generate function or an agent: docs/hooks.md, docs/agents.md",
    "max_tool_calling_iterations": "turns and tools are a generate function or an agent: docs/agents.md",
    "formatting_func": "write the rows as conversations",
    "data_collator": "headrace makes the batches",
    "callbacks": "docs/hooks.md has the places for functions of your own",
    "optimizers": "--optimizer and its companions",
    "packing_strategy": "batches are packed with --use-dynamic-batch-size",
    "packing": "batches are packed with --use-dynamic-batch-size",
}


def migrate(path: Path, environment: Mapping[str, str], flags: Sequence[str] = ()) -> Migration:
    """A script in Python, or one in bash that starts TRL; `flags` are those of the script's command line.

    Raises InvalidArgument for a file that trains nothing with TRL.
    """
    if path.suffix == ".py":
        return _Source(path, _tree(path), flags).migration()
    kind, script, words = _launched(path, environment)
    tree = None if script is None else _tree(script)
    return _Source(script or path, tree, [*words, *flags], kind).migration(str(path))


def _tree(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            return syntax_tree(script_text(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgument(f"{path} is no Python script: {error}") from error


def _launched(path: Path, environment: Mapping[str, str]) -> tuple[str | None, Path | None, list[str]]:
    """The trainer's class where the command says it, the script where it is here, and the flags."""
    script = read_script(path, environment)
    started = script.command_of("trl") or []
    if started[1:] and started[1] in _COMMANDS:
        return _COMMANDS[started[1]], None, started[2:]
    for name, trainer in _COMMANDS.items():
        if words := script.command_of(f"trl.scripts.{name}", f"trl/scripts/{name}.py"):
            return trainer, None, words[1:]
    for command in reversed(script.commands):
        for number, word in enumerate(command):
            if word.endswith(".py") and any(name in Path(word).stem for name in (*_COMMANDS, "gspo", "maxrl", "train")):
                near = (Path(word), path.parent / word, path.parent / Path(word).name)
                file = next((file for file in near if file.is_file()), None)
                named = next((trainer for name, trainer in _COMMANDS.items() if name in Path(word).stem), "GRPOTrainer")
                return None if file else named, file, command[number + 1 :]
    raise InvalidArgument(f"{path} starts neither `trl grpo|rloo|sft` nor a script of TRL: name the one that does")


class _Source:
    """A script with the flags that it is started with; or flags alone, with the trainer's class."""

    def __init__(self, path: Path, tree: ast.Module | None, flags: Sequence[str], trainer: str | None = None) -> None:
        self.path, self.tree = path, ast.Module([], []) if tree is None else tree
        self.values = _assigned(self.tree)
        calls = {_name(node.func): node for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        found = next((name for name in _TRAINERS if name in calls), None)
        if found is None and trainer is None:
            raise InvalidArgument(f"{path} makes none of TRL's trainers: {', '.join(_TRAINERS)}")
        self.trainer = trainer or found or ""
        self.call = calls.get(found or "")
        self.settings: dict[str, tuple[str, Any]] = {}
        for name in _CONFIGS:
            for keyword, value in self._keywords(calls.get(name)):
                self.settings[keyword] = (f"{name}({keyword}={_shown(value)})", value)
        for name, value in _attributes(self.tree):
            self.settings[name] = (f"training_args.{name} = {_shown(value)}", value)
        for name, value in _of_flags(flags, path.parent):
            self.settings[name] = (f"--{name} {value if isinstance(value, str) else _shown(value)}", value)
        self.lora = self._keywords(calls.get(_PEFT))
        self.makes_adapters = _PEFT in calls

    def migration(self, origin: str | None = None) -> Migration:
        migration = Migration(origin or str(self.path))
        supervised = self.trainer == "SFTTrainer"
        if supervised:
            migration.change(
                "SFTTrainer", "--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--loss-mask-type", "qwen",
                "--input-key", "messages", note="rows are conversations; --loss-mask-type names the template's marks",
            )  # fmt: skip
        else:
            migration.carry(self.trainer, "--advantage-estimator", _ESTIMATORS[self.trainer])
        self._trainer(migration)
        values = {name: value for name, (_, value) in self.settings.items()}
        known = {**_DEFAULTS[self.trainer.removeprefix("Async")], **values}
        if self.trainer == "AsyncGRPOTrainer":
            known = {"max_staleness": 4, **known}
        for name, (source, value) in self.settings.items():
            _setting(migration, source, name, value, known)
        for name, value in known.items():
            if name not in values and not (name == "num_train_epochs" and _positive(values.get("max_steps"))):
                _setting(migration, f"{name}={value}, TRL's default", name, value, known)
        for keyword, value in self.lora:
            _by_table(migration, f"{_PEFT}({keyword}={_shown(value)})", keyword, value, _OF_LORA)
        if self.makes_adapters and "--lora-rank" not in migration.words:
            migration.change(f"{_PEFT}()", "--lora-rank", "8", "--lora-alpha", "8", note="peft's defaults")
        if not supervised:
            migration.change("prompts", "--apply-chat-template", "--input-key", "prompt", note="rows with messages")
        return migration

    def _trainer(self, migration: Migration) -> None:
        given = {name for name, _ in self._keywords(self.call)}
        for keyword, value in self._keywords(self.call):
            if keyword == "model":
                self._model(migration, value)
            elif keyword == "reward_funcs" and "reward_funcs" not in self.settings:
                self._rewards(migration)
            elif keyword == "train_dataset":
                self._dataset(migration)
            elif keyword not in (
                "args",
                "peft_config",
                "processing_class",
                "tokenizer",
                "eval_dataset",
                "reward_funcs",
            ):
                why = _DROPPED.get(keyword, "set what it does with a hook: docs/hooks.md")
                migration.drop(f"{keyword}={_shown(value)}", why)
            elif keyword == "eval_dataset" and value is not None:
                migration.drop("eval_dataset", "write it to a JSONL file, and name it with --eval-prompt-data")
        if "reward_funcs" in self.settings:
            _, value = self.settings.pop("reward_funcs")
            self._named_rewards(migration, [str(name) for name in _listed(value)])
        if "reward_model_name_or_path" in self.settings:
            _, value = self.settings.pop("reward_model_name_or_path")
            migration.change(
                f"reward model {value}", *classifier(str(value)), note="a sequence classifier: docs/hooks.md"
            )
        if "model" not in given and "model_name_or_path" not in self.settings and self.call is not None:
            migration.drop("model", "set --hf-checkpoint")

    def _model(self, migration: Migration, value: Any) -> None:
        node = _argument(self.call, "model")
        if isinstance(node, ast.Name):
            node = self._expression(node.id) or node
        if isinstance(value, str):
            migration.carry(f'model="{value}"', "--hf-checkpoint", value)
        elif "model_name_or_path" in self.settings:
            return
        elif isinstance(node, ast.BoolOp) and isinstance(default := _literal(node.values[-1]), str):
            migration.change(f"model={ast.unparse(node)}", "--hf-checkpoint", default, note="the script's default")
        else:
            migration.drop(
                "model", "the script takes it from its command line: add `-- --model_name_or_path …`, or name the "
                "script in bash that starts it",
            )  # fmt: skip

    def _rewards(self, migration: Migration) -> None:
        node = _argument(self.call, "reward_funcs")
        if isinstance(node, ast.Name):
            node = self._expression(node.id) or node
        entries = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        names = [entry.value if isinstance(entry, ast.Constant) else _name(entry) for entry in entries if entry]
        self._named_rewards(migration, [str(name) for name in names if name])

    def _named_rewards(self, migration: Migration, names: Sequence[str]) -> None:
        """One function scores here: TRL's comparison with a solution, a classifier, or one of the script's own."""
        top = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        inner = {node.name for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        chosen = next((name for name in names if name in _ACCURACY and name not in inner), None)
        chosen = chosen or (names[0] if len(names) == 1 else None)
        for name in names:
            source = f"reward_funcs: {name}"
            if name != chosen:
                migration.drop(source, "one function here: write one that adds the rewards, for --custom-rm-path")
            elif name in _ACCURACY and name not in inner:
                migration.change(source, "--rm-type", "math", "--label-key", "solution", note="compares with the label")
            elif name in top:
                label = _label(top[name])
                words = ("--custom-rm-path", f"{self.path}:{name}", *label)
                migration.change(source, *words, note=self._note_of_reward())
            elif name in inner:
                migration.drop(source, "it is inside of a block: move it to a file's top level, for --custom-rm-path")
            elif "/" in name:
                migration.change(source, *classifier(name), note="a sequence classifier of one output: docs/hooks.md")
            elif "." in name:
                migration.carry(source, "--custom-rm-path", name)
            else:
                migration.drop(source, "copy it to a file of yours, for --custom-rm-path")
        if not names:
            migration.drop("reward_funcs", "the script computes them: set --rm-type or --custom-rm-path")

    def _note_of_reward(self) -> str:
        form = "TRL's form f(prompts, completions, **kwargs) is taken"
        runs = any(node is self.call for statement in self.tree.body for node in _run_at_import(statement))
        return f"{form}; move it to a file of its own, because importing this one trains" if runs else form

    def _dataset(self, migration: Migration) -> None:
        loaded, changes = self._loaded(_argument(self.call, "train_dataset"), 0)
        name = _value(loaded.args[0], self.values) if loaded is not None and loaded.args else None
        if "dataset_name" in self.settings:
            _, name = self.settings.pop("dataset_name")
        if isinstance(name, str):
            changed = "; the script changes the rows" if changes else ""
            migration.change(
                f'load_dataset("{name}")', "--prompt-data", name,
                note=f"without a network write it to a JSONL file: dataset.to_json(…){changed}",
            )  # fmt: skip
        else:
            migration.drop("train_dataset", "the script computes it: write it to a JSONL file, for --prompt-data")

    def _loaded(self, node: ast.expr | None, depth: int) -> tuple[ast.Call | None, bool]:
        """The call of load_dataset that a data set comes from, and whether rows are changed on the way."""
        match node:
            case ast.Call(func=ast.Name("load_dataset") | ast.Attribute(attr="load_dataset")):
                return node, False
            case ast.Call(func=ast.Attribute(value=inner, attr=name)) if depth < _MAX_STEPS:
                loaded, changes = self._loaded(inner, depth + 1)
                return loaded, changes or name in ("map", "filter", "select")
            case ast.Subscript(value=inner) | ast.Attribute(value=inner) if depth < _MAX_STEPS:
                return self._loaded(inner, depth + 1)
            case ast.Name(name) if depth < _MAX_STEPS:
                sources = _sources(self.tree, name)
                found = [self._loaded(value, depth + 1) for value in sources if not _mentions_only(value, name)]
                loaded = next((call for call, _ in found if call is not None), None)
                return loaded, len(sources) > 1 or any(changes for _, changes in found)
        return None, False

    def _expression(self, name: str) -> ast.expr | None:
        return next(iter(_sources(self.tree, name)), None)

    def _keywords(self, call: ast.Call | None) -> list[tuple[str, Any]]:
        return [(each.arg, _value(each.value, self.values)) for each in call.keywords if each.arg] if call else []


def _label(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """The column that a reward function of TRL's form asks for by name."""
    names = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
    columns = [name for name in names if name not in ("prompts", "completions", "completion_ids", "environments")]
    return ("--label-key", columns[0]) if columns else ()


_MAX_STEPS = 12
"""Assignments and calls that are followed back from a data set."""


def _argument(call: ast.Call | None, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None) if call else None


def _run_at_import(statement: ast.stmt) -> Iterator[ast.AST]:
    """What an import runs: not the bodies of functions, nor those of `if __name__ == …`."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return iter(())
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return iter(())
    return ast.walk(statement)


def _sources(tree: ast.AST, name: str) -> list[ast.expr]:
    """The expressions that are assigned to a name, alone or in a tuple."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        for each in (target.elts if isinstance(target, ast.Tuple) else [target])
        if isinstance(each, ast.Name) and each.id == name
    ]


def _mentions_only(node: ast.expr, name: str) -> bool:
    """An expression that changes what the name had before."""
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _attributes(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """`training_args.x = value`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Attribute(ast.Name(name), attribute)], expression):
                if name.endswith(("training_args", "config")):
                    value = _literal(expression)
                    yield attribute, _UNKNOWN if isinstance(value, ast.AST) else value


def _of_flags(words: Sequence[str], folder: Path) -> Iterator[tuple[str, Any]]:
    """Flags of TrlParser; those of a YAML file that --config names come first."""
    given: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") or (given and word.lstrip("\0").startswith("--")):
            name, equals, value = word.partition("=")
            given.append((name.lstrip("\0-").replace("-", "_"), [value] if equals else []))
        elif given:
            given[-1][1].append(word)
    for name, values in given:
        if name == "config" and values:
            yield from _of_config(folder, values[0])
    for name, values in given:
        if name not in ("config", "config_file"):
            yield name, _flag_value(values)


def _of_config(folder: Path, name: str) -> Iterator[tuple[str, Any]]:
    file = next((file for file in (Path(name), folder / name) if file.is_file()), None)
    if file is None:
        raise InvalidArgument(f"--config {name} is not here: run the command where it is, or beside the script")
    tree = parsed_yaml(file)
    if isinstance(tree, dict):
        yield from ((str(name), value) for name, value in tree.items())


def _flag_value(values: Sequence[str]) -> Any:
    if any(unknown_value(value) for value in values):
        return _UNKNOWN
    parsed = [_read_value(value.strip(",")) for value in values]
    return True if not parsed else parsed[0] if len(parsed) == 1 else parsed


def _read_value(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), literal(text))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _positive(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _setting(migration: Migration, source: str, name: str, value: Any, others: Mapping[str, Any]) -> None:
    if value is _UNKNOWN:
        migration.drop(source, "the script computes this value: set it yourself")
    elif name in _SPECIAL:
        _SPECIAL[name](migration, source, value, others)
    elif name in _SAME:
        carry_by_table(migration, source, _SAME[name], value)
    else:
        migration.drop(source, _DROPPED.get(name, "no option of headrace means this"))


def _beta(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    if value:
        migration.carry(source, "--use-kl-loss", "--kl-loss-coef", str(value), "--kl-loss-type", "low_var_kl")
    else:
        migration.carry(source, note="no KL term is the default here")


def _batch(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    steps, generations = others.get("gradient_accumulation_steps", 1), others.get("num_generations", 1)
    if not all(isinstance(each, int) for each in (value, steps, generations)):
        migration.drop(source, "set --rollout-batch-size (prompts a step) and --micro-batch-size")
        return
    prompts = max(1, value * steps // generations)
    migration.change(
        source, "--micro-batch-size", str(value), "--rollout-batch-size", str(prompts),
        note=f"prompts a step, of {generations} samples each, on one device: there it grows with the devices",
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
    kinds = {
        "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
    }  # fmt: skip
    if value in kinds:
        migration.carry(source, "--lr-decay-style", kinds[value])
    else:
        migration.drop(source, f"--lr-decay-style has {', '.join(sorted(set(kinds.values())))}")


def _steps(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    migration.carry(source, *(("--num-rollout", str(value)) if _positive(value) else ()))


def _switch(flag: str, off: str) -> Mover:
    def move(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
        migration.carry(source, *([flag] if value else ()), note="" if value else off)

    return move


def _adapters(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    if value and "lora_r" not in others:
        migration.change(source, "--lora-rank", "16", "--lora-alpha", "32", note="TRL's defaults")
    else:
        migration.carry(source, note="with --lora-rank")


def _type(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    if value == "bfloat16":
        migration.change(source, "--bf16", note="the optimizer's states stay float32")
    else:
        migration.drop(source, "the trainer computes in float32, or in bfloat16 with --bf16")


def _template(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    migration.carry(source, "--apply-chat-template-kwargs", json.dumps(value))


def _loggers(migration: Migration, source: str, value: Any, others: Mapping[str, Any]) -> None:
    names = _listed(value)
    words = [flag for name, flag in (("wandb", "--use-wandb"), ("tensorboard", "--use-tensorboard")) if name in names]
    migration.carry(source, *words, note="" if words else "the run's folder has every metric")


_SPECIAL: Mapping[str, Mover] = {
    "max_steps": _steps,
    "use_peft": _adapters,
    "dtype": _type,
    "torch_dtype": _type,
    "report_to": _loggers,
    "chat_template_kwargs": _template,
    "bf16": _switch("--bf16", "the default here"),
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


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _shown(value: Any) -> str:
    return "…" if value is _UNKNOWN else repr(value)
