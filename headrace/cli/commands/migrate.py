"""`headrace migrate`: writes a job from what starts a run of another project."""

from __future__ import annotations

import json
import os
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
from headrace.migrate.moved import Migration

_SOURCES = {"slime": "slime", "verl": "verl", "trl": "trl", "prime-rl": "prime_rl"}


@click.command(no_args_is_help=True)
@click.argument("project", type=click.Choice(list(_SOURCES)))
@click.argument("file", type=PATH)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("-o", "--output", type=PATH, default="job.toml", show_default=True, help="The job that is written.")
@click.option("--json", "as_json", is_flag=True, help="Print what became of each setting as JSON, and write no file.")
def migrate(project: str, file: Path, flags: tuple[str, ...], output: Path, as_json: bool) -> int:
    """Writes a job from slime's run.sh, verl's script or YAML, TRL's script, or prime-rl's TOML.

    FILE is read and never run. FLAGS behind `--` are those that FILE is started with. Each setting is listed: carried,
    changed, or without counterpart. The exit code is 1 if `headrace check --elsewhere` refuses the job.
    """
    if not as_json and output.exists():
        raise FailedPrecondition(f"{output} is there already: name another file with --output")
    migration: Migration = import_module(f"headrace.migrate.{_SOURCES[project]}").migrate(file, os.environ, flags)
    refusal = migration.settle()
    if as_json:
        print(json.dumps({"settings": [asdict(setting) for setting in migration.moved], "refused": refusal}, indent=2))
        return int(refusal is not None)
    _print(migration)
    try:
        text = migration.toml(refusal)
    except ConfigError as error:
        print(f"no job is written: {error.message}")
        return 1
    with atomic_write(output) as draft:
        draft.write_text(text)
    if refusal is None:
        print(f"{output} written: `headrace check {output} --elsewhere` shows its plan")
        return 0
    print(f"{output} written. It is refused until you change it: {refusal}")
    return 1


def _print(migration: Migration) -> None:
    carried = migration.of("carried")
    table = Table("", "setting", box=None, pad_edge=False, show_header=False)
    for state in ("changed", "no counterpart"):
        for setting in migration.of(state):
            table.add_row(state, setting.line)
    print_no_wrap(Console(), table)
    total = len(migration.moved)
    print(f"{len(carried)} of {total} settings carried, {len(migration.of('changed'))} changed, "
          f"{len(migration.of('no counterpart'))} without counterpart")  # fmt: skip
