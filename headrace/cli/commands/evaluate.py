"""`headrace eval [RUN]`: evaluates the policy that the engines serve now, or shows what evaluations found."""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from headrace.api.rollout.v1 import rollout_pb2
from headrace.cli.runs import add_run_argument, address_of, find_run
from headrace.cli.view.eval_history import history
from headrace.client.rollout import RolloutClient
from headrace.errors import InvalidArgument, NotFound
from headrace.job.eval_dataset import eval_dataset
from headrace.job.eval_sets import EvalSet, eval_sets
from headrace.run_folder import RunFolder

_DEADLINE_SECONDS = 24 * 3600.0


def evaluate(argv: Sequence[str]) -> int:
    """Prints one line for each data set."""
    parser = argparse.ArgumentParser(prog="headrace eval")
    add_run_argument(parser)
    parser.add_argument(
        "--data",
        nargs=2,
        action="append",
        metavar=("NAME", "PATH"),
        help="data set to evaluate, instead of the job's; repeatable",
    )
    parser.add_argument("--max-prompts", type=int, help="how many prompts of each data set to use, from its first")
    parser.add_argument(
        "--history", action="store_true", help="evaluate nothing: show the run's evaluations, by step and data set"
    )
    args = parser.parse_intermixed_args(argv)
    run = find_run(args.run)
    if args.history:
        return _show_history(run)
    job = run.job()
    named = [EvalSet(name=name, path=Path(path).absolute()) for name, path in args.data or ()]
    if not (sets := named or eval_sets(job.eval)):
        raise InvalidArgument("the job has no eval_prompt_data: pass --data NAME PATH")
    datasets = [eval_dataset(each, job.eval, job.rollout, job.data, args.max_prompts) for each in sets]
    results = asyncio.run(_evaluate(address_of(args.run, "rollout"), datasets))
    for result in results:
        print(described(result))
    return 0


def described(result: rollout_pb2.EvalResult) -> str:
    """A result in a line."""
    interval = f" (95 %: {result.low:.4f} to {result.high:.4f})" if result.HasField("low") else ""
    passed = "".join(f", pass@{each.k} {each.estimate:.4f}" for each in result.pass_at_k)
    return (
        f"eval/{result.name}: mean reward {result.mean_reward:.4f}{interval} over {result.num_samples} samples of "
        f"{result.num_prompts} prompts ({result.num_failed} failed){passed}, {result.mean_response_tokens:.1f} tokens, "
        f"{result.truncated_ratio:.0%} truncated, policy version {result.min_policy_version} to "
        f"{result.max_policy_version}"
    )


def _show_history(run: RunFolder) -> int:
    table = history(run.metrics)
    if table is None:
        raise NotFound(f"{run.path} has no evaluation yet: pass --eval-prompt-data NAME PATH to `headrace train`")
    console = Console()
    console.print(table)
    picture = run.path / "evaluations.png"
    if picture.is_file():
        console.print(f"{picture} has the curves; `headrace samples --eval NAME --step N` the samples of a number")
    return 0


async def _evaluate(address: str, datasets: list[rollout_pb2.EvalDataset]) -> list[rollout_pb2.EvalResult]:
    results: list[rollout_pb2.EvalResult] = []
    async with RolloutClient(address) as rollout:
        with Progress(transient=True) as progress:
            bar = progress.add_task("evaluating", total=None)
            replies = rollout.watch_evaluation(uuid.uuid4().hex, datasets, deadline_seconds=_DEADLINE_SECONDS)
            async for reply in replies:
                progress.update(bar, completed=reply.done, total=reply.total)
                results.extend(reply.results)
    return results
