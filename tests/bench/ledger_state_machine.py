"""`make bench`: the ledger's state machine alone, without disk, gRPC or clock.

First transitions a second (a transition is an event of the history) of whole steps: submit, lease, put, batch, consume,
publish, commit, forget. Then the cost of one transition in a ledger that holds 10,000 to 1,000,000 other groups, half
of them QUEUED and half READY: flat, or some command looks at all of them. `--picture PATH` draws that curve.
Only the commands are timed, in seconds of CPU, not the making of the samples that a producer would bring. What Python's
collector took of them is told apart, and the baseline is a bare dict of as many entries: what memory alone costs.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.buffer.ledger.group import Group, NewSample, Prompt, SampleRecord
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.produce import GroupPut, PutOutcome
from services.buffer.ledger.stream import StreamConfig, StreamState
from services.buffer.ledger.transaction import Instant

NOW = Instant(1000.0, 1_700_000_000.0)
GROUPS_PER_STEP = 256
PUTS_PER_CALL = 16
SAMPLES = 8
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
DIGEST = b"\x01" * 32
ENVELOPE = b"\x02" * 180
LOOK_UPS = 200_000


@dataclass(frozen=True)
class Cost:
    """Of one transition in a ledger that holds so many groups besides, medians over steps."""

    num_groups: int
    microseconds: float
    without_collector: float
    """Microseconds of it that were not the collector's passes."""
    look_up: float
    """The baseline: microseconds of one look-up in a bare dict of as many entries."""


