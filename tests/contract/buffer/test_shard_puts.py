"""The bench of shards in small: every put is stored, by one buffer and by two, and the report has its ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.ledger.shard_puts import NUM_WRITERS, SHARDS, Puts, measured, ratios, report
from tests.bench.ledger_throughput import PER_GROUP


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_shards", SHARDS)
async def test_all_puts_go_through_as_many_buffers_as_there_are_shards(tmp_path: Path, num_shards: int) -> None:
    puts = await measured(num_shards, 2_300, 16, tmp_path)
    assert puts.num_samples == NUM_WRITERS * 16 * PER_GROUP
    assert len(puts.buffer_cpu) == num_shards
    assert puts.writer_cpu > 0
    assert list(tmp_path.iterdir()) == []


def test_the_report_has_what_was_reached_what_the_cores_bear_and_what_a_buffer_takes() -> None:
    one, two = Puts(1000, 2.0, [1.5], 0.5), Puts(1000, 1.6, [0.75, 0.7], 0.55)
    rounds = {1: [one] * 3, 2: [two] * 3}
    assert ratios(rounds, num_cores=2) == pytest.approx((1.25, 2.0, 2.0))
    said = report(2_300, rounds)
    assert said.splitlines()[-1].startswith("  two of one: 1.25× a second, where these cores bear ")
    assert "1 buffer        500 samples a second; CPU of a sample: buffers 1500 µs, writers 500 µs" in said
