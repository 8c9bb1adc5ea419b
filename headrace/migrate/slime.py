"""slime's launch scripts: its flags keep their names, so nearly all are carried as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.errors import InvalidArgument
from headrace.migrate.moved import Migration
from headrace.migrate.shell import COMPUTED, command_of, read_script

_SYNCHRONOUS, _ASYNCHRONOUS = "train.py", "train_async.py"
_FUNCTIONS = ("--custom-", "--rollout-function-path", "--eval-function-path", "--data-source-path", "--rollout-data-")


def migrate(path: Path) -> Migration:
    """Raises InvalidArgument for a script that starts neither train.py nor train_async.py."""
    script = read_script(path)
    words = command_of(script, _SYNCHRONOUS, _ASYNCHRONOUS)
    if words is None:
        raise InvalidArgument(
            f"{path} starts neither {_SYNCHRONOUS} nor {_ASYNCHRONOUS}: name the script that starts slime's training"
        )
    migration = Migration(str(path))
    for name in script.missing:
        migration.change(f"source {name}", note="the file is not here; the model's shape is read from --hf-checkpoint")
    if words[0].endswith(_ASYNCHRONOUS):
        migration.change(
            _ASYNCHRONOUS, "--max-staleness", "1", note="generation is one step ahead of training, as there"
        )
    for flag, values in _flags(words[1:]):
        _move(migration, flag, values)
    if any(flag.startswith(_FUNCTIONS) for flag, _ in _flags(words[1:])):
        migration.change(
            "functions that import slime", "--slime-imports", note="`from slime… import` finds headrace's own names"
        )
    return migration


def _move(migration: Migration, flag: str, values: Sequence[str]) -> None:
    source = " ".join((flag, *values))
    if any(COMPUTED in value for value in values):
        migration.drop(source, "the script computes this value when it runs: set it yourself")
    else:
        migration.carry(source, flag, *values)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with their values; words before the first flag are none of the training's."""
    flag, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if flag:
                yield flag, values
            name, equals, value = word.partition("=")
            flag, values = name, [value] if equals else []
        elif word in ("|", "&", "2>&1", ">", ">>", "&&", ";"):
            break
        else:
            values.append(word)
    if flag:
        yield flag, values
