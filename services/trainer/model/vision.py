"""The images' part in a model's passes, where the model has a vision tower."""

from __future__ import annotations

from pathlib import Path

from headrace.models.architecture import Architecture
from services.trainer.hugging_face.rank_model import RankModel
from services.trainer.hugging_face.vision_tower import FrozenTower
from services.trainer.megatron.gpt.images import ImagePlaces
from services.trainer.megatron.parallel import Layout


def image_places(model: RankModel, architecture: Architecture, hf_checkpoint: Path, layout: Layout) -> ImagePlaces | None:
    """The tower of `hf_checkpoint` on ranks of the first stage; None for a model of text alone."""
    if architecture.vision is None:
        return None
    tower = None
    if layout.is_first_stage:
        tower = FrozenTower(hf_checkpoint, model.config.params_dtype, layout.device)
    return ImagePlaces(model.stages, architecture.vision, tower, layout)
