"""`make bench`: what evaluations cost the training that goes on beside them.

The loop, the ledger, producers, router, publications and evaluations are the real ones. Engine and trainer sleep, as in
`overlap`, for as long as each other; the engine is full with a step's samples and slows down beyond, so that what an
evaluation generates delays training by its share of all tokens. The baseline is the same training without evaluations.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from aiohttp import web
from transformers.utils.logging import disable_progress_bar

from headrace.api.rollout.v1 import rollout_pb2
from headrace.client.rollout import RolloutClient
from headrace.job.eval_sets import eval_sets
from headrace.job.schema.production import EvalSection
from headrace.rpc.log import drop_logs
from services.rollout.evaluation.runner import EvalRunner
from services.trainer.loop import train
from services.trainer.serving.evaluation import EvalScheduler, IntervalEvalScheduler, RolloutEvalClient
from services.trainer.serving.report import RunReport
from services.trainer.state import JobSchedule, TrainState
from tests.bench.overlap import GROUPS, SAMPLES, TOKENS, WARM_STEPS, Ledger, SleepingRanks, stack
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE

EVERY = 5
PROMPTS = 16


class FullEngine(FakeEngine):
    """Its tokens come as fast for any number of requests up to a step's samples, and slower in proportion beyond."""

    def __init__(self, token_seconds: float) -> None:
        super().__init__(WIRE, token_seconds=token_seconds)
        self._least_seconds = token_seconds

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self._share(self.num_in_flight)
        try:
            return await super()._generate(request, body)
        finally:
            self._share(self.num_in_flight - 1)

    def _share(self, requests: int) -> None:
        self._token_seconds = self._least_seconds * max(1.0, requests / (GROUPS * SAMPLES))


@dataclass
class InProcess:
    """The rollout service's client, without a network."""

    evaluator: EvalRunner
    services: Sequence[str] = ("the only one",)

    async def watch_evaluation(
        self, evaluation_id: str, datasets: Sequence[rollout_pb2.EvalDataset], **_: object
    ) -> AsyncIterator[rollout_pb2.EvaluateResponse]:
        async for progress in self.evaluator.run(datasets):
            yield rollout_pb2.EvaluateResponse(done=progress.done, total=progress.total, results=progress.results)


@dataclass
class Watch:
    """The loop's console: notes when each step was done, and starts evaluations."""

    evaluations: EvalScheduler
    stopping: bool = False
    done_at: list[float] = field(default_factory=list)

    async def before_step(self, state: TrainState) -> bool:
        return True

    async def evaluate(self, state: TrainState) -> None:
        await self.evaluations.at(state)
        if state.step:
            self.done_at.append(time.monotonic())

    async def evaluated(self) -> None:
        await self.evaluations.finish()

    def report(self, state: TrainState, metrics: dict[str, float]) -> None: ...


def full_engine(_: int, token_seconds: float) -> FullEngine:
    return FullEngine(token_seconds)


def section_of(data: Path, *, exact: bool) -> EvalSection:
    return EvalSection(
        eval_prompt_data=(("bench", data),), eval_interval=EVERY, eval_exact_version=exact, skip_eval_before_train=True
    )


async def seconds_of_a_step(steps: int, seconds: float, *, evaluates: bool, exact: bool = False) -> tuple[float, int]:
    """The mean over the steps after the first ones, with the evaluations among them, and how many had a result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "eval.jsonl"
        data.write_text("".join(f'{{"prompt": "e{number}"}}\n' for number in range(PROMPTS)))
        section, report = section_of(data, exact=exact), RunReport(folder / "run")
        engine = functools.partial(full_engine, token_seconds=seconds / TOKENS)
        async with stack(folder, staleness=1, engine=engine, job={"eval": section.model_dump()}) as (buffer, parts):
            schedule = JobSchedule(
                WARM_STEPS + steps, publish_every=1, save_every=None, evaluation=section, eval_sets=eval_sets(section)
            )
            asked = rollout_pb2.EvalDataset(name="bench", path=str(data), n_samples_per_prompt=1, input_key="prompt")
            client = cast(RolloutClient, InProcess(parts.evaluator))
            evaluator = RolloutEvalClient([asked], client, seconds=600.0)
            evaluations = EvalScheduler()
            if evaluates:
                evaluations = IntervalEvalScheduler(evaluator, schedule, report, exact=exact)
            watch = Watch(evaluations)
            await train(Ledger(buffer), SleepingRanks(parts.receiver, seconds), watch, Steps(WARM_STEPS + steps))
        results = [row for row in report.rows() if row.metrics.get("eval_error") == 0.0]
        report.close()
    return (watch.done_at[-1] - watch.done_at[WARM_STEPS - 1]) / steps, len(results)


@dataclass
class Steps:
    """The job's rhythm: every step is published."""

    num_steps: int

    def publishes(self, state: TrainState) -> bool:
        return True

    def saves(self, state: TrainState) -> bool:
        return False


async def measure(steps: int, seconds: float) -> None:
    without, _ = await seconds_of_a_step(steps, seconds, evaluates=False)
    share = PROMPTS / (EVERY * GROUPS * SAMPLES)
    print(
        f"a step of {GROUPS * SAMPLES} samples; {PROMPTS} are evaluated after every {EVERY}, which is {share:.0%} more"
    )
    print(f"  without evaluations                 {without:6.2f} s")
    for exact, name in ((False, "evaluations beside training"), (True, "--eval-exact-version")):
        taken, results = await seconds_of_a_step(steps, seconds, evaluates=True, exact=exact)
        print(f"  {name:36}{taken:6.2f} s {taken / without:6.2f}×  {results} evaluations")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    disable_progress_bar()
    drop_logs()
    asyncio.run(measure(given.steps, given.seconds))


if __name__ == "__main__":
    main()
