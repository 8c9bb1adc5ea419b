"""slime's launch scripts: its flags keep their names, so nearly all are carried as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from headrace.errors import InvalidArgument
from headrace.job.names import MEGATRON, SLIME
from headrace.migrate.moved import Migration, unknown_value
from headrace.migrate.bash import DECIDED_LATER, read_script

_SYNCHRONOUS, _ASYNCHRONOUS = "train.py", "train_async.py"
_FUNCTIONS = ("--custom-", "--rollout-function-path", "--eval-function-path", "--data-source-path", "--rollout-data-")
_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_RENAMED = {
    "sglang_cuda_graph_bs": "--sglang-cuda-graph-bs-decode",
    "sglang_cuda_graph_max_bs": "--sglang-cuda-graph-max-bs-decode",
    "sglang_tp": "--rollout-num-gpus-per-engine",
    "sglang_ep": "--sglang-ep-size",
    "sglang_expert_parallel_size": "--sglang-ep-size",
}
"""Earlier and shorter names of SGLang's arguments."""
_DEFAULTS = {
    "--input-key": "input",
    "--n-samples-per-prompt": "1",
    "--actor-num-gpus-per-node": "8",
    "--kl-loss-type": "k1",
    "--lr-decay-style": "linear",
}
"""What slime does without a flag, where headrace does something else."""
_NEEDED = ("--hf-checkpoint", "--prompt-data", "--eval-prompt-data")
_COMMAND = re.compile(r"\$\(.*\)|\0")
_NOT_GENERATED = ("--rollout-function-path", "--debug-train-only", "--apply-chat-template")
"""Flags of slime's supervised scripts that turn its generation off."""


def migrate(path: Path, environment: Mapping[str, str], more: Sequence[str] = ()) -> Migration:
    """`more` are flags that come behind those of the script.

    Raises InvalidArgument for a script that starts neither train.py nor train_async.py.
    """
    script = read_script(path, environment)
    words = script.command_of(_SYNCHRONOUS, _ASYNCHRONOUS)
    if words is None:
        raise InvalidArgument(
            f"{path} starts neither {_SYNCHRONOUS} nor {_ASYNCHRONOUS}: name the script that starts slime's training"
        )
    migration = Migration(str(path))
    for name in script.missing:
        migration.change(f"source {name}", note="the file is not here; the model's shape is read from --hf-checkpoint")
    for name in script.unjoined:
        migration.change(f"{name} …", note="bash would not pass this line on: a backslash is missing before it")
    flags = list(_flags([*words[1:], *more]))
    if ("--loss-type", ["sft_loss"]) in flags:
        _supervised(migration, flags)
    else:
        _generated(migration, flags, asynchronous=words[0].endswith(_ASYNCHRONOUS))
    for flag, value in _DEFAULTS.items():
        if flag not in migration.words and (flag != "--kl-loss-type" or "--use-kl-loss" in migration.words):
            migration.change(f"without {flag}", flag, value, note="slime's default")
    return migration


_Flags = Sequence[tuple[str, Sequence[str]]]


def _generated(migration: Migration, flags: _Flags, *, asynchronous: bool) -> None:
    if asynchronous:
        migration.change(
            _ASYNCHRONOUS, "--max-staleness", "1", note="generation is one step ahead of training, as there"
        )
    for flag, values in flags:
        _move(migration, flag, values)
    if any(flag.startswith(_FUNCTIONS) for flag, _ in flags):
        migration.change(
            "functions that import slime", "--slime-imports", note="`from slime… import` finds headrace's own names"
        )


def _supervised(migration: Migration, flags: _Flags) -> None:
    for flag, values in flags:
        source = " ".join((flag, *values))
        if flag in _NOT_GENERATED:
            migration.change(source, note="--loss-type sft_loss trains conversations as they are")
        elif flag == "--loss-mask-type" and not _is_taken(flag, *values):
            migration.change(source, flag, "qwen", note="choose the marks of your chat template")
        else:
            _move(migration, flag, values)
    if "--loss-mask-type" not in migration.words:
        migration.change("slime's default mask", "--loss-mask-type", "qwen", note="name your template's marks")


def _move(migration: Migration, flag: str, values: Sequence[str]) -> None:
    known = flag.removeprefix(DECIDED_LATER)
    name = known.removeprefix("--").replace("-", "_")
    source = " ".join((known, *values))
    why = next((why for why in map(unknown_value, (flag, *values)) if why), None)
    module = next((way for way in SLIME["modules"] if values and values[0].startswith(way)), None)
    if why and name in MEGATRON["architectural"]:
        migration.change(source, note="the model's shape is read from --hf-checkpoint")
    elif why and known in _NEEDED and not flag.startswith(DECIDED_LATER):
        words = [_COMMAND.sub("COMPUTED", value) for value in values]
        migration.change(source, known, *words, note="replace COMPUTED, which the script finds when it runs")
    elif why:
        migration.drop(source.replace(DECIDED_LATER, ""), why)
    elif flag == "--eval-prompt-data" and len(values) == 1:
        migration.change(source, flag, Path(values[0]).stem, values[0], note="a data set has a name")
    elif values and values[0] == _FILTERS:
        migration.change(source, flag, "headrace.hooks.filter.check_reward_nonzero_std", note="the same function")
    elif name in _RENAMED:
        migration.change(source, _RENAMED[name], *values, note="SGLang's name today")
    elif module is not None:
        migration.drop(source, SLIME["modules"][module])
    else:
        migration.carry(source, flag, *values)


def _is_taken(*words: str) -> bool:
    trial = Migration("")
    trial.carry("", *words)
    return bool(trial.words)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with their values; words before the first flag are none of the training's."""
    flag, values = "", list[str]()
    for word in words:
        if word.removeprefix(DECIDED_LATER).startswith("--"):
            if flag:
                yield flag, values
            name, equals, value = word.partition("=")
            flag, values = name, [value] if equals else []
        else:
            values.append(word)
    if flag:
        yield flag, values
