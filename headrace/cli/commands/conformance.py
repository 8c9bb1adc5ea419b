"""`headrace conformance SERVICE ADDRESS`: whether a service, in any language, keeps the contract of the protos."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.api.reward.v1 import reward_pb2
from headrace.cli.arg_types import PATH
from headrace.conformance import buffer, reward, rollout, trainer
from headrace.conformance.checks import Result, results
from headrace.errors import ConfigError, InvalidArgument
from headrace.limits import from_json, to_json
from headrace.rpc.client import connect
from headrace.rpc.log import drop_logs

_SUBJECTS: dict[str, tuple[Any, Any]] = {
    "buffer": (buffer.BufferSubject, buffer.CHECKS),
    "reward": (None, reward.CHECKS),
    "rollout": (rollout.RolloutSubject, rollout.CHECKS),
    "trainer": (trainer.TrainerSubject, trainer.CHECKS),
}
_ITEM = reward_pb2.ScoreItem(item_id="0", prompt="1 + 1 =", response="2", label="2")


@click.command()
@click.argument("service", type=click.Choice(sorted(_SUBJECTS)))
@click.argument("address")
@click.option("--scorer", default="", help="Of a reward service: the scorer to try (default: its own default).")
@click.option(
    "--items",
    type=PATH,
    metavar="FILE",
    help="Of a reward service: JSON lines with prompt, response, label, metadata that it can score.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a promise.")
def conformance(service: str, address: str, scorer: str, items: Path | None, as_json: bool) -> int:
    """Tries what the protos promise on the service at ADDRESS (host:port).

    A buffer gets streams named conformance-…, which are deleted again. A trainer is paused for a moment. Nothing else
    is changed. The exit code is 1 where a promise is not kept.
    """
    drop_logs()
    if service != "reward" and (scorer or items):
        raise ConfigError(f"--{'scorer' if scorer else 'items'} is about a reward service, not a {service}")
    made, checks = _SUBJECTS[service]
    scored = [_ITEM] if items is None else _items(items)
    num_broken = asyncio.run(_run(address, service, made, checks, scorer, scored, as_json))
    return int(num_broken > 0)


async def _run(
    address: str,
    service: str,
    made: Any,
    checks: Sequence[Any],
    scorer: str,
    items: Sequence[reward_pb2.ScoreItem],
    as_json: bool,
) -> int:
    """Returns how many promises are not kept."""
    console = Console(highlight=False, soft_wrap=True)
    num_broken = 0
    async with connect(address) as channel:
        subject = reward.RewardSubject(channel, scorer, items) if service == "reward" else made(channel)
        async for result in results(checks, subject):
            num_broken += result.broken is not None
            _show(console, result, as_json)
    if not as_json:
        kept = len(checks) - num_broken
        console.print(f"{kept} of {len(checks)} promises of the {service} service at {address} are kept")
    return num_broken


def _show(console: Console, result: Result, as_json: bool) -> None:
    if as_json:
        print(to_json({"promise": result.promise, "kept": result.broken is None, "instead": result.broken}), flush=True)
        return
    console.print("[green]ok    [/]" if result.broken is None else "[red]broken[/]", end="  ")
    console.print(result.promise, markup=False)
    if result.broken is not None:
        console.print(f"        {result.broken}", markup=False)


def _items(path: Path) -> list[reward_pb2.ScoreItem]:
    """Raises ConfigError for a file without rows, or with other rows."""
    try:
        rows = [from_json(line) for line in path.read_text().splitlines() if line.strip()]
        items = [
            reward_pb2.ScoreItem(
                item_id=str(number),
                prompt=row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"]),
                response=row["response"],
                label=row.get("label"),
                metadata_json=to_json(row.get("metadata") or {}),
            )
            for number, row in enumerate(rows)
        ]
    except (OSError, InvalidArgument, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--items {path}: {error}: write one JSON object a line, with prompt and response as text, and label and "
            "metadata where there are some"
        ) from error
    if not items:
        raise ConfigError(f"--items {path} has no rows")
    return items
