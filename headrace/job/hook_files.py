"""The forms of user functions by the flag that names them, and what a file has of them, without importing it.

`--custom-rm-path f.py` means the only function of the file that fits.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from headrace.errors import ConfigError
from headrace.job.names import SLIME
from headrace.limits import syntax_tree

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_SLIME = ("slime.", "slime_plugins.")


class _Way(Enum):
    """How a definition may be recognised; the first way that finds any decides."""

    NAMES = "by the names of its arguments, or by its method"
    NUMBER = "by the number of its arguments"
    GUESSED = "a class whose base is not read here, and may have the method"


_WAYS = tuple(_Way)
_METHODS = frozenset({"get_samples", "compute_reward"})
_NO_HOOKS = ("ABC", "BaseModel", "Enum", "Exception", "Generic", "NamedTuple", "Protocol", "TypedDict", "object")
_KNOWN_BASES: Mapping[str, frozenset[str]] = {
    **{name: frozenset() for name in _NO_HOOKS},
    "RolloutDataSource": frozenset({"get_samples", "add_samples"}),
    "RolloutDataSourceWithBuffer": frozenset({"get_samples", "add_samples", "buffer_filter"}),
    "SequenceClassifier": frozenset({"compute_reward"}),
}
"""The methods of classes that hooks extend; none of those that are no hooks."""


@dataclass(frozen=True, slots=True)
class HookForm:
    """The forms that a flag's hook may have: for each the names of the first arguments, or a class's method."""

    arguments: Sequence[tuple[str, ...]] = ()
    method: str | None = None


@dataclass(frozen=True, slots=True)
class TrainerForm:
    """How the trainer calls the hook that `option` names.

    `positional` arguments come in this order, `keywords` by name, and more keywords may come with them. `if_named` come
    by name to functions that have an argument of that name.
    """

    option: str
    positional: tuple[str, ...]
    returns: str
    keywords: tuple[str, ...] = ()
    if_named: tuple[str, ...] = ()

    @property
    def accepted(self) -> str:
        """The signature as a user would write it."""
        named = ", *, " + ", ".join(self.keywords) + ", **kwargs" if self.keywords else ""
        named += "".join(f"[, {name}]" for name in self.if_named)
        return f"def f({', '.join(self.positional)}{named}) -> {self.returns}"


TRAINER_FORMS: Mapping[str, TrainerForm] = {
    "sample_filter": TrainerForm("rollout_sample_filter_path", ("args", "samples"), "None"),
    "reward_post_process": TrainerForm(
        "custom_reward_post_process_path", ("args", "samples"), "tuple[list[float], list[float]]"
    ),
    "train_data": TrainerForm("custom_convert_samples_to_train_data_path", ("args", "samples"), "dict[str, list]"),
    "rollout_log": TrainerForm(
        "custom_rollout_log_function_path",
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        "bool",
    ),
    "eval_log": TrainerForm(
        "custom_eval_rollout_log_function_path", ("rollout_id", "args", "data", "extra_metrics"), "bool"
    ),
    "advantage": TrainerForm("custom_advantage_function_path", ("args", "rollout_data"), "None"),
    "rollout_data": TrainerForm("rollout_data_postprocess_path", ("args", "rollout_id", "rollout_data"), "None"),
    "loss": TrainerForm(
        "custom_loss_function_path",
        ("args", "batch", "logits", "sum_of_sample_mean"),
        "tuple[Tensor, dict[str, Tensor]]",
    ),
    "tis": TrainerForm(
        "custom_tis_function_path",
        ("args",),
        "tuple[Tensor, list[Tensor], dict[str, Tensor]]",
        ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks"),
    ),
    "reducer": TrainerForm(
        "custom_pg_loss_reducer_function_path",
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        "Callable[[Tensor], Tensor]",
    ),
    "megatron_init": TrainerForm("custom_megatron_init_path", ("args",), "None"),
    "model_provider": TrainerForm(
        "custom_model_provider_path",
        ("pre_process", "post_process", "vp_stage"),
        "GPTModel",
        if_named=("build_default",),
    ),
    "before_log_prob": TrainerForm(
        "custom_megatron_before_log_prob_hook_path", ("args", "model", "store_prefix"), "None"
    ),
    "before_train_step": TrainerForm(
        "custom_megatron_before_train_step_hook_path",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
        "None",
    ),
}
"""The hooks inside the trainer, by kind."""

_GENERATE = HookForm((("args", "samples"), ("args", "sample", "sampling_params")))
_ROLLOUT = HookForm((("args", "rollout_id", "data_source"),))
_GROUP_REWARD = HookForm((("args", "samples"),), "compute_reward")
_FORMS: Mapping[str, HookForm] = {
    "custom_generate_function_path": _GENERATE,
    "rollout_function_path": _ROLLOUT,
    "eval_function_path": _ROLLOUT,
    "rollout_all_samples_process_path": HookForm((("args", "all_samples", "data_source"),)),
    "agent_function_path": HookForm((("args", "task", "base_url"),)),
    "custom_rm_path": HookForm((("args", "sample"),), "compute_reward"),
    "rollout_sample_hook_path": HookForm((("args", "sample"),)),
    "dynamic_sampling_filter_path": HookForm((("args", "samples"),)),
    "buffer_filter_path": HookForm(
        (("args", "buffer", "num_samples"), ("args", "rollout_id", "buffer", "num_samples"))
    ),
    "data_source_path": HookForm(method="get_samples"),
    **{form.option: HookForm((form.positional,)) for form in TRAINER_FORMS.values()},
}
HOOK_LEAVES: Sequence[str] = tuple(_FORMS)
"""Options that name a user's function or class."""


