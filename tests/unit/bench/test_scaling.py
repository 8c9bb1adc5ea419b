"""The simulation of scaling, in the limits where a formula or a measurement says what must come out."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Generator
from pathlib import Path

import pytest
import simpy

from tests.bench.scaling.costs import Assumed, Costs, Measured
from tests.bench.scaling.layout import Demand, Layout, Workload, full_at, mended
from tests.bench.scaling.simulation import Report, Run
from tests.bench.scaling.station import Station

ROOT = Path(__file__).parents[3]
EVEN = Workload(spread=0.0, median_tokens=1_000, most_tokens=2_000, weight_bytes=0, column_bytes_per_token=0)
"""Responses of one length, and publications that take no time."""
FREE = Costs(
    put_points=((0.0, 1e-9), (1.0, 1e-9)), transition=0.0, batch_per_group=0.0, out_per_byte=0.0,
    service_per_sample=1e-9, score=1e-9, step_seconds=0.0,
)  # fmt: skip
"""Engines and a trainer, beside which the rest takes no time."""


def run(work: Workload, layout: Layout, costs: Costs, steps: int = 12) -> tuple[Report, Demand]:
    return Run(work, layout, costs).report(6, steps), Demand.of(work, layout, costs)


def test_every_cost_says_where_it_comes_from() -> None:
    for each in dataclasses.fields(Costs):
        assert each.metadata["sources"], each.name
        for source in each.metadata["sources"]:
            match source:
                case Measured(document, quote):
                    assert quote in (ROOT / document).read_text(), f"{each.name}: {document} does not say {quote!r}"
                case Assumed(reason):
                    assert reason, each.name


@pytest.mark.parametrize("trainer_share", [0.1, 0.5])
def test_without_queues_throughput_is_that_of_the_slower_of_engines_and_trainer(trainer_share: float) -> None:
    report, demand = run(dataclasses.replace(EVEN, steps_in_flight=3.0), Layout(16, trainer_share), FREE)
    slower = min(demand.engines, demand.trainer)
    assert (demand.engines < demand.trainer) == (trainer_share == 0.5)
    assert report.samples_per_second == pytest.approx(slower, rel=0.02)
    assert (report.engines if trainer_share == 0.5 else report.trainer) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_puts_that_come_at_random_wait_at_one_shard_as_long_as_the_formula_of_m_d_1_says(load: float) -> None:
    env, generator = simpy.Environment(), random.Random(1)
    shard = Station(env)

    def arrive() -> Generator[simpy.Event, object, None]:
        for _ in range(60_000):
            yield env.timeout(generator.expovariate(load))
            shard.serve(1.0)

    env.run(until=env.process(arrive()))
    assert shard.waited_seconds / shard.num_served == pytest.approx(load / (2 * (1 - load)), rel=0.05)
    assert shard.done_seconds / env.now == pytest.approx(load, rel=0.02)


def test_the_document_says_what_the_closed_forms_say() -> None:
    text = (ROOT / "docs/scaling.md").read_text()
    work, costs = Workload(), Costs()
    full = full_at(work, costs)
    layout = mended(work, Layout(4_096), costs)
    assert f"one is full at {full['buffer']:,.0f} GPUs" in text
    assert f"two are full at {full['reward']:,.0f} GPUs" in text
    assert f"one is full at {full['services']:,.0f} GPUs" in text
    assert f"{layout.num_shards} shards for 4,096 GPUs" in text
    assert (
        f"| 4,096 | {layout.num_shards}, {layout.num_services}, {layout.reward_workers}, {layout.num_senders} |" in text
    )
    assert f"responses of {work.mean_tokens:,.0f} on average" in text
    payload, columns = (32_768 * each / 1e9 for each in (work.payload_bytes, work.column_bytes))
    assert f"{payload:.1f} GB | {columns:.0f} GB |" in text
