"""Reference pages of the site, from the code: commands, errors, protos, classes of the client.

`make docs` writes them beside the pages of docs/; none is committed. docs/flags.md is: `python -m tools.flags`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from headrace.cli.check_hook import check_hook
from headrace.cli.job_arguments import JobCommand
from headrace.cli.main import _COMMANDS
from headrace.errors import HeadraceError, RetryableError, error_classes
from tools.proto_pages import proto_pages

ROOT = Path(__file__).resolve().parent.parent
CLIENT = (
    ("open.py", ("open_buffer", "open_rollout")),
    ("buffer.py", ("BatchClient", "BufferClient")),
    ("rollout.py", ("EvaluationClient", "RolloutClient")),
    ("reward.py", ("RewardClient",)),
    ("trainer.py", ("TrainerClient",)),
)
"""What docs/client.md names: the functions and classes of headrace.client that programs use."""

_ERRORS = """# Errors

```python
import time

from headrace.client.sync import SyncBuffer
from headrace.errors import Fenced, HeadraceError, ResourceExhausted


def submit(buffer: SyncBuffer, prompts: list) -> None:
    try:
        buffer.submit_prompts("train", prompts)
    except ResourceExhausted as error:  # a limit: nothing was stored
        time.sleep(error.retry_after_seconds)
    except Fenced:  # a newer trainer owns the ledger
        raise
    except HeadraceError as error:
        print(error.reason, error.message, error.metadata)
```

A client raises the class that the service raised. Every class is a `HeadraceError` with `message` for people, `reason`
for programs, and `metadata` for both. Programs in other languages read the gRPC status and the reason
([the protocol](../protocol.md#errors)). The exit codes of commands are in [operations](../operations.md#exit-codes).

| class | gRPC status, reason if it has its own | meaning | what to do |
|---|---|---|---|
"""


def pages() -> Mapping[str, str]:
    """The text of each page by its path in the site."""
    return {
        "reference/cli.md": commands(),
        "reference/errors.md": errors(),
        "reference/client.md": client(),
        **{f"reference/protos/{name}.md": text for name, text in proto_pages(ROOT / "protos").items()},
    }


def commands() -> str:
    """Every command with its options."""
    overview = [f"| [`{name}`](#headrace-{name}) | {each.help} |" for name, each in _COMMANDS.items()]
    parts = [
        "# Commands\n\nWhat `headrace COMMAND --help` prints, for all commands. "
        "A command without RUN acts on the live run, or on the newest.\n",
        "\n".join(["| command | what it does |", "|---|---|", *overview]),
    ]
    for name, each in _COMMANDS.items():
        parts += _command(f"headrace {name}", each.load(), depth=2)
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: click.Command, depth: int) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    yield f"{'#' * depth} headrace{name.removeprefix('headrace')}"
    yield f"```text\n{' '.join(command.get_usage(context).removeprefix('Usage: ').split())}\n```"
    yield inspect.cleandoc(command.help or "")
    records = filter(None, (each.get_help_record(context) for each in command.params))
    rows = [f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in records if meaning]
    if isinstance(command, JobCommand):
        rows.append("| any [flag](../flags.md) of a job | replaces its value in JOB.toml |")
    if rows:
        yield "\n".join(["| option | what it does |", "|---|---|", *rows])
    inner = command.commands if isinstance(command, click.Group) else {}
    if name == "headrace check":
        inner = {"hook": check_hook}
    for word, each in inner.items():
        yield from _command(f"{name} {word}", each, depth + 1)


def errors() -> str:
    """The tree of headrace/errors.py, with what to do from the table in docs/protocol.md."""
    told = [cls for cls in error_classes() if cls not in (HeadraceError, RetryableError)]
    names = {cls: ", ".join(dict.fromkeys((cls.status, cls("").reason))) for cls in told}
    rows = [f"| `{cls.__name__}` | {names[cls]} | {_meaning(cls)} | {_todo(cls)} |" for cls in told]
    return _ERRORS + "\n".join(rows) + "\n"


def _meaning(cls: type[HeadraceError]) -> str:
    base, (said, *_) = cls.__bases__[0], (cls.__doc__ or "").strip().splitlines()
    return _cell(said if base in (HeadraceError, RetryableError) else f"A kind of `{base.__name__}`. {said}")


def _todo(cls: type[HeadraceError]) -> str:
    """The last cell of the row of docs/protocol.md that has the reason."""
    reason = cls("").reason
    for row in re.findall(
        r"^\| ([A-Z_]+) \| ([A-Z_, ]+) \| .* \| (.*) \|$", (ROOT / "docs/protocol.md").read_text(), re.M
    ):
        if row[0] == cls.status and reason in row[1].split(", "):
            return str(row[2]).replace("](", "](../")
    return ""


def client() -> str:
    """Signatures and docstrings of headrace.client."""
    parts = [
        "# Classes of the client\n\n[The Python client](../client.md) has whole programs. "
        "Messages, as `pb.StreamStats`, are those of the [protos](protos/buffer.md). "
        "`headrace.client.sync` has the same methods for programs without asyncio.\n"
    ]
    for file, names in CLIENT:
        module = f"headrace.client.{Path(file).stem}"
        source = (ROOT / "headrace/client" / file).read_text()
        nodes = {node.name: node for node in ast.parse(source).body if isinstance(node, _NAMED)}
        for name in names:
            parts.append(f"## {name}\n\n`from {module} import {name}`\n")
            parts += _documented(nodes[name], source, depth=3)
    return "\n".join([*parts, *_sync()])


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_NAMED = (*_FUNCTION, ast.ClassDef)


def _documented(node: ast.stmt, source: str, depth: int) -> Iterator[str]:
    if isinstance(node, _FUNCTION):
        lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1] or [ast.unparse(node).splitlines()[0]]
        signature = textwrap.dedent("\n".join(lines)).rstrip().removesuffix("...").rstrip().removesuffix(":")
        yield f"```python\n{signature}\n```\n"
    yield f"{ast.get_docstring(node) or ''}\n"
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, _FUNCTION) and not each.name.startswith("_") and each.name != "close":
                yield f"{'#' * depth} {each.name}\n"
                yield from _documented(each, source, depth + 1)


def _sync() -> Iterator[str]:
    yield "## Without asyncio\n\n| class of `headrace.client.sync` | methods |\n|---|---|"
    for node in ast.parse((ROOT / "headrace/client/sync.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [each.targets[0].id for each in node.body if isinstance(each, ast.Assign)]
            yield f"| `{node.name}` | {', '.join(f'`{each}`' for each in methods)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
