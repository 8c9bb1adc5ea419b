"""`headrace eval`: evaluates a live run, a checkpoint or a Hugging Face folder, or shows what evaluations found."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headrace.api.rollout.v1 import rollout_pb2
from headrace.cli.commands.export import export_step
from headrace.cli.eval_services import SERVICES, ask, evaluate_url, evaluate_with_services, scratch, serving
from headrace.cli.job_arguments import load_job
from headrace.cli.runs import add_run_argument, address_of, find_run
from headrace.cli.view.lines import history, print_no_wrap
from headrace.cli.words import count, count_from_zero
from headrace.errors import InvalidArgument, NotFound
from headrace.job.eval_sets import EvalSet, eval_dataset, eval_sets
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.launch.previous_run import has_ended
from headrace.limits import shown
from headrace.run_folder import RunFolder

_FOLDER, _URL = "--hf-checkpoint", "--url"
_SIZES = ("--rollout-batch-size", "1", "--n-samples-per-prompt", "1", "--num-steps-per-rollout", "1")
_EPILOG = """A live run is asked as it is now. Of a run that has ended, and with --step, a checkpoint is exported, and
engines are started for it. `headrace eval [JOB.toml] --hf-checkpoint FOLDER --eval-prompt-data NAME PATH` with a reward
takes the flags of `headrace train`, and evaluates any Hugging Face folder; with `--url http://HOST:PORT/v1 --model
NAME` in place of the folder any server that speaks OpenAI's API."""


def evaluate(argv: Sequence[str]) -> int:
    """Prints one line for each data set."""
    names = {word.split("=")[0] for word in argv}
    if _URL in names:
        return _of_url(argv)
    if _FOLDER in names:
        return _of_folder(argv)
    parser = argparse.ArgumentParser(prog="headrace eval", epilog=_EPILOG)
    add_run_argument(parser)
    _add_common(parser)
    parser.add_argument(
        "--data",
        nargs=2,
        action="append",
        metavar=("NAME", "PATH"),
        help="data set to evaluate, instead of the job's; repeatable",
    )
    parser.add_argument("--step", type=count_from_zero, help="evaluate this step's checkpoint")
    parser.add_argument(
        "--history", action="store_true", help="evaluate nothing: show the run's evaluations, by step and data set"
    )
    args = parser.parse_intermixed_args(argv)
    run = find_run(args.run)
    if args.history:
        return _show_history(run)
    named = [EvalSet(name=name, path=Path(path).absolute()) for name, path in args.data or ()]
    job = run.job()
    datasets = _datasets(job, named or eval_sets(job.eval), args.max_prompts)
    if args.step is None and not has_ended(run):
        return _show(asyncio.run(ask(address_of(args.run, "rollout"), datasets, args.samples)))
    with scratch() as folder:
        step = export_step(run, args.step, folder / "weights")
        print(f"evaluating the checkpoint of step {step}", flush=True)
        alone = _with_data(serving(job, folder, hf_checkpoint=folder / "weights"), named)
        return _show(asyncio.run(evaluate_with_services(alone, datasets, args.samples)))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-prompts", type=count, help="how many prompts of each data set to use, from its first")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write all samples there as JSON lines")


def _of_folder(argv: Sequence[str]) -> int:
    """Takes the flags of a job; the sizes of its batches are of no account."""
    parser = argparse.ArgumentParser(prog="headrace eval", allow_abbrev=False)
    _add_common(parser)
    args, words = parser.parse_known_args(argv)
    words = words if words and not words[0].startswith("-") else [*_SIZES, *words]
    with scratch() as folder:
        job = load_job([*words, "--run-dir", str(folder)], lambda _: Scope(SERVICES))
        alone = serving(job, folder, hf_checkpoint=job.model.hf_checkpoint)
        datasets = _datasets(job, eval_sets(job.eval), args.max_prompts)
        return _show(asyncio.run(evaluate_with_services(alone, datasets, args.samples)))


def _of_url(argv: Sequence[str]) -> int:
    """Takes --url and --model, and the flags of a job that say what to ask and how to score it."""
    parser = argparse.ArgumentParser(prog="headrace eval", allow_abbrev=False)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    _add_common(parser)
    args, words = parser.parse_known_args(argv)
    if not args.url.startswith(("http://", "https://")):
        raise InvalidArgument(f"--url {shown(args.url)} must begin with http:// or https://, and mostly ends with /v1")
    words = words if words and not words[0].startswith("-") else [*_SIZES, *words]
    with scratch() as folder:
        job = load_job([*words, _FOLDER, str(folder), "--run-dir", str(folder)], lambda _: Scope(["reward"]))
        alone = serving(job, folder, hf_checkpoint=folder)
        datasets = _datasets(job, eval_sets(job.eval), args.max_prompts)
        return _show(asyncio.run(evaluate_url(alone, datasets, args.samples, args.url, args.model)))


def _datasets(job: Job, sets: Sequence[EvalSet], max_prompts: int | None) -> list[rollout_pb2.EvalDataset]:
    if not sets:
        raise InvalidArgument("no data to evaluate on: pass --data NAME PATH of a run, --eval-prompt-data of a folder")
    return [eval_dataset(each, job.eval, job.rollout, job.data, max_prompts) for each in sets]


def _with_data(job: Job, named: Sequence[EvalSet]) -> Job:
    """The job with the named files, which only its own rollout service reads then."""
    if not named:
        return job
    data = tuple((each.name, each.path) for each in named)
    return job.model_copy(update={"eval": job.eval.model_copy(update={"eval_prompt_data": data, "eval_config": None})})


def _show(results: Sequence[rollout_pb2.EvalResult]) -> int:
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
    print_no_wrap(console, table)
    picture = run.path / "evaluations.png"
    if picture.is_file():
        console.print(
            f"{picture} has the curves; `headrace samples --eval NAME --step N` the samples of a number", soft_wrap=True
        )
    return 0
