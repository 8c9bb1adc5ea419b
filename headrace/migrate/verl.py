"""verl's jobs: a YAML file, or a script with `python -m verl.trainer.main_ppo key=value …`. Nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.job.schema.section import literal
from headrace.migrate.bash import COMPUTED, DECIDED_LATER, UNSET, read_script
from headrace.migrate.table import Migration, Table, Values, leaves, parsed_yaml

_PROGRAMS = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.trainer.main", "main_ppo.py")
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_WHOLE = ("data.apply_chat_template_kwargs",)


def migrate(path: Path, environment: Mapping[str, str], overrides: Sequence[str] = ()) -> Migration:
    """`overrides` are key=value words, as behind verl's command.

    Raises InvalidArgument for a file that is neither verl's configuration nor a script that starts it.
    """
    of_file = _of_yaml(path) if path.suffix in (".yaml", ".yml") else _of_script(path, environment)
    settings = {name: (f"{name}={value}", value) for name, value in [*of_file, *_of_words(overrides)]}
    migration = Migration(str(path))
    _TABLE.move(migration, settings, _TABLE.defaults)
    if not {"--custom-rm-path", "--reward-model-path"} & set(migration.words):
        migration.change("rewards", note="verl chooses a rule by a row's data_source: choose yours, docs/rewards.md")
    return migration


def _of_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    tree = parsed_yaml(path)
    if not isinstance(tree, dict) or not {"actor_rollout_ref", "data"} & set(tree):
        raise InvalidArgument(f"{path} has neither actor_rollout_ref nor data: name verl's YAML or its script")
    return ((name, value) for name, value in leaves(tree, _WHOLE) if not name.endswith(("_target_", "defaults")))


def _of_script(path: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    words = read_script(path, environment).command_of(*_PROGRAMS)
    if words is None:
        raise InvalidArgument(f"{path} starts none of {', '.join(_PROGRAMS)}: name the script that starts verl")
    return _of_words(words[1:])


def _of_words(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Hydra's overrides: key=value, +key=value and ++key=value; ~key takes a key away."""
    for word in words:
        name, equals, value = word.removeprefix(DECIDED_LATER).lstrip("+").partition("=")
        if equals and not name.startswith(("-", "~")):
            yield name, f"{COMPUTED}{value})" if word.startswith(DECIDED_LATER) else _value(value)


def _value(text: str) -> Any:
    """Hydra's lists have no quotes once bash has read them: [console,wandb]."""
    if text.startswith("[") and text.endswith("]") and COMPUTED not in text:
        return [part.strip(" '\"") for part in text[1:-1].split(",") if part.strip()]
    return text if UNSET in text else literal(text.strip("'\""))


def _val_files(migration: Migration, source: str, value: Any, settings: Values) -> None:
    files = [Path(str(file)) for file in (value if isinstance(value, list | tuple) else [value])]
    stems = [file.stem for file in files]
    named = [file.stem if stems.count(file.stem) == 1 else f"{file.parent.name}-{file.stem}" for file in files]
    pairs = [word for name, file in zip(named, files, strict=True) for word in (name, str(file))]
    migration.carry(source, "--eval-prompt-data", *pairs)


def _mini_batch(migration: Migration, source: str, value: Any, settings: Values) -> None:
    batch = settings["data.train_batch_size"]
    if isinstance(value, int) and isinstance(batch, int) and value and not batch % value:
        note = f"optimizer steps of a batch of {batch} prompts; verl counts prompts of one"
        migration.change(source, "--num-steps-per-rollout", str(batch // value), note=note)
    else:
        migration.drop(source, "set --num-steps-per-rollout: the optimizer steps of a batch")


def _reward_file(migration: Migration, source: str, value: Any, settings: Values) -> None:
    function = f"{value}:{settings.get('custom_reward_function.name', 'compute_score')}"
    form = "verl calls f(data_source, solution_str, ground_truth, extra_info)"
    note = f"{form}; write `async def f(args, sample, **kwargs)` around it"
    migration.change(source, "--custom-rm-path", function, note=note)


_TABLE = Table(
    "verl",
    {"data.val_files": _val_files, _MINI_BATCH: _mini_batch, "custom_reward_function.path": _reward_file},
)
