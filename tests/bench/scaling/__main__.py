"""`make bench-scaling`: a simulated run on 1 to 4,096 GPUs, with one of each service and with as many as it takes.

Prints a table and draws docs/scaling.svg. Nothing runs but simpy: costs.py says where each number comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench.scaling.costs import Costs
from tests.bench.scaling.layout import Demand, Layout, Workload, full_at, groups_per_step, mended
from tests.bench.scaling.simulation import Report, Run

SIZES = (1, 8, 64, 512, 4_096)
PICTURE = Path(__file__).parents[3] / "docs" / "scaling.svg"
WARM_STEPS, MOST_STEPS, LEAST_STEPS = 4, 40, 6
GROUPS = 8_192
"""Enough for a mean: small runs are simulated for more steps."""
OTHERWISE_GPUS = 512
PARTS = ("buffer", "services", "reward", "publication")


OTHERWISE: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "a batch of 64 groups": ({"groups_per_gpu": 1 / 8}, {}),
    "on-policy": ({"max_staleness": 0}, {}),
    "3 steps' groups in flight": ({"steps_in_flight": 3.0}, {}),
    "8 services, 1 sender": ({}, {"num_services": 8}),
}
"""What changes of the workload and of the layout, on 512 GPUs."""


@dataclass(frozen=True)
class Row:
    layout: Layout
    demand: Demand
    report: Report


def simulated(work: Workload, layout: Layout, costs: Costs) -> Row:
    """One layout, with more steps the fewer groups a step has."""
    steps = max(LEAST_STEPS, min(MOST_STEPS, GROUPS // layout.num_gpus))
    report = Run(work, layout, costs).report(WARM_STEPS, steps)
    return Row(layout, Demand.of(work, layout, costs), report)


def line(row: Row) -> str:
    """A row of the table."""
    layout, report = row.layout, row.report
    counts = f"{layout.num_shards}/{layout.num_services}/{layout.reward_workers}/{layout.num_senders}"
    shares = "".join(f"{getattr(report, name):>12.1%}" for name in ("engines", "trainer", *PARTS, "expired"))
    return f"{layout.num_gpus:>5}{counts:>14}{report.steps_per_hour:>12.1f}{shares}  {report.first}"


def arithmetic(row: Row, work: Workload) -> str:
    """The bytes behind a row."""
    rate, layout, seconds = row.report.samples_per_second, row.layout, 3600 / row.report.steps_per_hour
    samples = groups_per_step(work, layout) * work.n_samples_per_prompt
    bytes_per_second = rate * (work.payload_bytes + work.column_bytes)
    weights = work.weight_bytes * layout.num_services
    return (
        f"{layout.num_gpus:>5}{samples:>10,}{seconds:>10.0f}{rate / work.n_samples_per_prompt:>10.2f}"
        f"{samples * work.payload_bytes / 1e9:>13.3f}{samples * work.column_bytes / 1e9:>13.2f}"
        f"{bytes_per_second / 1e6:>10.1f}{weights / 1e9:>11.0f}"
        f"{row.demand.standstill:>13.1f}"
    )


def limits(work: Workload, costs: Costs) -> str:
    """How far one of each goes."""
    return ", ".join(f"{name} {gpus:,.0f}" for name, gpus in full_at(work, costs).items())


def draw(as_is: Sequence[Row], enough: Sequence[Row], path: Path) -> None:
    """Steps an hour, with one of each and with enough; and how busy the one of each is."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"  # the same bytes for the same runs
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    sizes = [row.layout.num_gpus for row in as_is]
    for label, rows, style in (("as many as it takes", enough, "-"), ("one of each", as_is, "--")):
        steps = [row.report.steps_per_hour for row in rows]
        left.plot(sizes, steps, style, color="#1f4e79", marker="o", label=label)
    left.set(title="Steps an hour (a batch grows with the GPUs)", ylabel="steps an hour", ylim=(0, None))
    colours = ("#1f4e79", "#c0504d", "#7f9f3f", "#8064a2")
    names = {"services": "rollout service", "reward": "two reward workers"}
    for part, colour in zip(PARTS, colours, strict=True):
        right.plot(
            sizes,
            [100 * getattr(row.report, part) for row in as_is],
            color=colour,
            marker="o",
            label=names.get(part, part),
        )
    right.axhline(100, color="grey", linewidth=0.8)
    right.set(title="Busy, where there is one of each", ylabel="% of the time", ylim=(0, 108))
    for panel in (left, right):
        panel.set_xscale("log", base=8)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.set_xlabel("GPUs")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line for each size and layout as it is simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the curves are drawn")
    parser.add_argument("--most-gpus", type=int, default=SIZES[-1], help="larger sizes are left out")
    arguments = parser.parse_args(argv)
    work, costs = Workload(), Costs()
    sizes = [size for size in SIZES if size <= arguments.most_gpus]
    columns = "".join(f"{name:>12}" for name in ("engines", "trainer", *PARTS, "expired"))
    print("counts: shards/rollout services/reward workers/ranks that send weights; shares of the time of all of a kind")
    print(f"{'GPUs':>5}{'counts':>14}{'steps/hour':>12}{columns}  busiest service", flush=True)
    as_is, enough = [], []
    for size in sizes:
        for rows, layout in ((as_is, Layout(size)), (enough, mended(work, Layout(size), costs))):
            rows.append(simulated(work, layout, costs))
            print(line(rows[-1]), flush=True)
    if OTHERWISE_GPUS in sizes:
        layout = enough[sizes.index(OTHERWISE_GPUS)].layout
        for name, (of_work, of_layout) in OTHERWISE.items():
            row = simulated(replace(work, **of_work), replace(layout, **of_layout), costs)
            print(f"{line(row)}; {name}", flush=True)
    print("\nwith as many as it takes; GB and MB are 10^9 and 10^6 bytes, puts are groups")
    print(
        f"{'GPUs':>5}{'samples':>10}{'s/step':>10}{'puts/s':>10}{'payload GB':>13}{'columns GB':>13}"
        f"{'MB/s in':>10}{'weights GB':>11}{'standstill s':>13}"
    )
    for row in enough:
        print(arithmetic(row, work))
    print(f"\nGPUs that fill one of each, if neither engines nor trainer wait: {limits(work, costs)}")
    print(f"the same without routed experts: {limits(replace(work, column_bytes_per_token=0), costs)}")
    draw(as_is, enough, arguments.picture)


if __name__ == "__main__":
    main()
