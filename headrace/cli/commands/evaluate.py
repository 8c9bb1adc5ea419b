"""`headrace eval`: evaluates a live run, a checkpoint or a Hugging Face folder, or shows what evaluations found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.api.rollout.v1 import rollout_pb2
from headrace.cli.arg_types import COUNT, COUNT_FROM_ZERO, PATH, run_argument
from headrace.cli.commands.policy import export_step
from headrace.cli.eval_services import SERVICES, ask, evaluate_url, evaluate_with_services, scratch, serving
from headrace.cli.job_arguments import JobCommand, load_job
from headrace.cli.runs import address_of, find_run
from headrace.cli.view.lines import history_table, print_no_wrap
from headrace.errors import InvalidArgument, NotFound
from headrace.job.eval_sets import EvalSet, eval_dataset, eval_sets
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.launch.previous_run import has_ended
from headrace.limits import shown
from headrace.run_folder import RunFolder

_FOLDER, _URL = "--hf-checkpoint", "--url"
_SIZES = ("--rollout-batch-size", "1", "--n-samples-per-prompt", "1", "--num-steps-per-rollout", "1")


class _Evaluate(click.Command):
    """Weights that no run has are evaluated by commands that take the flags of a job."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        names = {word.split("=")[0] for word in args}
        for flag, command in ((_URL, _of_url), (_FOLDER, _of_folder)):
            if flag in names:
                return command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _common(function: Callable[..., int]) -> Callable[..., int]:
    samples = click.option("--samples", type=PATH, metavar="FILE", help="Write all samples there as JSON lines.")
    return click.option("--max-prompts", type=COUNT, help="How many prompts of each data set to use, from its first.")(
        samples(function)
    )


@click.command(cls=_Evaluate)
@run_argument
@_common
@click.option(
    "--data",
    nargs=2,
    multiple=True,
    metavar="NAME PATH",
    help="Data set to evaluate, instead of the job's; repeatable.",
)
@click.option("--step", type=COUNT_FROM_ZERO, help="Evaluate this step's checkpoint.")
@click.option("--history", is_flag=True, help="Evaluate nothing: show the run's evaluations, by step and data set.")
def evaluate(
    run: str | None,
    data: Sequence[tuple[str, str]],
    step: int | None,
    history: bool,
    max_prompts: int | None,
    samples: Path | None,
) -> int:
    """Evaluates a run, and prints one line for each data set.

    A live run is asked as it is now. Of a run that has ended, and with --step, a checkpoint is exported, and
    engines are started for it.

    `headrace eval [JOB.toml] --hf-checkpoint FOLDER --eval-prompt-data NAME PATH` with a reward takes the flags of
    `headrace train`, and evaluates any Hugging Face folder; with `--url http://HOST:PORT/v1 --model NAME` in place of
    the folder any server that speaks OpenAI's API.
    """
    folder = find_run(run)
    if history:
        return _show_history(folder)
    named = [EvalSet(name=name, path=Path(path).absolute()) for name, path in data]
    job = folder.job()
    datasets = _datasets(job, named or eval_sets(job.eval), max_prompts)
    if step is None and not has_ended(folder):
        return _show(asyncio.run(ask(address_of(run, "rollout"), datasets, samples)))
    with scratch() as place:
        exported = export_step(folder, step, place / "weights")
        print(f"evaluating the checkpoint of step {exported}", flush=True)
        alone = _with_data(serving(job, place, hf_checkpoint=place / "weights"), named)
        return _show(asyncio.run(evaluate_with_services(alone, datasets, samples)))


@click.command(cls=JobCommand)
@_common
def _of_folder(words: Sequence[str], max_prompts: int | None, samples: Path | None) -> int:
    """Evaluates a Hugging Face folder. The sizes of the job's batches are of no account."""
    with scratch() as folder:
        job = load_job([*_with_sizes(words), "--run-dir", str(folder)], lambda _: Scope(SERVICES))
        alone = serving(job, folder, hf_checkpoint=job.model.hf_checkpoint)
        datasets = _datasets(job, eval_sets(job.eval), max_prompts)
        return _show(asyncio.run(evaluate_with_services(alone, datasets, samples)))


@click.command(cls=JobCommand)
@click.option("--url", required=True)
@click.option("--model", required=True)
@_common
def _of_url(url: str, model: str, words: Sequence[str], max_prompts: int | None, samples: Path | None) -> int:
    """Evaluates a server that speaks OpenAI's API. The flags of a job say what to ask and how to score it."""
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"--url {shown(url)} must begin with http:// or https://, and mostly ends with /v1")
    with scratch() as folder:
        flags = [*_with_sizes(words), _FOLDER, str(folder), "--run-dir", str(folder)]
        job = load_job(flags, lambda _: Scope(["reward"]))
        alone = serving(job, folder, hf_checkpoint=folder)
        datasets = _datasets(job, eval_sets(job.eval), max_prompts)
        return _show(asyncio.run(evaluate_url(alone, datasets, samples, url, model)))


def _with_sizes(words: Sequence[str]) -> Sequence[str]:
    return words if words and not words[0].startswith("-") else [*_SIZES, *words]


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
    table = history_table(run.metrics)
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
