"""TRL's scripts: the arguments of its configurations and trainers, in Python or as flags. Nothing is run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from os.path import isfile  # unlike Path.is_file it takes any text for a name
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.job.schema.section import literal
from headrace.limits import syntax_tree
from headrace.migrate.bash import DECIDED_LATER, read_script, script_text
from headrace.migrate.table import UNKNOWN, Migration, Table, Values, flags_of, parsed_yaml, unknown_value

_TRAINERS = ("GRPOTrainer", "RLOOTrainer", "SFTTrainer", "AsyncGRPOTrainer")
_CONFIGS = ("GRPOConfig", "RLOOConfig", "SFTConfig", "AsyncGRPOConfig")
_COMMANDS = {"grpo": "GRPOTrainer", "rloo": "RLOOTrainer", "sft": "SFTTrainer"}
_SCRIPTS = (*_COMMANDS, "gspo", "maxrl", "train")
"""Parts of the names of scripts that train."""
_OF_TRAINERS = ("args", "peft_config", "processing_class", "tokenizer", "model", "train_dataset", "reward_funcs")
"""Arguments of trainers that need no row: the others are settings."""
_ACCURACY = ("accuracy_reward", "reasoning_accuracy_reward")
"""TRL's own rewards that compare with a row's solution by math_verify."""
_REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "environments")
_MAX_STEPS = 12
"""Assignments and calls that are followed back from a data set."""


def migrate(path: Path, environment: Mapping[str, str], flags: Sequence[str] = ()) -> Migration:
    """A script in Python, or one in bash that starts TRL; `flags` are those of the script's command line.

    Raises InvalidArgument for a file that trains nothing with TRL.
    """
    is_python = path.suffix == ".py"
    trainer, script, words = (None, path, []) if is_python else _launched(path, environment)
    source = _Source(ast.Module([], []) if script is None else _tree(script))
    trainer = next((name for name in _TRAINERS if name in source.calls), trainer)
    if trainer is None:
        raise InvalidArgument(f"{script} makes none of TRL's trainers: {', '.join(_TRAINERS)}")
    migration, call = Migration(str(path)), source.calls.get(trainer)
    settings = {**source.settings(call), **_of_flags([*words, *flags], path.parent)}
    _, rewards = settings.pop("reward_funcs", ("", source.rewards(call)))
    names = rewards if isinstance(rewards, list) else [] if rewards is UNKNOWN else [rewards]
    source.model_and_rows(call, settings)
    if trainer == "SFTTrainer":
        migration.supervise(trainer)
    else:
        migration.carry(trainer, "--advantage-estimator", "rloo" if trainer == "RLOOTrainer" else "grpo")
    if rewards is not None:
        _move_rewards(migration, source, script or path, list(map(str, names)))
    defaults = _TABLE.defaults[trainer] | (_TABLE.defaults["LoraConfig"] if "LoraConfig" in source.calls else {})
    _TABLE.move(migration, settings, defaults)
    return migration


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
        for number, word in enumerate(map(Path, command)):
            if word.suffix == ".py" and any(name in word.stem for name in _SCRIPTS):
                file = next(
                    (file for file in (word, path.parent / word, path.parent / word.name) if isfile(file)), None
                )
                named = next((trainer for name, trainer in _COMMANDS.items() if name in word.stem), "GRPOTrainer")
                return None if file else named, file, command[number + 1 :]
    raise InvalidArgument(f"{path} starts neither `trl grpo|rloo|sft` nor a script of TRL: name the one that does")


def _of_flags(words: Sequence[str], folder: Path) -> dict[str, tuple[str, Any]]:
    """Flags of TrlParser; those of a YAML file that --config names come first."""
    flags = [(flag.lstrip(f"{DECIDED_LATER}-").replace("-", "_"), flag, values) for flag, values in flags_of(words)]
    settings: dict[str, tuple[str, Any]] = {}
    for file in (values[0] for name, _, values in flags if name == "config" and values):
        settings |= {name: (f"--{name} {value}", value) for name, value in _of_config(file, folder).items()}
    for name, flag, values in flags:
        if any(map(unknown_value, (flag, *values))):
            settings[name] = (f"--{name} …", UNKNOWN)
        elif name not in ("config", "config_file"):
            parsed = [{"true": True, "false": False}.get(value.lower(), literal(value.strip(","))) for value in values]
            settings[name] = (" ".join((flag, *values)), parsed if parsed[1:] else parsed[0] if parsed else True)
    return settings


def _of_config(name: str, folder: Path) -> dict[str, Any]:
    file = next((file for file in (Path(name), folder / name) if isfile(file)), None)
    if file is None:
        raise InvalidArgument(f"--config {name} is not here: run the command where it is, or beside the script")
    tree = parsed_yaml(file)
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


class _Source:
    """A script's syntax tree; empty where flags alone start TRL."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.calls = {_name(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}

    def settings(self, trainer: ast.Call | None) -> dict[str, tuple[str, Any]]:
        """Arguments of configurations and of the trainer, and what is assigned to `training_args.x`."""
        settings: dict[str, tuple[str, Any]] = {}
        for config in (*_CONFIGS, "LoraConfig"):
            for name, value in self._arguments(self.calls.get(config)):
                key = name if config in _CONFIGS else f"{config}.{name}"
                settings[key] = (f"{config}({name}={_shown(value)})", value)
        for node in ast.walk(self.tree):
            match node:
                case ast.Assign([ast.Attribute(ast.Name(owner), name)], expression):
                    if owner.endswith(("training_args", "config")):
                        value = self._value(expression)
                        settings[name] = (f"{owner}.{name} = {_shown(value)}", value)
        for name, value in self._arguments(trainer):
            if name not in _OF_TRAINERS and value is not None:
                settings[name] = (f"{name}={_shown(value)}", None)
        return settings

    def model_and_rows(self, trainer: ast.Call | None, settings: dict[str, tuple[str, Any]]) -> None:
        """Adds what the trainer's call says of its model and its rows."""
        if trainer is None:
            return
        node = self._followed(_argument(trainer, "model"))
        default = node.values[-1] if isinstance(node, ast.BoolOp) else node
        if isinstance(name := self._value(default), str) and (default is node or "model_name_or_path" not in settings):
            settings["model_name_or_path"] = (f"model={ast.unparse(node)}" if node else "", name)
        elif "model_name_or_path" not in settings:
            settings["model"] = ("model", None)
        loaded, changed = self._loaded(_argument(trainer, "train_dataset"), 0)
        rows = self._value(loaded.args[0]) if loaded is not None and loaded.args else None
        if isinstance(rows, str):
            settings.setdefault("dataset_name", (f'load_dataset("{rows}")', rows))
        if changed or "dataset_name" not in settings:
            settings["train_dataset"] = ("train_dataset", None)

    def rewards(self, trainer: ast.Call | None) -> list[str] | None:
        """The names of reward functions, or of models that score; None where the trainer has none."""
        if (argument := _argument(trainer, "reward_funcs")) is None:
            return None
        node = self._followed(argument)
        entries = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        names = [entry.value if isinstance(entry, ast.Constant) else _name(entry) for entry in entries]
        return [str(name) for name in names if name]

    def trains_when_imported(self) -> bool:
        """Whether a trainer is made outside of functions and of `if __name__ == …`."""
        statements = [node for node in self.tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
        run = [node for node in statements if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))]
        calls = [node for statement in run for node in ast.walk(statement) if isinstance(node, ast.Call)]
        return any(_name(call.func) in _TRAINERS for call in calls)

    def _arguments(self, call: ast.Call | None) -> list[tuple[str, Any]]:
        keywords = [] if call is None else call.keywords
        return [(keyword.arg, self._value(keyword.value)) for keyword in keywords if keyword.arg]

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
                sources = self._sources(name)
                others = [value for value in sources if name not in {_name(part) for part in ast.walk(value)}]
                origins = [self._loaded(value, depth + 1) for value in others]
                loaded = next((call for call, _ in origins if call is not None), None)
                return loaded, len(sources) > 1 or any(changes for _, changes in origins)
        return None, False

    def _sources(self, name: str) -> list[ast.expr]:
        """The expressions that are assigned to a name; of a tuple, the whole as a part of it."""
        sources: list[ast.expr] = []
        for node in [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign)]:
            for target in node.targets:
                if _name(target) == name and isinstance(target, ast.Name):
                    sources.append(node.value)
                elif isinstance(target, ast.Tuple) and name in map(_name, target.elts):
                    sources.append(ast.Subscript(node.value, ast.Constant(name)))
        return sources

    def _followed(self, node: ast.expr | None) -> ast.expr | None:
        return next(iter(self._sources(node.id)), node) if isinstance(node, ast.Name) else node

    def _value(self, node: ast.expr | None) -> Any:
        """A literal, or that of a name which is assigned once."""
        if isinstance(node, ast.Name):
            sources = self._sources(node.id)
            node = sources[0] if len(sources) == 1 else node
        try:
            return UNKNOWN if node is None else ast.literal_eval(node)
        except (ValueError, RecursionError):
            return UNKNOWN


