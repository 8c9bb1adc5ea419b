"""`python -m services.reward`: with a job (`--config`), or alone (`--rm-type math`)."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.hooks import HookArgs, hook_args, section_args
from headrace.hooks.kit.sandbox import allow_insecure_sandbox
from headrace.job.eval_sets import eval_sets, own_rewards
from headrace.job.schema.job import read_job
from headrace.job.schema.services import RewardSection
from headrace.process.service_main import run_service
from headrace.rpc import tracing
from headrace.rpc.log import configure_logging
from headrace.rpc.server import add_listen_arguments, listen_of
from headrace.run_folder import RunFolder
from services.reward.server import RewardServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after a signal; otherwise one of `exit_status`, with one line on stderr that says why."""
    options = vars(_parser().parse_args(arguments))
    configure_logging("reward")
    return run_service("reward", lambda: asyncio.run(_serve(options)), alone=options["config"] is None)


async def _serve(options: dict[str, Any]) -> None:
    reward, args, of_evaluations, folder = _settings(options)
    allow_insecure_sandbox(reward.insecure_sandbox)
    server = await RewardServer.start(
        reward,
        args,
        listen_of(options),
        of_evaluations=of_evaluations,
        folder=RunFolder(options["folder"]) if options["folder"] else folder,
    )
    await server.run_until_signal()


def _settings(options: dict[str, Any]) -> tuple[RewardSection, HookArgs, Sequence[str], RunFolder | None]:
    given = {name: options[name] for name in RewardSection.model_fields if options[name] is not None}
    if options["config"] is None:
        reward = RewardSection.model_validate(given)
        return reward, section_args(reward), (), None
    job = read_job(options["config"])
    configure_logging("reward", run=job.run.run_name)
    tracing.start("reward", RunFolder.of(job).traces, run=job.run.run_name, ratio=job.tracking.trace_sample_ratio)
    reward = RewardSection.model_validate(job.reward.model_dump() | given)
    args = hook_args(job.model_copy(update={"reward": reward}))
    return reward, args, own_rewards(eval_sets(job.eval)), RunFolder.of(job)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.reward", description=__doc__)
    parser.add_argument("--config", type=Path, help="the resolved job as JSON; flags below override it")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where it keeps which scorer pays; absent: the run's folder, or nowhere without a job",
    )
    add_listen_arguments(parser, address="127.0.0.1:0")
    for name, option in RewardSection.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        if option.annotation is bool:
            parser.add_argument(flag, action="store_true", default=None, help=option.description)
        else:
            parser.add_argument(flag, help=option.description)
    return parser


if __name__ == "__main__":
    sys.exit(main())
