"""prime-rl's configuration: the TOML file of `rl` or `sft`, with its tables of orchestrator, trainer and inference."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.job.schema.section import literal
from headrace.migrate.table import Migration, Table, Values, flags_of, leaves

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
    given = {**dict(leaves(tree)), **dict(_of_flags(flags))}
    settings = {_own(name): (f"{name} = {value!r:.120}", value) for name, value in given.items()}
    if kind := "sft" if "data" in tree and "orchestrator" not in tree else "":
        migration.supervise(kind)
    _TABLE.move(migration, settings, _TABLE.defaults[kind or "rl"])
    return migration


def _of_flags(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for flag, values in flags_of(flags):
        yield flag.removeprefix("--").replace("-", "_"), literal(values[0]) if values else True


def _own(name: str) -> str:
    """The name without its process: one job has the settings of all."""
    process, _, rest = name.partition(".")
    return rest if process in _PROCESSES and rest else name


def _data_sets(migration: Migration, source: str, value: Any, settings: Values) -> None:
    tables = value if isinstance(value, list) else [{"dataset": value}]
    names = [str(table["dataset"]) for table in tables if isinstance(table, dict) and "dataset" in table]
    migration.change(source, "--prompt-data", *names, note="write the rows to JSONL if there is no network")


def _batch(migration: Migration, source: str, value: Any, settings: Values) -> None:
    """prime-rl counts samples, headrace prompts."""
    samples = settings.get("rollouts_per_example", settings.get("group_size"))
    if isinstance(value, int) and isinstance(samples, int) and samples > 0 and not value % samples:
        words = ("--rollout-batch-size", str(value // samples))
        migration.change(source, *words, note=f"prompts a step, {samples} samples each")
    else:
        migration.drop(source, "set --rollout-batch-size: prompts a step")


_TABLE = Table("prime_rl", {"batch_size": _batch, "data.name": _data_sets, "data.source": _data_sets})