def _move_rewards(migration: Migration, source: _Source, path: Path, names: Sequence[str]) -> None:
    """One function scores here: TRL's comparison with a solution, a classifier, or one of the script's own."""
    functions = {node.name: node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)}
    chosen = next((name for name in names if name in _ACCURACY and name not in functions), None)
    chosen = chosen or (names[0] if len(names) == 1 else None)
    for name in names:
        reward, function = f"reward_funcs: {name}", functions.get(name)
        if name != chosen:
            migration.drop(reward, "one function here: write one that adds the rewards, for --custom-rm-path")
        elif function is not None and function not in source.tree.body:
            migration.drop(reward, "it is inside of a block: move it to a file's top level, for --custom-rm-path")
        elif function is not None:
            columns = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
            label = next((("--label-key", name) for name in columns if name not in _REWARD_ARGUMENTS), ())
            note = "TRL's form f(prompts, completions, **kwargs) is taken"
            note += "; move it to a file of its own, because importing this one trains" * source.trains_when_imported()
            migration.change(reward, "--custom-rm-path", f"{path}:{name}", *label, note=note)
        elif name in _ACCURACY:
            migration.change(reward, "--rm-type", "math", "--label-key", "solution", note="compares with the label")
        elif "/" in name:
            _TABLE.row("reward_model_name_or_path").move(migration, reward, name, {})
        elif "." in name:
            migration.carry(reward, "--custom-rm-path", name)
        else:
            migration.drop(reward, "copy it to a file of yours, for --custom-rm-path")
    if not names:
        migration.drop("reward_funcs", "the script computes them: set --rm-type or --custom-rm-path")


def _batch(migration: Migration, source: str, value: Any, settings: Values) -> None:
    steps, generations = settings.get("gradient_accumulation_steps", 1), settings.get("num_generations", 1)
    if not all(isinstance(number, int) and number > 0 for number in (value, steps, generations)):
        migration.drop(source, "set --rollout-batch-size (prompts a step) and --micro-batch-size")
        return
    words = ("--micro-batch-size", str(value), "--rollout-batch-size", str(max(1, value * steps // generations)))
    note = f"prompts a step, of {generations} samples each, on one device: there it grows with the devices"
    migration.change(source, *words, note=note)


_TABLE = Table("trl", {"per_device_train_batch_size": _batch})


def _argument(call: ast.Call | None, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None) if call else None


def _name(node: ast.AST | None) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _shown(value: Any) -> str:
    return "…" if value is UNKNOWN else repr(value)
