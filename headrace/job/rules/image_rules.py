"""Rules of images in prompts: which models read them, and which ways of making samples take them along."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture


def check_images(job: Job, architecture: Architecture) -> None:
    """Raises ConfigError for a job whose prompts have images that nothing would look at."""
    if not job.data.multimodal_keys:
        return
    if architecture.vision is None:
        raise ConfigError(
            f"multimodal_keys {job.data.multimodal_keys}: this {architecture.family} model reads text alone: name a "
            "model with a vision tower (qwen2_5_vl), or leave --multimodal-keys out",
            field="multimodal_keys",
        )
    for name, is_set, why in (
        ("loss_mask_type", job.train.loss_mask_type, "conversations that are trained as they are given are text"),
        ("agent_function_path", job.rollout.agent_function_path, "its OpenAI-compatible endpoint takes text"),
        (
            "opd_type",
            job.distillation.use_opd and job.distillation.opd_type != "megatron",
            "a teacher at a URL is asked about tokens alone",
        ),
    ):
        if is_set:
            raise ConfigError(f"multimodal_keys with {name}: {why}; leave one of them out", field=name)


def image_plan(job: Job, architecture: Architecture | None) -> str | None:
    """Says what becomes of the vision tower, and of images; None for a model of text."""
    if architecture is None or architecture.vision is None:
        return None
    frozen = "the language part is trained; the vision tower is frozen, and exported as it is"
    if (key := job.data.image_key) is None:
        return f"{frozen}; no --multimodal-keys: prompts of files are text"
    return f"of each row's {key!r}, where its prompt says <image>; {frozen}"
