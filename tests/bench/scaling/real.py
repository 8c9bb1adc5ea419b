"""Real runs at 1, 2 and 4 engines beside the simulation of the same runs.

Loop, ledger, producers, router and publications are the real ones. Engines stand in for SGLang: they take as long for a
token as the simulation says, the longer the more they have to do, so that two cores are enough. The trainer sleeps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from headrace.rpc.log import drop_logs
from services.trainer.loop import train
from tests.bench.overlap import GROUPS, SAMPLES, TOKENS, Ledger, SleepingRanks, Steps, Watch, stack
from tests.bench.scaling.costs import Costs
from tests.bench.scaling.layout import Layout, Workload
from tests.bench.scaling.simulation import Run
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE

SIZES = (1, 2, 4)
EVEN = "round_robin"
"""The simulated router divides requests evenly. The default of a job goes by prefixes first (`cache_aware`)."""
WARM_STEPS = 2


def costs_of(slower: float) -> Costs:
    """So many times slower than a run of seconds, for a machine that others use too: what is real costs the same."""
    return replace(
        Costs(), token_base=20e-3 * slower, token_each=1.5e-3 * slower, step_seconds=0.6 * slower,
        flops_per_token=1e-3, score=1e-6, service_per_sample=1e-6, requests_per_gpu=GROUPS * SAMPLES,
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

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        super().__init__(WIRE)

    @property  # type: ignore[override]
    def token_seconds(self) -> float:
        return self._costs.token_base + max(1, self.num_in_flight) * self._costs.token_each

    @token_seconds.setter
    def token_seconds(self, _: float) -> None:
        """Follows from the requests alone."""


async def measured(num_engines: int, num_steps: int, costs: Costs, router_policy: str = EVEN) -> Figures:
    """A run of so many steps that count."""
    job: Mapping[str, Mapping[str, Any]] = {
        "placement": {"rollout_num_gpus": num_engines, "rollout_num_gpus_per_engine": 1},
        "rollout": {"router_policy": router_policy},
    }
    with tempfile.TemporaryDirectory() as folder:
        engines = stack(Path(folder), staleness=1, engine=lambda _: RatedEngine(costs), job=job)
        async with engines as (buffer, parts):
            watch = Watch()
            ranks = SleepingRanks(parts.receiver, costs.step_seconds)
            await train(Ledger(buffer), ranks, watch, Steps(WARM_STEPS + num_steps))
    seconds = statistics.mean(after - before for before, after in itertools.pairwise(watch.done_at[WARM_STEPS - 1 :]))
    return Figures(GROUPS / seconds, max(seconds - costs.step_seconds, 0.0))


def simulated(num_engines: int, num_steps: int, costs: Costs) -> Figures:
    """The same run."""
    work = Workload(
        groups_per_gpu=GROUPS / (2 * num_engines), n_samples_per_prompt=SAMPLES, max_staleness=1, prompt_tokens=8,
        median_tokens=TOKENS, spread=0.0, most_tokens=TOKENS, column_bytes_per_token=0.0, weight_bytes=0.0,
        steps_in_flight=1.0,
    )  # fmt: skip
    report = Run(work, Layout(2 * num_engines, trainer_share=0.5), costs).report(WARM_STEPS, num_steps)
    seconds = 3600 / report.steps_per_hour
    return Figures(GROUPS / seconds, seconds * (1 - report.trainer - report.publication))


def compared(num_engines: int, num_steps: int, costs: Costs, router_policy: str = EVEN) -> Comparison:
    """The real run comes first, so that they do not take each other's processors."""
    real = asyncio.run(measured(num_engines, num_steps, costs, router_policy))
    return Comparison(num_engines, real, simulated(num_engines, num_steps, costs))


def main() -> None:
    """Prints a line for each run as it ends: with a router that divides evenly, and with the default one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=3.0, help="times, where the machine has other work")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    disable_progress_bar()
    drop_logs()
    for router_policy, sizes in ((EVEN, SIZES), ("cache_aware", SIZES[1:])):
        print(f"real runs, {router_policy}; the trainer's wait is that of a step")
        print(f"{'engines':>7}{'groups/s':>12}{'simulated':>12}{'ratio':>8}{'wait s':>12}{'simulated':>12}", flush=True)
        for size in sizes:
            print(compared(size, given.steps, costs_of(given.slower), router_policy).line(), flush=True)


if __name__ == "__main__":
    main()
