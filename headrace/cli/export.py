"""`headrace export FOLDER`: the weights of a running trainer as a Hugging Face folder."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.runs import add_run_argument, address_of
from headrace.client.trainer import TrainerClient


def export(argv: Sequence[str]) -> int:
    """Waits for the end of the current step, then for the files."""
    parser = argparse.ArgumentParser(prog="headrace export")
    parser.add_argument("folder", type=Path, help="must not exist or be empty")
    add_run_argument(parser)
    parser.add_argument("--trainer-address", help="instead of a run")
    args = parser.parse_intermixed_args(argv)
    address = address_of(args.run, "trainer", args.trainer_address)
    with Console().status("exporting after the current step"):
        reply = asyncio.run(_export(address, args.folder.absolute()))
    print(f"{reply.path}: weights of step {reply.step}")
    return 0


async def _export(address: str, folder: Path) -> trainer_pb2.ExportModelResponse:
    async with TrainerClient(address) as trainer:
        return await trainer.export_model(folder)
