"""`headrace env list | export | train`: environments of the package `verifiers`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.cli.arg_types import COUNT, PATH, Group, json_option, print_json
from headrace.cli.commands.jobs import train_words
from headrace.cli.job_arguments import JobCommand, load_job
from headrace.cli.runs import find_run
from headrace.disk import atomic_write
from headrace.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.launch.health import is_serving
from headrace.run_folder import ROLLOUT, RunFolder

_AGENT = "headrace.environments.verifiers.run"
_REWARD = "reward"
_END_SECONDS = 30.0
_POLL_SECONDS = 0.2

_settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting, as taskset.num_tasks=100.",
)
_limit = click.option("--limit", type=COUNT, metavar="N", help="The first N tasks (default: all).")
_python = click.option("--python", metavar="PYTHON", help="The Python that has verifiers (default: this one).")


@click.group(cls=Group)
def env() -> None:
    """Environments of the package `verifiers`: lists them, writes their tasks as rows, trains on them."""


@env.command("list")
@_python
@json_option
def list_(python: str | None, as_json: bool) -> int:
    """Lists the tasksets that are installed."""
    if python is not None:
        return _there(python, ["list", *(["--json"] if as_json else [])])
    from headrace.environments.verifiers import tasksets

    found = tasksets()
    if as_json:
        print_json(found)
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("taskset", "package", "version", "does not load"):
        table.add_column(name)
    for each in found:
        table.add_row(*map(escape, (each.id, each.package, each.version, each.trouble)))
    Console().print(table)
    return 0


@env.command()
@click.argument("taskset")
@click.option("--out", type=PATH, required=True, metavar="FILE.jsonl", help="The prompt file that is written.")
@_settings
@_limit
@_python
def export(taskset: str, out: Path, settings: Sequence[str], limit: int | None, python: str | None) -> int:
    """Writes the tasks of a taskset as rows: prompt and metadata. A row holds all that an agent host needs."""
    if python is not None:
        return _there(python, _export_words(taskset, out, settings, limit))
    from headrace.environments.verifiers import rows

    if out.exists():
        raise FailedPrecondition(f"{out} is there already: name another file with --out")
    count = 0
    with atomic_write(out) as draft, draft.open("w") as file:
        for count, row in enumerate(rows(taskset, _tree(settings), limit), start=1):  # noqa: B007
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if not count:
            raise NotFound(f"taskset {taskset} has no task")
    print(f"{out}: {count} rows of {taskset}")
    return 0


@env.command(cls=JobCommand)
@click.argument("taskset")
@_settings
@_limit
@_python
def train(taskset: str, settings: Sequence[str], limit: int | None, python: str | None, words: Sequence[str]) -> int:
    """Trains a job on a taskset: `headrace train`, with the taskset's rows and an agent host that plays them.

    The rows are written once, to TASKSET.jsonl in this folder. The exit code is that of `headrace train`.
    """
    out, python = Path(f"{taskset}.jsonl"), python or sys.executable
    if not out.exists() and (code := _there(python, _export_words(taskset, out, settings, limit))):
        return code
    words = [
        *words,
        "--prompt-data",
        str(out),
        "--agent-hosts",
        "--agent-function-path",
        _AGENT,
        "--reward-key",
        _REWARD,
    ]
    with _host(python, RunFolder.of(load_job(words))):
        return train_words(words)


def _export_words(taskset: str, out: Path, settings: Sequence[str], limit: int | None) -> list[str]:
    named = [word for each in settings for word in ("--set", each)]
    return ["export", taskset, "--out", str(out), *named, *(["--limit", str(limit)] if limit else [])]


def _there(python: str, words: Sequence[str]) -> int:
    """`headrace env` with these words in another Python, which has verifiers. Raises NotFound without that Python."""
    try:
        return subprocess.run([python, "-m", "headrace.cli.main", "env", *words], check=False).returncode
    except OSError as error:
        raise NotFound(f"--python {python}: {error.strerror}: name the Python of an environment") from error


@contextmanager
def _host(python: str, run: RunFolder) -> Iterator[None]:
    """An agent host that begins once the run serves, and ends with the block."""
    host = subprocess.Popen([python, "-m", "headrace.cli.commands.env", str(run.path)], start_new_session=True)
    try:
        yield
    finally:
        host.terminate()
        try:
            host.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            host.kill()
            host.wait()


def _tree(settings: Sequence[str]) -> dict[str, Any]:
    """`a.b=1` as `{"a": {"b": 1}}`. A value is JSON, or text where it is none. Raises InvalidArgument."""
    tree: dict[str, Any] = {}
    for each in settings:
        name, equals, text = each.partition("=")
        *above, last = name.split(".")
        if not equals or not last:
            raise InvalidArgument(f"--set {each}: write NAME=VALUE, as taskset.num_tasks=100")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        into = tree
        for part in above:
            into = into.setdefault(part, {})
            if not isinstance(into, dict):
                raise InvalidArgument(f"--set {each}: {part} has a value already")
        into[last] = value
    return tree


def wait_for(run: RunFolder, starter: int) -> bool:
    """Returns True once the run's rollout service serves, False when the starter ended before."""
    while os.getppid() == starter:
        if run.services_file.is_file():
            entry = find_run(str(run.path)).running_services().get(ROLLOUT)  # with the run's certificates
            if entry is not None and asyncio.run(is_serving(entry.address)):
                return True
        time.sleep(_POLL_SECONDS)
    return False


def _host_agents(folder: RunFolder) -> int:
    """`PYTHON -m headrace.cli.commands.env RUN`: an agent host that begins with its run; its log is agents.log."""
    from headrace.cli.main import main

    if not wait_for(folder, os.getppid()):
        return 0
    with (folder.logs / "agents.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return main(["agent", str(folder.path)])


if __name__ == "__main__":
    sys.exit(_host_agents(RunFolder(Path(sys.argv[1]))))