class Collector:
    """Seconds of CPU that Python's collector has taken."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0

    def __call__(self, phase: str, _: object) -> None:
        if phase == "start":
            self._begun = time.process_time()
        else:
            self.seconds += time.process_time() - self._begun

    @contextmanager
    def counting(self) -> Iterator[None]:
        gc.callbacks.append(self)
        try:
            yield
        finally:
            gc.callbacks.remove(self)


class Run:
    """One stream, and the seconds that its commands took."""

    def __init__(self, samples: int, **config: object) -> None:
        self.ledger = Ledger("bench")
        self.seconds: list[float] = []
        self.collector = Collector()
        self.collected = 0.0
        """Of these seconds."""
        self.samples = samples
        self._prompts = 0
        self._requests = 0
        fields = {"max_staleness": None, "n_samples_per_prompt": samples, "groups_per_step": GROUPS_PER_STEP, **config}
        self.ledger.create_stream(NOW, StreamState(StreamConfig("train", **fields)))  # type: ignore[arg-type]
        self.epoch = self.ledger.rewind(NOW, "train", 0, "bench")[0][0]
        self.step = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        begun, before = time.process_time(), self.collector.seconds
        yield
        self.seconds.append(time.process_time() - begun)
        self.collected += self.collector.seconds - before

    def submit(self, count: int) -> None:
        first, self._prompts = self._prompts, self._prompts + count
        prompts = [Prompt(f"prompt-{i}", b"a prompt of some length") for i in range(first, first + count)]
        with self.timed():
            self.ledger.submit(NOW, "train", prompts)

    def produce(self, count: int) -> None:
        self._requests += 1
        with self.timed():
            groups, _ = self.ledger.lease(NOW, "train", "producer", f"request-{self._requests}", count)
        for first in range(0, len(groups), PUTS_PER_CALL):
            puts = [self._put(group) for group in groups[first : first + PUTS_PER_CALL]]
            with self.timed():
                self.ledger.put(NOW, puts)

    def train(self, *, commit: bool) -> None:
        with self.timed():
            batch, _ = self.ledger.lease_batch(NOW, "train", self.epoch, self.step)
        assert batch is not None
        with self.timed():
            self.ledger.consume(NOW, "train", self.epoch, self.step, batch.digest)
        self.step += 1
        with self.timed():
            self.ledger.set_policy_version(NOW, "train", self.epoch, self.step)
            if commit:
                self.ledger.commit(NOW, "train", self.epoch, self.step)

    def _put(self, group: Group) -> GroupPut:
        assert group.lease is not None
        names = [f"{group.lease.lease_id}/{i}" for i in range(self.samples)]
        records = [SampleRecord(n, n, i, DIGEST, 18_000, 0, ENVELOPE, 1.0) for i, n in enumerate(names)]
        samples = tuple(NewSample(record, b"") for record in records)
        return GroupPut(group.lease.lease_id, group.group_id, PutOutcome.COMPLETE, samples)


def throughput(steps: int) -> tuple[float, int]:
    """(transitions a second, transitions)."""
    run = Run(SAMPLES, retain_steps=4, max_payload_bytes=1 << 60)
    before = run.ledger.position
    for _ in range(steps):
        run.submit(GROUPS_PER_STEP)
        run.produce(GROUPS_PER_STEP)
        run.train(commit=True)
    count = run.ledger.position - before
    return count / sum(run.seconds), count


def cost_at(num_groups: int, steps: int) -> Cost:
    """In a ledger that holds so many groups besides."""
    run = Run(1, retain_steps=4, max_payload_bytes=1 << 60, max_queued_groups=1 << 30, max_groups=1 << 30)
    for _ in range(num_groups // 2 // 1000):
        run.submit(1000)
        run.produce(1000)
    for _ in range(num_groups // 2 // 1000):
        run.submit(1000)
    costs, without = [], []
    with run.collector.counting():
        for _ in range(steps):
            run.seconds, run.collected, before = [], 0.0, run.ledger.position
            run.submit(GROUPS_PER_STEP)
            run.produce(GROUPS_PER_STEP)
            run.train(commit=True)
            transitions, seconds = run.ledger.position - before, sum(run.seconds)
            costs.append(seconds / transitions * 1e6)
            without.append((seconds - run.collected) / transitions * 1e6)
    return Cost(num_groups, statistics.median(costs), statistics.median(without), look_up_microseconds(num_groups))


def look_up_microseconds(num_entries: int) -> float:
    """Of a random key in a bare dict of small objects."""
    entries = {f"train/{i}": [i] for i in range(num_entries)}
    numbers = random.Random(0)
    keys = [f"train/{numbers.randrange(num_entries)}" for _ in range(LOOK_UPS)]
    begun = time.process_time()
    for key in keys:
        entries[key][0]
    return (time.process_time() - begun) / LOOK_UPS * 1e6


def draw(curve: Sequence[Cost], path: Path) -> None:
    """The curve as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2))
    axes.plot([cost.num_groups for cost in curve], [cost.microseconds for cost in curve], marker="o")
    axes.set_xscale("log")
    axes.set_ylim(0, max(cost.microseconds for cost in curve) * 1.5)
    axes.set_xlabel("groups in the ledger")
    axes.set_ylabel("CPU microseconds a transition")
    axes.set_title("Cost of a transition by the size of the ledger, in CPU time")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-groups", type=int, default=1_000_000)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    per_second, count = throughput(arguments.steps)
    print(f"state machine alone: {per_second:,.0f} transitions/s ({count:,} transitions, {SAMPLES} samples a group)")
    print("   groups  a transition, µs  without the collector, µs  a look-up in a bare dict, µs")
    curve: list[Cost] = []
    for size in (size for size in SIZES if size <= arguments.max_groups):
        cost = cost_at(size, max(arguments.steps // 4, 3))
        curve.append(cost)
        print(
            f"{size:>9,}{cost.microseconds:18.2f}{cost.without_collector:27.2f}{cost.look_up:29.2f}",
            flush=True,
        )
        gc.collect()
    least, most = curve[0], curve[-1]
    print(
        f"most of least: {most.microseconds / least.microseconds:.2f}× a transition, "
        f"{most.without_collector / least.without_collector:.2f}× without the collector's passes; "
        f"baseline, a look-up in a bare dict: {most.look_up / least.look_up:.2f}×"
    )
    if arguments.picture:
        draw(curve, arguments.picture)


if __name__ == "__main__":
    main()
