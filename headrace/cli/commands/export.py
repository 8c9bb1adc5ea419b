"""`headrace export FOLDER [RUN]`: weights of a running trainer or of a run's checkpoint, for others to read."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headrace.api.trainer.v1 import trainer_pb2
from headrace.cli.runs import add_run_argument, address_of, find_run
from headrace.cli.words import count
from headrace.client.trainer import TrainerClient
from headrace.errors import FailedPrecondition, NotFound
from headrace.launch.previous_run import checkpoints_of, has_ended
from headrace.models.folders import HUGGING_FACE, PEFT
from headrace.models.torch_dist import FORMAT
from headrace.process.child import run_once
from headrace.run_folder import RunFolder


def export(argv: Sequence[str]) -> int:
    """Exports the current weights of a live run after its step, and a checkpoint's of a run that has ended."""
    parser = argparse.ArgumentParser(prog="headrace export")
    parser.add_argument("folder", type=Path, help="where to write; must not exist or be empty")
    add_run_argument(parser)
    parser.add_argument(
        "--step", type=count, help="export this step's checkpoint (default: the current or newest weights)"
    )
    parser.add_argument(
        "--format",
        choices=(HUGGING_FACE, FORMAT, PEFT),
        default=HUGGING_FACE,
        help="a Hugging Face folder; or from a checkpoint of the run a checkpoint folder of Megatron-core, or the "
        "adapters of LoRA as a folder of peft (default: %(default)s)",
    )
    parser.add_argument("--trainer-address", help="host:port of the trainer, instead of a run")
    args = parser.parse_intermixed_args(argv)
    if args.trainer_address and args.format != HUGGING_FACE:
        parser.error(f"--format {args.format} is written from a run's checkpoint: name the run, not --trainer-address")
    if not args.trainer_address:
        run = find_run(args.run)
        if args.step is not None or args.format != HUGGING_FACE or has_ended(run):
            return _of_checkpoint(run, args.step, args.folder.absolute(), args.format)
    address = address_of(args.run, "trainer", args.trainer_address)
    with Console().status("exporting after the current step"):
        reply = asyncio.run(_export(address, args.folder.absolute()))
    print(f"{reply.path}: weights of step {reply.step}")
    return 0


async def _export(address: str, folder: Path) -> trainer_pb2.ExportModelResponse:
    async with TrainerClient(address) as trainer:
        return await trainer.export_model(folder)


def _of_checkpoint(run: RunFolder, step: int | None, folder: Path, into: str) -> int:
    wanted = export_step(run, step, folder, into)
    print(f"{folder}: weights of step {wanted}, from {checkpoints_of(run, run.job())[wanted]}")
    return 0


def export_step(run: RunFolder, step: int | None, folder: Path, into: str = HUGGING_FACE) -> int:
    """Writes the weights of this step's checkpoint, or of the newest one, and returns its step.

    One process reads the checkpoint on CPUs: it needs no GPU and none of the run's services. Raises NotFound for a step
    without a checkpoint, FailedPrecondition for one that cannot be exported.
    """
    found = checkpoints_of(run, run.job())
    if not found:
        raise NotFound(f"{run.path} has no checkpoint: nothing was saved before it ended")
    wanted = max(found) if step is None else step
    if wanted not in found:
        raise NotFound(f"{run.path} has no checkpoint of step {wanted}; it has {', '.join(map(str, sorted(found)))}")
    with Console().status(f"exporting the checkpoint of step {wanted}"):
        program = [sys.executable, "-m", "services.trainer.export_checkpoint", "--config", str(run.job_file)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        done = asyncio.run(run_once([*program, "--format", into, str(found[wanted]), str(folder)], environment))
    if done.exit_code:
        said = [line for line in done.last_lines if line.strip()]
        raise FailedPrecondition(said[-1] if said else "the export ended with an error and wrote no message")
    return wanted
