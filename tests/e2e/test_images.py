"""A run on prompts with images: real services, a real SGLang engine with a vision tower, a real Megatron rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_whole_runs import ENGINE_BOUND, rows_of, started
from tests.long_forms import whole_run
from tests.support.models.tiny_vision import make_tiny_vision
from tests.support.pictures import png

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), whole_run]


FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("family", FAMILIES)
async def test_images_go_from_the_prompt_file_to_the_trained_step(tmp_path: Path, family: str) -> None:
    (tmp_path / "images").mkdir()
    for number in range(4):
        (tmp_path / "images" / f"{number}.png").write_bytes(png(60 + 20 * number, 60, number))
    rows = [{"prompt": f"<image>What is {n}?", "images": [f"images/{n % 4}.png"], "label": str(n)} for n in range(16)]
    model = make_tiny_vision(tmp_path / "model", family)
    flags = ("--multimodal-keys", '{"image": "images"}', "--num-rollout", "3", "--save-hf", str(tmp_path / "exported"))
    async with started(tmp_path, *flags, checkpoint=model, prompts=rows) as run:
        metrics = await rows_of(run, 3)
    assert max(row["log_prob_diff/max"] for row in metrics) < ENGINE_BOUND
    before, after = _weights(model), _weights(tmp_path / "exported")
    assert before.keys() == after.keys()
    stays = {name for name in before if torch.equal(before[name], after[name])}
    assert stays == {name for name in before if "visual." in name}


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
