"""`headrace migrate`: writes a job from what starts a run of another project."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from headrace.cli.arg_types import PATH
from headrace.cli.view.lines import print_no_wrap
from headrace.disk import atomic_write
from headrace.errors import ConfigError, FailedPrecondition
from headrace.job.load.load import load
from headrace.job.rules.scope import scope_of_check
from headrace.migrate.moved import Migration, one_line

_SOURCES = {"slime": "slime", "verl": "verl", "trl": "trl", "prime-rl": "prime_rl"}


@click.command(no_args_is_help=True)
@click.argument("project", type=click.Choice(list(_SOURCES)))
@click.argument("file", type=PATH)
@click.option("-o", "--output", type=PATH, default="job.toml", show_default=True, help="The job that is written.")
@click.option("--json", "as_json", is_flag=True, help="Print what became of each setting as JSON, and write no file.")
def migrate(project: str, file: Path, output: Path, as_json: bool) -> int:
    """Writes a job from slime's run.sh, verl's script or YAML, TRL's script, or prime-rl's TOML.

    FILE is read and never run. Each of its settings is listed: carried, changed, or without counterpart. The exit code
    is 1 if `headrace check --elsewhere` refuses the job.
    """
    migration: Migration = import_module(f"headrace.migrate.{_SOURCES[project]}").migrate(file)
    refused = _refusal(migration)
    if as_json:
        print(json.dumps({"settings": [asdict(each) for each in migration.moved], "refused": refused}, indent=2))
        return int(refused is not None)
    if output.exists():
        raise FailedPrecondition(f"{output} is there already: name another file with --output")
    _print(migration)
    if refused is None:
        with atomic_write(output) as draft:
            draft.write_text(migration.toml())
        print(f"{output} written: `headrace check {output} --elsewhere` shows its plan")
        return 0
    print(f"no job is written, because it is refused: {refused}")
    return 1


def _refusal(migration: Migration) -> str | None:
    """What the rules of a job say, without looking at this machine."""
    try:
        load(None, migration.words, {}, lambda job: scope_of_check(job, elsewhere=True))
    except ConfigError as error:
        return error.message
    return None


def _print(migration: Migration) -> None:
    carried = migration.of("carried")
    table = Table("", "setting", box=None, pad_edge=False, show_header=False)
    for state in ("changed", "no counterpart"):
        for each in migration.of(state):
            table.add_row(state, one_line(each))
    print_no_wrap(Console(), table)
    total = len(migration.moved)
    print(f"{len(carried)} of {total} settings carried, {len(migration.of('changed'))} changed, "
          f"{len(migration.of('no counterpart'))} without counterpart")  # fmt: skip
