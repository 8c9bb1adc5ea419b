"""Real runs at 1, 2 and 4 engines beside the simulation of the same runs.

Loop, ledger, producers, router and publications are the real ones. Engines stand in for SGLang: they take as long for a
token as the simulation says, the longer the more they have to do, so that two cores are enough. The trainer sleeps.
What services cost on those cores is measured beside each run, with engines that answer at once (`overheads`); what its
publications took, and how late its cores were, in the run itself. The simulation is given all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from headrace.client.buffer import BufferClient
from headrace.rpc.log import drop_logs
from services.trainer.loop import train
from services.trainer.state import TrainState
from tests.bench.overlap import GROUPS, SAMPLES, STREAM, TOKENS, Ledger, SleepingRanks, Steps, Watch, stack
from tests.bench.scaling.costs import Costs
from tests.bench.scaling.layout import Layout, Workload
from tests.bench.scaling.simulation import Run
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE

SIZES = (1, 2, 4)
POLICIES = ("manual", "round_robin")
"""The simulated router divides requests evenly, and so do these; `manual` is a job's default."""
EVEN = POLICIES[0]
WARM_STEPS = 2
_SLEEP_SECONDS = 0.05
MANY = 100
"""Steps' groups that may be generated before one is trained."""


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
class InRun:
    """Seconds that were noted in a run."""

    publication: tuple[float, float]
    """Its standstill, and the whole of it."""
    token_delay: float
    """Beyond the time of a token, until the core is there that makes the next."""


@dataclass(frozen=True)
class Overheads:
    """Seconds that are nobody's tokens: lease, routing, scoring and put of a group, and what was noted in the run."""

    of_sample: float
    """In which a service can do nothing for another sample."""
    of_group: float
    """Beside its samples', in which it waits for calls."""
    in_run: InRun

    def line(self) -> str:
        standstill, whole = self.in_run.publication
        return (
            f"        measured: {1e3 * self.of_sample:.1f} ms a sample, {1e3 * self.of_group:.0f} ms a group, a token "
            f"{1e3 * self.in_run.token_delay:.1f} ms late, publications {whole:.2f} s, of which engines stand still "
            f"{standstill:.2f} s"
        )


@dataclass
class Lateness:
    """How much later than asked this process's loop goes on after a sleep: engines of a run sleep for each token."""

    seconds: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            asked = time.monotonic() + _SLEEP_SECONDS
            await asyncio.sleep(_SLEEP_SECONDS)
            self.seconds.append(time.monotonic() - asked)


@dataclass
class TimedRanks(SleepingRanks):
    """Notes what publications take."""

    standstills: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)

    async def publish(self, state: TrainState) -> dict[str, float]:
        begun = time.monotonic()
        figures = await super().publish(state)
        self.wholes.append(time.monotonic() - begun)
        self.standstills.append(figures["publish/paused_seconds"])
        return figures

    @property
    def means(self) -> tuple[float, float]:
        """Standstill and whole, of those after the first steps."""
        return statistics.mean(self.standstills[WARM_STEPS:]), statistics.mean(self.wholes[WARM_STEPS:])


@dataclass(frozen=True)
class Comparison:
    num_engines: int
    real: Figures
    simulated: Figures
    overheads: Overheads

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


def job_of(num_engines: int, router_policy: str, groups_in_flight: int) -> Mapping[str, Mapping[str, Any]]:
    return {
        "placement": {"rollout_num_gpus": num_engines, "rollout_num_gpus_per_engine": 1},
        "rollout": {"router_policy": router_policy, "max_groups_in_flight": groups_in_flight},
    }


async def seconds_of_a_group(num_engines: int, router_policy: str, groups_in_flight: int, num_groups: int) -> float:
    """The time between two groups that are put, with engines whose tokens take none."""
    job = job_of(num_engines, router_policy, groups_in_flight)
    with tempfile.TemporaryDirectory() as folder:
        engines = stack(Path(folder), staleness=MANY, engine=lambda _: FakeEngine(WIRE), job=job)
        async with engines as (buffer, parts):
            epoch = (await buffer.rewind(STREAM, 0)).epoch
            await SleepingRanks(parts.receiver, 0.0).publish(TrainState(0, 0, epoch))
            await buffer.set_policy_version(STREAM, epoch, 0)
            first, begun = await _put(buffer, WARM_STEPS), time.monotonic()
            last = await _put(buffer, first + num_groups)
            return (time.monotonic() - begun) / (last - first)