def fitting(option: str, file: Path, *, group_rm: bool = False) -> list[str]:
    """Functions and classes of the file that the flag could mean, in the order of the file."""
    form = _form(option, group_rm)
    public = _public(option, file)
    return next((found for takes in _WAYS if (found := [node.name for node in public if _fits(node, form, takes)])), [])


def hooks_of(file: Path) -> list[str]:
    """Everything in the file whose arguments have the names that some flag expects, or else their number."""
    public = _public("hook", file)
    forms = [*_FORMS.values(), _GROUP_REWARD]
    for takes in _WAYS:
        if found := [node.name for node in public if any(_fits(node, form, takes) for form in forms)]:
            return found
    return []


@dataclass(frozen=True, slots=True)
class _Definition:
    """A function, or a class with the methods that it has: its own, and those of its base classes.

    `methods` is None of a class with a base whose code is not read here: it may have any.
    """

    name: str
    node: Definition
    methods: frozenset[str] | None = frozenset()


def _public(option: str, file: Path) -> list[_Definition]:
    """What the file defines, in its order."""
    scope = _Scope.of(option, file)
    return [
        _Definition(name, node, scope.methods(name) if isinstance(node, ast.ClassDef) else frozenset())
        for name, node in scope.nodes.items()
        if not name.startswith("_")
    ]


