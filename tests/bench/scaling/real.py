"""Real runs at 1, 2 and 4 engines beside the simulation of the same runs.

Loop, ledger, producers, router and publications are the real ones. Engines stand in for SGLang: they take as long for a
token as the simulation says, the longer the more they have to do, so that two cores are enough. The trainer sleeps.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.trainer.loop import train
from tests.bench.overlap import GROUPS, SAMPLES, TOKENS, Ledger, SleepingRanks, Steps, Watch, stack
from tests.bench.scaling.costs import Costs
from tests.bench.scaling.layout import Layout, Workload
from tests.bench.scaling.simulation import Run
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE

SIZES = (1, 2, 4)
WARM_STEPS = 2
TRAIN_SECONDS = 0.6
COSTS = replace(
    Costs(), token_base=20e-3, token_each=1.5e-3, step_seconds=TRAIN_SECONDS, flops_per_token=1e-3, score=1e-6,
    service_per_sample=1e-6, requests_per_gpu=GROUPS * SAMPLES,
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    groups_per_second: float
    wait_seconds: float
    """In which the trainer waits for a batch, in each step."""


@dataclass(frozen=True)
class Comparison:
    num_engines: int
    real: Figures
    simulated: Figures

    @property
    def ratio(self) -> float:
        """Groups a second, simulated over real."""
        return self.simulated.groups_per_second / self.real.groups_per_second

    def line(self) -> str:
        real, simulated = self.real, self.simulated
        return (
            f"{self.num_engines:>7}{real.groups_per_second:>12.2f}{simulated.groups_per_second:>12.2f}"
            f"{self.ratio:>8.2f}{real.wait_seconds:>12.2f}{simulated.wait_seconds:>12.2f}"
        )


class RatedEngine(FakeEngine):
    """A token of each of its requests takes as long as the costs say for so many at once."""

    @property  # type: ignore[override]
    def token_seconds(self) -> float:
        return COSTS.token_base + max(1, self.num_in_flight) * COSTS.token_each

    @token_seconds.setter
    def token_seconds(self, _: float) -> None:
        """Follows from the requests alone."""


async def measured(num_engines: int, num_steps: int) -> Figures:
    """A run of so many steps that count."""
    job = {"placement": {"rollout_num_gpus": num_engines, "rollout_num_gpus_per_engine": 1}}
    with tempfile.TemporaryDirectory() as folder:
        engines = stack(Path(folder), staleness=1, engine=lambda _: RatedEngine(WIRE), job=job)
        async with engines as (buffer, parts):
            watch = Watch()
            ranks = SleepingRanks(parts.receiver, TRAIN_SECONDS)
            await train(Ledger(buffer), ranks, watch, Steps(WARM_STEPS + num_steps))
    seconds = statistics.mean(after - before for before, after in itertools.pairwise(watch.done_at[WARM_STEPS - 1 :]))
    return Figures(GROUPS / seconds, max(seconds - TRAIN_SECONDS, 0.0))


def simulated(num_engines: int, num_steps: int) -> Figures:
    """The same run."""
    work = Workload(
        groups_per_gpu=GROUPS / (2 * num_engines), n_samples_per_prompt=SAMPLES, max_staleness=1, prompt_tokens=8,
        median_tokens=TOKENS, spread=0.0, most_tokens=TOKENS, column_bytes_per_token=0.0, weight_bytes=0.0,
        steps_in_flight=1.0,
    )  # fmt: skip
    report = Run(work, Layout(2 * num_engines, trainer_share=0.5), COSTS).report(WARM_STEPS, num_steps)
    seconds = 3600 / report.steps_per_hour
    return Figures(GROUPS / seconds, seconds * (1 - report.trainer - report.publication))


def compared(sizes: Sequence[int] = SIZES, num_steps: int = 8) -> list[Comparison]:
    """One after the other, so that they do not take each other's processors."""
    return [Comparison(size, asyncio.run(measured(size, num_steps)), simulated(size, num_steps)) for size in sizes]


def table(comparisons: Sequence[Comparison]) -> str:
    head = f"{'engines':>7}{'groups/s':>12}{'simulated':>12}{'ratio':>8}{'wait s':>12}{'simulated':>12}"
    return "\n".join([head, *(each.line() for each in comparisons)])
