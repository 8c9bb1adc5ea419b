"""Every family on a GPU, with Transformer Engine's layers where it is installed: log-probs are transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.test_one_device import SIZES
from tests.support.models.tiny_families import FAMILIES, make_tiny
from tests.support.ranks.device_case import run
from tests.support.ranks.rank_results import network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_a_family_are_transformers(family: str, tmp_path: Path) -> None:
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
    print(f"{family}: |log-prob difference| at most {largest:.2e}")
    assert largest < SIZES["cuda"].float32_largest_difference
