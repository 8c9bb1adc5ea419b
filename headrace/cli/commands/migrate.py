"""`headrace migrate`: writes a job from what starts a run of another project."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from headrace.cli.arg_types import PATH
from headrace.disk import atomic_write
from headrace.errors import ConfigError, FailedPrecondition
from headrace.migrate import prime_rl, slime, trl, verl

_SOURCES = {"slime": slime.migrate, "verl": verl.migrate, "trl": trl.migrate, "prime-rl": prime_rl.migrate}


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
    migration = _SOURCES[project](file, os.environ, flags)
    refusal = migration.settle()
    if as_json:
        print(json.dumps({"settings": [asdict(setting) for setting in migration.moved], "refused": refusal}, indent=2))
        return int(refusal is not None)
    changed, without = migration.of("changed"), migration.of("no counterpart")
    for setting in (*changed, *without):
        print(f"{setting.state:<16}{setting.line}")
    total, carried = len(migration.moved), len(migration.of("carried"))
    print(f"{carried} of {total} settings carried, {len(changed)} changed, {len(without)} without counterpart")
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
