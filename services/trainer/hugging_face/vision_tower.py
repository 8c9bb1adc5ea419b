"""The vision tower of a Hugging Face folder, as transformers computes it.

It is frozen: nothing of it is trained, and no gradient reaches it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture
from services.trainer.hugging_face.hf_folder import HfFolder
from services.trainer.hugging_face.names import VISION_TOWER
from services.trainer.hugging_face.rank_model import RankModel
from services.trainer.megatron.gpt.images import ImagePlaces
from services.trainer.megatron.parallel import Layout
from services.trainer.plan.images import SampleImages

_KEPT_BYTES = 256 << 20


class FrozenTower:
    """The vision tower of a Hugging Face folder. Embeddings of the latest images are kept: they never change."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

        source = HfFolder(folder)
        config = AutoConfig.from_pretrained(str(folder)).vision_config
        config._attn_implementation = "sdpa"
        self._model = Qwen2_5_VisionTransformerPretrainedModel(config)
        names = [name for name in source.names if name.startswith(VISION_TOWER)]
        weights = {name.removeprefix(VISION_TOWER): source.tensor(name) for name in names}
        try:
            self._model.load_state_dict(weights, strict=True)
        except RuntimeError as error:
            raise ConfigError(f"{folder}: its vision tower is not that of its config.json: {error}") from error
        for parameter in self._model.parameters():  # and not the rotary frequencies, which stay float32
            parameter.data = parameter.data.to(dtype)
        self._model.to(device).eval().requires_grad_(requires_grad=False)
        self._device, self._dtype = device, dtype
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    @torch.no_grad()
    def __call__(self, images: Sequence[SampleImages]) -> Tensor:
        return torch.cat([self._embedded(each) for each in images])

    def _embedded(self, images: SampleImages) -> Tensor:
        key = images.digest
        if (found := self._kept.get(key)) is None:
            pixels = torch.from_numpy(images.pixels.copy()).to(self._device, self._dtype)
            grids = torch.from_numpy(images.grids.copy()).to(self._device)
            found = self._kept[key] = self._model(pixels, grid_thw=grids).pooler_output
            while sum(each.nbytes for each in self._kept.values()) > _KEPT_BYTES and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


def image_places(
    model: RankModel, architecture: Architecture, hf_checkpoint: Path, layout: Layout
) -> ImagePlaces | None:
    """The tower of `hf_checkpoint` on ranks of the first stage; None for a model of text alone."""
    if architecture.vision is None:
        return None
    tower = None
    if layout.is_first_stage:
        tower = FrozenTower(hf_checkpoint, model.config.params_dtype, layout.device)
    return ImagePlaces(model.stages, architecture.vision, tower, layout)
