"""Every family on a GPU, with Transformer Engine's layers where it is installed: log-probs are transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.devices import NO_GPU, SIZES, Figure
from tests.support.models.tiny_families import FAMILIES, make_tiny
from tests.support.ranks.device_case import run
from tests.support.ranks.rank_results import network

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), NO_GPU]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_a_family_are_transformers(family: str, tmp_path: Path, figure: Figure) -> None:
    folder = make_tiny(tmp_path / "model", family)
    model = network(folder).cuda()
    case = replace(SIZES["cpu"].case(folder), vocab_size=model.config.vocab_size, num_steps=0)
    result = run(case, tmp_path / "run", device="cuda", timeout_seconds=300)
    largest = 0.0
    for sample, found in zip(case.samples(0), result["log_probs"], strict=False):
        tokens = torch.from_numpy(sample.tokens).long().cuda()
        with torch.no_grad():
            log_probs = torch.log_softmax(model(tokens[None]).logits[0], -1)
        expected = log_probs[sample.prompt_length - 1 : -1].gather(1, tokens[sample.prompt_length :, None])[:, 0]
        largest = max(largest, float((torch.tensor(found) - expected.cpu()).abs().max()))
    figure(f"log-probs of {family}, tiny, float32", f"differ by {largest:.1e} at most", "transformers in float32")
    assert largest < SIZES["cuda"].float32_largest_difference
