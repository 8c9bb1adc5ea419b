"""slime's launch scripts: its flags keep their names, so nearly all are carried as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import InvalidArgument
from headrace.job.names import MEGATRON, SLIME
from headrace.migrate.bash import DECIDED_LATER, read_script
from headrace.migrate.table import Migration, Table, flags_of, unknown_value

_SYNCHRONOUS, _ASYNCHRONOUS = "train.py", "train_async.py"
_FUNCTIONS = ("--custom-", "--rollout-function-path", "--eval-function-path", "--data-source-path", "--rollout-data-")
_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_NEEDED = ("--hf-checkpoint", "--prompt-data", "--eval-prompt-data")
_COMMAND = re.compile(r"\$\(.*\)|\0")
_NOT_GENERATED = ("--rollout-function-path", "--debug-train-only", "--apply-chat-template")
"""Flags of slime's supervised scripts that turn its generation off."""
_TABLE = Table("slime")
_Flags = Sequence[tuple[str, Sequence[str]]]


def migrate(path: Path, environment: Mapping[str, str], more: Sequence[str] = ()) -> Migration:
    """`more` are flags that come behind those of the script.

    Raises InvalidArgument for a script that starts neither train.py nor train_async.py.
    """
    script = read_script(path, environment)
    words = script.command_of(_SYNCHRONOUS, _ASYNCHRONOUS)
    if words is None:
        programs = f"neither {_SYNCHRONOUS} nor {_ASYNCHRONOUS}"
        raise InvalidArgument(f"{path} starts {programs}: name the script that starts slime's training")
    migration = Migration(str(path))
    for name in script.missing:
        migration.change(f"source {name}", note="the file is not here; the model's shape is read from --hf-checkpoint")
    for name in script.unjoined:
        migration.change(f"{name} …", note="bash would not pass this line on: a backslash is missing before it")
    flags = list(flags_of([*words[1:], *more]))
    if ("--loss-type", ["sft_loss"]) in flags:
        _supervised(migration, flags)
    else:
        _generated(migration, flags, asynchronous=words[0].endswith(_ASYNCHRONOUS))
    for flag, value in _TABLE.defaults.items():
        if flag not in migration.words and (flag != "--kl-loss-type" or "--use-kl-loss" in migration.words):
            migration.change(flag, flag, value, note="the default there")
    return migration


def _generated(migration: Migration, flags: _Flags, *, asynchronous: bool) -> None:
    if asynchronous:
        note = "generation is one step ahead of training, as there"
        migration.change(_ASYNCHRONOUS, "--max-staleness", "1", note=note)
    for flag, values in flags:
        _move(migration, flag, values)
    if any(flag.startswith(_FUNCTIONS) for flag, _ in flags):
        note = "`from slime… import` finds headrace's own names"
        migration.change("functions that import slime", "--slime-imports", note=note)


def _supervised(migration: Migration, flags: _Flags) -> None:
    for flag, values in flags:
        if flag in _NOT_GENERATED:
            migration.change(" ".join((flag, *values)), note="--loss-type sft_loss trains conversations as they are")
        else:
            _move(migration, flag, values)
    if "--loss-mask-type" not in migration.words:
        migration.change("slime's mask", "--loss-mask-type", "qwen", note="name the marks of your chat template")


def _move(migration: Migration, marked: str, values: Sequence[str]) -> None:
    flag = marked.removeprefix(DECIDED_LATER)
    source = " ".join((flag, *values)).replace(DECIDED_LATER, "")
    why = next((why for why in map(unknown_value, (marked, *values)) if why), None)
    module = next((way for way in SLIME["modules"] if values and values[0].startswith(way)), None)
    if why and flag.removeprefix("--").replace("-", "_") in MEGATRON["architectural"]:
        migration.change(source, note="the model's shape is read from --hf-checkpoint")
    elif why and flag in _NEEDED and flag == marked:
        words = [_COMMAND.sub("COMPUTED", value) for value in values]
        migration.change(source, flag, *words, note="replace COMPUTED, which the script finds when it runs")
    elif why:
        migration.drop(source, why)
    elif flag == "--eval-prompt-data" and len(values) == 1:
        migration.change(source, flag, Path(values[0]).stem, values[0], note="a data set has a name")
    elif values and values[0] == _FILTERS:
        migration.change(source, flag, "headrace.hooks.filter.check_reward_nonzero_std", note="the same function")
    elif module is not None:
        migration.drop(source, SLIME["modules"][module])
    elif flag in _TABLE.rows:
        _TABLE.rows[flag].move(migration, source, values, {})
    else:
        migration.carry(source, flag, *values)
