"""Evaluates weights that no run serves: starts the services that it needs, asks them, and ends them."""

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
from typing import Any

from rich.progress import Progress

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.client.open import open_rollout
from headrace.errors import FailedPrecondition, Unavailable
from headrace.job.schema.job import Job
from headrace.launch.launcher import Launcher
from headrace.process.child import OneShot
from headrace.rpc.client import connect
from headrace.sample_log import Answer, as_row
from headrace.trajectory import Sample

SERVICES = ("buffer", "reward", "rollout")
DEADLINE_SECONDS = 24 * 3600.0


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for logs and exported weights, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="headrace-eval-") as folder:
        yield Path(folder)


def serving(job: Job, folder: Path, *, hf_checkpoint: Path) -> Job:
    """The job as these services need it: other weights, no prompts to train on, nobody else's services."""
    data = job.data.model_copy(update={"prompt_data": (), "prompt_data_weights": (), "data_source_path": None})
    addresses = {f"{name}_address": None for name in (*SERVICES, "trainer")}
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


async def evaluate_with_services(
    job: Job, datasets: Sequence[rollout_pb2.EvalDataset], samples: Path | None
) -> Sequence[rollout_pb2.EvalResult]:
    """Returns when all services have ended. Raises ServiceFailed, or what kept the evaluation from its result."""
    launcher = Launcher(job, SERVICES, _tell)
    return await _while_they_run(launcher, _ask_when_ready(launcher, datasets, samples))


async def evaluate_url(
    job: Job, datasets: Sequence[rollout_pb2.EvalDataset], samples: Path | None, url: str, model: str
) -> Sequence[rollout_pb2.EvalResult]:
    """Asks a server that speaks OpenAI's API, and scores with a reward service of its own. Raises as the other does."""
    launcher = Launcher(job, ("reward",), _tell)
    return await _while_they_run(launcher, _ask_url(launcher, datasets, samples, url, model))


async def _while_they_run(
    launcher: Launcher, work: Coroutine[Any, Any, Sequence[rollout_pb2.EvalResult]]
) -> Sequence[rollout_pb2.EvalResult]:
    running, asking = asyncio.create_task(launcher.run()), asyncio.create_task(work)
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
    return await ask(address, datasets, samples)


async def _ask_url(
    launcher: Launcher, datasets: Sequence[rollout_pb2.EvalDataset], samples: Path | None, url: str, model: str
) -> Sequence[rollout_pb2.EvalResult]:
    """One process asks and has scored; it waits for the reward service by itself."""
    request = rollout_pb2.EvaluateRequest(
        evaluation_id=uuid.uuid4().hex, datasets=datasets, return_samples=samples is not None
    )
    program = [sys.executable, "-m", "services.rollout.evaluate_url", "--config", str(launcher.folder.job_file)]
    child = await OneShot.start([*program, "--url", url, "--model", model], os.environ)
    done = await child.result(request.SerializeToString(), seconds=DEADLINE_SECONDS)
    if done.exit_code:
        said = [line for line in done.last_lines if line.strip()]
        raise FailedPrecondition(said[-1] if said else "the evaluation ended with an error and wrote no message")
    reply = rollout_pb2.EvaluateResponse.FromString(done.out)
    with _written(samples) as write:
        write(reply.samples)
    return reply.results


async def ask(
    address: str, datasets: Sequence[rollout_pb2.EvalDataset], samples: Path | None
) -> Sequence[rollout_pb2.EvalResult]:
    """Evaluates with the rollout service at the address, shows how far it is, and writes the samples as they finish."""
    results: Sequence[rollout_pb2.EvalResult] = ()
    async with open_rollout(address) as rollout:
        with Progress(transient=True) as progress, _written(samples) as write:
            bar = progress.add_task("evaluating", total=None)
            replies = rollout.watch_evaluation(
                uuid.uuid4().hex, datasets, return_samples=samples is not None, deadline_seconds=DEADLINE_SECONDS
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


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
