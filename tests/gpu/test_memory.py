"""A rank's memory, with and without engines on its device: `make gpu PART=memory`."""

from __future__ import annotations

import pytest

from tests.gpu.devices import Figure, Trained

pytestmark = pytest.mark.timeout(900)


def test_a_step_needs_the_memory_of_weights_gradients_and_optimizer(trained: Trained, figure: Figure) -> None:
    if trained.device == "cpu":
        pytest.skip("memory is measured on a GPU")
    # bfloat16 weights, float32 gradients, and three float32 copies: master weights and Adam's moments.
    expected = trained.result["parameters"] * (2 + 4 + 3 * 4)
    allocated, peak = trained.result["allocated_bytes"], trained.result["peak_bytes"]
    held = f"{allocated / 1e9:.1f} GB, at most {peak / 1e9:.1f} GB during it"
    figure("memory after a step", held, f"{expected / 1e9:.1f} GB by arithmetic: weights, gradients and optimizer")
    assert expected * 0.95 < allocated < expected * 1.1 + 2**30


def test_a_rank_gives_its_memory_to_engines_and_goes_on_with_the_same_weights(trained: Trained, figure: Figure) -> None:
    turn = trained.result["turn"]
    assert turn["largest_difference"] == 0.0
    if trained.device == "cpu":
        return  # it has no memory apart from the host's
    gigabytes = {name: turn[f"{name}_bytes"] / 1e9 for name in ("had", "left", "has")}
    figure(
        "freeing the GPU for engines",
        f"{gigabytes['left']:.2f} GB of {gigabytes['had']:.2f} GB stay, {gigabytes['has']:.2f} GB again; "
        f"{turn['to_host_seconds']:.1f} s out, {turn['to_device_seconds']:.1f} s back; the first time "
        f"{turn['first_to_host_seconds']:.0f} s",
        "no change in log-probs",
    )
    assert turn["left_bytes"] < 0.05 * turn["had_bytes"] + 2**28
