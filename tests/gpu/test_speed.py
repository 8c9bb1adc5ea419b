"""A training step's speed: `make gpu PART=speed`."""

from __future__ import annotations

import pytest

from tests.gpu.devices import Figure, Trained

pytestmark = pytest.mark.timeout(900)


def test_a_step_in_bfloat16_trains_and_says_how_fast(trained: Trained, figure: Figure) -> None:
    steps = trained.result["metrics"]
    for metrics in steps:
        assert metrics["updated"] == 1.0
        assert 0.0 < metrics["grad_norm"] < float("inf")
        assert 0.0 < metrics["mfu"] < 1.0
        assert metrics["time/forward_seconds"] > 0.0
        assert metrics["time/backward_seconds"] > 0.0
    last = steps[-1]
    what = f"a step in bfloat16, {trained.result['parameters'] / 1e9:.2f}e9 parameters"
    speed = f"{last['tokens_per_second']:.0f} tokens/s, {last['tflops_per_rank']:.1f} TFLOP/s"
    figure(what, speed, f"{last['mfu']:.1%} of the peak (MFU) of {trained.result.get('name', 'a CPU')}")
