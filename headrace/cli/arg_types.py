"""Arguments and groups that several commands share. A wrong word ends in one line and the usage."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click
from google.protobuf.message import Message

from headrace.errors import InvalidArgument
from headrace.limits import did_you_mean, whole_number

RUNS = Path("runs")
_MAX_COUNT = (1 << 31) - 1

PATH = click.Path(path_type=Path)


class _Count(click.ParamType[int]):
    """A whole number from `least` on."""

    name = "number"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = value if isinstance(value, int) else whole_number(value, _MAX_COUNT)
        if number is None or number < self._least:
            self.fail(f"{value[:80]!r} is not a number from {self._least} to {_MAX_COUNT}", param, ctx)
        return number


COUNT, COUNT_FROM_ZERO = _Count(1), _Count(0)


class Finite(click.ParamType[float]):
    """A number from 0, or only above it, up to `most`."""

    name = "number"

    def __init__(self, most: float, *, above_zero: bool = False) -> None:
        self._most, self._above_zero = most, above_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number <= self._most or (self._above_zero and not number):
            least = "above 0 and" if self._above_zero else "from 0"
            self.fail(f"{value[:80]!r} is not a number {least} up to {self._most:g}", param, ctx)
        return number


class _Text(click.ParamType[str]):
    """What can be encoded as UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("the text is not valid UTF-8", param, ctx)
        return str(value)


TEXT = _Text()


class Group(click.Group):
    """Raises InvalidArgument for a command that it does not have."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not ctx.resilient_parsing:
            path = " ".join([*ctx.command_path.split()[1:], args[0][:80]])
            listed = f": {ctx.command_path} --help lists the commands"
            raise InvalidArgument(f"unknown command {path}{did_you_mean(args[0], known) or listed}")
        return super().resolve_command(ctx, args)


def run_argument(function: Callable[..., int]) -> Callable[..., int]:
    """`RUN` or `--run RUN`, which the command gets as `run`; below the command's own arguments."""

    @click.argument("run", required=False, metavar="[RUN]", shell_complete=_runs_here)
    @click.option(
        "--run",
        "named",
        metavar="RUN",
        help="a run's folder, or its name in runs/ (default: the live run, else the newest)",
    )
    @wraps(function)
    def with_run(*, run: str | None, named: str | None, **options: Any) -> int:
        if None not in (run, named) and run != named:
            raise click.UsageError(f"two runs are named, {named} and {run}: name only one")
        return function(run=named if run is None else run, **options)

    return with_run


def _runs_here(ctx: click.Context, param: click.Parameter, incomplete: str) -> Sequence[str]:
    names = (file.parent.name for file in RUNS.glob("*/services.json"))
    return sorted(name for name in names if name.startswith(incomplete))


stream_option = click.option("--stream", type=TEXT, default="train", help="Stream of the ledger (train)")
buffer_address_option = click.option(
    "--buffer-address",
    help="host:port of the buffer, instead of a run; for a sharded ledger all addresses, separated by commas",
)
rollout_address_option = click.option("--rollout-address", help="host:port of the rollout service, instead of a run")


# Machine-readable output.


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: Any) -> None:
    """Prints dataclasses, messages, paths and what JSON has itself."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def teller(as_json: bool) -> Callable[[str], None]:
    """Prints a line for a person: to stdout, or to stderr where stdout is JSON."""
    return lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Message):
        return _fields(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _fields(message: Message) -> dict[str, Any]:
    """All fields under the names of the protos; null for an absent one. Numbers stay numbers, also those of 64 bits."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if isinstance(value, Mapping):
        return dict(value)
    names = field.enum_type.values_by_number if field.enum_type else None
    if field.is_repeated:
        return [names[each].name if names else each for each in value]
    return names[value].name if names else value
