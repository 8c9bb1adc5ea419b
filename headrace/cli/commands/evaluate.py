"""`headrace eval`: evaluates a live run, a checkpoint or a Hugging Face folder, or shows what evaluations found."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich.console import Console
from rich.progress import Progress

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.arg_types import COUNT, COUNT_FROM_ZERO, PATH, json_option, print_json, run_argument, teller
from headrace.cli.commands.policy import export_step
from headrace.cli.job_arguments import JobCommand, load_job
from headrace.cli.runs import address_of, find_run
from headrace.cli.view.lines import evaluated_rows, history_table, print_no_wrap
from headrace.client.open import open_rollout
from headrace.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.job.eval_sets import EvalSet, eval_dataset, eval_sets
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.launch.launcher import Launcher
from headrace.launch.previous_run import has_ended
from headrace.limits import shown
from headrace.process.child import OneShot
from headrace.rpc.client import connect
from headrace.run_folder import RunFolder
from headrace.sample_log import Answer, as_row
from headrace.trajectory import Sample

_FOLDER, _URL = "--hf-checkpoint", "--url"
_SERVICES = ("buffer", "reward", "rollout")
_DEADLINE_SECONDS = 24 * 3600.0
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
        samples(json_option(function))
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
    as_json: bool,
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
        return _show_history(folder, as_json=as_json)
    named = [EvalSet(name=name, path=Path(path).absolute()) for name, path in data]
    job = folder.job()
    datasets = _datasets(job, named or eval_sets(job.eval), max_prompts)
    if step is None and not has_ended(folder):
        return _show(_ask(address_of(run, "rollout"), datasets, samples, run=folder.path.name), as_json)
    with _scratch() as place:
        exported = export_step(folder, step, place / "weights")
        teller(as_json)(f"evaluating the checkpoint of step {exported}")
        alone = _with_data(serving(job, place, hf_checkpoint=place / "weights"), named)
        return _show(_beside(alone, _SERVICES, lambda launcher: _ask_when_ready(launcher, datasets, samples)), as_json)


@click.command(cls=JobCommand)
@_common
def _of_folder(words: Sequence[str], max_prompts: int | None, samples: Path | None, as_json: bool) -> int:
    """Evaluates a Hugging Face folder. The sizes of the job's batches are of no account."""
    with _scratch() as folder:
        job = load_job([*_with_sizes(words), "--run-dir", str(folder)], lambda _: Scope(_SERVICES))
        alone = serving(job, folder, hf_checkpoint=job.model.hf_checkpoint)
        datasets = _datasets(job, eval_sets(job.eval), max_prompts)
        return _show(_beside(alone, _SERVICES, lambda launcher: _ask_when_ready(launcher, datasets, samples)), as_json)


@click.command(cls=JobCommand)
@click.option("--url", required=True)
@click.option("--model", required=True)
@_common
def _of_url(
    url: str, model: str, words: Sequence[str], max_prompts: int | None, samples: Path | None, as_json: bool
) -> int:
    """Evaluates a server that speaks OpenAI's API. The flags of a job say what to ask and how to score it."""
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"--url {shown(url)} must begin with http:// or https://, and mostly ends with /v1")
    with _scratch() as folder:
        flags = [*_with_sizes(words), _FOLDER, str(folder), "--run-dir", str(folder)]
        job = load_job(flags, lambda _: Scope(["reward"]))
        alone = serving(job, folder, hf_checkpoint=folder)
        datasets = _datasets(job, eval_sets(job.eval), max_prompts)
        asked = _beside(alone, ["reward"], lambda launcher: _ask_url(launcher, datasets, samples, url, model))
        return _show(asked, as_json)


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


def _show(evaluation: Coroutine[Any, Any, Sequence[rollout_pb2.EvalResult]], as_json: bool) -> int:
    results = asyncio.run(evaluation)
    if as_json:
        print_json(list(results))
        return 0
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


def _show_history(run: RunFolder, *, as_json: bool) -> int:
    table = history_table(run.metrics)
    if table is None:
        raise NotFound(f"{run.path} has no evaluation yet: pass --eval-prompt-data NAME PATH to `headrace train`")
    if as_json:
        print_json(evaluated_rows(run.metrics))
        return 0
    console = Console()
    print_no_wrap(console, table)
    picture = run.path / "evaluations.png"
    if picture.is_file():
        console.print(
            f"{picture} has the curves; `headrace samples --eval NAME --step N` the samples of a number", soft_wrap=True
        )
    return 0


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for logs and exported weights, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="headrace-eval-") as folder:
        yield Path(folder)


