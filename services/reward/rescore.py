"""`python -m services.reward.rescore`: scores the stored samples of a run with another scorer.

Reads samples/ of the run's folder, and writes a JSON line for each sample: a `Comparison`, or why it was not scored.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.hooks import hook_args
from headrace.hooks.kit.sandbox import allow_insecure_sandbox
from headrace.job.schema.job import Job, read_job
from headrace.limits import MAX_SCORE_ITEMS_PER_CALLER, canonical, from_json
from headrace.process.workers import WorkerError
from headrace.rpc.log import drop_logs
from headrace.run_folder import RunFolder
from headrace.sample_log import Answer, SampleLog
from headrace.score import Score, ScoreItem, ScoreResult
from headrace.shadow_log import as_line
from services.reward.live_scorers import comparison, scorer_named, settings_of, workers_for
from services.reward.registry import Registry
from services.reward.scoring import BatchScorer, RewardMetrics

_GROUPS_AT_ONCE = 16


async def rescored(job: Job, name: str, answers: Iterable[Answer]) -> AsyncIterator[tuple[Answer, ScoreResult]]:
    """Each sample that has a reward, with its new one. Raises InvalidArgument for a scorer that cannot be loaded."""
    allow_insecure_sandbox(job.reward.insecure_sandbox)
    registry = Registry.of(None, None, (), settings_of(job.reward))
    async with AsyncExitStack() as stack:
        scorer = await scorer_named(registry, job.reward, name)
        stack.push_async_callback(scorer.close)
        workers = workers_for(job.reward, scorer)
        stack.push_async_callback(workers.close)
        batch_scorer = BatchScorer(
            registry,
            workers,
            workers,
            hook_args(job),
            RewardMetrics(),
            reward_key=job.reward.reward_key,
            timeout_seconds=job.reward.reward_timeout_seconds,
        )
        for batch in _batches(answers):
            results = await batch_scorer.score_with(scorer, [_item(answer) for answer in batch])
            for pair in zip(batch, results, strict=True):
                yield pair


def _batches(answers: Iterable[Answer]) -> Iterator[list[Answer]]:
    """Whole groups, some at once."""
    batch: list[Answer] = []
    groups = 0
    for _, group in groupby((each for each in answers if each.reward is not None), key=lambda each: each.group_id):
        batch += group
        groups += 1
        if groups == _GROUPS_AT_ONCE or len(batch) >= MAX_SCORE_ITEMS_PER_CALLER:
            yield batch
            batch, groups = [], 0
    if batch:
        yield batch


def _item(answer: Answer) -> ScoreItem:
    """What a scorer sees of a stored sample: its text, and no tokens."""
    return ScoreItem(
        item_id=answer.sample_id,
        prompt=answer.prompt,
        response=answer.response,
        label=answer.label,
        metadata=from_json(answer.metadata),
        group_id=answer.group_id,
        status=answer.status,
        response_tokens=answer.response_tokens,
        index=answer.index,
    )


def _line(answer: Answer, result: ScoreResult) -> str:
    if not isinstance(result, Score):
        return canonical({"sample_id": answer.sample_id, "reason": result.reason, "message": result.message})
    paid = Score(answer.reward or 0.0, answer.scorer, answer.scorer_version)
    return as_line(comparison(_item(answer), paid, result))


def _answers(run: RunFolder, step: int | None) -> Iterator[Answer]:
    log = SampleLog(run.samples)
    for each in log.steps():
        if step in (None, each):
            yield from log.of_step(each)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.reward.rescore", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--scorer", required=True)
    parser.add_argument("--step", type=int)
    options = parser.parse_args(arguments)
    drop_logs()  # stdout is the command's
    run = RunFolder(options.run)

    async def write() -> None:
        job = read_job(run.job_file)
        async for answer, result in rescored(job, options.scorer, _answers(run, options.step)):
            print(_line(answer, result), flush=True)  # noqa: T201  # the command reads it

    try:
        asyncio.run(write())
    except (HeadraceError, WorkerError) as error:
        print(error.message, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
