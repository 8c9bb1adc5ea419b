"""Which jobs may train on images, and what a person is told about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.job.rules.combinations import check_combinations
from headrace.job.rules.production import check_images
from headrace.job.schema.job import Job
from headrace.models.families.qwen2 import FAMILY as TEXT
from headrace.models.families.qwen2_5_vl import FAMILY
from headrace.models.registry import architecture, find, read_architecture, table

VISION = FAMILY.presets[0].config | {"vision_config": {}}
IMAGES = {"data": {"multimodal_keys": {"image": "images"}, "prompt_data": ["rows.jsonl"]}}


def test_images_need_a_model_that_reads_them(tmp_path: Path) -> None:
    job = _job(tmp_path, IMAGES)
    check_images(job, architecture(VISION))
    with pytest.raises(ConfigError, match="multimodal_keys .*this qwen2 model reads text alone"):
        check_images(job, architecture(TEXT.presets[0].config))
    check_images(_job(tmp_path, {}), architecture(TEXT.presets[0].config))


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"loss_type": "sft_loss", "loss_mask_type": "qwen"}},
        {"rollout": {"agent_function_path": "a.py:f"}},
        {"distillation": {"use_opd": True, "opd_teacher_url": "http://t:1"}},
    ],
)
def test_ways_of_making_samples_that_are_of_text_refuse_images(tmp_path: Path, sections: dict[str, Any]) -> None:
    job = _job(tmp_path, IMAGES | sections)
    with pytest.raises(ConfigError, match="multimodal_keys"):
        _check(job)


def test_a_config_is_read_in_its_old_and_in_its_new_form(tmp_path: Path) -> None:
    new = {name: VISION[name] for name in ("model_type", "image_token_id", "vision_config", "tie_word_embeddings")}
    text = {name: value for name, value in VISION.items() if name not in new and name != "rope_scaling"}
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}
    (tmp_path / "config.json").write_text(json.dumps(new | {"text_config": text | {"rope_parameters": rope}}))
    found = read_architecture(tmp_path)
    assert found == architecture(VISION)
    assert found.vision is not None
    assert (found.vision.patch_values, found.vision.rotary_axes) == (1176, (0,) * 16 + (1,) * 24 + (2,) * 24)
    assert {tensor.name for tensor in table(found).tensors()} == {
        tensor.name for tensor in table(architecture(find("qwen2.5-3B").config)).tensors()
    }


def _check(job: Job) -> None:
    check_combinations(job)
    check_images(job, architecture(VISION))


def _job(folder: Path, sections: dict[str, Any]) -> Job:
    shape = {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
    return Job.model_validate(
        {
            "model": {"hf_checkpoint": folder},
            **sections,
            "rollout": shape | sections.get("rollout", {}),
            "train": {"global_batch_size": 4, "num_steps_per_rollout": 1} | sections.get("train", {}),
        }
    )