def serving(job: Job, folder: Path, *, hf_checkpoint: Path) -> Job:
    """The job as these services need it: other weights, no prompts to train on, nobody else's services."""
    data = job.data.model_copy(update={"prompt_data": (), "prompt_data_weights": (), "data_source_path": None})
    addresses = {f"{name}_address": None for name in (*_SERVICES, "trainer")}
    alone = {"rollout_services": 1, "rollout_service": None}
    buffer = {"buffer_store": "memory", "buffer_shards": 1, "buffer_shard": None}
    return job.model_copy(
        update={
            "data": data,
            "train": job.train.model_copy(update={"loss_mask_type": None}),  # engines answer, whatever was trained
            "model": job.model.model_copy(update={"hf_checkpoint": hf_checkpoint}),
            "services": job.services.model_copy(update=addresses | alone),
            "buffer": job.buffer.model_copy(update=buffer),
            "run": job.run.model_copy(update={"run_dir": folder, "run_name": "eval"}),
        }
    )


Ask: TypeAlias = Callable[[Launcher], Coroutine[Any, Any, Sequence[rollout_pb2.EvalResult]]]


async def _beside(job: Job, services: Sequence[str], ask: Ask) -> Sequence[rollout_pb2.EvalResult]:
    """Asks while the services run, and returns when all have ended.

    Raises ServiceFailed, or what kept the evaluation from its result.
    """
    launcher = Launcher(job, services, lambda line: print(line, file=sys.stderr, flush=True))
    running, asking = asyncio.create_task(launcher.run()), asyncio.create_task(ask(launcher))
    try:
        await asyncio.wait({running, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            await running
        return await asking
    finally:
        asking.cancel()
        running.cancel()
        await asyncio.gather(asking, running, return_exceptions=True)


async def _ask_when_ready(
    launcher: Launcher, datasets: Sequence[rollout_pb2.EvalDataset], samples: Path | None
) -> Sequence[rollout_pb2.EvalResult]:
    address, start_seconds = launcher.address_of("rollout"), launcher.job.services.start_timeout_seconds
    async with connect(address) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), start_seconds)
        except TimeoutError as error:
            raise Unavailable(
                f"the rollout service did not serve within {start_seconds:g} s: raise --start-timeout-seconds"
            ) from error
    return await _ask(address, datasets, samples)


async def _ask_url(
    launcher: Launcher, datasets: Sequence[rollout_pb2.EvalDataset], samples: Path | None, url: str, model: str
) -> Sequence[rollout_pb2.EvalResult]:
    """One process asks and has scored; it waits for the reward service by itself."""
    request = rollout_pb2.EvaluateRequest(
        evaluation_id=uuid.uuid4().hex, datasets=datasets, return_samples=samples is not None
    )
    program = [sys.executable, "-m", "services.rollout.evaluation.by_url", "--config", str(launcher.folder.job_file)]
    child = await OneShot.start([*program, "--url", url, "--model", model], os.environ)
    done = await child.result(request.SerializeToString(), seconds=_DEADLINE_SECONDS)
    if done.exit_code:
        said = [line for line in done.last_lines if line.strip()]
        raise FailedPrecondition(said[-1] if said else "the evaluation ended with an error and wrote no message")
    reply = rollout_pb2.EvaluateResponse.FromString(done.out)
    with _written(samples) as write:
        write(reply.samples)
    return reply.results


async def _ask(
    address: str, datasets: Sequence[rollout_pb2.EvalDataset], samples: Path | None, *, run: str = ""
) -> Sequence[rollout_pb2.EvalResult]:
    """Evaluates with the rollout service at the address, shows how far it is, and writes the samples as they finish.

    `run`: whose policy, where several share the service.
    """
    results: Sequence[rollout_pb2.EvalResult] = ()
    async with open_rollout(address, run=run) as rollout:
        with Progress(transient=True) as progress, _written(samples) as write:
            bar = progress.add_task("evaluating", total=None)
            replies = rollout.watch_evaluation(
                uuid.uuid4().hex, datasets, return_samples=samples is not None, deadline_seconds=_DEADLINE_SECONDS
            )
            async for reply in replies:
                write(reply.samples)
                progress.update(bar, completed=reply.done, total=reply.total)
                results = reply.results
    return results


@contextmanager
def _written(path: Path | None) -> Iterator[Callable[[Iterable[sample_pb2.Sample]], None]]:
    """Writes samples as JSON lines, as `headrace samples --json` prints them; without a path, nowhere."""
    if path is None:
        yield lambda _: None
        return
    try:
        file = path.open("w")
    except OSError as error:
        raise FailedPrecondition(f"--samples {path} cannot be written: {error.strerror}") from error
    with file:
        yield lambda samples: file.writelines(
            json.dumps(as_row(Answer.of(Sample.unpack(one))), ensure_ascii=False) + "\n" for one in samples
        )