@dataclass(frozen=True, slots=True)
class _Scope:
    """A file's definitions, and the names that it imports: (module, name there)."""

    option: str
    file: Path
    nodes: Mapping[str, Definition]
    imported: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, option: str, file: Path) -> _Scope:
        imported: dict[str, tuple[str, str]] = {}
        for node in _body(option, file):
            if isinstance(node, ast.ImportFrom):
                imported |= {each.asname or each.name: (node.module or "", each.name) for each in node.names}
            elif isinstance(node, ast.Import):
                imported |= {each.asname or each.name: (each.name, "") for each in node.names}
        return cls(option, file, {node.name: node for node in definitions(option, file)}, imported)

    def methods(self, name: str, seen: frozenset[tuple[Path, str]] = frozenset()) -> frozenset[str] | None:
        """The methods of a class of the file; None where one of its bases cannot be read."""
        node = self.nodes.get(name)
        if not isinstance(node, ast.ClassDef) or (self.file, name) in seen:
            return None
        found = frozenset(each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
        for base in node.bases:
            inherited = self._of_base(ast.unparse(base).partition("[")[0], seen | {(self.file, name)})
            if inherited is None:
                return None if not found & _METHODS else found
            found |= inherited
        return found

    def _of_base(self, name: str, seen: frozenset[tuple[Path, str]]) -> frozenset[str] | None:
        if name in self.nodes:
            return self.methods(name, seen)
        first, _, rest = name.partition(".")
        module, there = self.imported.get(first, ("", ""))
        name = there or rest or name
        if (known := _KNOWN_BASES.get(name.rpartition(".")[2])) is not None:
            return known
        neighbour = self.file.parent / f"{module.replace('.', '/')}.py"
        if module and neighbour.is_file():
            return _Scope.of(self.option, neighbour).methods(name, seen)
        return None


def _form(option: str, group_rm: bool) -> HookForm:
    return _GROUP_REWARD if group_rm and option == "custom_rm_path" else _FORMS[option]


def definitions(option: str, file: Path) -> list[Definition]:
    """Functions and classes of the file. Raises ConfigError when it is not valid Python."""
    return [node for node in _body(option, file) if isinstance(node, Definition)]


def _body(option: str, file: Path) -> list[ast.stmt]:
    try:
        return syntax_tree(file.read_text()).body
    except (SyntaxError, ValueError, RecursionError) as error:
        where = f"{file}, line {error.lineno}" if isinstance(error, SyntaxError) else str(file)
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{option} {file}: {where}: {message}") from error


def completed(option: str, path: str, *, group_rm: bool = False) -> str:
    """Completes `f.py` to `f.py:fn` when exactly one function fits; every other path stays as it is.

    Raises ConfigError when none or several fit. A file that does not exist here is left to the service that needs it.
    """
    if not path.endswith(".py") or not Path(path).is_file():
        return path
    found = fitting(option, Path(path), group_rm=group_rm)
    if len(found) == 1:
        return f"{path}:{found[0]}"
    if not found:
        there = ", ".join(node.name for node in definitions(option, Path(path))) or "nothing"
        raise ConfigError(
            f"{option} {path}: the file defines {there}, and none of them fits: the flag takes "
            f"{_accepted(option, group_rm)}"
        )
    raise ConfigError(f"{option} {path}: {', '.join(found)} all fit: name one of them, as {path}:{found[0]}")


def refuse_slimes(option: str, path: str) -> None:
    """Raises ConfigError for a module of slime, which headrace does not have."""
    if not path.startswith(_SLIME):
        return
    way = next((way for module, way in SLIME["modules"].items() if path.startswith(module)), None)
    raise ConfigError(
        f"{option} {path} is a module of slime, which headrace does not have: "
        f"{way or 'leave it out where it is the default, or copy the function into a file of yours'}"
    )


def _fits(definition: _Definition, form: HookForm, way: _Way) -> bool:
    node = definition.node
    if isinstance(node, ast.ClassDef):
        if form.method is None:
            return False
        return way is _Way.GUESSED if definition.methods is None else form.method in definition.methods
    given = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    required = [name for name in given[: len(given) - len(node.args.defaults)] if name != "evaluation"]
    takes = {_Way.NAMES: _has_names, _Way.NUMBER: _has_number}.get(way)
    return takes is not None and any(takes(given, required, names) for names in form.arguments)


def _has_names(given: Sequence[str], required: Sequence[str], names: tuple[str, ...]) -> bool:
    return tuple(given[: len(names)]) == names and set(required) <= set(names)


def _has_number(given: Sequence[str], required: Sequence[str], names: tuple[str, ...]) -> bool:
    """Accepts other names, because user code may call its arguments anything."""
    return len(required) == len(names)


def _accepted(option: str, group_rm: bool) -> str:
    form = _form(option, group_rm)
    ways = [f"f({', '.join(names)})" for names in form.arguments]
    ways += [f"a class with {form.method}"] if form.method else []
    return " or ".join(ways)