async def _put(buffer: BufferClient, at_least: int) -> int:
    """Waits for so many groups, and says how many there are then."""
    while (ready := (await buffer.stats(STREAM)).groups["READY"]) < at_least:
        await asyncio.sleep(0.01)  # another party's state
    return ready


async def overheads(num_engines: int, router_policy: str, in_run: InRun) -> Overheads:
    """Of groups one by one, and of as many at once as a run has: there their waits overlap, and work is left."""
    alone = await seconds_of_a_group(num_engines, router_policy, 1, 2 * GROUPS)
    together = await seconds_of_a_group(num_engines, router_policy, GROUPS, 6 * GROUPS)
    return Overheads(together / SAMPLES, max(alone - together, 0.0), in_run)


async def measured(num_engines: int, num_steps: int, costs: Costs, router_policy: str = EVEN) -> tuple[Figures, InRun]:
    """A run of so many steps that count, and what was noted in it."""
    job = job_of(num_engines, router_policy, GROUPS)
    with tempfile.TemporaryDirectory() as folder:
        engines = stack(Path(folder), staleness=1, engine=lambda _: RatedEngine(costs), job=job)
        async with engines as (buffer, parts):
            watch = Watch()
            ranks = TimedRanks(parts.receiver, costs.step_seconds)
            watching = asyncio.create_task((lateness := Lateness()).watch())
            await train(Ledger(buffer), ranks, watch, Steps(WARM_STEPS + num_steps))
            watching.cancel()
    seconds = statistics.mean(after - before for before, after in itertools.pairwise(watch.done_at[WARM_STEPS - 1 :]))
    return Figures(GROUPS / seconds, max(seconds - costs.step_seconds, 0.0)), InRun(
        ranks.means, statistics.mean(lateness.seconds)
    )


def simulated(num_engines: int, num_steps: int, costs: Costs, cost: Overheads) -> Figures:
    """The same run."""
    costs = replace(
        costs,
        token_base=costs.token_base + cost.in_run.token_delay,
        service_per_sample=cost.of_sample,
        group_latency=cost.of_group,
        publication_seconds=cost.in_run.publication,
    )
    work = Workload(
        groups_per_gpu=GROUPS / (2 * num_engines), n_samples_per_prompt=SAMPLES, max_staleness=1, prompt_tokens=8,
        median_tokens=TOKENS, spread=0.0, most_tokens=TOKENS, column_bytes_per_token=0.0, weight_bytes=0.0,
        steps_in_flight=1.0,
    )  # fmt: skip
    report = Run(work, Layout(2 * num_engines, trainer_share=0.5), costs).report(WARM_STEPS, num_steps)
    seconds = 3600 / report.steps_per_hour
    return Figures(GROUPS / seconds, seconds * (1 - report.trainer))


def compared(num_engines: int, num_steps: int, costs: Costs, router_policy: str = EVEN) -> Comparison:
    """The real run comes first, so that they do not take each other's processors."""
    real, in_run = asyncio.run(measured(num_engines, num_steps, costs, router_policy))
    cost = asyncio.run(overheads(num_engines, router_policy, in_run))
    return Comparison(num_engines, real, simulated(num_engines, num_steps, costs, cost), cost)


def main() -> None:
    """Prints two lines for each run as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=3.0, help="times, where the machine has other work")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    disable_progress_bar()
    drop_logs()
    for router_policy, sizes in ((EVEN, SIZES), (POLICIES[1], SIZES[1:])):
        print(f"real runs, {router_policy}; the trainer's wait is that of a step")
        print(f"{'engines':>7}{'groups/s':>12}{'simulated':>12}{'ratio':>8}{'wait s':>12}{'simulated':>12}", flush=True)
        for size in sizes:
            found = compared(size, given.steps, costs_of(given.slower), router_policy)
            print(f"{found.line()}\n{found.overheads.line()}", flush=True)


if __name__ == "__main__":
    main()
